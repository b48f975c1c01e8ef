"""Sharded checkpoints under global names: atomic, verified, and free of pickles."""
