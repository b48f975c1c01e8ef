"""Writer and reader of `events.jsonl`: append-only, one JSON object per line.

Through this file a training reports to the processes that supervise, plot and track it.
"""

import json
import math
import os
import re
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Self

from megacore.artifact.files import access_errors, naming, workspace_errors
from megacore.errors import DataFormatError
from megacore.paths import exists
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
_KIND = re.compile(rb'\{"kind": "(\w+)"')
"""Begin of a line as EventWriter writes it."""
_HEAD = re.compile(
    rb'\{"kind": "(\w+)", "time": (\d+\.\d+), "attempt": (\d+), "iteration": (\d+)[,}]'
)
"""Begin of the line of an event with an iteration."""


class EventWriter:
    """Writer that appends events; each line reaches the file before the call returns."""

    def __init__(self, path: Path, attempt: int) -> None:
        """Open the file and cut off a torn line that a killed writer left.

        Every event has the number of this start of the run, the attempt.
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

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()


class EventReader:
    """Iterator over pairs (event, offset of the next event), starting at a byte offset.

    It stops before a torn last line. It raises DataFormatError for a complete line that is not an
    event, and FileAccessError if the file cannot be read now. A month of steps is a gigabyte, which
    takes many times longer to parse than to read: what a reader does not need is not parsed.
    """

    def __init__(
        self,
        path: Path,
        offset: int = 0,
        *,
        kinds: Collection[str] | None = None,
        heads: Collection[str] = (),
    ) -> None:
        """Read `path` from byte `offset`, the end of an event; without a file there are no events.

        Only events of `kinds` are read, None reads all. Of `heads` kind, time, attempt and
        iteration are enough.
        """
        self._path = path
        self._offset = offset
        self._kinds = None if kinds is None else {kind.encode() for kind in kinds}
        self._heads = {kind.encode() for kind in heads}

    def __iter__(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield the events that are complete now."""
        if not exists(self._path):
            return
        offset = self._offset
        with access_errors(self._path), open(self._path, "rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                offset += len(line)
                event = self._read(line, offset)
                if event is not None:
                    yield event, offset

    def newest_first(self) -> Iterator[dict[str, Any]]:
        """Yield the events that are complete now, from the end of the file to `offset`."""
        if not exists(self._path):
            return
        with access_errors(self._path), open(self._path, "rb") as file:
            end, later = end_of_lines(file), b""
            while end > self._offset:
                start = max(self._offset, end - _BLOCK)
                file.seek(start)
                lines = (file.read(end - start) + later).splitlines(keepends=True)
                # The first line may begin in the block before.
                later = lines.pop(0) if start > self._offset else b""
                place = start + len(later) + sum(map(len, lines))
                for line in reversed(lines):
                    event = self._read(line, place)
                    if event is not None:
                        yield event
                    place -= len(line)
                end = start

    def _read(self, line: bytes, end: int) -> dict[str, Any] | None:
        """Return the event of a line that ends at byte `end`; None for one that is not to read."""
        begin = _KIND.match(line) if self._kinds is not None or self._heads else None
        if begin is not None:
            if self._kinds is not None and begin[1] not in self._kinds:
                return None
            if begin[1] in self._heads and (head := _HEAD.match(line)) is not None:
                return {
                    "kind": head[1].decode(),
                    "time": float(head[2]),
                    "attempt": int(head[3]),
                    "iteration": int(head[4]),
                }
        event = _parse(line, self._path, end)
        wanted = self._kinds is None or event["kind"].encode() in self._kinds
        return event if wanted else None


class Iterations:
    """Set of iterations, whose size grows with the changes of their distance, not their number."""

    def __init__(self) -> None:
        """Create an empty set."""
        self._ranges: list[range] = []
        self._highest = -1

    def add(self, iteration: int) -> None:
        """Add an iteration that is not in the set."""
        self._highest = max(self._highest, iteration)
        last = self._ranges[-1] if self._ranges else None
        distance = 0 if last is None else iteration - last[-1]
        if last is not None and (distance == last.step or (len(last) == 1 and distance > 0)):
            self._ranges[-1] = range(last.start, iteration + 1, distance)
        else:
            self._ranges.append(range(iteration, iteration + 1))

    def __contains__(self, iteration: int) -> bool:
        """Return True if an iteration was added."""
        return iteration <= self._highest and any(iteration in each for each in self._ranges)


def end_of_lines(file: BinaryIO) -> int:
    """Return the offset after the last complete line of a file."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


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
    if not exists(path):
        return
    with open(path, "rb+") as file:
        end = end_of_lines(file)
        if end != path.stat().st_size:
            file.truncate(end)
