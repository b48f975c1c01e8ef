"""Output of flows."""

import io
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.states import Completed

from megacore.artifact import Artifact, StageKey
from megacore.config import RunConfig, load_config
from tasks import _stage_runner
from tasks._cache import StageResult, stage_task
from tasks._plan import DryRun
from tasks._stage_runner import Output, StageRunner
from tasks.index import RunData


@pytest.fixture
def closed_pipe() -> Iterator[io.TextIOWrapper]:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb", buffering=0) as pipe:
        yield io.TextIOWrapper(pipe, write_through=True)


def test_a_closed_pipe_does_not_end_a_flow(
    closed_pipe: io.TextIOWrapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", closed_pipe)
    output = Output()
    output.print("table")
    output.print("summary")


def test_an_output_that_cannot_be_written_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_stage_runner, "_log", logging.getLogger("flow"))
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(full, write_through=True))
        output = Output()
        output.print("table")
        output.print("summary")
        monkeypatch.undo()
    assert caplog.messages == [
        "standard output cannot be written (No space left on device): direct it to another place"
    ]


def test_the_key_of_a_training_is_the_one_that_commands_accept() -> None:
    config, directory = load_config("gpt2-tiny"), Path("/w/runs/0123")
    artifact = Artifact(stage="train", key="4567", path=str(directory), digest="", counts={})
    runner = StageRunner(config)
    runner._record("train", Completed(data=StageResult(artifact=artifact, ran=True)), 1.0)
    assert runner.rows[0].cells()["key"] == "0123"

    @stage_task(
        "train",
        lambda config: StageKey("train", 1, {}, {}),
        check=lambda config: "it was not built yet",
        directory_of=lambda config: directory,
    )
    def train(config: RunConfig) -> StageResult:
        raise AssertionError("a dry run starts nothing")

    plan = DryRun(config)
    trained = plan.stage(train)
    plan.stage(train, RunData(artifact, artifact, trained))
    assert [(row["stage"], row["key"]) for row in plan.planned] == [
        ("train", "0123"),
        ("train 2", "known after train"),
    ]
    assert not plan.artifacts
