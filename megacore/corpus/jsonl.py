"""Local JSON Lines files: nothing is copied, the corpus refers to them."""

import glob
from pathlib import Path
from typing import Any

from megacore.config.source import JsonlSource
from megacore.corpus.documents import JsonlDocuments, SourceFile, write_sources
from megacore.errors import DataFormatError


def fingerprint(source: JsonlSource) -> dict[str, Any]:
    """Absolute path, size and modification time of every file, in order, and the key."""
    files = [[file.path, file.size, file.mtime_ns] for file in list_files(source)]
    return {"kind": source.kind, "key": source.key, "files": files}


def collect(source: JsonlSource, directory: Path) -> dict[str, int]:
    """Write `sources.json`; the lines are counted here and parsed when they are tokenized."""
    files = list_files(source)
    documents = JsonlDocuments([Path(file.path) for file in files], source.key)
    write_sources(directory, source.kind, files, key=source.key)
    return {"documents": len(documents), "files": len(files), "skipped_files": 0, "bytes": documents.bytes}


def list_files(source: JsonlSource) -> list[SourceFile]:
    """Every file that the paths and globs name, the matches of a glob sorted. Raises DataFormatError."""
    return [SourceFile.of(path) for pattern in source.files for path in _expand(pattern)]


def _expand(pattern: str) -> list[Path]:
    if Path(pattern).exists() or not glob.has_magic(pattern):
        return [Path(pattern)]
    paths = sorted(Path(name) for name in glob.glob(pattern, recursive=True))
    if not paths:
        raise DataFormatError(f"data.source.files: no file matches {pattern!r}: check the glob")
    return paths
