"""Exit reasons of ranks, written to files and read back as typed errors.

torchrun exits with 1 whatever the exit code of a rank is, so each rank writes its reason. A rank
that cannot write the file, as on a full disk, prints the reason, which the guard passes on to the
supervisor.
"""

import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megacore.artifact.files import read_json, read_record, workspace_errors, write_json
from megacore.errors import (
    ERROR_TYPES,
    GpuFailedError,
    MegacoreError,
    MemoryExhaustedError,
    RankLostError,
    TrainingError,
    TrainingStoppedError,
    WorkspaceError,
    one_line,
)
from megacore.launch.guard import (
    JOB_VARIABLE,
    PR_SET_PDEATHSIG,
    REASON_MARK,
    job_mark,
    load_prctl,
)
from megacore.paths import exists, glob

LAUNCHER_REASON = "launcher_reason.json"
"""Name of the file with the launcher's own reason for ending the job, next to the ranks' reasons.

The launcher here is the process that reaches other hosts or a scheduler.
"""

_LINE = 400
"""Most characters of an error in one line."""
_LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connection was likely closed",
    "connection timed out",
    "no route to host",
    "host is down",
    "network is unreachable",
    "network is down",
    "broken pipe",
    "timed out waiting",
    "timed out connecting",
    "timeout caused pair closure",
    "recvvalue failed",
    "remote process exited or there was a network error",
    "failed to recv",
)
"""Phrases, in lower case, in the errors of gloo, NCCL and the rendezvous store when another rank is
gone."""
_GPU_FAILED = (
    "uncorrectable ecc error",
    "uncorrectable nvlink error",
    "access of peer gpu memory over nvlink or a hardware error",
    "unspecified launch failure",
    "illegal memory access",
    "illegal instruction was encountered",
    "misaligned address",
    "hardware stack error",
    "the launch timed out and was terminated",
    "cuda error: unknown error",
    "cuda error: cuda-capable device(s) is/are busy or unavailable",
    "cublas_status_execution_failed",
    "cublas_status_internal_error",
    "cudnn_status_execution_failed",
    "cudnn_status_internal_error",
)
"""Phrases, in lower case, in the errors of CUDA, its libraries and NCCL when this rank's GPU or a
kernel on it failed. Errors that every retry would repeat, such as a failed assertion in a kernel or
a missing kernel image, are not among them."""
NO_GPU_MEMORY = (
    "cuda error: out of memory",
    "cuda driver error: out of memory",
    "triton error [cuda]: out of memory",
    "cuda failure 'out of memory'",
    "cuda failure 2 'out of memory'",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)
"""Phrases, in lower case, in the errors of CUDA, NCCL, cuBLAS and cuDNN, which allocate outside of
torch's allocator, when the GPU has no memory left."""


@dataclass(frozen=True)
class ExitReason:
    """Reason for the end of one rank."""

    rank: int
    error: str
    """Name of a class in `megacore.errors`."""
    message: str
    time: float
    """Unix time in seconds."""
    secondary: bool
    """True if this rank failed only because another rank was gone."""
    mark: str = ""
    """Mark of the job; empty for a rank without one, which a scheduler or a user started."""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> "ExitReason":
        """Build the reason from the exception that ended `rank`."""
        typed, secondary = _typed(error)
        name = next(base.__name__ for base in type(typed).__mro__ if base.__name__ in ERROR_TYPES)
        mark = job_mark(os.environ.get(JOB_VARIABLE, ""))
        return cls(rank, name, str(typed), time.time(), secondary, mark)

    @property
    def stopped(self) -> bool:
        """True if the rank stopped on request, together with all others."""
        return issubclass(ERROR_TYPES.get(self.error, MegacoreError), TrainingStoppedError)

    def exception(self) -> MegacoreError:
        """Return the typed error; the message names the rank unless it stopped on request."""
        message = self.message if self.stopped else f"rank {self.rank}: {self.message}"
        return ERROR_TYPES.get(self.error, MegacoreError)(message)


@contextlib.contextmanager
def reported_exit(directory: Path | str, rank: int) -> Iterator[None]:
    """Write `rank_<rank>.json` for any exception of the block, then exit with the error's code.

    The traceback is written to stderr, for a WorkspaceError only its sentence. If the file cannot
    be written, the reason is printed to stderr too, where the guard looks for it. SystemExit and
    KeyboardInterrupt pass through: they are not failures of the rank.

    TrainingStoppedError is not a failure either: it ends the block, one line is written to stderr,
    and the rank ends normally with code 0. Only if the reason cannot be written does the rank exit
    with the error's code, because otherwise nobody would know that it stopped.
    """
    try:
        yield
    except TrainingStoppedError as stop:
        with contextlib.suppress(OSError):  # stderr may be a file on a full disk
            sys.stderr.write(f"{_cut(stop)}\n")
        if not _write_or_say(directory, rank, stop):
            raise SystemExit(stop.exit_code) from stop
    except Exception as error:
        with contextlib.suppress(OSError):
            if isinstance(typed := _typed(error)[0], WorkspaceError):
                sys.stderr.write(f"{_cut(typed)}\n")  # it says where
            else:
                traceback.print_exception(error)
        _write_or_say(directory, rank, error)
        raise SystemExit(ERROR_TYPES[ExitReason.of(rank, error).error].exit_code) from error


def write_reason(directory: Path | str, rank: int, error: BaseException) -> None:
    """Write the reason for the end of `rank` atomically to `rank_<rank>.json` in `directory`.

    Raises WorkspaceError.
    """
    path = Path(directory) / f"rank_{rank}.json"
    with workspace_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(ExitReason.of(rank, error)))


def write_launcher_reason(directory: Path | str, error: MegacoreError) -> None:
    """Write the launcher's own reason for ending the job atomically, unless there is one already.

    Raises:
        WorkspaceError: the file cannot be written.
    """
    path = Path(directory) / LAUNCHER_REASON
    if not exists(path):
        with workspace_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Another host may write its reason now, in a container with the same process id, which
            # is part of the names of temporary files.
            own = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
            write_json(
                own, {"error": type(error).__name__, "message": str(error), "time": time.time()}
            )
            os.replace(own, path)


def read_launcher_reason(directory: Path | str) -> MegacoreError | None:
    """Return the launcher's reason for ending the job, or None if it gave none."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        reason = read_json(Path(directory) / LAUNCHER_REASON)
        return ERROR_TYPES.get(reason["error"], MegacoreError)(str(reason["message"]))
    return None


def _write_or_say(directory: Path | str, rank: int, error: BaseException) -> bool:
    try:
        write_reason(directory, rank, error)
    except (OSError, MegacoreError) as unwritable:  # a full disk may be the very reason
        reason = json.dumps(asdict(ExitReason.of(rank, error))).encode("ascii")
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{_cut(unwritable)}\n")
            sys.stderr.flush()
            os.write(2, b"\n" + REASON_MARK + reason + b"\n")
        return False
    return True


def printed_reasons(lines: Iterable[bytes]) -> list[ExitReason]:
    """Return the reasons that ranks printed, one in each line; a torn line is skipped."""
    reasons = []
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            reasons.append(ExitReason(**json.loads(line)))
    return reasons


def read_reasons(directory: Path, printed: Sequence[ExitReason] = ()) -> list[ExitReason]:
    """Return the reasons in `directory` and the `printed` ones, sorted by kind and then by time.

    Ranks with a failure of their own come first, then ranks that stopped on request, then ranks
    that failed only because another rank was gone.
    """
    files = [read_record(path, ExitReason) for path in glob(directory, "rank_*.json")]
    reasons = [reason for reason in files if reason is not None]  # None: torn by a crash
    written = {reason.rank for reason in reasons}
    reasons += [reason for reason in printed if reason.rank not in written]
    return sorted(
        reasons, key=lambda reason: (reason.secondary, reason.stopped, reason.time, reason.rank)
    )


def remove_rank_files(directory: Path, *more: str) -> None:
    """Remove reasons, heartbeats and stacks of an earlier attempt, and files of `more` patterns.

    They would be taken for files of the next attempt.
    """
    for pattern in ("rank_*.json*", "rank_*.beat*", "rank_*.stack", *more):
        for old in glob(directory, pattern):
            old.unlink(missing_ok=True)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends for any reason. Raises OSError.

    The kernel watches the thread that started this process. The parent must therefore start its
    children from a thread that lives as long as they do; torchrun does. If the parent ended before
    this call, the guard ends this process.
    """
    load_prctl()(PR_SET_PDEATHSIG, signal.SIGKILL)


def _typed(error: BaseException) -> tuple[MegacoreError, bool]:
    """Return `error` as a megacore error, and True if another rank's end caused it."""
    if isinstance(error, MegacoreError):
        return error, False
    if (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or _telling_line(error, NO_GPU_MEMORY)
    ):
        return MemoryExhaustedError(
            f"out of memory ({_cut(error)}): lower train.micro_batch_size or data.seq_length, "
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
    if failure := _telling_line(error, _GPU_FAILED):
        return GpuFailedError(
            f"{_own_gpu()} failed ({failure}); see the Xid messages in that host's kernel log "
            "(dmesg), and if it fails again, leave out the GPU or the host"
        ), False
    if _is_lost_peer(error):
        return RankLostError(f"lost another rank: {_cut(error)}"), True
    return TrainingError(
        f"{type(error).__name__}: {_cut(error)}; the traceback is in the log"
    ), False


def _telling_line(error: BaseException, phrases: Sequence[str]) -> str | None:
    """Return the line of a RuntimeError's text with one of `phrases`; None if there is none."""
    lines = str(error).splitlines() if isinstance(error, RuntimeError) else ()
    return next(
        (line.strip() for line in lines if any(phrase in line.lower() for phrase in phrases)), None
    )


def _own_gpu() -> str:
    """Return the number or id of this rank's GPU and its host, as in `GPU 3 of host node-5`."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    gpu = visible[local_rank] if local_rank < len(visible) and visible[0] else str(local_rank)
    return f"GPU {gpu} of host {socket.gethostname()}"


def _is_lost_peer(error: BaseException) -> bool:
    names = {cls.__name__ for cls in type(error).__mro__}
    if "DistError" in names or isinstance(error, ConnectionError):
        return True
    return isinstance(error, RuntimeError) and any(
        phrase in str(error).lower() for phrase in _LOST_PEER
    )


def _cut(error: BaseException) -> str:
    text = one_line(error)
    return text if len(text) <= _LINE else f"{text[:_LINE]}…"
