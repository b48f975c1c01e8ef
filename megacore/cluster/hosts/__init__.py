"""Several machines: an agent on each, and a head that starts and ends them together.

Agents are reached through ssh.
"""
