"""The process of one host in a batch job, started as in a pod."""

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
from megacore.cluster.batch.node import JobNode, _interfaces, _job_of, _taking_part
from megacore.cluster.batch.spec import BatchSpec, FollowerBeat
from megacore.config.launch import LaunchConfig
from megacore.errors import LaunchError, ParallelLayoutError
from megacore.jobs.run import RankJob
from megacore.launch.exit_reason import read_launcher_reason, read_reasons
from tests._limits import HANG
from tests.launch._processes import environment, none_alive, wait_until
from tests.train import _runs


def spec(directory: Path, **launch: Any) -> BatchSpec:
    settings = {"kind": "kubernetes", "nproc_per_node": 1, "stop_grace": 25.0, **launch}
    paths = {"job_file": str(directory / "run.json"), "exit_directory": str(directory / "exit")}
    values: dict[str, Any] = {"directory": "/", "python": "python", "workspace": str(directory)}
    values |= {"module": "tests.cluster.batch._rank", "environment": {}, "follower_limit": 300.0}
    return BatchSpec(**paths, **values, launch=LaunchConfig.model_validate(settings))


@contextmanager
def node(batch_spec: BatchSpec, behaviour: str) -> Iterator["subprocess.Popen[str]"]:
    """Run the process of one pod."""
    RankJob(exit_directory=batch_spec.exit_directory, ranks=9, threads_per_rank=9).write(
        Path(batch_spec.job_file)
    )
    batch_spec.write()
    command = [
        sys.executable,
        "-m",
        "megacore.cluster.batch.node",
        "kubernetes",
        f"--spec={batch_spec.path}",
    ]
    process = subprocess.Popen(
        [*command, "--token=mine", "--jobset=set"],
        env={**environment(), "JOB_COMPLETION_INDEX": "0", "MEGACORE_RANK_DOES": behaviour},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=HANG)


def rank_of(batch_spec: BatchSpec) -> int:
    path = Path(batch_spec.job_file).parent / "pid_0"
    wait_until(path.exists, HANG, "the rank started")
    return int(path.read_text())


def test_job_of_the_ranks_is_adapted_to_the_allocated_hosts(tmp_path: Path) -> None:
    batch_spec = spec(tmp_path, threads_per_rank=2)
    stale = tmp_path / "exit" / "rank_7.json"
    stale.parent.mkdir()
    stale.write_text("of an earlier start of the same job")
    with node(batch_spec, "end") as process:
        output = process.communicate(timeout=HANG)[0]
    assert process.returncode == 0, output
    assert "rank 0 of 1, 2 threads" in output
    assert not stale.exists()
    assert json.loads((tmp_path / "run.json").read_text())["ranks"] == 9


def test_node_exits_with_the_code_of_its_rank(tmp_path: Path) -> None:
    with node(spec(tmp_path), "fail") as process:
        output = process.communicate(timeout=HANG)[0]
    assert process.returncode == 7, output


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 0)])
def test_node_forwards_signals_to_its_rank(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    batch_spec = spec(tmp_path)
    with node(batch_spec, "wait") as process:
        pid = rank_of(batch_spec)
        process.send_signal(number)
        output = process.communicate(timeout=HANG)[0]
    assert process.returncode == code, output
    none_alive([pid], HANG)
    assert [reason.message for reason in read_reasons(tmp_path / "exit")] == [
        f"stopped by {number.name}"
    ]


def test_sigkill_of_the_node_process_ends_its_ranks(tmp_path: Path) -> None:
    batch_spec = spec(tmp_path)
    with node(batch_spec, "wait") as process:
        pid = rank_of(batch_spec)
        process.kill()
        none_alive([pid], HANG)


def test_end_announced_by_the_follower_stops_the_ranks(tmp_path: Path) -> None:
    batch_spec = spec(tmp_path, stop_grace=1.0)
    (tmp_path / "batch").mkdir()
    beat = FollowerBeat(batch_spec.folder, "mine")
    beat.beat()
    with node(batch_spec, "nothing") as process:
        pid = rank_of(batch_spec)
        beat.over = True
        beat.beat()
        output = process.communicate(timeout=HANG)[0]
    none_alive([pid], HANG)
    assert process.returncode == 143
    assert "the job has ended for its follower" in output
    assert read_launcher_reason(tmp_path / "exit") is None


def test_node_ends_with_a_retryable_reason_if_no_follower_beats(tmp_path: Path) -> None:
    batch_spec = spec(tmp_path).model_copy(update={"follower_limit": 1.0})
    with node(batch_spec, "wait") as process:
        output = process.communicate(timeout=HANG)[0]
    assert process.returncode == 8, output
    reason = read_launcher_reason(tmp_path / "exit")
    assert "nobody followed the batch job for 1 s" in str(reason)
    assert reason is not None
    assert reason.retryable


def job_node(nodes: int, rank: int = 0) -> JobNode:
    return JobNode(rank, [f"n{number}" for number in range(nodes)], 4, "127.0.0.1", 1)


@pytest.mark.parametrize("damaged", [False, True])
def test_error_before_the_ranks_is_written_so_that_it_is_not_retried(
    damaged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_spec = spec(tmp_path)
    batch_spec.write()
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    message = "JOB_COMPLETION_INDEX is '1' in this pod"
    if damaged:
        values = json.loads(batch_spec.path.read_text()) | {"new": 1}
        batch_spec.path.write_text(json.dumps(values))
        message = "no batch job written by this version"
    with pytest.raises(SystemExit):
        node_module.main(["kubernetes", f"--spec={batch_spec.path}", "--token=t", "--jobset=set"])
    reason = read_launcher_reason(tmp_path / "exit")
    assert message in str(reason)
    assert reason is not None
    assert not reason.retryable


def test_largest_number_of_hosts_that_divides_the_batch_takes_part(tmp_path: Path) -> None:
    """A global batch of 8 in micro batches of 2 is divisible among 1, 2 and 4 ranks."""
    run = _runs.config(launch={"kind": "slurm", "nnodes": "2:4", "nproc_per_node": 1})
    batch_spec = spec(tmp_path).model_copy(update={"launch": run.launch})
    _runs.job(run, tmp_path, tmp_path, ranks=4).write(Path(batch_spec.job_file))
    assert [len(_taking_part(batch_spec, job_node(nodes)).names) for nodes in (2, 3, 4)] == [
        2,
        2,
        4,
    ]
    with pytest.raises(LaunchError, match=r"gave 5 machines and launch\.nnodes is 2:4"):
        _taking_part(batch_spec, job_node(5))
    odd = run.launch.model_copy(update={"nnodes": "3:4"})
    with pytest.raises(ParallelLayoutError, match="no number of machines from 3 to 3 gives"):
        _taking_part(batch_spec.model_copy(update={"launch": odd}), job_node(3))


def test_the_users_tunables_of_glibc_are_kept(tmp_path: Path) -> None:
    batch_spec = spec(tmp_path).model_copy(
        update={"environment": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}}
    )
    RankJob(exit_directory=batch_spec.exit_directory, ranks=9, threads_per_rank=9).write(
        Path(batch_spec.job_file)
    )
    batch_spec.write()
    _, variables = _job_of(batch_spec, job_node(1), None)
    assert variables["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=0"


def test_interface_is_from_environment_setting_or_route(
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


def test_unresolved_peer_name_is_retried_until_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of pods resolve only some seconds after the pods have started."""
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
