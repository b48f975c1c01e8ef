"""Files that have to be on every machine, as one machine tells another about them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

COPY_MARK = "copied"
"""A file in a checkpoint that was copied to this machine, and may be deleted when the run goes on from another."""


@dataclass
class Entry:
    """One file as it is on this machine."""

    size: int
    """Bytes."""
    mtime_ns: int
    """Modification time: a file with this size and time is taken to be the same, unless `full` is asked for."""
    sha256: str | None
    """Hex digest of the content; None where nothing has recorded it."""


@dataclass
class Item:
    """Files that belong together in one directory."""

    role: str
    """What they are, in words."""
    directory: Path
    """Where they lie, at the same path on every machine."""
    whole: bool
    """Whether the directory holds nothing else and appears, whole, under its name; else each file for itself."""
    entries: dict[str, Entry]
    """By path relative to `directory`, in the order in which they are put there."""
    full: bool = False
    """Whether every hash is compared, else sizes and times."""
    checkpoint: bool = False
    """Whether it is one."""

    def to_json(self) -> dict[str, Any]:
        """For another machine."""
        entries = {name: [entry.size, entry.mtime_ns, entry.sha256] for name, entry in self.entries.items()}
        return {**vars(self), "directory": str(self.directory), "entries": entries}

    @classmethod
    def of(cls, values: dict[str, Any]) -> Self:
        """What `to_json` returned."""
        entries = {name: Entry(*entry) for name, entry in values["entries"].items()}
        return cls(**{**values, "directory": Path(values["directory"]), "entries": entries})
