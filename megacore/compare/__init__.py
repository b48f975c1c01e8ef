"""Comparison of two models or two runs that names the cause of a difference."""
