"""Sharded checkpoints under global names: whole or absent, verified, free of pickles."""
