"""Texts that a model was not trained for: WikiText's perplexity and LAMBADA's last words."""
