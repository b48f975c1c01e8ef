"""Checkpoints in the file format of DeepSpeed's engine."""
