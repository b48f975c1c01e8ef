"""Where documents come from: source trees, JSON Lines, the hub, ready-made token files."""
