"""Fused operations, one file each.

A file has a plain torch reference, faster implementations, and the conditions for their use.
"""
