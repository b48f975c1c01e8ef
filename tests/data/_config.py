"""Data and run configurations for tests."""

from typing import Any

from megacore.config.data import DataConfig
from megacore.config.run import RunConfig
from tests._tiny import tiny_config


def data_config(**values: Any) -> DataConfig:
    """Return a small data configuration with the given values replaced."""
    defaults = {
        "source": {"kind": "source_tree"},
        "tokenizer": {"kind": "train-bpe", "vocab_size": 300},
        "seq_length": 8,
    }
    return DataConfig.model_validate(defaults | values)


def run_config(
    *, family: str = "gpt", seed: int = 1, binary_head: bool = True, **data: Any
) -> RunConfig:
    """Return the configuration of a tiny run with these data; it is not validated again."""
    run = tiny_config(seed=seed)
    model = run.model.model_copy(update={"bert_binary_head": binary_head})
    return run.model_copy(update={"family": family, "model": model, "data": data_config(**data)})
