"""Layers of a transformer."""
