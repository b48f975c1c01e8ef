"""Atomic writes of files, JSON and directories, and the reader of all JSON files.

Data is written under a temporary name, synced, and renamed: a crash leaves no partial output. The
reader has limits, so that a damaged or hostile file gives one error, not a full memory.
"""

import errno
import json
import os
import shutil
import stat
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from megacore.errors import (
    ArtifactError,
    ConfigError,
    FileAccessError,
    TransientFileError,
    WorkspaceError,
)
from megacore.paths import exists, glob, is_dir, is_symlink

if TYPE_CHECKING:
    import numpy.typing as npt

Record = TypeVar("Record")
_NO_FILES = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)
"""Kinds of paths that may block the one who opens them, or never end."""

JSON_BYTES = 256 << 20
"""Largest JSON file in bytes. The index of a model with 400 billion parameters has some MB, a
tokenizer up to 40 MB, the list of a corpus of a million files 150 MB."""
MAX_DEPTH = 64
"""Deepest nesting of JSON and YAML; real files have up to ten levels."""
MAX_DIGITS = 100
"""Most digits of an integer in JSON and YAML. The state of a random number generator has 39; a
number of over 308 digits does not even fit a float."""
TEMPORARY = ".tmp-"
"""Part of the name of every file and directory that is not complete, or about to be deleted."""
_PIECE = 1 << 16
"""Bytes that are read at a time from a file that is longer than the system says."""
_TRIES = 3
"""Attempts to open a file whose handle was stale: another host may just have replaced it."""
_FAULTS = {
    errno.EIO: (
        "the disk or its connection fails: look at the kernel's messages (`dmesg`) and check the "
        "disk or mount"
    ),
    errno.EREMOTEIO: "the file server's disk fails: look at the kernel's messages there (`dmesg`)",
    errno.ESTALE: "the file server has lost the file: mount the directory again",
    errno.ENOTCONN: "the file server does not answer: mount the directory again",
    **dict.fromkeys(
        (
            errno.ETIMEDOUT,
            errno.EHOSTDOWN,
            errno.EHOSTUNREACH,
            errno.ENETDOWN,
            errno.ENETUNREACH,
            errno.ENOLINK,
        ),
        "the file server does not answer: check it, its network and the mount",
    ),
    errno.EAGAIN: "the file system was busy: try again",
    errno.EINTR: "a signal broke off the call: try again",
    errno.EMFILE: "this process has too many files open: raise the limit (`ulimit -n`)",
    errno.ENFILE: "this host has too many files open: raise it (`sysctl fs.file-max`)",
    errno.ENAMETOOLONG: "the path or a name in it is too long: give a shorter one",
}
"""Cause and remedy of the errors that say nothing about the file's content."""
_LASTING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENAMETOOLONG})
"""Those that a later attempt would meet again."""
_ONLY_OF_FILES = frozenset({errno.EIO, errno.EREMOTEIO, errno.ESTALE, *_LASTING})
"""Those that only files have; the others are also errors of sockets and processes."""
_OF_PATHS = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EINVAL,
        errno.EFBIG,
        errno.ELOOP,
        errno.ENAMETOOLONG,
    }
)
"""Errors that say what is at a path: nothing, or no file of the right kind."""
_WITHOUT_LINK = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
"""Errors where a hard link is not possible: there are none, too many, or none across disks."""
_FREE_SPACE = "free some space (in a workspace, `megacore clean` removes stale temporaries)"


def temporary_of(path: Path) -> Path:
    """Return the name under which this process writes `path` until it is complete."""
    return path.with_name(f"{path.name}{TEMPORARY}{os.getpid()}")


def replace_file(path: Path, data: bytes, *, durable: bool = True, mode: int = 0o666) -> None:
    """Replace the content of `path` atomically: a reader sees the old content or the new.

    Args:
        path: file to write; it need not exist.
        data: new content.
        durable: sync, so that the new content survives a crash of the host.
        mode: permissions of the new file, before the umask.

    Raises:
        OSError: the file cannot be written; the old content is untouched.
    """
    temporary = temporary_of(path)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with open(os.open(temporary, flags, mode), "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` with `value` as JSON, atomically and durably. Raises WorkspaceError."""
    with workspace_errors(path, only_writes=True):
        text = json.dumps(value, indent=2, sort_keys=True) + "\n"
        replace_file(path, text.encode("utf-8"))
    remove_dead_temporaries(path)


def save_array(path: Path, values: "npt.NDArray[Any]") -> None:
    """Write a C-contiguous array as `.npy` without a copy. Raises WorkspaceError."""
    import numpy as np  # imported here because most users of this module write no arrays

    with workspace_errors(path), open(path, "wb") as file:
        # numpy.save and tofile report a full disk as an error without errno, which cannot be
        # recognized, or for small arrays not at all.
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(values))
        file.write(values.data)


def standard_json(value: Any, default: Callable[[Any], Any] = str) -> Any:
    """Return a value as it is read from JSON, with null for NaN and infinities, which JSON lacks.

    Args:
        value: the value.
        default: function that is called with what JSON has no form for.
    """
    return json.loads(json.dumps(value, default=default), parse_constant=lambda name: None)


def regular(path: Path, most: int | None = None) -> Path:
    """Return `path` after checking that it is no pipe or device, so that reading it ends.

    With `most`, it has at most as many bytes. Raises FileAccessError, or OSError with what the path
    is in its strerror. Directories pass: opening reports them.
    """
    with access_errors(path):
        status = os.stat(path)
    _refuse_endless(status, path)
    if most is not None and status.st_size > most:
        reason = f"it has {status.st_size:,} bytes, over the limit of {most:,}"
        raise OSError(errno.EFBIG, reason, str(path))
    return path


def is_stored_zip(path: Path) -> bool:
    """Return True for a zip archive, such as torch.save writes, and False for another file.

    Raises OSError, and ValueError for an archive that holds more bytes than the file has. Unpacking
    such an archive could take any amount of memory; torch.save never compresses.
    """
    if not zipfile.is_zipfile(regular(path)):
        return False
    with zipfile.ZipFile(path) as archive:
        size = sum(member.file_size for member in archive.infolist())
    if size > path.stat().st_size:
        raise ValueError(
            f"its members unpack to {size:,} bytes, more than the file's {path.stat().st_size:,}"
        )
    return True


def _refuse_endless(status: os.stat_result, path: Path) -> None:
    for is_kind, name in _NO_FILES:
        if is_kind(status.st_mode):
            raise OSError(errno.EINVAL, f"it is {name}, not a file", str(path))


def access_error(error: OSError, path: Path | None = None) -> FileAccessError | None:
    """Return the sentence for a failing disk, a lost mount, too many open files or a long path.

    It is None for other errors, and a TransientFileError if the cause may pass.
    """
    fault = _FAULTS.get(error.errno or 0)
    if fault is None or (error.errno not in _ONLY_OF_FILES and error.filename is None):
        return None  # a socket's error names no file
    where = _place(error, path) or "a file"
    kind = FileAccessError if error.errno in _LASTING else TransientFileError
    return kind(f"cannot read or write {where} ({error.strerror}): {fault}")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name `path` in the operating system's errors of the block that name no file.

    For calls on an open file, so that `access_error` does not take the error for a socket's.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def access_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's errors that `access_error` knows into FileAccessError."""
    try:
        yield
    except OSError as error:
        fault = access_error(error, path)
        raise error if fault is None else fault from error


def unreadable(error: OSError, path: Path) -> FileAccessError | None:
    """Return the error for a file that may be sound although it could not be read.

    It is None if `error` says that the file is missing or is of another kind, such as a directory.
    """
    if error.errno in _OF_PATHS:
        return None
    remedy = "make it readable" if isinstance(error, PermissionError) else "check its disk or mount"
    return access_error(error, path) or FileAccessError(
        f"cannot read {_place(error, path)} ({error.strerror or error}): {remedy}"
    )


def reason_of(error: Exception) -> str:
    """Return what an error says, for a sentence that names the file.

    An OSError's own text also has its number and the path.
    """
    return (isinstance(error, OSError) and error.strerror) or str(error)


def read_bytes(path: Path, limit: int) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Raises:
        FileAccessError: the disk fails, the mount is lost, or too many files are open.
        OSError: the file is missing, may not be read, or is a pipe, device or directory.
        ValueError: the file is larger.
    """
    for attempt in range(_TRIES):
        try:
            with open(path, "rb", opener=_open_without_waiting) as file:
                status = os.fstat(file.fileno())
                _refuse_endless(status, path)
                content = b"" if status.st_size > limit else _read(file, status.st_size, limit + 1)
        except OSError as error:
            if error.errno == errno.ESTALE and attempt + 1 < _TRIES:
                continue
            fault = access_error(error, path)
            raise error if fault is None else fault from error
        if max(status.st_size, len(content)) > limit:
            raise ValueError(
                f"it has {max(status.st_size, len(content)):,} bytes, more than the {limit:,} that "
                "such a file may have"
            )
        return content
    raise AssertionError("unreachable")


def _read(file: BinaryIO, size: int, most: int) -> bytes:
    """Return the first `most` bytes of a file whose size is probably `size`.

    read() allocates all that it is asked for, so it is never asked for `most` at once: that may be
    more than the process has.
    """
    content = file.read(size + 1)
    while len(content) < most and (more := file.read(min(_PIECE, most - len(content)))):
        content += more
    return content


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a file; a pipe without a writer does not block."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_json(path: Path, *, limit: int = JSON_BYTES) -> Any:
    """Return the content of a JSON file of at most `limit` bytes, as `parse_json` checks it.

    Raises FileAccessError, OSError, or ValueError; the latter's message does not name the file.
    """
    return parse_json(read_bytes(path, limit))


def read_object(
    path: Path, remedy: str = "run the same command again, which writes it"
) -> dict[str, Any]:
    """Return the JSON object in a file that a stage or rank has written.

    Raises FileAccessError, or ArtifactError with `remedy`, what to do about a damaged file.
    """
    try:
        value = read_json(path)
        if not isinstance(value, dict):
            raise TypeError(f"it holds {type(value).__name__}, not an object")
    except (OSError, ValueError, TypeError) as error:
        raise ArtifactError(f"{path} cannot be read ({reason_of(error)}): {remedy}") from error
    return value


def parse_json(data: bytes, *, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Return the value of a JSON document in UTF-8, with or without a byte order mark.

    Objects with a repeated key, nesting deeper than `MAX_DEPTH` and integers of more than
    `MAX_DIGITS` digits are refused.

    Args:
        data: the document.
        parse_constant: function that is called with NaN, Infinity and -Infinity; None accepts them.

    Raises:
        ValueError: what is wrong, and where.
    """
    try:
        value = json.loads(
            data.decode("utf-8-sig"),
            object_pairs_hook=_without_repetition,
            parse_int=_integer,
            parse_constant=parse_constant,
        )
    except RecursionError:
        value = None
    else:
        if not nests_too_deep(value):
            return value
    raise ValueError(f"it nests more than {MAX_DEPTH} levels deep")


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = Counter(name for name, _ in pairs)
        twice = next(name for name, count in names.items() if count > 1)
        raise ValueError(f"the key {twice[:100]} is given twice")
    return content


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"the number {text[:20]}… has {len(text)} digits, more than {MAX_DIGITS}")
    return int(text)


def nests_too_deep(value: Any) -> bool:
    """Return True if lists and dictionaries nest more than `MAX_DEPTH` levels deep."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        level = [
            item
            for container in level
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, dict | list)
        ]
        if not level:
            return False
    return True


def read_record(path: Path, kind: type[Record]) -> Record | None:
    """Return a JSON file as the dataclass `kind`, or None if it is missing or damaged.

    Raises FileAccessError.
    """
    try:
        return kind(**read_json(path))
    except (OSError, ValueError, TypeError):
        return None


def canonical_json(value: Any) -> bytes:
    """Return the canonical bytes of a JSON value: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode(
        "ascii"
    )


@contextmanager
def workspace_errors(
    path: Path, elsewhere: str | None = None, *, only_writes: bool = False
) -> Iterator[None]:
    """Turn the operating system's write errors into WorkspaceError or FileAccessError.

    Args:
        path: file or directory that is written.
        elsewhere: advice to write to another place; None means that of `_elsewhere`.
        only_writes: True if the block reads nothing, so that a missing directory is that of the
            output; otherwise its error may be that of an input, and is not changed.
    """
    try:
        yield
    except OSError as error:
        if (fault := access_error(error, path)) is not None:
            raise fault from error
        elsewhere = elsewhere or _elsewhere(path)
        advice = {
            "ENOSPC": f"{_FREE_SPACE} or {elsewhere}",
            "EFBIG": "raise the limit on file sizes (`ulimit -f`)",
            "EDQUOT": f"raise the quota or {elsewhere}",
            "EACCES": f"make it writable or {elsewhere}",
            "EPERM": f"make it writable or {elsewhere}",
            "EROFS": elsewhere,
            "EEXIST": f"move what is in the way or {elsewhere}",
            "EBUSY": f"it is a mount point or in use: {elsewhere}",
            "ENOTEMPTY": f"move what is in the way or {elsewhere}",
            "ENOTDIR": f"move the file that is in the way or {elsewhere}",
            "EISDIR": f"move the directory that is in the way or {elsewhere}",
            "ENAMETOOLONG": "give it a shorter name",
            "ENOENT": f"make its directory first or {elsewhere}",
        }
        code = errno.errorcode.get(error.errno or 0, "")
        if code not in advice or (
            code == "ENOENT" and not (only_writes and _lacks_directory(error))
        ):
            raise
        room = f"; {free_text(path)}" if code == "ENOSPC" else ""
        raise WorkspaceError(
            f"cannot write {_place(error, path)}: {error.strerror}: {advice[code]}{room}"
        ) from error


def _elsewhere(path: Path) -> str:
    """Return the advice to write to another place than `path`."""
    from megacore.artifact.workspace import workspace_root  # which imports this module

    inside = path.absolute().is_relative_to(workspace_root())
    return f"write elsewhere{' (MEGACORE_WORKSPACE names another workspace)' if inside else ''}"


def _lacks_directory(error: OSError) -> bool:
    """Return True if the directory of the path in an error is missing, so it cannot be written."""
    named = str(error.filename or "")
    return os.sep in named and not os.path.isdir(os.path.dirname(named))


def _place(error: OSError, path: Path | None) -> str:
    """Return the path in an error; that of a temporary file is the path it is written for.

    A bare name is one in a directory that `rmtree` has open.
    """
    named = str(error.filename or "")
    if path is not None and named.startswith(f"{path}{TEMPORARY}"):
        return str(path)
    if path is None or os.sep in named:
        return named
    return str(path) if named in ("", path.name) else f"{named} in {path}"


def free_text(path: Path) -> str:
    """Describe the free space of the file system that holds `path`, which need not exist."""
    place = _existing_directory(path)
    return f"{_size(shutil.disk_usage(place).free)} are free in {place}"


def _existing_directory(path: Path) -> Path:
    return next(each for each in (path, *path.absolute().parents) if is_dir(each))


def require_space(path: Path, needed: int, purpose: str) -> None:
    """Refuse to begin what the file system of `path`, which need not exist, has no room for.

    Args:
        path: file or directory that is about to be written.
        needed: bytes that are about to be written.
        purpose: beginning of the message, such as "tokenize writes about".

    Raises:
        WorkspaceError: less is free; names both numbers.
    """
    if needed > shutil.disk_usage(_existing_directory(path)).free:
        raise WorkspaceError(
            f"{purpose} {_size(needed)}, and {free_text(path)}: {_FREE_SPACE} or {_elsewhere(path)}"
        )


def _size(count: int) -> str:
    """Return a number of bytes as text."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


@contextmanager
def staged(output: Path) -> Iterator[Path]:
    """Yield a temporary directory that is renamed to `output` when the block succeeds.

    If the block fails, the directory is removed.

    Raises:
        ConfigError: `output` is refused by `check_output`.
        WorkspaceError: `output` cannot be written.
        FileAccessError: the disk fails, the mount is lost, or too many files are open.
    """
    check_output(output)
    # A rename would not follow a link.
    target = Path(os.path.realpath(output)) if is_symlink(output) else output.absolute()
    staging = temporary_of(target)
    missing_parents = [path for path in target.parents if not exists(path)]
    with workspace_errors(target, "give another --output"):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_dead_temporaries(target)
            staging.mkdir()
        except OSError as error:
            _remove_empty(missing_parents)
            if isinstance(error, FileExistsError) and exists(staging):  # process ids of containers
                raise WorkspaceError(
                    f"--output {output} cannot be made, for {staging} is there, which a process "
                    "with the same number has left, or writes on another machine: remove it if "
                    "nothing writes it"
                ) from error
            if error.errno not in _OF_PATHS:
                raise
            raise WorkspaceError(
                f"--output {output} cannot be made ({error.strerror}): write elsewhere"
            ) from error
        try:
            yield staging
            sync_tree(staging)
            os.rename(staging, target)
            staging = target
            sync_directory(target.parent)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            _remove_empty(missing_parents)
            raise


def check_output(output: Path) -> None:
    """Refuse an output that a finished directory cannot be renamed to. Raises ConfigError.

    Such outputs are files, directories that are not empty, mount points, and the working directory,
    which the shell would lose.
    """
    for place in (output.absolute(), *output.absolute().parents):
        if exists(place) and not is_dir(place):
            raise ConfigError(f"{place} is a file: give another --output")
    if is_dir(output) and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty: give another --output, or remove it")
    target = output.absolute()
    if is_dir(target) and (target.is_mount() or target.samefile(os.curdir)):
        what = "a mount point" if target.is_mount() else "the working directory"
        raise ConfigError(
            f"{target} is {what}, which a finished output cannot replace: give a new "
            "directory in it as --output"
        )


def _remove_empty(directories: Sequence[Path]) -> None:
    """Remove the empty directories among `directories`, given innermost first."""
    for path in directories:
        if is_dir(path) and not any(path.iterdir()):
            path.rmdir()


def remove_dead_temporaries(target: Path) -> None:
    """Remove `<target>.tmp-<pid>` files and directories of processes that have ended."""
    for path in glob(target.absolute().parent, f"{escape(target.name)}.tmp-*"):
        pid = path.name.rpartition("-")[2]
        if pid.isdecimal() and exists("/proc") and not exists(Path("/proc", pid)):
            with suppress(OSError):
                delete_tree(path) if is_dir(path) else path.unlink()


def delete_tree(directory: Path) -> None:
    """Delete a directory, or only the link if a link leads to it. Raises OSError."""
    directory.unlink() if is_symlink(directory) else shutil.rmtree(directory)


def link_or_copy(path: Path, target: Path) -> None:
    """Hard-link a file as `target`, or copy it where the file system has no hard link for it.

    A copy is not synced yet. Raises OSError.
    """
    try:
        os.link(path, target)
    except OSError as error:
        if error.errno not in _WITHOUT_LINK:
            raise
        shutil.copyfile(path, target)


def copy_tree(source: Path, target: Path) -> None:
    """Copy a directory as `target`, which must not exist. The copy is not synced yet.

    The first file that cannot be copied ends it; shutil's error of a tree has only texts.

    Raises:
        WorkspaceError: `target` cannot be written.
        FileAccessError: the disk fails, the mount is lost, or too many files are open.
    """

    def copy(path: str, copied: str) -> None:
        with workspace_errors(Path(copied)):
            shutil.copy2(path, copied)

    with workspace_errors(target):
        shutil.copytree(source, target, copy_function=copy)


def sync_tree(path: Path) -> None:
    """Flush every file and directory below `path` to disk, except temporary directories.

    Those that another process removes meanwhile are left out.
    """
    for folder, below, names in os.walk(path):
        below[:] = [name for name in below if TEMPORARY not in name]
        for name in names:
            with suppress(FileNotFoundError), open(Path(folder, name), "rb") as file:
                os.fsync(file.fileno())
        with suppress(FileNotFoundError):
            sync_directory(Path(folder))


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
