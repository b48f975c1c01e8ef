"""Tokens on disk, the maps that order them into samples, and the samples themselves."""
