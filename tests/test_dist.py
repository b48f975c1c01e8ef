"""The helper that the distributed tests stand on: results, tracebacks, stacks of a hang, nothing
left behind."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests._dist import DistributedError, own_groups, run_distributed, still_alive


def _sum_of_ranks(offset: int) -> tuple[float, int]:
    value = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(value)
    return value.item(), torch.get_num_threads()


def _raise_on_last_rank() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise RuntimeError("the last rank gives up")
    dist.barrier()


def _wait_for_nobody(directory: Path) -> None:
    (directory / str(dist.get_rank())).write_text(str(os.getpid()))
    if dist.get_rank() == 0:
        dist.barrier()
    while True:
        time.sleep(0.1)


def _work_with_heartbeats(cases: int, seconds: float) -> None:
    for _ in range(cases):
        still_alive()
        time.sleep(seconds)


def _threads_after_groups() -> tuple[int, int, int]:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    dist.barrier()  # starts the threads of the default group
    before = threads()
    with own_groups():
        dist.barrier(dist.new_group())
        during = threads()
    return before, during, threads()


def test_own_groups_end_with_their_threads() -> None:
    for before, during, after in run_distributed(2, _threads_after_groups):
        assert before == after < during


def test_returns_the_results_by_rank() -> None:
    assert run_distributed(2, _sum_of_ranks, 10) == [(21.0, 1), (21.0, 1)]


def test_an_exception_carries_its_rank_and_traceback() -> None:
    with pytest.raises(
        DistributedError, match=r"(?s)rank 1 raised:.*_raise_on_last_rank.*the last rank gives up"
    ):
        run_distributed(2, _raise_on_last_rank)


def test_a_heartbeat_extends_the_deadline() -> None:
    run_distributed(2, _work_with_heartbeats, 9, 2.0, timeout=15)


def test_a_hang_shows_every_stack_and_leaves_no_process(tmp_path: Path) -> None:
    with pytest.raises(DistributedError) as failure:
        run_distributed(2, _wait_for_nobody, tmp_path, timeout=20)
    message = str(failure.value)
    assert "no rank finished within 20 s" in message
    assert message.count("in _wait_for_nobody") == 2
    for pid_file in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid_file.read_text()), 0)
