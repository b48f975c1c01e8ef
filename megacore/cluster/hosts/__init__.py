"""Jobs on several hosts: an agent on each host, and a head that starts and ends all of them.

The head reaches the agents through ssh.
"""
