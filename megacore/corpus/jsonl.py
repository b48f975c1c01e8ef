"""Local files of documents, JSON Lines or parquet: nothing is copied, the corpus refers to them."""

import glob
from pathlib import Path
from typing import Any

from megacore.config.keys import key_parameters
from megacore.config.source import JsonlSource, ParquetSource
from megacore.corpus import parquet
from megacore.corpus.documents import SourceFile, write_sources
from megacore.corpus.formats import form_of, pieces
from megacore.errors import DataFormatError


def fingerprint(source: JsonlSource | ParquetSource) -> dict[str, Any]:
    """Return absolute path, size and modification time of every file, in order, and the key."""
    files = [[file.path, file.size, file.mtime_ns] for file in list_files(source)]
    return key_parameters(source, "collect", {"files": files})


def collect(source: JsonlSource | ParquetSource, directory: Path) -> dict[str, int]:
    """Write `sources.json`; lines and rows are counted here and parsed when they are tokenized.

    Compressed files are decompressed once for that. Raises DataFormatError for a damaged one, and for parquet without
    the column.
    """
    files = list_files(source)
    for file in files:
        if (form_of(file.path) == "parquet") != (source.kind == "parquet"):
            other = "jsonl" if source.kind == "parquet" else "parquet"
            raise DataFormatError(f"{file.path} is no {source.kind} file: give it to a source of kind {other}")
    documents = sum(count_documents(file.path, source.key) for file in files)
    write_sources(directory, source.kind, files, key=source.key)
    size = sum(file.size for file in files)
    return {"documents": documents, "files": len(files), "skipped_files": 0, "bytes": size}


def count_documents(path: str | Path, key: str) -> int:
    """How many lines or rows a file has; the last line needs no newline. Raises DataFormatError for a damaged file."""
    form = form_of(path)
    if form == "parquet":
        parquet.check_column(path, key)
        return sum(parquet.group_rows(path))
    count, last = 0, b"\n"
    for piece in pieces(path, form):
        count += piece.count(b"\n")
        last = piece[-1:] or last
    return count + (last != b"\n")


def list_files(source: JsonlSource | ParquetSource) -> list[SourceFile]:
    """Every file that the paths and globs name, the matches of a glob sorted. Raises DataFormatError."""
    return [SourceFile.of(path) for pattern in source.files for path in _expand(pattern)]


def _expand(pattern: str) -> list[Path]:
    if Path(pattern).exists() or not glob.has_magic(pattern):
        return [Path(pattern)]
    paths = sorted(Path(name) for name in glob.glob(pattern, recursive=True))
    if not paths:
        raise DataFormatError(f"data.source.files: no file matches {pattern!r}: check the glob")
    return paths
