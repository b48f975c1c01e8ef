"""Small configurations of fine-tunings, loaded from files as users write them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megacore.config import FinetuneConfig, load_finetune_config
from megacore.config.load import parse_finetune_config
from megacore.errors import ConfigError


def minimal() -> dict[str, Any]:
    """Return the values that every fine-tuning must give."""
    return {
        "name": "small",
        "model": {"path": "some/model"},
        "data": {"source": {"kind": "files", "train": ["rows.jsonl"]}},
        "task": {"kind": "causal_lm"},
        "optim": {"lr": 1e-3},
    }


class Files:
    """A directory with a configuration and the files of other tools that it names."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.conf = directory / "small.yaml"
        self.conf.write_text(yaml.safe_dump(minimal()), encoding="utf-8")

    def load(
        self,
        accelerate: dict[str, Any] | None = None,
        deepspeed: dict[str, Any] | None = None,
        **overrides: Any,
    ) -> FinetuneConfig:
        """Load the configuration with these files; `a__b` in a keyword is the dotted name a.b."""
        options = {}
        if accelerate is not None:
            (self.directory / "accelerate.yaml").write_text(
                yaml.safe_dump(accelerate), encoding="utf-8"
            )
            options["launch.accelerate_config"] = "accelerate.yaml"
        if deepspeed is not None:
            (self.directory / "ds.json").write_text(json.dumps(deepspeed), encoding="utf-8")
            if "ds.json" not in str(accelerate):
                options["launch.deepspeed_config"] = "ds.json"
        return load_finetune_config(
            str(self.conf),
            options | {name.replace("__", "."): value for name, value in overrides.items()},
        )

    def refusal(self, *files: dict[str, Any] | None, **overrides: Any) -> str:
        """Return the message with which loading is refused, without this directory.

        It is one line.
        """
        with pytest.raises(ConfigError) as caught:
            self.load(*files, **overrides)
        message = str(caught.value)
        assert "\n" not in message
        return message.replace(f"{self.directory}/", "")


def reread(config: FinetuneConfig) -> FinetuneConfig:
    """Return the configuration as another process reads it."""
    return parse_finetune_config(json.loads(config.model_dump_json()), origin="run.json")
