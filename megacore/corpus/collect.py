"""The first stage: a source becomes a corpus directory.

A corpus directory holds either `corpus.jsonl`, one {"text", "source"} object per line in a stable order, or
`sources.json`, which names files that stay where they are (JSON Lines files, or a pair of token files).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megacore.config.source import HubSource, JsonlSource, PrefixSource, Source, SourceTreeSource
from megacore.corpus import hub, jsonl, prefix, source_tree
from megacore.errors import DataFormatError

VERSION = 1
"""Of the collect stage; raised when it produces something else."""


def fingerprint(source: Source) -> dict[str, Any]:
    """The identity of a source's content as JSON, for the stage's key. Raises DataFormatError when it is missing."""
    match source:
        case SourceTreeSource():
            return source_tree.fingerprint(source)
        case JsonlSource():
            return jsonl.fingerprint(source)
        case HubSource():
            return hub.fingerprint(source)
        case PrefixSource():
            return prefix.fingerprint(source)


def collect(source: Source, directory: Path, *, cache_directory: Path | None = None) -> dict[str, int]:
    """Fill the empty `directory` with the corpus; returns counts: documents, files, skipped_files, bytes.

    Downloads are cached in `cache_directory` (default: `.huggingface` beside `directory`). Raises DataFormatError
    for a source that is missing, empty or malformed, DownloadError when the hub cannot be reached, WorkspaceError.
    """
    counts = _collector(source, cache_directory or directory.parent / ".huggingface")(directory)
    if not counts["documents"]:
        raise DataFormatError(
            f"the corpus is empty: {_describe(source)} has no document "
            f"({counts['files']} files, {counts['skipped_files']} of them skipped): point data.source at text"
        )
    return counts


def _collector(source: Source, cache_directory: Path) -> Callable[[Path], dict[str, int]]:
    match source:
        case SourceTreeSource():
            return lambda directory: source_tree.collect(source, directory)
        case JsonlSource():
            return lambda directory: jsonl.collect(source, directory)
        case HubSource():
            return lambda directory: hub.collect(source, directory, cache_directory)
        case PrefixSource():
            return lambda directory: prefix.collect(source, directory)


def _describe(source: Source) -> str:
    match source:
        case SourceTreeSource():
            return f"{source_tree.root_of(source)} with pattern {source.pattern}"
        case JsonlSource():
            return ", ".join(source.files)
        case HubSource():
            return f"{source.dataset} split {source.split}"
        case PrefixSource():
            return source.prefix
