"""Records in `documents.json` of the files and lines that the stored documents came from."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megacore.artifact.files import read_json, reason_of
from megacore.errors import DataFormatError

if TYPE_CHECKING:
    from megacore.corpus.segments import Segment

DOCUMENTS_NAME = "documents.json"
FORMAT = 1


@dataclass
class FileRecord:
    """Documents read from consecutive lines of one file."""

    path: str
    key: str
    documents: int = 0
    """Number of documents read, in the order of their lines (or rows)."""
    skipped_lines: list[int] = field(default_factory=list)
    """Numbers, from 1, of the file's lines without a document."""
    first_line: int | None = 1
    """Number of the first line read; None in an unmerged shard that begins inside a file."""
    size: int | None = None
    """Size in bytes of the complete file when it was read; a different size means it changed."""

    @classmethod
    def of(cls, segment: "Segment") -> "FileRecord":
        """Return the record of a segment that has not been read yet."""
        first_line = None if segment.start else 1
        return cls(
            segment.path, segment.key, first_line=first_line, size=os.path.getsize(segment.path)
        )


def portable(path: str | Path, directory: Path | None) -> str:
    """Return `path` relative to the artifact `directory` if both are in one workspace.

    Otherwise return it absolute. Relative paths stay valid when a workspace is moved.
    """
    if directory is None:
        return str(Path(path).absolute())
    workspace = directory.absolute().parent.parent
    full = Path(path).absolute()
    return (
        os.path.relpath(full, directory.absolute()) if full.is_relative_to(workspace) else str(full)
    )


def read_files(directory: Path) -> list[FileRecord]:
    """Read the file records in a directory's `documents.json`. Raises DataFormatError."""
    path = directory / DOCUMENTS_NAME
    try:
        values = read_json(path)
        files = [FileRecord(**entry) for entry in values["files"]]
        for file in files:
            if not os.path.isabs(file.path):
                file.path = os.path.normpath(directory.absolute() / file.path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataFormatError(
            f"{path} is missing or damaged ({reason_of(error)}): tokenize again"
        ) from error
    return files


def join_shards(shards: Sequence[Sequence[FileRecord]]) -> list[FileRecord]:
    """Join the records of consecutive shards into one record per file.

    Raises DataFormatError if a shard does not continue where the previous one ends.
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
