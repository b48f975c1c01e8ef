"""Fixtures with a real SQLite store per test, copied from one empty store."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megacore.artifact import Artifact, Workspace
from megacore.config import RunConfig
from megacore.config.load import parse_config
from tasks._mlflow import Dataset, RunFacts, Tracking
from tests.tasks.events import EventLog


@pytest.fixture(autouse=True)
def _without_store_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_REGISTRY_URI", raising=False)


@pytest.fixture
def tracking(tmp_path: Path, empty_store: Path) -> Tracking:
    """Provide a separate store for the test."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return Tracking(Workspace(tmp_path), "pretrain")


@pytest.fixture
def config() -> RunConfig:
    """Return a small valid configuration."""
    return make_config()


@pytest.fixture
def facts(tmp_path: Path) -> RunFacts:
    """Return facts with one data set."""
    tokens = Artifact(
        stage="tokenize",
        key="ab" * 8,
        path=str(tmp_path / "tokenized"),
        digest="f" * 64,
        counts={"tokens": 1000},
    )
    return RunFacts("0123456789abcdef", {"tokens": Dataset.of(tokens)}, {"flow_run": "daring-lynx"})


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """Provide an empty run directory."""
    directory = tmp_path / "runs" / "0123456789abcdef"
    directory.mkdir(parents=True)
    return directory


@pytest.fixture
def log(run_directory: Path) -> EventLog:
    """Return a writer of the run directory's events."""
    return EventLog(run_directory / "events.jsonl")


@pytest.fixture
def crash() -> Callable[..., None]:
    """Return a function that raises an unexpected error, like a kill at that line."""

    def raise_killed(*args: object, **kwargs: object) -> None:
        raise KilledError

    return raise_killed


class KilledError(BaseException):
    """An error in place of SIGKILL."""


def make_config(**train: Any) -> RunConfig:
    """Return a small valid configuration with changed values in its train section."""
    values = {
        "name": "gpt2-test.v1",
        "data": {
            "source": {"kind": "source_tree"},
            "tokenizer": {"kind": "train-bpe", "vocab_size": 512},
            "seq_length": 16,
        },
        "model": {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2},
        "optim": {"lr": 1e-3, "min_lr": 1e-4},
        "train": {"micro_batch_size": 1, "global_batch_size": 2, "train_iters": 100} | train,
        "checkpoint": {"save_interval": 10},
        "launch": {"nproc_per_node": 1},
    }
    return parse_config(values, origin="test")
