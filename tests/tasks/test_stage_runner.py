"""Output of flows."""

import io
import logging
import os
from collections.abc import Iterator

import pytest

from tasks import _stage_runner
from tasks._stage_runner import Output


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
