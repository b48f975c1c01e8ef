"""Source of the files below a directory, by default Python's standard library."""

import codecs
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megacore.artifact.files import access_error, canonical_json
from megacore.artifact.manifest import file_digest
from megacore.config.data import SourceTreeSource
from megacore.config.keys import key_parameters
from megacore.corpus.documents import CorpusWriter
from megacore.corpus.formats import too_large
from megacore.errors import DataFormatError
from megacore.paths import is_dir, is_file

EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
"""Folders with installed or generated files, which are not collected."""
_PIECE_BYTES = 1 << 20


def root_of(source: SourceTreeSource) -> Path:
    """Return the absolute path of the source's directory."""
    return Path(source.path or sysconfig.get_paths()["stdlib"]).absolute()


def pattern_of(source: SourceTreeSource) -> str | None:
    """Return the source's pattern with the default filled in; None for every text file."""
    return source.pattern or ("*.py" if source.path is None else None)


def fingerprint(source: SourceTreeSource) -> dict[str, Any]:
    """Return the number of files, and one sha256 over all relative paths and content digests."""
    root, pattern = root_of(source), pattern_of(source)
    entries = []
    for name in list_files(root, pattern):
        with _reading(root / name):
            entries.append([name, file_digest(root / name)])
    content: dict[str, Any] = {
        "files": len(entries),
        "sha256": hashlib.sha256(canonical_json(entries)).hexdigest(),
    }
    if pattern is None:
        content["pattern"] = None  # `collect` skips files that it keeps with any pattern
    return key_parameters(source, "collect", content)


def collect(source: SourceTreeSource, directory: Path, document_bytes: int) -> dict[str, int]:
    """Write each file as a document and return counts.

    Files that are not UTF-8 are skipped and counted; without a pattern, so are files that are empty
    or contain NUL bytes. Raises DataFormatError for a text of more than `document_bytes`.
    """
    root, pattern = root_of(source), pattern_of(source)
    files = skipped = size = 0
    with CorpusWriter(directory, document_bytes) as writer:
        for name in list_files(root, pattern):
            files += 1
            path = root / name
            with _reading(path):
                bytes_on_disk = path.stat().st_size
            if bytes_on_disk > document_bytes:
                if _is_text(path, with_zeros=pattern is not None):
                    raise too_large(name, f"{bytes_on_disk:,} bytes", document_bytes)
                skipped += 1
                continue
            with _reading(path):
                content = path.read_bytes()
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError:
                skipped += 1
                continue
            if pattern is None and (not text.strip() or "\0" in text):
                skipped += 1
                continue
            writer.add(text, name)
            size += len(content)
    return {"documents": writer.documents, "files": files, "skipped_files": skipped, "bytes": size}


def list_files(root: Path, pattern: str | None) -> list[str]:
    """Return the sorted paths, relative to `root`, of the regular files that match `pattern`.

    A pattern without a slash is matched against file names in any folder. Any other pattern is
    matched against the relative path; `*` matches within one folder and `**` any number of folders.
    None matches every file, except those whose name or folder begins with a dot.

    Raises DataFormatError if `root` is not a readable directory.
    """
    if not is_dir(root):
        raise DataFormatError(
            f"data.source.path is {root}, which is not a directory: give one that holds text files"
        )
    return sorted(_walk(root, pattern))


def _walk(root: Path, pattern: str | None) -> Iterator[str]:
    def refuse(error: OSError) -> None:
        raise access_error(error, root) or DataFormatError(
            f"{error.filename} cannot be listed: {error.strerror}: make it readable"
        ) from error

    parts = None if pattern is None else tuple(pattern.split("/"))
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if name not in EXCLUDED_FOLDERS]
        if parts is None:
            folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            below = path.relative_to(root)
            if parts is None:
                matches = not name.startswith(".")
            else:
                matches = _matches(below.parts if len(parts) > 1 else (name,), parts)
            if matches and _is_utf8(below) and _is_regular(path):
                yield below.as_posix()


def _matches(names: tuple[str, ...], patterns: tuple[str, ...]) -> bool:
    if not patterns:
        return not names
    first, rest = patterns[0], patterns[1:]
    if first == "**" and rest:
        return any(_matches(names[start:], rest) for start in range(len(names)))
    if first == "**":
        return bool(names)
    return bool(names) and fnmatchcase(names[0], first) and _matches(names[1:], rest)


def _is_utf8(below: Path) -> bool:
    try:
        str(below).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _is_regular(path: Path) -> bool:
    """Return True for a regular file.

    Pipes and devices are excluded because reading them may never end, and so are dangling links.
    Raises DataFormatError if what is at the path cannot be known.
    """
    with _reading(path):
        return is_file(path)


def _is_text(path: Path, *, with_zeros: bool) -> bool:
    """Return True for a file of UTF-8, in which NUL bytes may be, with one piece in memory."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with _reading(path), open(path, "rb") as file:
        try:
            while piece := file.read(_PIECE_BYTES):
                if "\0" in decoder.decode(piece) and not with_zeros:
                    return False
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return False
    return True


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise access_error(error, path) or DataFormatError(
            f"{path} cannot be read: {error.strerror}: make it readable or move it away"
        ) from error
