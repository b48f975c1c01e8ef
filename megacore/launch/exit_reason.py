"""Why a rank ended: torchrun exits with 1 whatever a rank's own exit code was, so each rank writes its reason."""

import contextlib
import ctypes
import json
import os
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from megacore.artifact.files import workspace_errors, write_json
from megacore.errors import ERROR_TYPES, MegacoreError, RankLostError, TrainingError

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

    def exception(self) -> MegacoreError:
        """The typed error, its message naming the rank."""
        return ERROR_TYPES.get(self.error, MegacoreError)(f"rank {self.rank}: {self.message}")


@contextlib.contextmanager
def reported_exit(directory: Path | str, rank: int) -> Iterator[None]:
    """Write `rank_<rank>.json` into `directory` for any exception of the block, then exit with the error's code.

    The traceback goes to stderr. SystemExit and KeyboardInterrupt pass: they are not the rank's own failure.
    """
    try:
        yield
    except Exception as error:
        traceback.print_exception(error)
        reason = ExitReason.of(rank, error)
        path = Path(directory) / f"rank_{rank}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, asdict(reason))
        except (OSError, MegacoreError) as unwritable:  # a full disk may be the very reason
            traceback.print_exception(unwritable)
        raise SystemExit(ERROR_TYPES[reason.error].exit_code) from error


def read_reasons(directory: Path) -> list[ExitReason]:
    """The reasons in `directory`: those of ranks that failed by themselves first, then by time."""
    reasons = []
    for path in directory.glob("rank_*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):  # torn by the same crash: no reason then
            reasons.append(ExitReason(**json.loads(path.read_text(encoding="utf-8"))))
    return sorted(reasons, key=lambda reason: (reason.secondary, reason.time, reason.rank))


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, however that happens.

    The kernel watches the thread that started this process: the parent must start its children from a thread
    that lives as long as they do, as torchrun does. A parent that ended before this call is the guard's business.
    Raises OSError.
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
        return TrainingError(
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
    return TrainingError(f"{type(error).__name__}: {_one_line(error)}; the traceback is in the log"), False


def _is_lost_peer(error: BaseException) -> bool:
    names = {cls.__name__ for cls in type(error).__mro__}
    if "DistError" in names or isinstance(error, ConnectionError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in _LOST_PEER)


def _one_line(error: BaseException, limit: int = 400) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= limit else f"{text[:limit]}…"
