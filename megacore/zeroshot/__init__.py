"""Zero-shot evaluation: perplexity on WikiText, last words of LAMBADA, hidden passkeys."""
