"""Inspection of token files and index maps: statistics, checks, and the text of samples."""
