import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import SpawnProcess
from typing import Any

import pytest

from megacore.launch.workers import WorkerPool
from tests._limits import HANG

ERRORS = (OSError("handle is closed"), ValueError("bad value(s) in fds_to_keep"))
"""Errors of the start of a process while the pool closes its queue."""


def start_failing(error: Exception, broken: str | None) -> Callable[[Any], None]:
    def start(pool: Any) -> None:
        pool._broken = broken
        raise error

    return start


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_pool_that_breaks_while_a_process_starts_is_broken(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    start = start_failing(error, "A child process terminated abruptly")
    monkeypatch.setattr(ProcessPoolExecutor, "_adjust_process_count", start)
    with WorkerPool(2) as pool, pytest.raises(BrokenProcessPool, match="while another one"):
        pool.submit(print)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_other_error_of_a_start_is_raised(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(ProcessPoolExecutor, "_adjust_process_count", start_failing(error, None))
    with WorkerPool(2) as pool, pytest.raises(type(error)):
        pool.submit(print)


def test_end_of_the_newest_process_breaks_the_pool_while_others_work() -> None:
    pool = WorkerPool(2)
    try:
        pool.submit(time.sleep, 600)
        time.sleep(0.2)  # until the pool waits for the first process
        newest = pool.submit(os._exit, 1)
        with pytest.raises(BrokenProcessPool):
            newest.result(HANG)
    finally:
        pool.kill()


def blocked() -> set[signal.Signals]:
    """Return the signals that this thread blocks."""
    return {signal.Signals(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())}


def ignores_interrupts() -> bool:
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN and not blocked()


def test_an_interrupt_does_not_reach_a_process_that_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    masks: list[set[signal.Signals]] = []
    start = SpawnProcess.start

    def record(process: SpawnProcess) -> None:
        masks.append(blocked())
        start(process)

    monkeypatch.setattr(SpawnProcess, "start", record)
    before = blocked()
    with WorkerPool(1) as pool:
        assert pool.submit(ignores_interrupts).result(HANG)
    assert masks == [before | {signal.SIGINT}]
    assert blocked() == before
