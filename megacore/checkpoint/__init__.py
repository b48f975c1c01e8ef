"""Sharded checkpoints under global names: whole or absent, verified before they are believed, free of pickles."""
