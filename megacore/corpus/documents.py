"""Files of a corpus directory: `corpus.jsonl` with documents, or `sources.json` with paths."""

import json
from collections.abc import Container, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import orjson

from megacore.artifact.files import read_json, reason_of, workspace_errors, write_json
from megacore.corpus.formats import DOCUMENT_BYTES, too_large, unreadable
from megacore.errors import DataFormatError, listed
from megacore.paths import exists, is_file

CORPUS_NAME = "corpus.jsonl"
SOURCES_NAME = "sources.json"
_SHOWN_KEYS = 20
"""Maximum number of key names in an error message."""


class CorpusWriter:
    """A context manager that writes `corpus.jsonl`, one document per line."""

    def __init__(self, directory: Path, document_bytes: int = DOCUMENT_BYTES) -> None:
        """Create the file in `directory`; its lines have at most `document_bytes`."""
        self.documents = 0
        self._limit = document_bytes
        self._path = directory / CORPUS_NAME
        with workspace_errors(self._path):
            self._file = open(self._path, "wb", buffering=1 << 20)  # noqa: SIM115 (closed by __exit__)

    def add(self, text: str, source: str) -> None:
        """Append a document and the name of its source. Raises DataFormatError."""
        try:
            line = orjson.dumps({"text": text, "source": source}, option=orjson.OPT_APPEND_NEWLINE)
        except orjson.JSONEncodeError as error:
            name = source.encode("utf-8", "backslashreplace").decode()
            if name != source:
                raise DataFormatError(f"{name} has a name that is not UTF-8: rename it") from error
            raise DataFormatError(
                f"{source} holds text that is not Unicode ({error}): remove it"
            ) from error
        if len(line) > self._limit + 1:
            raise too_large(source, f"{len(line) - 1:,} bytes as JSON", self._limit)
        with workspace_errors(self._path):
            self._file.write(line)
        self.documents += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with workspace_errors(self._path):
            self._file.close()


@dataclass(frozen=True)
class SourceFile:
    """Path, size and modification time of a file of a corpus, at the time of collection."""

    path: str
    """Absolute path."""
    size: int
    """Size in bytes."""
    mtime_ns: int | None
    """Modification time; a file with another one is refused. None for files inside the corpus
    directory, of which only the size is checked."""

    @classmethod
    def of(cls, path: Path) -> "SourceFile":
        """Return the current state of the file. Raises DataFormatError if it is missing."""
        try:
            status = path.stat()
        except OSError as error:
            raise unreadable(path, error) from error
        if not is_file(path):
            raise DataFormatError(f"{path} is not a file: check data.source")
        return cls(str(path.absolute()), status.st_size, status.st_mtime_ns)

    def check_unchanged(
        self, problem: str = "has changed since it was collected: run the collect stage again"
    ) -> None:
        """Raise DataFormatError, with `problem`, if the file has another size or time now."""
        current = SourceFile.of(Path(self.path))
        if current.size != self.size or self.mtime_ns not in (None, current.mtime_ns):
            raise DataFormatError(f"{self.path} {problem}")


def check_unchanged_files(files: Iterable[SourceFile]) -> None:
    """Raise DataFormatError if a file changed while a command read it."""
    for file in files:
        file.check_unchanged("changed while it was read: start again when nobody writes to it")


def write_sources(directory: Path, kind: str, files: Sequence[SourceFile], **facts: Any) -> None:
    """Write `sources.json`, the list of the files that the corpus consists of.

    The files are not copied. Relative paths are relative to `directory`.
    """
    entries = [asdict(file) for file in files]
    write_json(directory / SOURCES_NAME, {"kind": kind, "files": entries, **facts})


def read_sources(
    directory: Path, paths: Container[str] | None = None
) -> tuple[dict[str, Any], list[SourceFile]] | None:
    """Read `sources.json` and check that its files are unchanged.

    With `paths`, only these files are checked. Returns its content and the files, with absolute
    paths (also of a prefix), or None if the corpus has a `corpus.jsonl` instead. Raises
    DataFormatError.
    """
    path = directory / SOURCES_NAME
    if not exists(path):
        return None
    try:
        facts = read_json(path)
        files = [
            SourceFile(**{**entry, "path": _below(directory, entry["path"])})
            for entry in facts["files"]
        ]
        if facts["kind"] == "prefix":
            facts["prefix"] = _below(directory, facts["prefix"])
        elif facts["kind"] == "warc":
            facts["cuts"] = [
                [(int(start), int(page)) for start, page in places] for places in facts["cuts"]
            ]
        elif not isinstance(facts["key"], str):
            raise TypeError(f"its key is {facts['key']!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataFormatError(
            f"{path} is damaged ({reason_of(error)}): run the collect stage again"
        ) from error
    for file in files:
        if paths is None or file.path in paths:
            file.check_unchanged()
    return facts, files


def names_sources(directory: Path) -> bool:
    """Return True if the field `source` of a corpus's documents says where they came from.

    `collect` and curation write it; in files that the corpus refers to it is a field like others.
    Raises DataFormatError.
    """
    sources = read_sources(directory)
    return sources is None or bool(sources[0].get("written"))


def _below(directory: Path, path: str) -> str:
    return str(directory.absolute() / path)


def parse_document(line: bytes, key: str, where: str) -> str:
    """Return the text of a JSON line; `where` names its file and line. Raises DataFormatError."""
    text: str = parse_fields(line, key, where)[key]
    return text


def parse_fields(line: bytes, key: str, where: str) -> dict[str, Any]:
    """Return the fields of a JSON line, with a text under `key`.

    `where` names its file and line. Raises DataFormatError.
    """
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        value = _lenient_fields(line, key)
        if value is not None:
            return value
        problem = f"not JSON ({error})" if line.strip() else "blank"
        raise DataFormatError(f"{where} is {problem}: repair or remove the line") from error
    if not isinstance(value, dict):
        raise DataFormatError(
            f"{where} holds a JSON {type(value).__name__}, not an object with the key {key!r}"
        )
    text = value.get(key)
    if isinstance(text, str):
        return value
    if key not in value:
        others = listed(sorted(value), _SHOWN_KEYS) or "nothing"
        raise DataFormatError(f"{where} has no key {key!r}, only {others}: set data.source.key")
    raise DataFormatError(
        f"{where} has a {type(text).__name__} under {key!r} instead of a string: repair the line, "
        "or leave it out with data.on_bad_line: skip"
    )


def _lenient_fields(line: bytes, key: str) -> dict[str, Any] | None:
    """Return the fields of a line that only Python's json accepts, or None.

    Python's json writes NaN and unpaired surrogates, which orjson rejects. They may occur only
    outside the text.
    """
    try:
        value = json.loads(line.decode("utf-8"))
        text = value.get(key) if isinstance(value, dict) else None
        return value if isinstance(text, str) and text.encode("utf-8") is not None else None
    except (ValueError, RecursionError):
        return None
