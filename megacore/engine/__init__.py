"""Engines: implementations of the forward and backward pass and the optimizer step."""
