"""Data sections for the tests of this package."""

from typing import Any

from megacore.config.data import DataConfig


def data_config(**values: Any) -> DataConfig:
    """One that reads token files; each keyword replaces a value."""
    given = {"source": {"kind": "source_tree"}, "tokenizer": {"kind": "train-bpe", "vocab_size": 300}, "seq_length": 8}
    return DataConfig.model_validate(given | values)
