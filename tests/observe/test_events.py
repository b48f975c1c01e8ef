"""Tests of the event log: each event is read exactly once, also after a crash."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from megacore.errors import DataFormatError, TransientFileError, WorkspaceError
from megacore.observe import events
from megacore.observe.events import EventReader, EventWriter, Iterations


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


@pytest.fixture
def long_log(tmp_path: Path) -> Path:
    """Return a log of several blocks, some of whose lines are longer than one, and a torn line."""
    path = tmp_path / "events.jsonl"
    with EventWriter(path, attempt=7) as writer:
        for iteration in range(1, 401):
            writer.write("step", iteration=iteration, text="x" * (iteration % 7) * 100)
            if iteration % 100 == 0:
                writer.write("perplexity", iteration=iteration, text="y" * 200_000)
        writer.write("exit", reason="finished")
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"kind": "step", "time": 1.0')
    return path


def test_events_are_read_from_the_end_as_from_the_beginning(long_log: Path) -> None:
    known = list(EventReader(long_log))
    assert list(EventReader(long_log).newest_first()) == [event for event, _ in known[::-1]]
    assert list(EventReader(long_log, known[9][1]).newest_first()) == [
        event for event, _ in known[:9:-1]
    ]
    assert next(EventReader(long_log, kinds=("step",)).newest_first())["iteration"] == 400
    assert list(EventReader(long_log.with_name("absent")).newest_first()) == []


def test_events_of_other_kinds_are_not_parsed(
    long_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = list(EventReader(long_log))
    short = [
        (event, end)
        for event, end in whole
        if event.pop("text", None) is None or event["kind"] == "step"
    ]
    lines: list[bytes] = []
    parse = events._parse
    monkeypatch.setattr(events, "_parse", lambda *line: lines.append(line[0]) or parse(*line))
    assert list(EventReader(long_log, kinds=("step", "exit"), heads=("step",))) == short
    assert len(lines) == 1


def test_iterations_are_a_set_in_little_memory() -> None:
    added: list[int] = []
    iterations = Iterations()
    for iteration in (*range(1, 5000), *range(5010, 90_000, 10), 89_995, *range(6001, 6009), 7):
        if iteration not in iterations:
            iterations.add(iteration)
            added.append(iteration)
    assert {each for each in range(-5, 100_000) if each in iterations} == set(added)
    assert len(iterations._ranges) < 10


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
