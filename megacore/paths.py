"""Existence, kind and listing of paths, with errors of the file system raised.

pathlib's methods of these names take such an error for an absence: since Python 3.14 a file behind
a failing server (EIO, ESTALE) or a forbidden folder (EACCES) does not exist, and since 3.13 a
folder that cannot be read is empty. A training would then miss its checkpoints and begin again.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

AnyPath = str | os.PathLike[str]
_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def exists(path: AnyPath) -> bool:
    """Return True if there is something at a path, False if not or if a link leads nowhere.

    Raises:
        OSError: the file system cannot say.
    """
    return _mode(path) is not None


def is_file(path: AnyPath) -> bool:
    """Return True for a regular file or a link to one. Raises OSError as `exists` does."""
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def is_dir(path: AnyPath) -> bool:
    """Return True for a directory or a link to one. Raises OSError as `exists` does."""
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def is_symlink(path: AnyPath) -> bool:
    """Return True for a symbolic link. Raises OSError as `exists` does."""
    mode = _mode(path, follow_symlinks=False)
    return mode is not None and stat.S_ISLNK(mode)


def glob(folder: AnyPath, pattern: str) -> Iterator[Path]:
    """Yield the paths in a folder that match a pattern, as `pathlib.Path.glob`, in any order.

    `**` is any number of directories, without those behind links, and is not the last part. What is
    removed meanwhile is left out, and so is what `*/run.json` names in a folder of somebody else
    that may not be entered; a folder that does not exist has no paths.

    Raises:
        OSError: a folder cannot be listed.
    """
    part, _, rest = pattern.partition("/")
    if part == "**":
        yield from glob(folder, rest)
        for entry in _entries(folder):
            if entry.is_dir(follow_symlinks=False):
                yield from glob(entry.path, pattern)
    elif any(sign in part for sign in "*?["):
        for entry in _entries(folder):
            if fnmatchcase(entry.name, part):
                yield from glob(entry.path, rest) if rest else (Path(entry.path),)
    elif rest:
        yield from glob(Path(folder, part), rest)
    else:
        with suppress(PermissionError):
            if exists(Path(folder, part)):
                yield Path(folder, part)


def rglob(folder: AnyPath, pattern: str) -> Iterator[Path]:
    """Yield the paths at any depth below a folder that match a pattern, see `glob`."""
    return glob(folder, f"**/{pattern}")


def matches(pattern: str) -> list[Path]:
    """Return the paths that match a pattern of a user, sorted.

    They are those of Python's `glob.glob(pattern, recursive=True)`: names that begin with a dot are
    left out, and links to directories are followed. A directory to which several links lead is
    listed once, so a loop of links ends.

    Raises:
        OSError: a folder cannot be listed, which `glob.glob` takes for an empty one.
    """
    paths = _matches(Path(), Path(pattern).parts, set())
    return sorted(path for path in paths if not pattern.endswith("/") or is_dir(path))


def _matches(folder: Path, parts: tuple[str, ...], listed: set[tuple[str, int]]) -> Iterator[Path]:
    """Yield what matches the parts of a pattern below a folder.

    `listed` are the directories that were listed, each with the number of parts.
    """
    if not parts:
        yield folder
        return
    part, rest = parts[0], parts[1:]
    if not any(sign in part for sign in "*?["):
        place = folder / part
        if rest or exists(place) or is_symlink(place):
            yield from _matches(place, rest, listed)
        return
    if (state := (os.path.realpath(folder), len(parts))) in listed or not is_dir(folder):
        return
    listed.add(state)
    if part == "**":
        yield from _matches(folder, rest, listed)
    for entry in sorted(_entries(folder), key=lambda entry: entry.name):
        if entry.name.startswith(".") and not part.startswith("."):
            continue
        if part == "**":
            if _leads_to_directory(entry):
                yield from _matches(folder / entry.name, parts, listed)
            elif not rest:
                yield folder / entry.name
        elif fnmatchcase(entry.name, part) and (not rest or _leads_to_directory(entry)):
            yield from _matches(folder / entry.name, rest, listed)


def _leads_to_directory(entry: os.DirEntry[str]) -> bool:
    """Return True for a directory or a link to one; only a link costs a call of the system."""
    return entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and is_dir(entry.path))


def _entries(folder: AnyPath) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        if error.errno not in _NOTHING_THERE:
            raise
        return []


def _mode(path: AnyPath, *, follow_symlinks: bool = True) -> int | None:
    """Return the mode of a path; None if nothing is there."""
    try:
        return os.stat(path, follow_symlinks=follow_symlinks).st_mode
    except ValueError:  # a null character
        return None
    except OSError as error:
        if error.errno not in _NOTHING_THERE:
            raise
        return None
