"""One file for each fused operation.

A plain torch reference, what else computes it, and when which is used.
"""
