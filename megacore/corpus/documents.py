"""The documents of a corpus directory: writing them, and reading any of them by its number."""

import itertools
import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import orjson

from megacore.artifact.files import workspace_errors, write_json
from megacore.errors import DataFormatError

CORPUS_NAME = "corpus.jsonl"
SOURCES_NAME = "sources.json"
_SCAN_BYTES = 1 << 24
_BLOCK = 1 << 16
_NEWLINE = 0x0A


class CorpusWriter:
    """Writes `corpus.jsonl`, a document per line, as a context manager."""

    def __init__(self, directory: Path) -> None:
        """Start the file in `directory`."""
        self.documents = 0
        self._path = directory / CORPUS_NAME
        with workspace_errors(self._path):
            self._file = open(self._path, "wb", buffering=1 << 20)  # noqa: SIM115 (closed by __exit__)

    def add(self, text: str, source: str) -> None:
        """Append a document and where it came from."""
        try:
            line = orjson.dumps({"text": text, "source": source}, option=orjson.OPT_APPEND_NEWLINE)
        except orjson.JSONEncodeError as error:
            raise DataFormatError(f"{source} holds text that is not Unicode ({error}): remove it") from error
        with workspace_errors(self._path):
            self._file.write(line)
        self.documents += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with workspace_errors(self._path):
            self._file.close()


@dataclass(frozen=True)
class SourceFile:
    """A file that a corpus refers to, as it was when it was collected."""

    path: str
    """Absolute."""
    size: int
    """Bytes."""
    mtime_ns: int
    """Modification time: a file that was touched since is refused."""

    @classmethod
    def of(cls, path: Path) -> "SourceFile":
        """The file as it is now. Raises DataFormatError when it is missing."""
        try:
            status = path.stat()
        except OSError as error:
            raise DataFormatError(f"{path} cannot be read: {error.strerror}: check data.source") from error
        if not path.is_file():
            raise DataFormatError(f"{path} is not a file: check data.source")
        return cls(str(path.absolute()), status.st_size, status.st_mtime_ns)

    def check_unchanged(self) -> None:
        """Raise DataFormatError when the file is not what was collected."""
        if SourceFile.of(Path(self.path)) != self:
            raise DataFormatError(f"{self.path} has changed since it was collected: run the collect stage again")


def write_sources(directory: Path, kind: str, files: Sequence[SourceFile], **facts: Any) -> None:
    """Write `sources.json`: the files that the corpus consists of, which stay where they are."""
    entries = [{"path": file.path, "size": file.size, "mtime_ns": file.mtime_ns} for file in files]
    write_json(directory / SOURCES_NAME, {"kind": kind, "files": entries, **facts})


def read_sources(directory: Path) -> tuple[dict[str, Any], list[SourceFile]] | None:
    """What `sources.json` says, its files checked to be unchanged; None for a corpus with text of its own.

    Raises DataFormatError.
    """
    path = directory / SOURCES_NAME
    if not path.exists():
        return None
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        files = [SourceFile(**entry) for entry in facts["files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataFormatError(f"{path} is damaged ({error}): run the collect stage again") from error
    for file in files:
        file.check_unchanged()
    return facts, files


class JsonlDocuments:
    """Random access to the documents of JSON Lines files, in order of the files and their lines.

    Memory: 8 bytes per document.
    """

    def __init__(self, paths: Sequence[Path], key: str) -> None:
        """Find every line of `paths`; `key` is the field that holds the text. Raises DataFormatError."""
        self.paths = tuple(paths)
        self.key = key
        self._starts = [_line_starts(path) for path in self.paths]
        self._first = np.cumsum([0, *(len(starts) - 1 for starts in self._starts)])

    def __len__(self) -> int:
        return int(self._first[-1])

    def read(self, numbers: npt.NDArray[np.int64]) -> Iterator[str]:
        """The texts of the documents with these numbers, in this order.

        Raises DataFormatError with file and line for a line that is not a JSON object with text under the key.
        """
        with _OpenFiles(self.paths) as files:
            # In blocks: a list of all numbers would take more memory than the array.
            blocks = (numbers[first : first + _BLOCK].tolist() for first in range(0, len(numbers), _BLOCK))
            for number in itertools.chain.from_iterable(blocks):
                file = int(np.searchsorted(self._first, number, side="right")) - 1
                line = number - int(self._first[file])
                start, stop = self._starts[file][line : line + 2].tolist()
                yield parse_document(files.read(file, start, stop), self.key, f"{self.paths[file]}:{line + 1}")

    def __iter__(self) -> Iterator[str]:
        return self.read(np.arange(len(self)))

    @cached_property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(int(starts[-1]) for starts in self._starts)


class _OpenFiles:
    """Keeps the files that were read last open: a corpus may have more of them than a process has descriptors."""

    LIMIT = 128

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._descriptors: OrderedDict[int, int] = OrderedDict()

    def read(self, file: int, start: int, stop: int) -> bytes:
        """The bytes start … stop-1 of file number `file`."""
        if file not in self._descriptors:
            if len(self._descriptors) == self.LIMIT:
                os.close(self._descriptors.popitem(last=False)[1])
            self._descriptors[file] = os.open(self._paths[file], os.O_RDONLY)
        self._descriptors.move_to_end(file)
        return os.pread(self._descriptors[file], stop - start, start)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)


def open_documents(directory: Path) -> JsonlDocuments:
    """The documents of a corpus directory.

    Raises DataFormatError when it holds token files instead of text, or its files have changed.
    """
    found = read_sources(directory)
    if found is None:
        return JsonlDocuments([directory / CORPUS_NAME], "text")
    facts, files = found
    if facts["kind"] != "jsonl":
        raise DataFormatError(
            f"{directory} refers to ready-made tokens and has no text: give data.tokenizer a tokenizer that exists "
            "(gpt2-bpe or hf), since none can be trained on them"
        )
    return JsonlDocuments([Path(file.path) for file in files], facts["key"])


def parse_document(line: bytes, key: str, where: str) -> str:
    """The text of one JSON line; `where` is its file and line number. Raises DataFormatError."""
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        what = f"not JSON ({error})" if line.strip() else "blank"
        raise DataFormatError(f"{where} is {what}: repair or remove the line") from error
    if not isinstance(value, dict):
        raise DataFormatError(f"{where} holds a JSON {type(value).__name__}, not an object with the key {key!r}")
    text = value.get(key)
    if isinstance(text, str):
        return text
    if key not in value:
        raise DataFormatError(f"{where} has no key {key!r}, only {', '.join(sorted(value))}: set data.source.key")
    raise DataFormatError(f"{where} has a {type(text).__name__} under {key!r} instead of a string: repair the line")


def _line_starts(path: Path) -> npt.NDArray[np.int64]:
    """Byte offset of each line and, last, the end of the file; the last line needs no newline."""
    starts, position, last = [np.zeros(1, np.int64)], 0, _NEWLINE
    try:
        with open(path, "rb") as file:
            while block := file.read(_SCAN_BYTES):
                starts.append(np.flatnonzero(np.frombuffer(block, np.uint8) == _NEWLINE) + (position + 1))
                position += len(block)
                last = block[-1]
    except OSError as error:
        raise DataFormatError(f"{path} cannot be read: {error.strerror}: check data.source") from error
    if last != _NEWLINE:
        starts.append(np.array([position], np.int64))
    return np.concatenate(starts)
