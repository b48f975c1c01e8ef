"""Why a rank ended.

torchrun exits with 1 whatever a rank's own exit code was, so each rank writes its reason.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from megacore.artifact.files import read_json, read_record, workspace_errors, write_json
from megacore.errors import (
    ERROR_TYPES,
    MegacoreError,
    MemoryExhaustedError,
    RankLostError,
    TrainingError,
    TrainingStoppedError,
)

LAUNCHER_REASON = "launcher_reason.json"
"""Beside the ranks' reasons: why the launcher itself (what reaches other machines, a scheduler)
ended the job."""

_PR_SET_PDEATHSIG = 1
_LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connection was likely closed",
    "broken pipe",
    "timed out waiting",
    "recvvalue failed",
    "remote process exited or there was a network error",
    "failed to recv",
)
"""What gloo, NCCL and the rendezvous store say, in lower case, when another rank is gone."""


@dataclass(frozen=True)
class ExitReason:
    """What ended one rank."""

    rank: int
    error: str
    """Name of a class in `megacore.errors`."""
    message: str
    time: float
    """Unix time in seconds."""
    secondary: bool
    """Whether this rank only noticed that another one was gone."""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> "ExitReason":
        """Classify an exception that ended `rank`."""
        typed, secondary = _typed(error)
        name = next(base.__name__ for base in type(typed).__mro__ if base.__name__ in ERROR_TYPES)
        return cls(rank, name, str(typed), time.time(), secondary)

    @property
    def stopped(self) -> bool:
        """Whether the rank only did what it was asked to, and all others with it."""
        return issubclass(ERROR_TYPES.get(self.error, MegacoreError), TrainingStoppedError)

    def exception(self) -> MegacoreError:
        """The typed error, its message naming the rank unless all of them stopped on request."""
        text = self.message if self.stopped else f"rank {self.rank}: {self.message}"
        return ERROR_TYPES.get(self.error, MegacoreError)(text)


@contextlib.contextmanager
def reported_exit(directory: Path | str, rank: int) -> Iterator[None]:
    """Write `rank_<rank>.json` into `directory` for any exception of the block.

    Then exit with the error's code.

    The traceback goes to stderr. SystemExit and KeyboardInterrupt pass: they are not the rank's own
    failure. Training that stopped on request is no failure: TrainingStoppedError ends the block,
    one line of it goes to stderr, and the rank goes on to its end with code 0, unless its reason
    cannot be written: nobody would know that it stopped.
    """
    try:
        yield
    except TrainingStoppedError as stop:
        sys.stderr.write(f"{_one_line(stop)}\n")
        if not _write_or_say(directory, rank, stop):
            raise SystemExit(stop.exit_code) from stop
    except Exception as error:
        traceback.print_exception(error)
        _write_or_say(directory, rank, error)
        raise SystemExit(ERROR_TYPES[ExitReason.of(rank, error).error].exit_code) from error


def write_reason(directory: Path | str, rank: int, error: BaseException) -> None:
    """Write why `rank` ends as `rank_<rank>.json` into `directory`, which is made, atomically.

    Raises:
        WorkspaceError: the file cannot be written.
    """
    path = Path(directory) / f"rank_{rank}.json"
    with workspace_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(ExitReason.of(rank, error)))


def write_launcher_reason(directory: Path | str, error: MegacoreError) -> None:
    """Write why the launcher itself ends the job, atomically; the first reason stays.

    Raises:
        WorkspaceError: the file cannot be written.
    """
    path = Path(directory) / LAUNCHER_REASON
    if not path.exists():
        with workspace_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(
                path, {"error": type(error).__name__, "message": str(error), "time": time.time()}
            )


def read_launcher_reason(directory: Path | str) -> MegacoreError | None:
    """Why the launcher ended the job; None where it gave no reason."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        said = read_json(Path(directory) / LAUNCHER_REASON)
        return ERROR_TYPES.get(said["error"], MegacoreError)(str(said["message"]))
    return None


def _write_or_say(directory: Path | str, rank: int, error: BaseException) -> bool:
    try:
        write_reason(directory, rank, error)
    except (OSError, MegacoreError) as unwritable:  # a full disk may be the very reason
        traceback.print_exception(unwritable)
        return False
    return True


def read_reasons(directory: Path) -> list[ExitReason]:
    """The reasons in `directory`, by time; those of ranks that failed by themselves come first.

    Then those of ranks that stopped on request, at last those of ranks that only noticed that
    another one was gone.
    """
    files = [read_record(path, ExitReason) for path in directory.glob("rank_*.json")]
    reasons = [reason for reason in files if reason is not None]  # a crash may have torn some
    return sorted(
        reasons, key=lambda reason: (reason.secondary, reason.stopped, reason.time, reason.rank)
    )


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, however that happens.

    The kernel watches the thread that started this process: the parent must start its children from
    a thread that lives as long as they do, as torchrun does. A parent that ended before this call
    is the guard's business. Raises OSError.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")


def _typed(error: BaseException) -> tuple[MegacoreError, bool]:
    """The error as one of ours, and whether it only tells of another rank's end."""
    if isinstance(error, MegacoreError):
        return error, False
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return MemoryExhaustedError(
            f"out of memory ({_one_line(error)}): lower train.micro_batch_size or data.seq_length, "
            "or set train.recompute: full"
        ), False
    if isinstance(error, OSError):
        try:
            with workspace_errors(Path(error.filename or ".")):
                raise error
        except MegacoreError as workspace:
            return workspace, False
        except OSError:
            pass
    if _is_lost_peer(error):
        return RankLostError(f"lost another rank: {_one_line(error)}"), True
    return TrainingError(
        f"{type(error).__name__}: {_one_line(error)}; the traceback is in the log"
    ), False


def _is_lost_peer(error: BaseException) -> bool:
    names = {cls.__name__ for cls in type(error).__mro__}
    if "DistError" in names or isinstance(error, ConnectionError):
        return True
    return isinstance(error, RuntimeError) and any(
        phrase in str(error).lower() for phrase in _LOST_PEER
    )


def _one_line(error: BaseException, limit: int = 400) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= limit else f"{text[:limit]}…"
