"""Training loop: its state, one iteration, evaluation and checkpoints."""
