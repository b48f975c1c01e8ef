"""Engine that runs the optimizer step with DeepSpeed."""
