"""events.jsonl: what is written is read once, also after crashes."""

import json
from pathlib import Path

import pytest

from megacore.errors import DataFormatError, WorkspaceError
from megacore.observe.events import EventReader, EventWriter


def test_each_event_is_on_disk_when_the_call_returns(tmp_path: Path) -> None:
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


def test_a_loss_that_is_not_finite_is_null(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventWriter(path, attempt=1) as writer:
        writer.write("step", iteration=1, lm_loss=float("nan"), grad_norm=float("inf"))
    event = next(iter(EventReader(path)))[0]
    assert event["lm_loss"] is None
    assert event["grad_norm"] is None


def test_a_reader_goes_on_where_it_stopped(tmp_path: Path) -> None:
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


def test_a_torn_last_line_is_left_alone_and_then_cut_by_the_next_writer(tmp_path: Path) -> None:
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


def test_no_file_has_no_events(tmp_path: Path) -> None:
    assert list(EventReader(tmp_path / "absent.jsonl")) == []


def test_a_complete_line_that_is_no_event_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind": "start"}\nnonsense\n', encoding="utf-8")
    with pytest.raises(DataFormatError, match="byte 27 is no event"):
        list(EventReader(path))


def test_a_full_disk_is_said_as_such() -> None:
    with (
        pytest.raises(WorkspaceError, match="No space left"),
        EventWriter(Path("/dev/full"), attempt=1) as writer,
    ):
        writer.write("step", iteration=1)
