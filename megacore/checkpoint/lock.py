"""Who reads a checkpoint holds a shared lock on its marker; who deletes it needs the lock alone. No torch here.

The kernel drops the locks of a process that dies. A file system without locks is named in a warning: there a
checkpoint that is read may be deleted, and the reader is told so.
"""

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megacore.errors import CheckpointError

_WITHOUT_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
_logger = logging.getLogger(__name__)


@contextmanager
def shared_lock(file: Path) -> Iterator[None]:
    """Keep others from deleting what `file` belongs to.

    Waits while somebody deletes it. Raises FileNotFoundError when it is not there, and CheckpointError when it
    vanished or was replaced, at the beginning or while the lock was held.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _lock(descriptor, fcntl.LOCK_SH, file)
        _check_same(descriptor, file)
        yield
        _check_same(descriptor, file)
    finally:
        os.close(descriptor)


@contextmanager
def exclusive_lock(file: Path) -> Iterator[bool]:
    """Whether nobody reads what `file` belongs to; while the lock is held, nobody begins to.

    Does not wait: False where a reader holds it, or where it is gone already.
    """
    try:
        # Over NFS only a file that is open for writing can be locked for oneself.
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    try:
        yield _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, file)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, operation: int, file: Path) -> bool:
    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        _logger.warning("%s is on a file system without locks: it may be deleted while it is read", file)
    return True


def _check_same(descriptor: int, file: Path) -> None:
    """Raise CheckpointError unless the path still leads to the open file."""
    try:
        there = os.path.samestat(os.fstat(descriptor), os.stat(file))
    except OSError:  # over NFS the descriptor of a file that another machine deleted is stale
        there = False
    if not there:
        raise CheckpointError(
            f"checkpoint {file.parent} was deleted or replaced while it was opened or read: use another checkpoint, or "
            "keep more (checkpoint.keep_last)"
        )
