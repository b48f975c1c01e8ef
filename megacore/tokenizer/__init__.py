"""Text to token ids: building a tokenizer's files, loading them, and tokenizing a corpus."""

from megacore.tokenizer.load import Tokenizer, load_tokenizer, padded_vocab_size

__all__ = ["Tokenizer", "load_tokenizer", "padded_vocab_size"]
