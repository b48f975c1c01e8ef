"""Source of files on web servers.

The files are downloaded into the corpus directory and then read like local files.
"""

import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from megacore.artifact.files import workspace_errors
from megacore.config.data import HttpSource, RemoteFile
from megacore.config.keys import key_parameters
from megacore.corpus.documents import SourceFile, write_sources
from megacore.corpus.fetch import Version, fetch, forget_version, shown
from megacore.corpus.local_files import count_documents
from megacore.errors import DamagedFileError, DataFormatError
from megacore.redact import address_identity
from megacore.token_files.indexed_dataset import IndexedDataset

TEXT_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".json.gz", ".json.zst", ".parquet")
"""Suffixes of files of documents; C4 and other data sets name JSON Lines files .json."""
TOKEN_SUFFIXES = (".bin", ".idx")
"""Suffixes of a pair of token files."""
_NAME_LENGTH = 60
"""Maximum length of a name in characters; each may take up to four bytes."""


@dataclass(frozen=True)
class _Planned:
    """A file to download."""

    remote: RemoteFile
    name: str
    """Name of the file in the corpus directory."""

    def in_cache(self, cache_directory: Path) -> Path:
        """Return the path of the download, which all sources with the same address share."""
        address = hashlib.sha256(self.remote.url.encode()).hexdigest()[:16]
        return cache_directory / address / _name_of(self.remote.url)


def fingerprint(source: HttpSource) -> dict[str, Any]:
    """Return the field `key`, and addresses (without passwords and tokens) and digests in order.

    Without a digest the content may change under the same address. Raises DataFormatError for a
    name with an unknown suffix.
    """
    _plan(source)
    files = [[address_identity(remote.url), remote.sha256] for remote in source.files]
    return key_parameters(source, "collect", {"files": files})


def collect(
    source: HttpSource,
    directory: Path,
    cache_directory: Path,
    document_bytes: int,
) -> dict[str, int]:
    """Download and check every file, link it into `directory` and write `sources.json`.

    Returns counts. Downloads stay in `cache_directory`, so that neither another attempt nor a
    corpus with another key downloads them again; only damaged ones are removed. Raises
    DataFormatError, DownloadError, FileAccessError, WorkspaceError.
    """
    planned = _plan(source)
    limit = int(source.max_file_gb * 1e9)
    versions = [
        fetch(
            plan.remote.url,
            plan.remote.sha256,
            plan.in_cache(cache_directory),
            max_bytes=limit,
        )
        for plan in planned
    ]
    downloads = [{"url": shown(version.url), "sha256": version.sha256} for version in versions]
    with workspace_errors(directory):
        for plan in planned:
            _link(plan.in_cache(cache_directory), directory / plan.name)
    files = [
        SourceFile(plan.name, (directory / plan.name).stat().st_size, None) for plan in planned
    ]
    tokens = planned[0].name.endswith(TOKEN_SUFFIXES)
    try:
        if tokens:
            prefix = PurePosixPath(planned[0].name).stem
            dataset = IndexedDataset(directory / prefix)
            documents = dataset.documents if len(dataset) else 0
            write_sources(directory, "prefix", files, prefix=prefix, downloads=downloads)
        else:
            documents = sum(
                count_documents(directory / plan.name, source.key, document_bytes)
                for plan in planned
            )
            write_sources(directory, "jsonl", files, key=source.key, downloads=downloads)
    except DataFormatError as error:
        # A document over the limit and a wrong key are no faults of the download; any error in
        # token files is.
        if tokens or isinstance(error, DamagedFileError):
            _forget_unproven(planned, versions, cache_directory)
        raise
    return {
        "documents": documents,
        "files": len(files),
        "skipped_files": 0,
        "bytes": sum(file.size for file in files),
    }


def _forget_unproven(
    planned: Sequence[_Planned], versions: Sequence[Version], cache_directory: Path
) -> None:
    """Remove downloads without a known digest, so that the next attempt downloads them again."""
    for plan, version in zip(planned, versions, strict=True):
        if plan.remote.sha256 is None:
            forget_version(plan.in_cache(cache_directory), version)


def _plan(source: HttpSource) -> list[_Planned]:
    names = [_name_of(remote.url) for remote in source.files]
    suffixes = [_suffix_of(name) for name in names]
    if set(suffixes).isdisjoint(TOKEN_SUFFIXES):
        # The number keeps names unique (files of different folders may share one) and records the
        # order of the documents.
        return [
            _Planned(remote, f"{number:05}-{name}")
            for number, (remote, name) in enumerate(zip(source.files, names, strict=True))
        ]
    if sorted(suffixes) != sorted(TOKEN_SUFFIXES):
        raise DataFormatError(
            f"data.source.files names {', '.join(names)}: token files come as one pair .bin and "
            ".idx and with nothing else: give others to a source of their own"
        )
    stem = PurePosixPath(names[suffixes.index(".bin")]).stem
    pair = [
        _Planned(remote, stem + suffix)
        for remote, suffix in zip(source.files, suffixes, strict=True)
    ]
    return sorted(pair, key=lambda plan: plan.name)


def _name_of(url: str) -> str:
    try:
        path = urlsplit(url).path
    except ValueError as error:
        raise DataFormatError(
            f"{shown(url)} is no address ({error}): check data.source.files"
        ) from error
    # Only the end of a long name: a prefix and suffixes must fit into the file name, too.
    return PurePosixPath(unquote(path)).name[-_NAME_LENGTH:]


def _suffix_of(name: str) -> str:
    for suffix in (*TEXT_SUFFIXES, *TOKEN_SUFFIXES):
        if name.endswith(suffix) and name.isprintable():
            return suffix
    raise DataFormatError(
        f"data.source.files names {name or 'no file'}, whose form is unknown: its address must end "
        f"in one of {', '.join((*TEXT_SUFFIXES, *TOKEN_SUFFIXES))}"
    )


def _link(path: Path, target: Path) -> None:
    try:
        os.link(path, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(path, target)
