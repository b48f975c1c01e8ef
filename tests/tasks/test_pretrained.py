"""Runs that begin with another checkpoint's weights.

Whose runs they are, and what is refused before they start.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

from megacore.artifact import Artifact
from megacore.artifact.files import write_json
from megacore.checkpoint.format import Marker
from megacore.config import RunConfig
from megacore.config.spec import ModelSpec
from megacore.errors import CheckpointError, ConfigError
from tasks.preflight import check_machine
from tasks.train import check_pretrained, run_key
from tests.tasks.conftest import make_config

INPUT = Artifact(stage="tokenize", key="ab" * 8, path="somewhere", digest="f" * 64, counts={})


def checkpoint(path: Path, config: RunConfig, iteration: int = 0) -> Path:
    """What a checkpoint says of itself, without weights."""
    path.mkdir(parents=True)
    write_json(path / "state.json", {"model": ModelSpec.of(config, 500).model_dump(mode="json")})
    Marker(iteration, None, {}).write(path)
    return path


def beginning_with(path: Path, **model: Any) -> RunConfig:
    config = make_config()
    return config.model_copy(
        update={
            "train": config.train.model_copy(update={"pretrained_checkpoint": str(path)}),
            "model": config.model.model_copy(update=model),
        }
    )


def key(config: RunConfig) -> str:
    return run_key(config, INPUT, INPUT).key


def test_a_run_is_known_by_what_it_began_with_wherever_that_lies(tmp_path: Path) -> None:
    first = checkpoint(tmp_path / "iter_0000000", make_config())
    other = checkpoint(tmp_path / "other/iter_0000010", make_config(), iteration=10)
    moved = tmp_path / "moved/iter_0000000"
    shutil.copytree(first, moved)
    keys = {key(make_config()), key(beginning_with(first)), key(beginning_with(other))}
    assert len(keys) == 3
    assert key(beginning_with(moved)) == key(beginning_with(first))


@pytest.mark.parametrize("refuse", [key, check_pretrained, check_machine])
def test_a_missing_checkpoint_is_refused_before_anything_starts(
    tmp_path: Path, refuse: Any
) -> None:
    (tmp_path / "iter_0000001").mkdir()
    with pytest.raises(
        ConfigError,
        match=r"pretrained_checkpoint is .*iter_0000001, which has no complete\.json: give",
    ):
        refuse(beginning_with(tmp_path / "iter_0000001"))


def test_another_architecture_is_refused_before_anything_starts(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "iter_0000000", make_config())
    check_pretrained(beginning_with(path, hidden_dropout=0.3))
    with pytest.raises(
        CheckpointError, match=r"another model: model\.activation is gelu_tanh there and relu here"
    ):
        check_machine(beginning_with(path, activation="relu"))
