"""The format of a file of documents, told from its first bytes, and its decompression."""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

from megacore.errors import DataFormatError

FileFormat = Literal["plain", "gzip", "zstd", "parquet"]
"""JSON Lines as they are or compressed, or parquet."""
BOM = b"\xef\xbb\xbf"
"""UTF-8's byte order mark, which some editors put before the first line; it is passed over."""
SUFFIXES: dict[str, FileFormat] = {".gz": "gzip", ".zst": "zstd", ".parquet": "parquet"}
"""What a name promises; any other is JSON Lines."""
_FOREIGN = frozenset({".bz2", ".lz4", ".xz", ".zip", ".7z", ".tar", ".tgz"})
_READ_BYTES = 1 << 16
_PIECE_BYTES = 1 << 20
"""Decompressed bytes that are handed on at a time."""
_ZSTD_READ_BYTES = 1 << 12
"""The library knows no limit of its output: little input keeps it small for text that repeats
itself."""
_ZSTD_MAX_WINDOW = 1 << 31
"""As `zstd --long=31` needs it."""


def file_format_of(path: str | Path) -> FileFormat:
    """What `path` holds, whatever its name.

    Raises DataFormatError when its name promises something else.
    """
    path = Path(path)
    with open_file(path) as file:
        file_format = _format_of_head(file.read(4))
    promised = SUFFIXES.get(path.suffix)
    if promised is not None and file_format != promised:
        raise DataFormatError(
            f"{path} does not begin as a {promised} file does: it is damaged or misnamed"
        )
    if file_format == "plain" and path.suffix in _FOREIGN:
        raise DataFormatError(
            f"{path} is compressed in a way that is not read: repack it as .gz or .zst"
        )
    return file_format


def decompress(path: str | Path, file_format: FileFormat) -> Iterator[bytes]:
    """The content of a gzip or zstd file in pieces of at most 1 MiB.

    Several frames in a file follow each other.

    Raises DataFormatError for a file that is damaged or ends too early.
    """
    import zstandard  # here: only compressed files need it

    try:
        with open_file(path) as file:
            yield from _gunzip(file) if file_format == "gzip" else _unzstd(file)
    except EOFError as error:
        raise DataFormatError(
            f"{path} ends in the middle of its {file_format} data: fetch the whole file again"
        ) from error
    except (zlib.error, zstandard.ZstdError) as error:
        raise DataFormatError(
            f"{path} holds damaged {file_format} data ({error}): fetch the file again"
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error


def pieces(path: str | Path, file_format: FileFormat) -> Iterator[bytes]:
    """The lines of a JSON Lines file in pieces of at most 1 MiB, without a byte order mark.

    Raises DataFormatError.
    """
    content = _content(path) if file_format == "plain" else decompress(path, file_format)
    head = b""
    for piece in content:
        head += piece
        if len(head) >= len(BOM):
            break
    yield head.removeprefix(BOM)
    yield from content


def open_file(path: str | Path) -> BinaryIO:
    """`path` for reading. Raises DataFormatError."""
    try:
        return open(path, "rb", buffering=_READ_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: str | Path, error: OSError) -> DataFormatError:
    """The operating system's refusal to read `path`."""
    return DataFormatError(f"{path} cannot be read: {error.strerror}: check data.source")


def _content(path: str | Path) -> Iterator[bytes]:
    try:
        with open_file(path) as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece
    except OSError as error:
        raise unreadable(path, error) from error


def _format_of_head(head: bytes) -> FileFormat:
    if head[:2] == b"\x1f\x8b":
        return "gzip"
    # RFC 8878: a frame, or a skippable frame as parallel compressors put it first.
    if head == b"\x28\xb5\x2f\xfd" or (head[1:] == b"\x2a\x4d\x18" and head[0] >> 4 == 5):
        return "zstd"
    return "parquet" if head == b"PAR1" else "plain"


def _gunzip(file: BinaryIO) -> Iterator[bytes]:
    data = file.read(_READ_BYTES)
    while data:
        member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        while not member.eof:
            if not data and not (data := file.read(_READ_BYTES)):
                raise EOFError
            yield member.decompress(data, _PIECE_BYTES)
            data = member.unconsumed_tail
        # Zeros may fill up the last block of a medium (RFC 1952 leaves it to the reader; gzip
        # ignores them).
        data = member.unused_data.lstrip(b"\0")
        while not data and (read := file.read(_READ_BYTES)):
            data = read.lstrip(b"\0")


def _unzstd(file: BinaryIO) -> Iterator[bytes]:
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_MAX_WINDOW)
    data = file.read(_ZSTD_READ_BYTES)
    while data:
        frame = decompressor.decompressobj()
        while not frame.eof:
            if not data and not (data := file.read(_ZSTD_READ_BYTES)):
                raise EOFError
            content = frame.decompress(data)
            for start in range(0, len(content), _PIECE_BYTES):
                yield content[start : start + _PIECE_BYTES]
            data = b""
        data = frame.unused_data or file.read(_ZSTD_READ_BYTES)
