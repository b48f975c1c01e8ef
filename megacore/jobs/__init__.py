"""Job files: one JSON file that a stage writes and all its processes read."""
