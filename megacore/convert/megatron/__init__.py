"""Checkpoints in the file format of Megatron-LM."""
