"""A configuration small enough to compute by hand."""

from typing import Any

from megacore.config import RunConfig
from megacore.config.load import parse_config


def tiny_config(*, seed: int = 7, train: dict[str, Any] | None = None, **model: Any) -> RunConfig:
    """Return a configuration of two layers of width 32 with 4 heads, without dropout.

    Sequences have 16 tokens; `model` replaces the model's values.
    """
    return parse_config(
        {
            "name": "tiny",
            "seed": seed,
            "data": {
                "source": {"kind": "source_tree"},
                "tokenizer": {"kind": "train-bpe", "vocab_size": 512},
                "seq_length": 16,
            },
            "model": {
                "num_layers": 2,
                "hidden_size": 32,
                "num_attention_heads": 4,
                "hidden_dropout": 0.0,
                "attention_dropout": 0.0,
                "make_vocab_size_divisible_by": 8,
                **model,
            },
            "optim": {"lr": 1e-3},
            "train": {
                "micro_batch_size": 2,
                "global_batch_size": 2,
                "train_iters": 1,
                **(train or {}),
            },
            "checkpoint": {"save_interval": 1},
        },
        origin="tests",
    )
