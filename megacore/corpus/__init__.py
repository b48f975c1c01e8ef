"""Where documents come from: source trees, JSON Lines, the Hugging Face hub, ready-made token files."""
