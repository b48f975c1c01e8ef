"""Rows of local files, read by `datasets`; what it refuses is told with file and line where they can be found."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.corpus.formats import form_of, pieces
from megacore.corpus.hub import disk_errors
from megacore.errors import DataFormatError

if TYPE_CHECKING:
    from datasets import Dataset

_READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".jsonl": ("json", {}),
    ".json": ("json", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"delimiter": "\t"}),
    ".parquet": ("parquet", {}),
    # Only running text is read from such files, in which a line break means something.
    ".txt": ("text", {"keep_linebreaks": True}),
}
"""By suffix, the reader of `datasets` and its options."""
_COMPRESSED = (".gz", ".zst")
_SHOWN = 80
_NO_ROWS = "corresponds to no data"
"""In what `datasets` says of files that hold none."""


def read_files(files: list[Path], split: str, cache_directory: Path) -> "Dataset":
    """The rows of all files, one after another.

    Raises DataFormatError for files of several forms, and for one that is empty, damaged or has other columns.
    """
    suffix = _common_suffix(files, split)
    for path in files:
        if not path.stat().st_size:
            raise DataFormatError(f"{path} is empty: remove it from data.source.{split}")
    try:
        return _load(files, suffix, cache_directory)
    except DataFormatError:
        for path in files:
            _load_alone(path, suffix, cache_directory)
        raise


def _common_suffix(files: list[Path], split: str) -> str:
    by_suffix: dict[str, Path] = {}
    for path in files:
        by_suffix.setdefault(suffix_of(path), path)
    if len(by_suffix) > 1:
        shown = " and ".join(f"{path.name} ({suffix or 'no suffix'})" for suffix, path in list(by_suffix.items())[:2])
        raise DataFormatError(f"data.source.{split} mixes forms, {shown}: give files of one form")
    (suffix,) = by_suffix
    if suffix not in _READERS:
        raise DataFormatError(
            f"data.source.{split} has {by_suffix[suffix]}, which is none of {', '.join(_READERS)} (or one of them "
            f"with {' or '.join(_COMPRESSED)}): convert it"
        )
    return suffix


def suffix_of(path: Path) -> str:
    """The suffix that tells the form, whatever the file is compressed with."""
    return (path.with_suffix("") if path.suffix in _COMPRESSED else path).suffix.lower()


def _load(files: list[Path], suffix: str, cache_directory: Path) -> "Dataset":
    import datasets
    from datasets.exceptions import DatasetsError

    reader, options = _READERS[suffix]
    try:
        with disk_errors(cache_directory):
            return datasets.load_dataset(
                reader,
                data_files=[str(path.absolute()) for path in files],
                split="train",
                cache_dir=str(cache_directory / "datasets"),
                **options,
            )
    except (DatasetsError, OSError, ValueError, RuntimeError, EOFError) as error:
        named = ", ".join(map(str, files[:3])) + (", …" if len(files) > 3 else "")
        if _NO_ROWS in str(error):
            raise DataFormatError(f"{named} has no rows: check data.source") from error
        raise DataFormatError(
            f"{named} cannot be read as {suffix}: {_reason(error)}: repair it, or give files with the same columns"
        ) from error


def _load_alone(path: Path, suffix: str, cache_directory: Path) -> None:
    """Raise DataFormatError that names `path`, and the line if it can be found, when it cannot be read."""
    form_of(path)
    if suffix in (".jsonl",):
        _check_lines(path)
    _load([path], suffix, cache_directory)


def _check_lines(path: Path) -> None:
    rest, number = b"", 0
    for piece in pieces(path, form_of(path)):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            number += 1
            _check_line(path, number, line)
    _check_line(path, number + 1, rest)


def _check_line(path: Path, number: int, line: bytes) -> None:
    if not line.strip():
        return
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataFormatError(
            f"{path}, line {number}: not JSON ({error}): {line[:_SHOWN].decode('utf-8', 'replace')!r}"
        ) from error
    if not isinstance(row, dict):
        raise DataFormatError(f"{path}, line {number}: a {type(row).__name__} where an object belongs")


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause: what `datasets` itself says is only that reading failed."""
    cause: BaseException = error
    while cause.__cause__ is not None or cause.__context__ is not None:
        cause = cause.__cause__ or cause.__context__ or cause
    lines = str(cause).strip().splitlines() or [type(cause).__name__]
    return lines[0].rstrip(". ")
