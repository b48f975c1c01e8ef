"""Survey of a user's files: which source reads them, how much text they hold, and a sample.

The command `megacore init` proposes a configuration from it.
"""

import glob
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from megacore.artifact.files import access_error
from megacore.config.data import JsonlSource, ParquetSource, TextSource
from megacore.corpus import local_files, text_files
from megacore.corpus.blocks import BadLine, read_columns
from megacore.corpus.formats import DOCUMENT_BYTES, lines
from megacore.corpus.source_tree import list_files
from megacore.errors import ConfigError, DataFormatError
from megacore.paths import exists, is_dir, is_file

Kind = Literal["text", "jsonl", "parquet"]
_SUFFIXES: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_COMPRESSED = (".gz", ".zst")
_SAMPLE_BYTES = 1 << 20
"""Size of the sample of a corpus."""
_SAMPLE_ROWS = 1000
_PREFERRED_KEY = "text"
_ADVICE = (
    "divide or remove it, or name only the other files, and add this one to the configuration with "
    "a higher data.max_document_mb"
)
"""Advice on a document that is over the limit of the proposed configuration."""


@dataclass(frozen=True)
class Survey:
    """Text that was found."""

    source: TextSource | JsonlSource | ParquetSource
    """Source that reads it, with absolute paths."""
    size: int
    """Bytes of text; estimated from the sample for JSON Lines and parquet."""
    documents: int
    """Number of documents, without cutting files."""
    largest: int
    """Bytes of the largest text file; 0 for other kinds."""
    sample: tuple[str, ...]
    """Texts from the beginning, about 1 MiB."""
    remarks: tuple[str, ...] = ()
    """Sentences about what was chosen or left out."""


def survey(paths: Sequence[Path]) -> Survey:
    """Look at files and directories and return what they hold.

    The kind with the most bytes is taken. A path that is given twice counts once. Raises
    ConfigError with one sentence if there is no text, or a path is in another one.
    """
    try:
        places = {Path(os.path.realpath(path)): path for path in paths}
        paths = [*places.values()]
        for place, path in places.items():
            outer = next((places[above] for above in place.parents if above in places), None)
            if outer is not None:
                raise ConfigError(
                    f"{path} is in {outer}, which is named, too: name only one of them"
                )
        candidates = [entry for path in paths for entry in _candidates(path)]
        sizes: dict[Kind, int] = {}
        for path, kind, _ in candidates:
            sizes[kind] = sizes.get(kind, 0) + path.stat().st_size
        if not sizes:
            raise ConfigError(
                f"{_names(paths)} holds no file whose name is UTF-8 and begins without a dot: name "
                "a file or directory with text"
            )
        kinds = sorted({kind for _, kind, named in candidates if named})
        if len(kinds) > 1:
            raise ConfigError(
                f"the named files are of several kinds ({', '.join(kinds)}): name files of one kind"
            )
        kind = max(sizes, key=lambda name: sizes[name])
        if kind == "text":
            return _text(paths, candidates)
        return _rows(paths, kind, candidates)
    except DataFormatError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise access_error(error) or ConfigError(
            f"{error.filename} cannot be read: {error.strerror}"
        ) from error


def _candidates(path: Path) -> Iterator[tuple[Path, Kind, bool]]:
    """Yield each file with its kind, and True if the user named it."""
    if is_dir(path):
        for name in list_files(path, None):
            yield path / name, _kind(path / name, named=False), False
    elif is_file(path):
        yield path, _kind(path, named=True), True
    elif exists(path):
        raise ConfigError(f"{path} is neither a file nor a directory: name one with text")
    else:
        raise ConfigError(f"{path} does not exist: name a file or directory with text")


def _kind(path: Path, named: bool) -> Kind:
    suffix = path.suffix.lower()
    name = path.with_suffix("") if suffix in _COMPRESSED else path
    if suffix == ".json" and _holds_objects(path, named=named):
        return "jsonl"
    return _SUFFIXES.get(name.suffix.lower(), "text")


def _holds_objects(path: Path, *, named: bool) -> bool:
    """Return True if the first line of a file is a complete JSON object, as in JSON Lines.

    Unless the user named the file, its second line must be one, too. Raises ConfigError for a JSON
    array that the user named.
    """
    with path.open("rb") as file:
        first = [file.readline(_SAMPLE_BYTES) for _ in range(1 if named else 2)]
    if named and first[0].lstrip().startswith(b"["):
        raise ConfigError(
            f"{path} is a JSON array, not JSON Lines: write each element on a line of its own, as "
            "`jq -c '.[]'` does"
        )
    try:
        return all(isinstance(orjson.loads(line), dict) for line in first)
    except orjson.JSONDecodeError:
        return False


def _text(paths: Sequence[Path], candidates: Sequence[tuple[Path, Kind, bool]]) -> Survey:
    texts, problems = [], []
    for path, _, named in candidates:
        problem = text_files.text_problem(path)
        if problem is None:
            texts.append(path)
        elif named and path.suffix.lower() in _COMPRESSED:
            raise ConfigError(f"{path} is compressed text: unpack it first")
        elif named:
            raise ConfigError(f"{path} {problem}: name files of UTF-8 text, JSON Lines or parquet")
        else:
            problems.append(problem)
    if not texts:
        reasons = ", ".join(
            f"{problems.count(reason)} {reason.removeprefix('is ')}"
            for reason in dict.fromkeys(problems)
        )
        raise ConfigError(
            f"{_names(paths)} holds no text: of {len(problems)} files, {reasons}: name files of "
            "UTF-8 text, JSON Lines or parquet"
        )
    sizes = [path.stat().st_size for path in texts]
    remarks = []
    if problems:
        remarks.append(
            f"{len(problems)} of {len(candidates)} files are skipped: they are empty or not text"
        )
    return Survey(
        TextSource(kind="text", files=tuple(str(path.absolute()) for path in paths)),
        size=sum(sizes),
        documents=len(texts),
        largest=max(sizes),
        sample=tuple(_head(texts)),
        remarks=tuple(remarks),
    )


def _head(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the beginning of the texts, up to the size of a sample."""
    room = _SAMPLE_BYTES
    for path in paths:
        text = next(text_files.documents(path, room))
        yield text
        room -= len(text)
        if room < 16:
            return


def _rows(
    paths: Sequence[Path], kind: Kind, candidates: Sequence[tuple[Path, Kind, bool]]
) -> Survey:
    """Return a survey of JSON Lines or parquet files."""
    files = [path for path, other, _ in candidates if other == kind]
    rows = list(itertools.islice(_sample_rows(files, kind), _SAMPLE_ROWS))
    key, others = _text_key(rows, files[0])
    texts = [row[key] for row in rows]
    documents = sum(
        local_files.count_documents(path, key, DOCUMENT_BYTES, _ADVICE) for path in files
    )
    remarks = [f"the text is in {key!r}" + (f", not in {', '.join(others)}" if others else "")]
    if len(files) < len(candidates):
        remarks.append(f"{len(candidates) - len(files)} files of other kinds are not read")
    patterns = tuple(
        pattern
        for path in paths
        for pattern in (_patterns(path, files) if is_dir(path) else [str(path.absolute())])
    )
    source = (
        ParquetSource(kind="parquet", files=patterns, key=key)
        if kind == "parquet"
        else JsonlSource(kind="jsonl", files=patterns, key=key)
    )
    mean = sum(len(text.encode()) for text in texts) / len(texts)
    return Survey(
        source, int(mean * documents), documents, 0, tuple(_limited(texts)), tuple(remarks)
    )


def _patterns(root: Path, files: Sequence[Path]) -> list[str]:
    """Return globs for files below a directory, one for each ending."""
    endings = {
        "".join(path.suffixes[-2:] if path.suffix.lower() in _COMPRESSED else path.suffixes[-1:])
        for path in files
        if path.is_relative_to(root)
    }
    return [f"{glob.escape(str(root.absolute()))}/**/*{ending}" for ending in sorted(endings)]


def _sample_rows(files: Sequence[Path], kind: Kind) -> Iterator[dict[str, Any]]:
    for path in files:
        if kind == "parquet":
            columns = local_files.text_columns(path)
            if not columns:
                raise ConfigError(f"{path} has no column with text: name another file")
            yield from read_columns(path, columns)
        else:
            yield from _objects(path)


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON Lines file. Raises ConfigError for a line that is none."""
    for number, line in enumerate(lines(path, DOCUMENT_BYTES, _ADVICE), 1):
        if not line.strip():
            continue
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise ConfigError(
                f"{path}:{number} is not JSON ({error}): repair or remove the line"
            ) from error
        if not isinstance(value, dict):
            raise ConfigError(
                f"{path}:{number} holds a JSON {type(value).__name__}, not an object with text"
            )
        yield value


def _text_key(rows: Sequence[dict[str, Any]], path: Path) -> tuple[str, list[str]]:
    """Return the field with the longest texts, or `text`, and the other fields.

    Raises ConfigError if there are no rows, or if one of them lacks the text or has one that is not
    UTF-8.
    """
    if not rows:
        raise ConfigError(f"{path} has no rows: name a file with text")
    lengths: dict[str, int] = {}
    for row in rows:
        for key, value in row.items():
            lengths.setdefault(key, 0)
            lengths[key] += len(value.strip()) if isinstance(value, str) else 0
    keys = [key for key in lengths if lengths[key]]
    if not keys:
        raise ConfigError(
            f"{path} has no field with text (fields: {', '.join(lengths) or 'none'}): name another "
            "file"
        )
    longest = max(keys, key=lambda name: lengths[name])
    key = _PREFERRED_KEY if _PREFERRED_KEY in keys else longest
    for row in rows:
        if isinstance(bad := row.get(key), BadLine):
            raise ConfigError(bad.reason)
    without = [number for number, row in enumerate(rows, 1) if not isinstance(row.get(key), str)]
    if without:
        raise ConfigError(
            f"{path} has its text in {key!r}, but {len(without)} of the first {len(rows)} rows "
            f"have no text there, the first is row {without[0]}: remove these rows, "
            "or write a configuration by hand with data.on_bad_line: skip"
        )
    return key, [name for name in lengths if name != key]


def _limited(texts: Sequence[str]) -> Iterator[str]:
    room = _SAMPLE_BYTES
    for text in texts:
        yield text[:room]
        room -= len(text)
        if room <= 0:
            return


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths)) or "nothing"
