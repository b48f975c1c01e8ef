"""Text generation: greedy or sampled, one token at a time."""
