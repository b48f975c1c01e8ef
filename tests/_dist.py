"""Run a function on several gloo ranks; a hang, a crash or an exception fails with every rank's
account of it."""

import contextlib
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests._limits import HANG

GRACE = 30.0
"""Seconds that the other ranks get once one has failed, and that a hanging rank gets to write its
stacks."""
HEARTBEAT = "MEGACORE_TEST_HEARTBEAT"
"""Environment variable with the path of the file that `still_alive` touches, and the file's
name."""
_POLL = 0.05


class DistributedError(AssertionError):
    """A rank raised, died or did not finish in time."""


def run_distributed(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = HANG
) -> list[Any]:
    """Call `fn(*args)` on `world_size` processes of one gloo group and return what each rank
    returned, by rank.

    `fn` is a function at module level; arguments and return values can be pickled. Each rank runs
    on one thread, with RANK, WORLD_SIZE, LOCAL_RANK set and the default process group initialised
    over loopback.

    A function that runs many cases calls `still_alive` between them: the deadline then counts from
    the last call.

    Raises:
        DistributedError: a rank raised (its traceback is in the message), died, or ran beyond
            `timeout` seconds (the Python stacks of every rank are in the message). No process is
            left behind.
    """
    with tempfile.TemporaryDirectory(prefix="megacore-dist-") as folder:
        directory = Path(folder)
        (directory / "call").write_bytes(pickle.dumps((fn, args, timeout)))
        for rank in range(world_size):
            (directory / f"output_{rank}").touch()  # a rank may die before it opens the file
        ranks = [_start(directory, rank, world_size) for rank in range(world_size)]
        try:
            late = _wait(ranks, timeout, directory / HEARTBEAT)
            _dump_stacks(late, [directory / f"output_{ranks.index(rank)}" for rank in late])
        finally:
            _kill(ranks)
        _raise_failures(directory, ranks, late, timeout)
        return [
            pickle.loads((directory / f"result_{rank}").read_bytes()) for rank in range(world_size)
        ]


def still_alive() -> None:
    """Let the deadline of this rank's `run_distributed` count from now; without effect
    elsewhere."""
    if HEARTBEAT in os.environ:
        Path(os.environ[HEARTBEAT]).touch()


@contextlib.contextmanager
def own_groups() -> Iterator[None]:
    """Destroy the process groups that the body creates; collective.

    Each of them has a thread that wakes up a hundred times a second until the process ends
    (github.com/pytorch/gloo/issues/246). Those of many cases take more time than the cases.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    before = list(_world.pg_map)
    yield
    if not dist.is_initialized():
        return
    dist.barrier()  # no rank still uses them
    for group in list(_world.pg_map):
        if group not in before:
            dist.destroy_process_group(group)
    gc.collect()  # engines refer to themselves, and to their groups


def _start(directory: Path, rank: int, world_size: int) -> ForkServerProcess:
    """Fork a rank from the server that has imported torch and megacore already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests._warm"])
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    environment = {
        **os.environ,
        **threads,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GLOO_SOCKET_IFNAME": "lo",
        HEARTBEAT: str(directory / HEARTBEAT),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    process = context.Process(target=_run_rank, args=(directory, rank, world_size, environment))
    process.start()
    return process


def _wait(
    ranks: list[ForkServerProcess], timeout: float, heartbeat: Path
) -> list[ForkServerProcess]:
    """Wait until all have ended, and return those that still run at the deadline or `GRACE` after a
    failure."""
    deadline = time.monotonic() + timeout
    failed, beat = False, 0.0
    while running := [rank for rank in ranks if rank.exitcode is None]:
        if not failed and any(rank.exitcode for rank in ranks):
            failed, deadline = True, min(deadline, time.monotonic() + GRACE)
        if not failed and heartbeat.exists() and (latest := heartbeat.stat().st_mtime) != beat:
            beat, deadline = latest, time.monotonic() + timeout
        if time.monotonic() > deadline:
            return running
        multiprocessing.connection.wait([rank.sentinel for rank in running], _POLL)
    return []


def _dump_stacks(late: list[ForkServerProcess], outputs: list[Path]) -> None:
    """Let each rank that still runs write the Python stacks of its threads to its output.

    Faulthandler needs no interpreter lock.
    """
    before = sizes = [output.stat().st_size for output in outputs]
    for rank in late:
        assert rank.pid is not None
        os.kill(rank.pid, signal.SIGUSR1)
    deadline = time.monotonic() + GRACE
    while late and time.monotonic() < deadline:
        time.sleep(0.3)
        earlier, sizes = sizes, [output.stat().st_size for output in outputs]
        if sizes == earlier and all(now > then for now, then in zip(sizes, before, strict=True)):
            break


def _kill(ranks: list[ForkServerProcess]) -> None:
    for rank in ranks:
        if rank.exitcode is None:
            assert rank.pid is not None
            with contextlib.suppress(ProcessLookupError):  # before the rank leads a session
                os.killpg(rank.pid, signal.SIGKILL)
            rank.kill()
        rank.join()


def _raise_failures(
    directory: Path,
    ranks: list[ForkServerProcess],
    late: list[ForkServerProcess],
    timeout: float,
) -> None:
    if not any(rank.exitcode for rank in ranks):
        return
    accounts = []
    for number, rank in enumerate(ranks):
        error, output = directory / f"error_{number}", directory / f"output_{number}"
        if error.exists():
            raised_at = error.stat().st_mtime
            accounts.append(
                (raised_at, f"rank {number} raised:\n{error.read_text(encoding='utf-8')}")
            )
        elif rank in late:
            text = output.read_text(encoding="utf-8", errors="replace")
            accounts.append((time.time(), f"rank {number} was still running:\n{text}"))
        elif rank.exitcode:
            text = output.read_text(encoding="utf-8", errors="replace")
            accounts.append((0.0, f"rank {number} died with exit code {rank.exitcode}:\n{text}"))
    hang = len(late) == len(ranks)
    title = (
        f"no rank finished within {timeout:g} s"
        if hang
        else f"{len(ranks)} ranks did not all succeed"
    )
    raise DistributedError("\n".join([title, *(text for _, text in sorted(accounts))]))


def _run_rank(directory: Path, rank: int, world_size: int, environment: dict[str, str]) -> None:
    """Join the group, call the function, leave the group; the process ends here."""
    os.setsid()
    with open(directory / f"output_{rank}", "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.clear()
    os.environ.update(environment)
    try:
        fn, args, timeout = pickle.loads((directory / "call").read_bytes())
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory / 'store'}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout + 60),
        )
        try:
            result = fn(*args)
            dist.barrier()
        finally:
            dist.destroy_process_group()
        (directory / f"result_{rank}").write_bytes(pickle.dumps(result))
        sys.stdout.flush()
        sys.stderr.flush()
        # As megacore.ranks.rank does: gloo's threads may abort the teardown of an interpreter that
        # is done.
        os._exit(0)
    except BaseException:
        partial = directory / f"error_{rank}.partial"
        partial.write_text(traceback.format_exc(), encoding="utf-8")
        partial.rename(directory / f"error_{rank}")
        sys.stderr.flush()
        os._exit(1)
