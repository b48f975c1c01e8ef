"""Tests of the event log: each event is read exactly once, also after a crash."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from megacore.errors import DataFormatError, TransientFileError, WorkspaceError
from megacore.observe.events import EventReader, EventWriter


def test_an_event_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    with EventWriter(path, attempt=3) as writer:
        writer.write("step", iteration=1, lm_loss=2.5)
        event = json.loads(path.read_text(encoding="utf-8"))
    assert (event["kind"], event["attempt"], event["iteration"], event["lm_loss"]) == (
        "step",
        3,
        1,
        2.5,
    )
    assert event["time"] > 1e9


def test_a_non_finite_number_is_written_as_null(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventWriter(path, attempt=1) as writer:
        writer.write("step", iteration=1, lm_loss=float("nan"), grad_norm=float("inf"))
    event = next(iter(EventReader(path)))[0]
    assert event["lm_loss"] is None
    assert event["grad_norm"] is None


def test_a_reader_resumes_from_an_offset(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventWriter(path, attempt=1) as writer:
        writer.write("step", iteration=1)
        writer.write("step", iteration=2)
        (_, offset), _ = list(EventReader(path))
        writer.write("step", iteration=3)
        assert [event["iteration"] for event, _ in EventReader(path, offset)] == [2, 3]
    *_, (_, end) = EventReader(path)
    assert end == path.stat().st_size
    assert list(EventReader(path, end)) == []


def test_a_torn_last_line_is_not_read_and_the_next_writer_removes_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventWriter(path, attempt=1) as writer:
        writer.write("step", iteration=1)
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"kind": "step", "iterat' + "x" * 100_000)
    assert [event["iteration"] for event, _ in EventReader(path)] == [1]
    with EventWriter(path, attempt=2) as writer:
        writer.write("step", iteration=2)
    assert [(event["attempt"], event["iteration"]) for event, _ in EventReader(path)] == [
        (1, 1),
        (2, 2),
    ]


def test_a_missing_file_has_no_events(tmp_path: Path) -> None:
    assert list(EventReader(tmp_path / "absent.jsonl")) == []


def test_a_complete_line_without_an_event_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind": "start"}\nnonsense\n', encoding="utf-8")
    with pytest.raises(DataFormatError, match="byte 27 is no event"):
        list(EventReader(path))


def test_events_on_a_failing_disk_are_named() -> None:
    with pytest.raises(TransientFileError, match="cannot read or write /proc/self/mem "):
        list(EventReader(Path("/proc/self/mem")))  # the system refuses to read its first page


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOTCONN, errno.ETIMEDOUT])
def test_a_line_that_a_file_server_did_not_take_may_be_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    path = tmp_path / "events.jsonl"
    with EventWriter(path, attempt=1) as writer:
        writer.write("step", iteration=1)

        def fail() -> None:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr(writer, "_file", SimpleNamespace(write=lambda line: None, flush=fail))
            with pytest.raises(TransientFileError, match=rf"{path} \({os.strerror(code)}\)"):
                writer.write("step", iteration=2)


def test_a_full_disk_raises_a_workspace_error() -> None:
    with (
        pytest.raises(WorkspaceError, match="No space left"),
        EventWriter(Path("/dev/full"), attempt=1) as writer,
    ):
        writer.write("step", iteration=1)
