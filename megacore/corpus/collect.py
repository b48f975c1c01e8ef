"""The collect stage, which turns a source into a corpus directory.

A corpus directory contains either `corpus.jsonl`, one {"text", "source"} object per line in a
stable order, or `sources.json`, a list of files (JSON Lines, parquet, WARC, or token files)
that are read in place or were downloaded into the directory.
"""

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
    TextSource,
    WarcSource,
)
from megacore.corpus import hub, local_files, remote, source_tree, text_files, web_pages
from megacore.corpus.fetch import shown
from megacore.corpus.formats import DOCUMENT_BYTES
from megacore.errors import DataFormatError

VERSION = 1
"""Version of the collect stage, increased whenever its output changes."""


def fingerprint(source: Source) -> dict[str, Any]:
    """Return the identity of a source's content as JSON, for the stage's key.

    Raises DataFormatError if the source is missing.
    """
    match source:
        case SourceTreeSource():
            return source_tree.fingerprint(source)
        case TextSource():
            return text_files.fingerprint(source)
        case JsonlSource() | ParquetSource():
            return local_files.fingerprint(source)
        case WarcSource():
            return web_pages.fingerprint(source)
        case HttpSource():
            return remote.fingerprint(source)
        case HubSource():
            return hub.fingerprint(source)
        case PrefixSource():
            return local_files.prefix_fingerprint(source)


def collect(
    source: Source, directory: Path, *, document_bytes: int = DOCUMENT_BYTES
) -> dict[str, Any]:
    """Fill the empty `directory` with the corpus.

    Returns counts: documents, files, skipped_files, bytes; of a data set of the hub also its
    commit, and the rows if several form a document.

    Downloads stay in `.huggingface` (hub) or `.downloads` (web servers) next to `directory`, which
    outlive a failed attempt. Raises DataFormatError for a source that is missing, empty or
    malformed, or has a document of more than `document_bytes`, DownloadError if a server cannot be
    reached, WorkspaceError.
    """
    counts = _collect(source, directory, document_bytes)
    if not counts["documents"]:
        raise DataFormatError(
            f"the corpus is empty: {describe(source)} has no document "
            f"({counts['files']} files, {counts['skipped_files']} of them skipped): point "
            "data.source at text"
        )
    return counts


def _collect(source: Source, directory: Path, limit: int) -> dict[str, Any]:
    match source:
        case SourceTreeSource():
            return source_tree.collect(source, directory, limit)
        case TextSource():
            return text_files.collect(source, directory, limit)
        case JsonlSource() | ParquetSource():
            return local_files.collect(source, directory, limit)
        case WarcSource():
            return web_pages.collect(source, directory)
        case HttpSource():
            return remote.collect(source, directory, directory.parent / DOWNLOADS, limit)
        case HubSource():
            return hub.collect(source, directory, directory.parent / ".huggingface", limit)
        case PrefixSource():
            return local_files.collect_prefix(source, directory)


def describe(source: Source) -> str:
    """Return the name of a source for messages."""
    match source:
        case SourceTreeSource():
            pattern = source_tree.pattern_of(source)
            return f"{source_tree.root_of(source)}" + (
                f" with pattern {pattern}" if pattern else ""
            )
        case TextSource() | JsonlSource() | ParquetSource() | WarcSource():
            return ", ".join(source.files)
        case HttpSource():
            return ", ".join(shown(file.url) for file in source.files)
        case HubSource():
            name = f"{source.dataset} {source.config}" if source.config else source.dataset
            return f"{name} split {source.split}"
        case PrefixSource():
            return source.prefix
