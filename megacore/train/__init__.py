"""The training loop: its state, one iteration, evaluation."""
