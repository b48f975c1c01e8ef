"""Text from a model: greedy or sampled, one token at a time."""
