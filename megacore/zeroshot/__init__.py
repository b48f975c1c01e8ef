"""Zero-shot evaluation: perplexity on WikiText and last-word accuracy on LAMBADA."""
