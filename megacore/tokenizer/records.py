"""`documents.json`: which file and line each stored document came from."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.artifact.files import read_json
from megacore.errors import DataFormatError

if TYPE_CHECKING:
    from megacore.corpus.segments import Segment

DOCUMENTS_NAME = "documents.json"
FORMAT = 1


@dataclass
class FileRecord:
    """The documents that were read from a run of lines of one file."""

    path: str
    key: str
    documents: int = 0
    """Read from here, in the order of their lines (or rows)."""
    skipped_lines: list[int] = field(default_factory=list)
    """Numbers in the file, from 1, of lines that hold no document."""
    first_line: int | None = 1
    """Where reading began; None in a shard that begins inside of a file, until it is merged."""
    size: int | None = None
    """Bytes of the whole file when it was read: another size tells that it has changed."""

    @classmethod
    def of(cls, segment: "Segment") -> "FileRecord":
        """The record of a segment before it is read."""
        first_line = None if segment.start else 1
        return cls(
            segment.path, segment.key, first_line=first_line, size=os.path.getsize(segment.path)
        )


def documents_record(
    files: Sequence[FileRecord], facts: dict[str, Any], directory: Path | None
) -> dict[str, Any]:
    """The content of a documents.json that lies in `directory` (None: anywhere).

    `facts` say how and with which tokenizer the files were read.
    """
    entries = [asdict(file) | {"path": portable(file.path, directory)} for file in files]
    return {"format": FORMAT, "files": entries, **facts}


def portable(path: str | Path, directory: Path | None) -> str:
    """`path` relative to an artifact's `directory` if both are in one workspace; else absolute.

    A workspace may be moved.
    """
    if directory is None:
        return str(Path(path).absolute())
    workspace = directory.absolute().parent.parent
    full = Path(path).absolute()
    return (
        os.path.relpath(full, directory.absolute()) if full.is_relative_to(workspace) else str(full)
    )


def read_files(directory: Path) -> list[FileRecord]:
    """The files that `documents.json` of a directory names. Raises DataFormatError."""
    path = directory / DOCUMENTS_NAME
    try:
        values = read_json(path)
        files = [FileRecord(**entry) for entry in values["files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataFormatError(f"{path} is missing or damaged ({error}): tokenize again") from error
    for file in files:
        if not os.path.isabs(file.path):
            file.path = os.path.normpath(directory.absolute() / file.path)
    return files


def join_shards(shards: Sequence[Sequence[FileRecord]]) -> list[FileRecord]:
    """One record for each file of consecutive shards.

    Raises DataFormatError when one does not follow another.
    """
    joined: list[FileRecord] = []
    for file in (file for shard in shards for file in shard):
        if file.first_line is not None:
            joined.append(FileRecord(**asdict(file)))
        elif joined and (joined[-1].path, joined[-1].key) == (file.path, file.key):
            joined[-1].documents += file.documents
            joined[-1].skipped_lines += file.skipped_lines
        else:
            raise DataFormatError(
                f"a shard begins inside of {file.path}, but the one before it does not end there: "
                "give all shards of a corpus in their order"
            )
    return joined
