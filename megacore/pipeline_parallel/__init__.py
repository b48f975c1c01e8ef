"""Stages of consecutive layers: who holds which, in which order they work, and what they send each other."""
