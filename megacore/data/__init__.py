"""Data sets for training: index maps that order tokens into samples, and reading of samples."""
