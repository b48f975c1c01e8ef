"""Writer and reader of `events.jsonl`: append-only, one JSON object per line.

Through this file a training reports to the processes that supervise, plot and track it.
"""

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megacore.artifact.files import access_errors, naming, workspace_errors
from megacore.errors import DataFormatError
from megacore.redact import redact

_BLOCK = 1 << 16
_NUMBERS = {
    "step": ("time", "iteration"),
    "evaluation": ("time", "iteration"),
    "perplexity": ("time", "iteration"),
    "checkpoint": ("time", "iteration"),
    "checkpoint_deleted": ("iteration",),
}
"""Numeric fields that all readers rely on, by kind of event."""


class EventWriter:
    """Writer that appends events; each line reaches the file before the call returns."""

    def __init__(self, path: Path, attempt: int) -> None:
        """Open the file and cut off a torn line that a killed writer left.

        Args:
            path: events.jsonl of a run directory.
            attempt: number of this start of the run, written with every event.
        """
        self._path = path
        self._attempt = attempt
        with workspace_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            _drop_torn_line(path)
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def write(self, kind: str, **values: Any) -> None:
        """Append one event with its time (Unix seconds).

        Floats that JSON cannot represent become null.

        Raises:
            WorkspaceError: the disk is full or not writable.
            FileAccessError: the disk fails; TransientFileError if that may pass.
        """
        event = {"kind": kind, "time": time.time(), "attempt": self._attempt, **values}
        line = json.dumps(
            {key: _json_value(key, value) for key, value in event.items()}, allow_nan=False
        )
        with workspace_errors(self._path), naming(self._path):
            self._file.write(line + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file. Raises WorkspaceError or FileAccessError if the last write fails."""
        with workspace_errors(self._path), naming(self._path):
            self._file.close()

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Close the file."""
        self.close()


class EventReader:
    """Iterator over pairs (event, offset of the next event), starting at a byte offset.

    It stops before a torn last line. It raises DataFormatError for a complete line that is not an
    event, and FileAccessError if the file cannot be read now.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        """Read `path` from byte `offset`; a file that does not exist yet has no events."""
        self._path = path
        self._offset = offset

    def __iter__(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield the events that are complete now."""
        if not self._path.exists():
            return
        offset = self._offset
        with access_errors(self._path), open(self._path, "rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                offset += len(line)
                yield _parse(line, self._path, offset), offset


def _parse(line: bytes, path: Path, end: int) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    if not isinstance(event, dict) or not _is_whole(event):
        raise DataFormatError(
            f"{path}: the line that ends at byte {end} is no event: {line[:80]!r}: remove it or "
            "delete the run"
        )
    return event


def _is_whole(event: dict[str, Any]) -> bool:
    """Return True if the event has the fields that readers of its kind rely on.

    Disk corruption can change a letter of a field's name and leave valid JSON.
    """
    kind = event.get("kind")
    if not isinstance(kind, str) or (
        kind.startswith("checkpoint") and kind in _NUMBERS and "path" not in event
    ):
        return False
    numbers = (event.get(name) for name in _NUMBERS.get(kind, ()))
    return all(isinstance(number, int | float) for number in numbers)


def _json_value(key: str, value: Any) -> Any:
    if isinstance(value, str):
        return redact(value, environment=key != "path")  # paths are read back
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _drop_torn_line(path: Path) -> None:
    """Cut the file after its last complete line; no reader has read further."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        size = end = path.stat().st_size
        while end > 0:
            start = max(0, end - _BLOCK)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end != size:
            file.truncate(end)
