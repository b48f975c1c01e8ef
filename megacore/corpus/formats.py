"""Detection of a document file's format from its first bytes, and decompression."""

import zlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Literal

from megacore.artifact.files import access_error, regular
from megacore.config.data import DEFAULT_MAX_DOCUMENT_MB
from megacore.errors import DamagedFileError, DataFormatError, FileAccessError

FileFormat = Literal["plain", "gzip", "zstd", "parquet"]
"""Formats of document files: JSON Lines (plain or compressed) and parquet."""
BOM = b"\xef\xbb\xbf"
"""Byte order mark of UTF-8, which some editors write before the first line; it is skipped."""
SUFFIXES: dict[str, FileFormat] = {".gz": "gzip", ".zst": "zstd", ".parquet": "parquet"}
"""Format by file suffix; files with any other suffix are JSON Lines."""
_FOREIGN = frozenset({".bz2", ".lz4", ".xz", ".zip", ".7z", ".tar", ".tgz"})
_READ_BYTES = 1 << 16
_PIECE_BYTES = 1 << 20
"""Maximum number of decompressed bytes yielded at a time."""
_ZSTD_READ_BYTES = 1 << 12
"""Compressed bytes read at a time. The library cannot limit its output, so the input is small to
keep the output small even for highly repetitive text."""
_ZSTD_MAX_WINDOW = 1 << 31
"""Window size that files written by `zstd --long=31` need."""
_MEASURED = 4
"""A line that is too long is measured up to this multiple of the limit."""
DOCUMENT_BYTES = DEFAULT_MAX_DOCUMENT_MB * 10**6
"""Default maximum size of a document in bytes, for readers that have no configuration."""
_ESCAPED = 6
"""Maximum number of bytes of JSON per byte of text: those of a control character."""
_SOURCE_BYTES = 1 << 20
"""Bytes of a line that this package writes for the name of the document's source."""
RAISE = "raise data.max_document_mb"
ADVICE = f"divide or remove it, or {RAISE}"
"""Advice on a document over the limit, where the configuration sets the limit."""
_UNPACKED_BYTES = 1 << 27
_UNPACKED_RATIO = 200
"""A file may unpack to _UNPACKED_BYTES, and beyond to this multiple of its compressed bytes. Text
unpacks to 3 to 10 times its size, zeros to 1,000 (gzip) or 30,000 times (zstd)."""


def file_format_of(path: str | Path) -> FileFormat:
    """Return the format of the file, detected from its content.

    Raises DamagedFileError if the content contradicts the suffix, DataFormatError if the
    compression is unsupported, FileAccessError.
    """
    path = Path(path)
    try:
        with open_file(path) as file:
            file_format = _format_of_head(file.read(4))
    except OSError as error:
        raise unreadable(path, error) from error
    promised = SUFFIXES.get(path.suffix)
    if promised is not None and file_format != promised:
        raise DamagedFileError(
            f"{path} does not begin as a {promised} file does: it is damaged or misnamed"
        )
    if file_format == "plain" and path.suffix in _FOREIGN:
        raise DataFormatError(
            f"{path} is compressed in a way that is not read: repack it as .gz or .zst"
        )
    return file_format


def decompress(path: str | Path, file_format: FileFormat, start: int = 0) -> Iterator[bytes]:
    """Yield the decompressed content of a gzip or zstd file in pieces of at most 1 MiB.

    A file may consist of several frames, of which those from byte `start` on are read. Raises
    DamagedFileError if it is damaged or truncated, DataFormatError if it unpacks to far more than
    text does, FileAccessError.
    """
    import zstandard  # imported here because only compressed files need it

    size = 0
    try:
        with open_file(path) as file:
            file.seek(start)
            for piece in _gunzip(file) if file_format == "gzip" else _unzstd(file):
                size += len(piece)
                if size > _UNPACKED_BYTES and size > _UNPACKED_RATIO * file.tell():
                    raise DataFormatError(
                        f"{path} unpacks to over {_UNPACKED_BYTES >> 20} MiB and over "
                        f"{_UNPACKED_RATIO} times its {file_format} data, as no text does: it is "
                        "damaged or hostile; unpack it yourself if you trust it"
                    )
                yield piece
    except EOFError as error:
        raise DamagedFileError(
            f"{path} ends in the middle of its {file_format} data: fetch the whole file again"
        ) from error
    except (zlib.error, zstandard.ZstdError) as error:
        raise DamagedFileError(
            f"{path} holds damaged {file_format} data ({error}): fetch the file again"
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error


def pieces(
    path: str | Path,
    file_format: FileFormat,
    document_bytes: int,
    advice: str = ADVICE,
) -> Iterator[bytes]:
    """Yield the content of a JSON Lines file in pieces of at most 1 MiB, without byte order mark.

    Raises DataFormatError, also with `advice` for a line of more than `document_bytes`, and
    FileAccessError.
    """
    content = _content(path, file_format)
    head = b""
    for piece in content:
        head += piece
        if len(head) >= len(BOM):
            break
    position = len(BOM) if head.startswith(BOM) else 0
    line = 0
    for piece in chain([head[position:]], content):
        start = long_line(piece, document_bytes, line)
        if start is not None:
            raise too_long(path, file_format, position + start, document_bytes, advice)
        newline = piece.rfind(b"\n")
        line = len(piece) - 1 - newline if newline >= 0 else line + len(piece)
        position += len(piece)
        yield piece


def lines(path: str | Path, document_bytes: int, advice: str) -> Iterator[bytes]:
    """Yield the lines of a JSON Lines file without their newlines; an empty one may be the last.

    Raises DataFormatError, also with `advice` for a line of more than `document_bytes`, and
    FileAccessError.
    """
    parts: list[bytes] = []
    for piece in pieces(path, file_format_of(path), document_bytes, advice):
        first, *others = piece.split(b"\n")
        parts.append(first)
        if others:
            yield b"".join(parts)
            yield from others[:-1]
            parts = others[-1:]
    yield b"".join(parts)


def written_line_bytes(document_bytes: int) -> int:
    """Return the maximum size of a line that curation writes for a text of `document_bytes`."""
    return _ESCAPED * document_bytes + _SOURCE_BYTES


def long_line(data: bytes, limit: int, before: int = 0) -> int | None:
    """Return the start in `data` of the first line of more than `limit` bytes; None without one.

    The first line began `before` bytes before `data`, which gives a negative start.
    """
    start = -before
    while len(data) - start > limit:
        end = data.find(b"\n", max(start, 0))
        if end < 0 or end - start > limit:
            return start
        start = end + 1
    return None


def too_long(
    path: str | Path, file_format: FileFormat, start: int, limit: int, advice: str = ADVICE
) -> DataFormatError:
    """Return the error for a line of more than `limit` bytes.

    The line begins at byte `start` of the unpacked content. The file is read again to number the
    line, and to measure it, if it is not much longer than the limit.
    """
    number, position, measured, ends = 1, 0, start, False
    with suppress(DataFormatError):  # it may also unpack to too much
        for piece in _content(path, file_format):
            inside = max(start - position, 0)
            number += piece.count(b"\n", 0, inside)
            newline = piece.find(b"\n", inside)
            ends = newline >= 0 and inside < len(piece)
            position += len(piece)
            measured = position - len(piece) + newline if ends else position
            if ends or measured - start > _MEASURED * limit:
                break
        else:
            ends = True
    size = f"{'' if ends else 'more than '}{measured - start:,} bytes"
    return too_large(f"{path}:{number}", size, limit, advice)


def too_large(place: str, size: str, limit: int, advice: str = ADVICE) -> DataFormatError:
    """Return the error for a document of `size`, with a unit, which is over `limit` bytes."""
    return DataFormatError(
        f"{place} is a document of {size}, over the limit of {limit:,}: {advice}"
    )


def open_file(path: str | Path) -> BinaryIO:
    """Open `path` for reading. Raises DataFormatError, FileAccessError."""
    try:
        return open(regular(Path(path)), "rb", buffering=_READ_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: str | Path, error: OSError) -> DataFormatError | FileAccessError:
    """Return the error for an OSError while reading `path`.

    It is a FileAccessError if this machine or a disk is at fault.
    """
    return access_error(error, Path(path)) or DataFormatError(
        f"{path} cannot be read: {error.strerror}: check data.source"
    )


def _content(path: str | Path, file_format: FileFormat) -> Iterator[bytes]:
    if file_format != "plain":
        yield from decompress(path, file_format)
        return
    try:
        with open_file(path) as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece
    except OSError as error:
        raise unreadable(path, error) from error


def _format_of_head(head: bytes) -> FileFormat:
    if head[:2] == b"\x1f\x8b":
        return "gzip"
    # RFC 8878: a frame, or a skippable frame, with which the output of parallel compressors begins.
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
        # Zeros after a member may be padding of the storage medium (RFC 1952 leaves them to the
        # reader; gzip ignores them).
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
