"""Checkpoints in the file form of DeepSpeed's engine."""
