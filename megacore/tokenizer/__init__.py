"""Tokenizers: building their files, loading them, and tokenizing a corpus."""

from megacore.tokenizer.load import Tokenizer, load_tokenizer

__all__ = ["Tokenizer", "load_tokenizer"]
