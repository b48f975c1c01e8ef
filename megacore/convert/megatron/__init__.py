"""Checkpoints in the file form of Megatron-LM."""
