"""Where documents come from: source trees, JSON Lines, the Hugging Face hub, ready-made token files."""

from megacore.corpus.collect import VERSION, collect, fingerprint

__all__ = ["VERSION", "collect", "fingerprint"]
