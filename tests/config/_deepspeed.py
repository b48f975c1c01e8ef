"""Small configurations of the engine deepspeed, and those that agree with public JSON files."""

import json
from pathlib import Path
from typing import Any

import pytest

from megacore.config import RunConfig
from megacore.config.load import parse_config
from megacore.errors import ConfigError

FILES = Path(__file__).parent / "ds"
PUBLIC: dict[str, dict[str, Any]] = {
    "accelerate-zero2": {
        "optim": {
            "lr": 5e-4,
            "lr_decay_style": "linear",
            "lr_warmup_iters": 10,
            "lr_warmup_style": "log",
            "loss_scale": {"initial": 2.0**16},
        },
        "train": {"micro_batch_size": 4, "global_batch_size": 8, "precision": "fp16"},
    },
    "accelerate-zero3-offload": {
        "optim": {
            "lr": 5e-4,
            "lr_decay_style": "linear",
            "lr_warmup_iters": 10,
            "lr_warmup_style": "log",
            "loss_scale": {"initial": 2.0**16},
        },
        "train": {"micro_batch_size": 4, "global_batch_size": 8, "precision": "fp16"},
    },
    "megatron-zero1": {
        "optim": {"lr": 1.5e-4, "adam_beta2": 0.95, "loss_scale": {"initial": 2.0**12}},
        "train": {"micro_batch_size": 4, "global_batch_size": 16, "precision": "fp16"},
    },
}
"""Values of a configuration that agrees with each public file, on two replicas."""


def public(name: str) -> dict[str, Any]:
    """Return the content of a public file."""
    content: dict[str, Any] = json.loads((FILES / f"{name}.json").read_text(encoding="utf-8"))
    return content


def asking(content: Any = None, **sections: Any) -> RunConfig:
    """Return a small run on two ranks with the engine deepspeed.

    Each keyword replaces values of one section.
    """
    values: dict[str, Any] = {
        "name": "small",
        "engine": "deepspeed",
        "data": {
            "source": {"kind": "source_tree"},
            "tokenizer": {"kind": "train-bpe"},
            "seq_length": 64,
        },
        "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4},
        "optim": {"lr": 1e-3},
        "train": {
            "micro_batch_size": 2,
            "global_batch_size": 8,
            "train_iters": 100,
            "precision": "fp32",
        },
        "checkpoint": {"save_interval": 5},
        "launch": {"nproc_per_node": 2},
    }
    if content is not None:
        values["deepspeed"] = {"config": content}
    for section, changes in sections.items():
        values[section] = (
            values.get(section, {}) | changes if isinstance(changes, dict) else changes
        )
    return parse_config(values, origin="test")


def refusal(content: Any = None, **sections: Any) -> str:
    """Return the message with which such a run is refused."""
    with pytest.raises(ConfigError) as caught:
        asking(content, **sections)
    return str(caught.value)


def nested(key: str, value: Any) -> dict[str, Any]:
    """Return a JSON object with `value` at the dotted `key`."""
    for name in reversed(key.split(".")):
        value = {name: value}
    content: dict[str, Any] = value
    return content
