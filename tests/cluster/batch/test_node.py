"""One machine's part of a batch job, as a pod starts it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megacore.cluster.batch import node as node_module
from megacore.cluster.batch.meeting import Meeting
from megacore.cluster.batch.node import JobNode, _interfaces, _taking_part
from megacore.cluster.batch.spec import BatchSpec, FollowerBeat
from megacore.config.launch import LaunchConfig
from megacore.errors import LaunchError, ParallelLayoutError
from megacore.jobs.run import RankJob
from megacore.launch.exit_reason import read_launcher_reason, read_reasons
from tests.launch._processes import environment, none_alive, wait_until
from tests.train import _runs

LIMIT = 30.0


def spec(directory: Path, **launch: Any) -> BatchSpec:
    settings = {"kind": "kubernetes", "nproc_per_node": 1, "stop_grace": 5.0, **launch}
    paths = {"job_file": str(directory / "run.json"), "exit_directory": str(directory / "exit")}
    values: dict[str, Any] = {"directory": "/", "python": "python", "workspace": str(directory)}
    values |= {"module": "tests.cluster.batch._rank", "environment": {}, "follower_limit": 300.0}
    return BatchSpec(**paths, **values, launch=LaunchConfig.model_validate(settings))


@contextmanager
def node(own: BatchSpec, does: str) -> Iterator["subprocess.Popen[str]"]:
    """A pod's process."""
    RankJob(exit_directory=own.exit_directory, ranks=9, threads_per_rank=9).write(
        Path(own.job_file)
    )
    own.write()
    words = [
        sys.executable,
        "-m",
        "megacore.cluster.batch.node",
        "kubernetes",
        f"--spec={own.path}",
    ]
    process = subprocess.Popen(
        [*words, "--token=mine", "--jobset=set"],
        env={**environment(), "JOB_COMPLETION_INDEX": "0", "MEGACORE_RANK_DOES": does},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=LIMIT)


def rank_of(own: BatchSpec) -> int:
    path = Path(own.job_file).parent / "pid_0"
    wait_until(path.exists, LIMIT, "the rank started")
    return int(path.read_text())


def test_ranks_get_a_job_for_the_machines_that_there_are(tmp_path: Path) -> None:
    own = spec(tmp_path, threads_per_rank=2)
    left = tmp_path / "exit" / "rank_7.json"
    left.parent.mkdir()
    left.write_text("of an earlier start of the same job")
    with node(own, "end") as process:
        said = process.communicate(timeout=LIMIT)[0]
    assert process.returncode == 0, said
    assert "rank 0 of 1, 2 threads" in said
    assert not left.exists()
    assert json.loads((tmp_path / "run.json").read_text())["ranks"] == 9


def test_what_a_rank_exits_with_is_what_the_machine_does(tmp_path: Path) -> None:
    with node(spec(tmp_path), "fail") as process:
        said = process.communicate(timeout=LIMIT)[0]
    assert process.returncode == 7, said


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 0)])
def test_signals_reach_the_rank(number: signal.Signals, code: int, tmp_path: Path) -> None:
    own = spec(tmp_path)
    with node(own, "wait") as process:
        pid = rank_of(own)
        process.send_signal(number)
        said = process.communicate(timeout=LIMIT)[0]
    assert process.returncode == code, said
    none_alive([pid], 1)
    assert [reason.message for reason in read_reasons(tmp_path / "exit")] == [
        f"stopped by {number.name}"
    ]


def test_a_killed_machines_process_takes_its_ranks_along(tmp_path: Path) -> None:
    own = spec(tmp_path)
    with node(own, "wait") as process:
        pid = rank_of(own)
        process.kill()
        none_alive([pid], 10)


def test_the_follower_says_save_and_over(tmp_path: Path) -> None:
    own = spec(tmp_path, stop_grace=1.0)
    (tmp_path / "batch").mkdir()
    beat = FollowerBeat(own.folder, "mine")
    beat.beat()
    with node(own, "nothing") as process:
        pid = rank_of(own)
        beat.over = True
        beat.beat()
        said = process.communicate(timeout=LIMIT)[0]
    none_alive([pid], 1)
    assert process.returncode == 143
    assert "the job has ended for its follower" in said
    assert read_launcher_reason(tmp_path / "exit") is None


def test_without_a_follower_it_ends(tmp_path: Path) -> None:
    own = spec(tmp_path).model_copy(update={"follower_limit": 1.0})
    with node(own, "wait") as process:
        said = process.communicate(timeout=LIMIT)[0]
    assert process.returncode == 8, said
    reason = read_launcher_reason(tmp_path / "exit")
    assert "nobody followed the batch job for 1 s" in str(reason)
    assert reason is not None
    assert reason.retryable


def job_node(nodes: int, rank: int = 0) -> JobNode:
    return JobNode(rank, [f"n{number}" for number in range(nodes)], 4, "127.0.0.1", 1)


def test_fewer_machines_take_part_where_more_do_not_divide(tmp_path: Path) -> None:
    """A global batch of 8 in micro batches of 2 is divided by 1, 2 and 4 ranks."""
    run = _runs.config(launch={"kind": "slurm", "nnodes": "2:4", "nproc_per_node": 1})
    own = spec(tmp_path).model_copy(update={"launch": run.launch})
    _runs.job(run, tmp_path, tmp_path, ranks=4).write(Path(own.job_file))
    assert [len(_taking_part(own, job_node(nodes)).names) for nodes in (2, 3, 4)] == [2, 2, 4]
    with pytest.raises(LaunchError, match=r"gave 5 machines and launch\.nnodes is 2:4"):
        _taking_part(own, job_node(5))
    odd = run.launch.model_copy(update={"nnodes": "3:4"})
    with pytest.raises(
        ParallelLayoutError, match="gave 3 machines, and by the ranks of none of 3 to 3"
    ):
        _taking_part(own.model_copy(update={"launch": odd}), job_node(3))


def test_the_interface_is_the_users_the_named_one_or_the_one_that_leads_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    meeting = Meeting("127.0.0.1", 1, "127.0.0.1")
    both = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert _interfaces(spec(tmp_path), job_node(2), meeting) == both
    assert _interfaces(spec(tmp_path, interface="lo"), job_node(2), meeting) == both
    with pytest.raises(
        LaunchError, match=r"n0: it has no interface 'ib7'.*correct launch\.interface"
    ):
        _interfaces(spec(tmp_path, interface="ib7"), job_node(2), meeting)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert _interfaces(spec(tmp_path), job_node(2), meeting) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"


def test_a_name_that_the_cluster_learns_later_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of pods are known some seconds after these have begun."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    answers = iter([None, None, "eth0"])
    monkeypatch.setattr(node_module, "interface_to", lambda peer: next(answers))
    monkeypatch.setattr(node_module, "_POLL", 0.01)
    meeting = Meeting("pod-0", 1, "pod-1")
    assert set(_interfaces(spec(tmp_path), job_node(2), meeting).values()) == {"eth0"}
    monkeypatch.setattr(node_module, "interface_to", lambda peer: None)
    monkeypatch.setattr(node_module, "_NAME_SECONDS", 0.05)
    with pytest.raises(LaunchError, match="n0 finds no interface that leads to pod-1"):
        _interfaces(spec(tmp_path), job_node(2), meeting)
