"""The parts of a transformer."""
