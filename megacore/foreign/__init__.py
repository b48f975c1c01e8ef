"""Readers of other programs' settings files, which yield claims about configuration values."""
