"""Source of data sets of the Hugging Face hub or a local directory, read with `datasets`."""

import errno
import importlib
import importlib.util
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megacore.artifact.files import workspace_errors
from megacore.config.data import HubSource
from megacore.config.keys import key_parameters
from megacore.corpus.documents import CorpusWriter, SourceFile
from megacore.corpus.fetch import first_sentence
from megacore.corpus.formats import too_large, unreadable
from megacore.errors import DataFormatError, DownloadError
from megacore.paths import is_dir, is_file, rglob

_logger = logging.getLogger(__name__)
_COMMIT = re.compile("[0-9a-f]{40}")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def fingerprint(source: HubSource) -> dict[str, Any]:
    """Return the fields that determine the documents: name, configuration, split, revision, column.

    For a local directory, the paths, sizes and modification times of its files are included.

    Without a revision the hub's content may change under the same name; pin a commit where that
    matters. Raises DataFormatError for a local directory that cannot be listed, FileAccessError.
    """
    if not is_dir(source.dataset):
        return key_parameters(source, "collect")
    try:
        files = sorted(path for path in rglob(source.dataset, "*") if is_file(path))
    except OSError as error:
        raise unreadable(error.filename or source.dataset, error) from error
    identities = [[file.path, file.size, file.mtime_ns] for file in map(SourceFile.of, files)]
    return key_parameters(source, "collect", {"files": identities})


def collect(
    source: HubSource,
    directory: Path,
    cache_directory: Path,
    document_bytes: int,
) -> dict[str, Any]:
    """Write the text of every row as a document, in the data set's order, and return counts.

    With `document_start`, the rows from one that matches to the next are a document. A document is
    named after its first row. Memory holds one document; it does not grow with the data set.

    The count of files is always 0. `revision` is the commit that was read, if it is known, and
    `rows` the number of rows, with `document_start`.

    Unless the data set is streamed, all of its files are downloaded into `cache_directory` first;
    files that an earlier attempt downloaded are reused.

    Raises DataFormatError for a data set, split or column that does not exist and for a document of
    more than `document_bytes`, DownloadError for a lost connection.
    """
    size, rows = 0, 0

    def counted(texts: Iterator[str]) -> Iterator[str]:
        nonlocal rows
        for text in texts:
            rows += 1
            yield text

    revision = _commit(source, cache_directory)
    with CorpusWriter(directory, document_bytes) as writer:
        texts = counted(_texts(source, revision or source.revision, cache_directory))
        for row, text in _documents(source, texts, document_bytes):
            writer.add(text, f"{source.dataset}/{source.split}/{row}")
            size += len(text.encode("utf-8", "surrogatepass"))
    counts = {"documents": writer.documents, "files": 0, "skipped_files": 0, "bytes": size}
    joined = {} if source.document_start is None else {"rows": rows}
    return counts | joined | ({} if revision is None else {"revision": revision})


def _documents(
    source: HubSource, texts: Iterator[str], document_bytes: int
) -> Iterator[tuple[int, str]]:
    """Yield (number of its first row, text) of each document.

    With `document_start`, each row ends with a line break, also an empty one; those at the end of a
    document are removed. Empty rows before the first document are dropped. Raises DataFormatError
    if no row matches, or if a document has more than `document_bytes`.
    """
    if source.document_start is None:
        yield from enumerate(texts)
        return
    begins = re.compile(source.document_start).search
    first, size, matches = 0, 0, 0
    parts: list[str] = []
    for row, text in enumerate(texts):
        if begins(text):
            yield from _joined(first, parts)
            first, size, parts, matches = row, 0, [], matches + 1
        parts.append(text if text.endswith("\n") else f"{text}\n")
        row_bytes = len(text.encode("utf-8", "surrogatepass"))
        if row_bytes > document_bytes:
            place = f"row {row} of {_name(source)}"
            raise too_large(place, f"{row_bytes:,} bytes", document_bytes)
        size += row_bytes
        if size > document_bytes:
            raise DataFormatError(
                f"{_name(source)}: no row from {first + bool(matches)} to {row} matches "
                f"data.source.document_start "
                f"{source.document_start!r}, and a document has at most "
                f"{document_bytes:,} bytes: correct the expression, or raise data.max_document_mb"
            )
    if parts and not matches:
        raise DataFormatError(
            f"{_name(source)}: no row matches data.source.document_start "
            f"{source.document_start!r}: correct the expression"
        )
    yield from _joined(first, parts)


def _joined(first: int, parts: list[str]) -> Iterator[tuple[int, str]]:
    text = "".join(parts).rstrip("\n")
    if text:
        yield first, text


def _commit(source: HubSource, cache_directory: Path) -> str | None:
    """Return the commit that the data set's revision means now, or None for a path or if unknown.

    The rows are then read from this commit, even if the branch moves on. Without a connection,
    `datasets` may still read a downloaded copy.
    """
    if is_dir(source.dataset) or not _HUB_NAME.fullmatch(source.dataset):
        return None  # a path
    if _COMMIT.fullmatch(source.revision or ""):
        return source.revision
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    with loading(_name(source), cache_directory):
        try:
            return HfApi().dataset_info(source.dataset, revision=source.revision).sha
        except (RepositoryNotFoundError, RevisionNotFoundError) as error:
            # Also errors of HTTP, which would count as a lost connection.
            raise ValueError(first_sentence(error)) from error
        except broken_connections() as error:
            _logger.warning(
                "%s: the hub cannot be asked for the commit (%s), so it is not recorded",
                _name(source),
                first_sentence(error),
            )
            return None


def _texts(source: HubSource, revision: str | None, cache_directory: Path) -> Iterator[str]:
    rows = _open(source, revision, cache_directory)
    broken: tuple[type[Exception], ...] = (OSError, *broken_connections())
    try:
        for number, row in enumerate(rows):
            yield _text(source, row, number)
    except broken as error:
        raise DownloadError(
            f"reading {_name(source)} broke off: {first_sentence(error)}: try again"
        ) from error


def broken_connections() -> tuple[type[Exception], ...]:
    """Return the types of errors that a lost connection raises.

    The errors of the hub's HTTP client are not subclasses of OSError.
    """
    clients = [
        importlib.import_module(name)
        for name in ("httpx", "httpx2")
        if importlib.util.find_spec(name)
    ]
    return ConnectionError, TimeoutError, *(client.TransportError for client in clients)


def _open(source: HubSource, revision: str | None, cache_directory: Path) -> Any:
    # Imported here because `datasets` takes a second to import and only this source needs it.
    import datasets

    with loading(_name(source), cache_directory):
        rows = datasets.load_dataset(
            source.dataset,
            source.config,
            split=source.split,
            revision=revision,
            streaming=source.streaming,
            cache_dir=str(cache_directory / "datasets"),
        )
        # Decode only the text column of rows on disk. A wrong key is refused at the first row.
        return (
            rows.select_columns([source.key])
            if not source.streaming and source.key in rows.column_names
            else rows
        )


@contextmanager
def loading(name: str, cache_directory: Path) -> Iterator[None]:
    """Translate the errors of loading a data set, and set the hub's cache to `cache_directory`.

    `name` is the name of the data set in error messages. Raises DataFormatError for a data set that
    does not exist or is damaged, DownloadError for a lost connection, WorkspaceError for a full
    disk.
    """
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HfHubHTTPError

    lost: tuple[type[Exception], ...] = (HfHubHTTPError, *broken_connections())
    try:
        with _hub_cache(cache_directory / "hub"), disk_errors(cache_directory):
            yield
    except lost as error:
        raise DownloadError(
            f"{name} cannot be loaded: {first_sentence(error)}: check the network, or give a local "
            "directory of parquet files as data.source.dataset"
        ) from error
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        raise DataFormatError(
            f"{name} cannot be loaded: {first_sentence(error)}: check data.source (data sets that "
            "need a script are not supported)"
        ) from error


_CACHE_USERS: list[tuple[Path, str]] = []
"""Directory of each data set that is being loaded, and the cache before the first of them."""
_CACHE_FREE = threading.Condition()


@contextmanager
def _hub_cache(directory: Path) -> Iterator[None]:
    """Set the hub client's cache to `directory` within the context.

    The client stores a data set's card there; `load_dataset` does not pass its cache_dir for that.
    The setting belongs to the process: threads with the same directory share it, the last one
    restores it, and a thread with another directory waits.
    """
    from huggingface_hub import constants

    with _CACHE_FREE:
        _CACHE_FREE.wait_for(lambda: not _CACHE_USERS or _CACHE_USERS[0][0] == directory)
        before = _CACHE_USERS[0][1] if _CACHE_USERS else constants.HF_HUB_CACHE
        _CACHE_USERS.append((directory, before))
        constants.HF_HUB_CACHE = str(directory)
    try:
        yield
    finally:
        with _CACHE_FREE:
            _CACHE_USERS.pop()
            if not _CACHE_USERS:
                constants.HF_HUB_CACHE = before
            _CACHE_FREE.notify_all()


@contextmanager
def disk_errors(directory: Path) -> Iterator[None]:
    """Raise WorkspaceError if an error of `datasets` was caused by a full or read-only disk."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, OSError) and cause.errno in (
                errno.ENOSPC,
                errno.EDQUOT,
                errno.EROFS,
            ):
                with workspace_errors(directory):
                    raise cause from error
            cause = cause.__cause__ or cause.__context__
        raise


def _text(source: HubSource, row: dict[str, Any], number: int) -> str:
    text = row.get(source.key)
    if isinstance(text, str):
        return text
    if source.key not in row:
        raise DataFormatError(
            f"{_name(source)} has no column {source.key!r}, only {', '.join(sorted(row))}: set "
            "data.source.key"
        )
    raise DataFormatError(
        f"row {number} of {_name(source)} has a {type(text).__name__} in column {source.key!r} "
        "instead of text"
    )


def _name(source: HubSource) -> str:
    parts = [source.dataset, source.config, source.split, source.revision]
    return "the data set " + " ".join(part for part in parts if part)
