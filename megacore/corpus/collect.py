"""The first stage: a source becomes a corpus directory.

A corpus directory holds either `corpus.jsonl`, one {"text", "source"} object per line in a stable
order, or `sources.json`, which names files that stay where they are (JSON Lines, parquet, or a pair
of token files) or that were downloaded into the directory itself.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megacore.artifact.workspace import DOWNLOADS
from megacore.config.data import (
    HttpSource,
    HubSource,
    JsonlSource,
    ParquetSource,
    PrefixSource,
    Source,
    SourceTreeSource,
)
from megacore.corpus import hub, local_files, remote, source_tree
from megacore.corpus.fetch import shown
from megacore.errors import DataFormatError

VERSION = 1
"""Of the collect stage; raised when it produces something else."""


def fingerprint(source: Source) -> dict[str, Any]:
    """The identity of a source's content as JSON, for the stage's key.

    Raises DataFormatError when it is missing.
    """
    match source:
        case SourceTreeSource():
            return source_tree.fingerprint(source)
        case JsonlSource() | ParquetSource():
            return local_files.fingerprint(source)
        case HttpSource():
            return remote.fingerprint(source)
        case HubSource():
            return hub.fingerprint(source)
        case PrefixSource():
            return local_files.prefix_fingerprint(source)


def collect(
    source: Source, directory: Path, *, cache_directory: Path | None = None
) -> dict[str, int]:
    """Fill the empty `directory` with the corpus.

    Returns counts: documents, files, skipped_files, bytes.

    Downloads are cached in `cache_directory` (default: `.huggingface` for the hub and `.downloads`
    for web servers, beside `directory`), which outlives a failed attempt. Raises DataFormatError
    for a source that is missing, empty or malformed, DownloadError when a server cannot be reached,
    WorkspaceError.
    """
    counts = _collector(source, cache_directory, directory.parent)(directory)
    if not counts["documents"]:
        raise DataFormatError(
            f"the corpus is empty: {_describe(source)} has no document "
            f"({counts['files']} files, {counts['skipped_files']} of them skipped): point "
            "data.source at text"
        )
    return counts


def _collector(
    source: Source, cache_directory: Path | None, beside: Path
) -> Callable[[Path], dict[str, int]]:
    match source:
        case SourceTreeSource():
            return lambda directory: source_tree.collect(source, directory)
        case JsonlSource() | ParquetSource():
            return lambda directory: local_files.collect(source, directory)
        case HttpSource():
            downloads = cache_directory or beside / DOWNLOADS
            return lambda directory: remote.collect(source, directory, downloads)
        case HubSource():
            hub_cache = cache_directory or beside / ".huggingface"
            return lambda directory: hub.collect(source, directory, hub_cache)
        case PrefixSource():
            return lambda directory: local_files.collect_prefix(source, directory)


def _describe(source: Source) -> str:
    match source:
        case SourceTreeSource():
            return f"{source_tree.root_of(source)} with pattern {source.pattern}"
        case JsonlSource() | ParquetSource():
            return ", ".join(source.files)
        case HttpSource():
            return ", ".join(shown(file.url) for file in source.files)
        case HubSource():
            return f"{source.dataset} split {source.split}"
        case PrefixSource():
            return source.prefix
