from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pytest

from megacore.launch.workers import WorkerPool


def close_queue(pool: Any) -> None:
    """Fail as the start of a process does while the pool closes its queue."""
    raise OSError("handle is closed")


def test_pool_that_breaks_while_a_process_starts_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_pool(pool: Any) -> None:
        pool._broken = "A child process terminated abruptly"
        close_queue(pool)

    monkeypatch.setattr(ProcessPoolExecutor, "_adjust_process_count", break_pool)
    with WorkerPool(2) as pool, pytest.raises(BrokenProcessPool, match="while another one"):
        pool.submit(print)


def test_other_error_of_a_start_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessPoolExecutor, "_adjust_process_count", close_queue)
    with WorkerPool(2) as pool, pytest.raises(OSError, match="handle is closed"):
        pool.submit(print)
