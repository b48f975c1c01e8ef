"""The engine that lets DeepSpeed carry out the optimizer step."""
