"""Time limit of what tests wait for."""

HANG = 300.0
"""Seconds after which a test gives up on a process, a file or a server that should have come.

Only a hang takes so long. On a machine whose cores several tests share, a start may take minutes.
"""
