"""Local sources: JSON Lines, parquet with a document per row, and ready-made token files.

No file is copied; the corpus refers to the files by path.
"""

import glob
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from megacore.artifact.manifest import file_digest
from megacore.config.data import JsonlSource, ParquetSource, PrefixSource, WarcSource
from megacore.config.keys import key_parameters
from megacore.corpus.documents import SourceFile, write_sources
from megacore.corpus.formats import (
    ADVICE,
    DOCUMENT_BYTES,
    file_format_of,
    pieces,
    too_large,
    unreadable,
)
from megacore.errors import DamagedFileError, DataFormatError, one_line
from megacore.observe.logging import counted
from megacore.paths import exists, matches
from megacore.token_files.indexed_dataset import IndexedDataset, bin_path, idx_path

Value = TypeVar("Value")
_logger = logging.getLogger(__name__)

_BATCH_ROWS = 1024
_VALUE_BYTES = 16
_GROUP_BYTES = 1 << 16
"""Bytes that parquet's encodings may add to a text and to a column of a row group."""


def fingerprint(source: JsonlSource | ParquetSource | WarcSource) -> dict[str, Any]:
    """Return the fields of a key, and path, size and modification time of every file in order."""
    files = [[file.path, file.size, file.mtime_ns] for file in list_files(source)]
    return key_parameters(source, "collect", {"files": files})


def collect(
    source: JsonlSource | ParquetSource, directory: Path, document_bytes: int
) -> dict[str, int]:
    """Write `sources.json` and return counts.

    Lines and rows are only counted, not parsed; compressed files are decompressed once for that.
    Raises DataFormatError for a damaged file, for a document of more than `document_bytes`, and for
    parquet without the column.
    """
    files = list_files(source)
    warn_of_repetitions([Path(file.path) for file in files])
    for file in files:
        if (file_format_of(file.path) == "parquet") != (source.kind == "parquet"):
            kind = "jsonl" if source.kind == "parquet" else "parquet"
            raise DataFormatError(
                f"{file.path} is no {source.kind} file: give it to a source of kind {kind}"
            )
    documents = sum(count_documents(file.path, source.key, document_bytes) for file in files)
    write_sources(directory, source.kind, files, key=source.key)
    size = sum(file.size for file in files)
    return {"documents": documents, "files": len(files), "skipped_files": 0, "bytes": size}


def count_documents(
    path: str | Path, key: str, document_bytes: int = DOCUMENT_BYTES, advice: str = ADVICE
) -> int:
    """Return the number of lines or rows of a file; the last line needs no newline.

    Raises DamagedFileError; DataFormatError, with `advice`, for a line of more than
    `document_bytes` or a row group whose rows have more than that on average; FileAccessError.
    """
    file_format = file_format_of(path)
    if file_format == "parquet":
        with _open(path) as file:
            _check_column(path, file, key)
            groups = range(file.num_row_groups)
            return sum(
                _group_rows(path, file, group, key, document_bytes, advice) for group in groups
            )
    count, last = 0, b"\n"
    for piece in pieces(path, file_format, document_bytes, advice):
        count += piece.count(b"\n")
        last = piece[-1:] or last
    return count + (last != b"\n")


def list_files(source: JsonlSource | ParquetSource | WarcSource) -> list[SourceFile]:
    """Return all files that match the source's paths and globs, the matches of a glob sorted.

    Raises DataFormatError for a missing file or a glob without matches.
    """
    return [SourceFile.of(path) for pattern in source.files for path in expand(pattern)]


def expand(pattern: str) -> list[Path]:
    """Return the path, or the sorted matches of a glob.

    What a glob also finds through links to directories is returned once. Raises DataFormatError
    without matches, or for a folder that cannot be listed; FileAccessError.
    """
    try:
        if exists(pattern) or not glob.has_magic(pattern):
            return [Path(pattern)]
        paths = matches(pattern)
    except OSError as error:
        raise unreadable(error.filename or pattern, error) from error
    if not paths:
        raise DataFormatError(f"data.source.files: no file matches {pattern!r}: check the glob")
    return without_links(zip(paths, paths, strict=True))


def without_links(paths: Iterable[tuple[Path, Value]]) -> list[Value]:
    """Return the values, but only the first of each file that several directory links lead to.

    A link to a file is a file of its own: the hub's cache consists of them.
    """
    parents: dict[Path, Path] = {}
    found: dict[Path, Value] = {}
    for path, value in paths:
        if path.parent not in parents:
            parents[path.parent] = path.parent.resolve()
        found.setdefault(parents[path.parent] / path.name, value)
    return list(found.values())


def warn_of_repetitions(paths: Sequence[Path]) -> None:
    """Log a warning if the patterns of a source overlap, so that files are read more than once."""
    parents = {path.parent: path.parent.resolve() for path in paths}
    counts = Counter(parents[path.parent] / path.name for path in paths)
    repeated = [(path, times) for path, times in counts.items() if times > 1]
    if repeated:
        path, times = repeated[0]
        _logger.warning(
            "the source names %s more than once, the first being %s %d times: their documents are "
            "repeated as often; name each file once unless that is intended",
            counted(len(repeated), "file"),
            path,
            times,
        )


def prefix_fingerprint(source: PrefixSource) -> dict[str, Any]:
    """Return paths, sizes and modification times of both files, and the sha256 of the index."""
    files = [[file.path, file.size, file.mtime_ns] for file in _files(source)]
    return key_parameters(
        source, "collect", {"files": files, "idx_sha256": file_digest(idx_path(source.prefix))}
    )


def collect_prefix(source: PrefixSource, directory: Path) -> dict[str, int]:
    """Check the files' structure and write `sources.json`. Raises DataFormatError."""
    files = _files(source)
    dataset = IndexedDataset(source.prefix)
    write_sources(directory, source.kind, files, prefix=str(Path(source.prefix).absolute()))
    # Token files with only empty documents count as empty.
    documents = dataset.documents if len(dataset) else 0
    size = sum(file.size for file in files)
    return {"documents": documents, "files": len(files), "skipped_files": 0, "bytes": size}


def _files(source: PrefixSource) -> list[SourceFile]:
    return [SourceFile.of(path) for path in (bin_path(source.prefix), idx_path(source.prefix))]


def group_rows(path: str | Path) -> list[int]:
    """Return the number of rows of each row group."""
    with _open(path) as file:
        return [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]


def group_sizes(path: str | Path, key: str) -> list[int]:
    """Return the uncompressed bytes of column `key` in each row group. Raises DataFormatError."""
    with _open(path) as file:
        _check_column(path, file, key)
        return [_group_bytes(file, group, key) for group in range(file.num_row_groups)]


def text_columns(path: str | Path) -> list[str]:
    """Return the names of the columns with text."""
    with _open(path) as file:
        return [field.name for field in file.schema_arrow if _is_text(field.type)]


def read_batches(
    path: str | Path, columns: list[str] | None, start: int = 0, stop: int | None = None
) -> Iterator[Any]:
    """Yield arrow batches with some columns (None: all) of row groups start … stop-1, in order."""
    with _open(path) as file:
        groups = range(start, file.num_row_groups if stop is None else stop)
        yield from file.iter_batches(
            _BATCH_ROWS, row_groups=groups, columns=columns, use_threads=False
        )


def read_column(
    path: str | Path,
    key: str,
    start: int,
    stop: int | None,
    size: int,
    document_bytes: int = DOCUMENT_BYTES,
) -> Iterator[Any]:
    """Yield column `key` of row groups start … stop-1 as arrow arrays of about `size` bytes.

    Memory holds one array and one page of the file. Raises DataFormatError, also for a text of more
    than `document_bytes`.
    """
    import pyarrow as pa

    with _open(path) as file:
        _check_column(path, file, key)
        for group in range(start, file.num_row_groups if stop is None else stop):
            # Read few rows at a time: their size is known only per group, and is unreliable where
            # values are repeated.
            rows = _group_rows(path, file, group, key, document_bytes)
            batch = max(1, min(_BATCH_ROWS, size * rows // max(1, _group_bytes(file, group, key))))
            chunks: list[Any] = []
            taken = row = 0
            for table in file.iter_batches(
                batch, row_groups=[group], columns=[key], use_threads=False
            ):
                column = table.column(0)
                if column.nbytes > document_bytes:
                    _check_texts(path, file, group, column, row, document_bytes)
                row += len(column)
                chunks.append(column)
                taken += column.nbytes
                if taken >= size:
                    yield pa.chunked_array(chunks)
                    chunks, taken = [], 0
            if chunks:
                yield pa.chunked_array(chunks)


def _group_rows(
    path: str | Path, file: Any, group: int, key: str, document_bytes: int, advice: str = ADVICE
) -> int:
    """Return the number of rows of a group, unless one must be larger than `document_bytes`."""
    rows = int(file.metadata.row_group(group).num_rows)
    size = _group_bytes(file, group, key)
    if size > (document_bytes + _VALUE_BYTES) * rows + _GROUP_BYTES:
        raise too_large(
            f"{path}, one of the {rows:,} rows of its row group {group},",
            f"at least {size // max(rows, 1):,} bytes",
            document_bytes,
            advice,
        )
    return rows


def _check_texts(
    path: str | Path, file: Any, group: int, column: Any, row: int, document_bytes: int
) -> None:
    """Raise DataFormatError if a text of a column is too large; `row` is its first in the group."""
    import pyarrow as pa
    import pyarrow.compute as pc

    # Views and dictionaries have no length of their own; large_string holds more than 2 GiB.
    lengths = pc.binary_length(column.cast(pa.large_string()))
    largest = pc.max(lengths).as_py() or 0
    if largest > document_bytes:
        before = sum(file.metadata.row_group(number).num_rows for number in range(group))
        number = before + row + pc.index(lengths, largest).as_py() + 1
        raise too_large(f"{path} row {number}", f"{largest:,} bytes", document_bytes)


@contextmanager
def _open(path: str | Path) -> Iterator[Any]:
    # Imported here because pyarrow imports slowly and only these files need it.
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    try:
        # With a buffer, a column is read as it is needed instead of a whole row group at once.
        with ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            yield file
    except pa.ArrowException as error:
        raise _damaged(path, error) from error
    except OSError as error:
        # Arrow reports damaged pages as OSError without an errno.
        if error.errno is not None:
            raise unreadable(path, error) from error
        raise _damaged(path, error) from error


def _damaged(path: str | Path, error: Exception) -> DamagedFileError:
    reason = one_line(error)  # Arrow's messages may have several lines
    return DamagedFileError(f"{path} is a damaged parquet file ({reason}): fetch the file again")


def _check_column(path: str | Path, file: Any, key: str) -> None:
    schema = file.schema_arrow
    if key not in schema.names:
        raise DataFormatError(
            f"{path} has no column {key!r}, only {', '.join(schema.names)}: set data.source.key"
        )
    if (count := schema.names.count(key)) > 1:
        raise DataFormatError(
            f"{path} has {count} columns {key!r}: rename all but one, or set data.source.key"
        )
    kind = schema.field(key).type
    if not _is_text(kind):
        raise DataFormatError(
            f"{path} has {kind} in column {key!r} instead of text: set data.source.key"
        )


def _is_text(kind: Any) -> bool:
    """Return True for an arrow type of strings."""
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _group_bytes(file: Any, group: int, key: str) -> int:
    metadata = file.metadata.row_group(group)
    columns = [metadata.column(number) for number in range(metadata.num_columns)]
    return sum(column.total_uncompressed_size for column in columns if column.path_in_schema == key)
