"""Source of plain text files, each a document or cut into several."""

import codecs
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacore.artifact.files import canonical_json
from megacore.artifact.manifest import file_digest
from megacore.config.data import TextSource
from megacore.config.keys import key_parameters
from megacore.corpus.documents import CorpusWriter
from megacore.corpus.formats import RAISE, open_file, too_large, unreadable
from megacore.corpus.local_files import expand, warn_of_repetitions, without_links
from megacore.corpus.source_tree import list_files
from megacore.errors import DataFormatError
from megacore.paths import is_dir

_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class TextFile:
    """A file of the source."""

    path: Path
    name: str
    """Path relative to the directory that the source names, or the name of a named file."""
    named: bool
    """True if the source names the file itself; if it is not text, it is refused, not skipped."""


def list_text_files(source: TextSource) -> list[TextFile]:
    """Return all candidate files in order. Raises DataFormatError for one that is missing."""
    files: list[TextFile] = []
    for pattern in source.files:
        found: list[TextFile] = []
        for path in expand(pattern):
            if is_dir(path):
                found += [TextFile(path / name, name, False) for name in list_files(path, None)]
            else:
                found.append(TextFile(path, path.name, True))
        # `notes/**` matches a directory and the files below it
        files += without_links((file.path, file) for file in found)
    return files


def fingerprint(source: TextSource) -> dict[str, Any]:
    """Return the number of files, and one sha256 over all names and content digests."""
    entries = []
    for file in list_text_files(source):
        try:
            entries.append([file.name, file_digest(file.path)])
        except OSError as error:
            raise unreadable(file.path, error) from error
    digest = hashlib.sha256(canonical_json(entries)).hexdigest()
    return key_parameters(source, "collect", {"files": len(entries), "sha256": digest})


def collect(source: TextSource, directory: Path, document_bytes: int) -> dict[str, int]:
    """Write the documents and return counts.

    Files of a directory that are not text are skipped and counted. The source of a document is the
    name of its file, followed by the line at which it begins if the file was cut.

    Raises:
        DataFormatError: a file that the source names is not text, or a document has more than
            `document_bytes`.
    """
    files = list_text_files(source)
    warn_of_repetitions([file.path for file in files])
    skipped = size = 0
    with CorpusWriter(directory, document_bytes) as writer:
        for file in files:
            problem = text_problem(file.path)
            if problem is not None and file.named:
                raise DataFormatError(f"{file.path} {problem}: name files of UTF-8 text")
            if problem is not None:
                skipped += 1
                continue
            file_size = file.path.stat().st_size
            if source.document_characters is None and file_size > document_bytes:
                advice = f"set data.source.document_characters, at which files are cut, or {RAISE}"
                raise too_large(str(file.path), f"{file_size:,} bytes", document_bytes, advice)
            size += file_size
            line = 1
            for text in documents(file.path, source.document_characters):
                place = file.name if source.document_characters is None else f"{file.name}:{line}"
                if text.strip():
                    writer.add(text, place)
                line += text.count("\n")
    return {
        "documents": writer.documents,
        "files": len(files),
        "skipped_files": skipped,
        "bytes": size,
    }


def text_problem(path: Path) -> str | None:
    """Return why a file is not text (empty, binary, not UTF-8), as a predicate; None if it is."""
    blank = True
    try:
        for piece in _pieces(path):
            if "\0" in piece:
                return "is binary: it contains NUL bytes"
            blank = blank and not piece.strip()
    except UnicodeDecodeError as error:
        return f"is not UTF-8 text ({error.reason})"
    return "is empty" if blank else None


def documents(path: Path, characters: int | None) -> Iterator[str]:
    """Yield a file's text in parts of at most `characters` characters; None yields one part.

    The parts together are the whole text. Memory holds one part and one read.
    """
    if characters is None:
        yield "".join(_pieces(path))
        return
    parts, length = [], 0
    for piece in _pieces(path):
        parts.append(piece)
        length += len(piece)
        if length <= characters:
            continue
        text, start = "".join(parts), 0
        while len(text) - start > characters:
            end = _cut(text, start, characters)
            yield text[start:end]
            start = end
        parts, length = [text[start:]], len(text) - start
    if length:
        yield "".join(parts)


def _cut(text: str, start: int, characters: int) -> int:
    """Return the end of the part of a text that begins at `start`."""
    middle, end = start + characters // 2, start + characters
    for separators in (("\n\n", "\n\r\n"), ("\n",)):
        cut = max(text.rfind(each, middle, end) + len(each) for each in separators)
        if cut > middle:
            return cut
    return end - (text[end - 1 : end + 1] == "\r\n")


def _pieces(path: Path) -> Iterator[str]:
    """Yield the text of a file, without byte order mark. Raises UnicodeDecodeError."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    with open_file(path) as file:
        try:
            while data := file.read(_READ_BYTES):
                yield decoder.decode(data)
        except OSError as error:
            raise unreadable(path, error) from error
    yield decoder.decode(b"", final=True)
