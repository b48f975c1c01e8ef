"""Source of web pages in WARC files (ISO 28500): responses of servers, or text of WET files.

The corpus refers to the files by path. Only the stage curate reads them, since what they contain is
HTML, or text of which most is not worth training on.
"""

import codecs
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import SEEK_END
from pathlib import Path
from typing import Any

from megacore.config.data import WarcSource
from megacore.corpus import local_files
from megacore.corpus.documents import SourceFile, write_sources
from megacore.corpus.formats import decompress, open_file, too_large, unreadable
from megacore.corpus.segments import Segment, page_segments
from megacore.errors import ConfigError, DamagedFileError, one_line

_VERSION = 3
"""Version of what is read of a page, in the keys of the stages that read web pages."""
_CUT_BYTES = 1 << 22
"""Least number of bytes on disk between two places at which a file may be cut into segments."""
_MOST_CUTS = 4_000_000
"""Number of places of all files, beyond which they are farther apart: `sources.json`, with 50 bytes
for each, has to stay below the limit of a JSON file."""
_PIECE_BYTES = 1 << 16
_GZIP = b"\x1f\x8b"
_HTML = ("text/html", "application/xhtml+xml")
_META_BYTES = 1024
"""Beginning of a page in which HTML names its encoding, as in the HTML standard."""
_META = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([\w.:-]+)""", re.IGNORECASE)
_CHARSET = re.compile(r"""charset\s*=\s*["']?([\w.:-]+)""", re.IGNORECASE)
_READ_AS = {
    "ascii": "cp1252",
    "big5": "big5hkscs",
    "euc_kr": "cp949",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "iso2022_jp": "iso2022_jp_ext",
    "iso8859-1": "cp1252",
    "iso8859-9": "cp1254",
    "shift_jis": "cp932",
    "tis-620": "cp874",
}
"""Encodings that pages name, and the larger ones that the web's Encoding Standard reads instead."""
_SEVEN_BIT, _ESCAPE = "iso2022_jp", b"\x1b"
"""Encoding that is valid ASCII, and the byte with which it begins Japanese characters."""
_DAMAGED_CHARACTERS = 0.1
"""Number of invalid sequences in relation to valid characters beyond ASCII, below which a page is
taken as UTF-8."""


@dataclass(frozen=True)
class Page:
    """Page of a WARC file."""

    number: int
    """Number in its file, from 1."""
    text: str
    """HTML of a response, or the text of a WET file's record."""
    is_html: bool
    url: str
    date: str


def check_installed() -> None:
    """Raise ConfigError unless what reads WARC files is installed."""
    try:
        import warcio  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "a source of kind warc needs warcio, which is not installed: install megacore[web]"
        ) from error


def fingerprint(source: WarcSource) -> dict[str, Any]:
    """Return the version, and path, size and modification time of every file in order.

    Raises ConfigError.
    """
    check_installed()
    return local_files.fingerprint(source) | {"pages": _VERSION}


def collect(source: WarcSource, directory: Path) -> dict[str, int]:
    """Write `sources.json` with the places at which the files may be cut, and return counts.

    Each file is read once. Raises DamagedFileError for one that is no whole WARC file.
    """
    files = local_files.list_files(source)
    local_files.warn_of_repetitions([Path(file.path) for file in files])
    distance = sum(file.size for file in files) // _MOST_CUTS
    scanned = [_scan(file.path, distance) for file in files]
    write_sources(directory, source.kind, files, cuts=[places for places, _ in scanned])
    return {
        "documents": sum(pages for _, pages in scanned),
        "files": len(files),
        "skipped_files": 0,
        "bytes": sum(file.size for file in files),
    }


def is_web(path: str | Path) -> bool:
    """Return True if a file has the name of a WARC or WET file, such as `a.warc.wet.gz`."""
    return ".warc" in Path(path).suffixes


def file_segments(files: Sequence[SourceFile]) -> list[Segment]:
    """Return the segments of files that are not collected. Raises ConfigError, DamagedFileError."""
    check_installed()
    return page_segments(files, [_scan(file.path)[0] for file in files])


def read_pages(segment: Segment, document_bytes: int) -> Iterator[Page]:
    """Yield the pages of a segment in order, with one in memory at a time.

    Responses other than successful ones and other than HTML are left out, as are texts that no
    encoding decodes. Raises DamagedFileError; DataFormatError for a page of more than
    `document_bytes`.
    """
    number = segment.first_page or 1
    for _, record in _records(segment.path, segment.start, segment.stop):
        if not _is_page(record):
            continue
        content = _content(record, segment.path, number, document_bytes)
        is_html = record.rec_type == "response"
        text = _decoded(content, _charset(record), is_html=is_html)
        headers = record.rec_headers
        if text is not None:
            yield Page(
                number,
                text,
                is_html,
                headers.get_header("WARC-Target-URI", ""),
                headers.get_header("WARC-Date", ""),
            )
        number += 1


def _scan(path: str, distance: int = 0) -> tuple[list[list[int]], int]:
    """Return places to cut a file, each as byte and number of the next page, and all its pages.

    They are at least `distance` bytes apart, and _CUT_BYTES.
    """
    places, page = [[0, 1]], 1
    for start, record in _records(path, 0, None):
        if start - places[-1][0] >= max(distance, _CUT_BYTES):
            places.append([start, page])
        page += _is_page(record)
    return places, page - 1


def _records(path: str, start: int, stop: int | None) -> Iterator[tuple[int, Any]]:
    """Yield the records that begin at bytes start … stop-1, each with its first byte.

    Raises DamagedFileError for a record that is cut off, and for a file with other content.
    """
    from warcio.archiveiterator import WARCIterator

    with _damage(path), open_file(path) as file:
        begin, record = start, None
        file.seek(start)
        records = WARCIterator(file)
        for record in records:
            begin = records.offset
            if stop is not None and begin >= stop:
                return
            yield begin, record
            while record.raw_stream.read(_PIECE_BYTES):
                pass
            length = record.rec_headers.get_header("Content-Length", "")  # the last of some writers
            if not length.isdigit() or getattr(record.raw_stream, "limit", 0) > 0:
                raise _cut_off(path, begin)
        # warcio takes a header that is cut off, or a damaged member of gzip, for the end of a file.
        if records.next_line or (record is None and file.seek(0, SEEK_END) > start):
            raise _cut_off(path, records.offset)
        file.seek(begin)
        compressed = file.read(len(_GZIP)) == _GZIP
    if compressed:
        for _ in decompress(path, "gzip", begin):
            pass


def _cut_off(path: str, begin: int) -> DamagedFileError:
    return DamagedFileError(
        f"{path} has a record at byte {begin:,} that is cut off or damaged: fetch the whole file "
        "again"
    )


@contextmanager
def _damage(path: str) -> Iterator[None]:
    from warcio.exceptions import ArchiveLoadFailed
    from warcio.statusandheaders import StatusAndHeadersParserException

    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from error
    except (
        ArchiveLoadFailed,
        StatusAndHeadersParserException,
        EOFError,
        zlib.error,
        AttributeError,  # from warcio, for a response without an address
    ) as error:
        raise _no_warc(path, error) from error


def _no_warc(path: str, error: Exception) -> DamagedFileError:
    text = "".join(filter(str.isprintable, one_line(error)))
    reason = text[:80] or type(error).__name__
    return DamagedFileError(
        f"{path} is no WARC file, plain or with each record compressed by itself as .gz "
        f"({reason}): fetch it again, or write it anew with `warcio recompress`"
    )


def _is_page(record: Any) -> bool:
    """Return True for a successful response with HTML, and for a text that was extracted."""
    if record.rec_type == "conversion":
        return (record.rec_headers.get_header("Content-Type") or "text/plain").startswith("text/")
    if record.rec_type != "response" or record.http_headers is None:
        return False
    if not (record.http_headers.get_statuscode() or "").startswith("2") or not _unpacks(record):
        return False
    kind = record.rec_headers.get_header(
        "WARC-Identified-Payload-Type"
    ) or record.http_headers.get_header("Content-Type", "")
    return kind.partition(";")[0].strip().lower() in _HTML


def _unpacks(record: Any) -> bool:
    """Return True unless a response is compressed in a way that cannot be read here."""
    from warcio.bufferedreaders import BufferedReader

    packing = _coding(record, "Content-Encoding")
    return packing in ("", "identity", *BufferedReader.get_supported_decompressors())


def _coding(record: Any, header: str) -> str:
    """Return the coding that a header of a response names, as warcio spells it."""
    value: str = record.http_headers.get_header(header, "")
    return value.strip().lower().removeprefix("x-")


def _content(record: Any, path: str, number: int, limit: int) -> bytes:
    """Return a page's bytes, unpacked. Raises DataFormatError for more than `limit`."""
    if record.http_headers:
        for header in ("Content-Encoding", "Transfer-Encoding"):
            record.http_headers.replace_header(header, _coding(record, header))
    content: bytes = record.content_stream().read(limit + 1)
    if len(content) > limit:
        raise too_large(f"{path} page {number}", f"more than {limit:,} bytes", limit)
    return content


def _charset(record: Any) -> str | None:
    """Return the encoding that the server named, or None."""
    headers = record.http_headers
    match = _CHARSET.search(headers.get_header("Content-Type", "")) if headers else None
    return match[1] if match else None


def _decoded(content: bytes, charset: str | None, *, is_html: bool) -> str | None:
    """Return a text that is UTF-8, or in the encoding that is named or detected; else None."""
    from charset_normalizer import from_bytes

    escaped = _ESCAPE in content
    if not escaped and (text := _utf8(content)) is not None:
        return text
    meta = _META.search(content[:_META_BYTES]) if is_html else None
    labels = (charset, meta and meta[1].decode("ascii", "ignore"))
    names = [name for label in labels for name in _encodings(label)]
    if escaped and _SEVEN_BIT not in names and (text := _utf8(content)) is not None:
        return text
    for name in names:
        if (text := _strictly(content, name)) is not None:
            return text
    best = from_bytes(content).best()
    return None if best is None else str(best)


def _utf8(content: bytes) -> str | None:
    """Return the text of a page that is UTF-8, except for few damaged characters, or None."""
    text = _strictly(content, "utf-8")
    if text is not None:
        return text
    text = content.decode("utf-8", "replace")
    damaged = text.count("\ufffd")
    whole = len(text) - len(text.encode("ascii", "ignore")) - damaged
    return text if damaged < _DAMAGED_CHARACTERS * whole else None


def _encodings(label: str | None) -> list[str]:
    """Return Python's names of the encodings to try for the name that a page has for its own."""
    try:
        name = codecs.lookup(label or "").name
    except (LookupError, UnicodeError):
        return []
    return [_READ_AS[name], name] if name in _READ_AS else [name]


def _strictly(content: bytes, name: str) -> str | None:
    """Return the decoded text, without a last character that is cut off, or None."""
    try:
        text = content.decode(name)
        text.encode()  # some encodings have halves of surrogate pairs
        return text
    except UnicodeDecodeError as error:
        # Crawlers cut long pages at a byte.
        whole = content[: error.start]
        return _strictly(whole, name) if whole and error.end == len(content) else None
    except (UnicodeError, LookupError):
        return None
