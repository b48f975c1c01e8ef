"""Source of data sets of the Hugging Face hub or a local directory, read with `datasets`."""

import errno
import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megacore.artifact.files import workspace_errors
from megacore.config.data import HubSource
from megacore.config.keys import key_parameters
from megacore.corpus.documents import CorpusWriter, SourceFile
from megacore.errors import DataFormatError, DownloadError


def fingerprint(source: HubSource) -> dict[str, Any]:
    """Return the fields that determine the documents: name, configuration, split, revision, column.

    For a local directory, the paths, sizes and modification times of its files are included.

    Without a revision the hub's content may change under the same name; pin a commit where that
    matters.
    """
    if not Path(source.dataset).is_dir():
        return key_parameters(source, "collect")
    files = sorted(path for path in Path(source.dataset).rglob("*") if path.is_file())
    identities = [[file.path, file.size, file.mtime_ns] for file in map(SourceFile.of, files)]
    return key_parameters(source, "collect", {"files": identities})


def collect(source: HubSource, directory: Path, cache_directory: Path) -> dict[str, int]:
    """Write the text of every row as a document, in the data set's order, and return counts.

    Memory does not grow with the size of the data set. The count of files is always 0.

    Unless the data set is streamed, all of its files are downloaded into `cache_directory` first;
    files that an earlier attempt downloaded are reused.

    Raises DataFormatError for a data set, split or column that does not exist, DownloadError for a
    lost connection.
    """
    size = 0
    with CorpusWriter(directory) as writer:
        for text in _texts(source, cache_directory):
            writer.add(text, f"{source.dataset}/{source.split}/{writer.documents}")
            size += len(text.encode("utf-8", "surrogatepass"))
    return {"documents": writer.documents, "files": 0, "skipped_files": 0, "bytes": size}


def _texts(source: HubSource, cache_directory: Path) -> Iterator[str]:
    rows = _open(source, cache_directory)
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


def _open(source: HubSource, cache_directory: Path) -> Any:
    # Imported here because `datasets` takes a second to import and only this source needs it.
    import datasets

    with loading(_name(source), cache_directory):
        rows = datasets.load_dataset(
            source.dataset,
            source.config,
            split=source.split,
            revision=source.revision,
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


@contextmanager
def _hub_cache(directory: Path) -> Iterator[None]:
    """Set the hub client's cache to `directory` within the context.

    The client stores a data set's card there; `load_dataset` does not pass its cache_dir for that.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_CACHE
    constants.HF_HUB_CACHE = str(directory)
    try:
        yield
    finally:
        constants.HF_HUB_CACHE = before


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


def first_sentence(error: BaseException) -> str:
    """Return the first line of an error's message, without the full stop."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(". ")
