"""DeepSpeed's real launcher under the real guard, on this machine and on stand-ins for others."""

import json
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from megacore.config.train import LaunchConfig
from megacore.errors import DataFormatError, LaunchError, RankLostError
from megacore.launch import stages
from megacore.launch.deepspeed_launcher import command, command_on
from megacore.launch.guard import descendants
from megacore.launch.start import check_launcher, start_ranks
from megacore.launch.supervise import supervise
from megacore.launch.torchrun import rank_environment
from tests.launch._hosts import Hosts
from tests.launch._processes import environment, wait_until
from tests.train import _runs

pytest.importorskip("deepspeed")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    _runs.write_data(directory, _runs.config())
    return directory


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """Two machines, one and two, with a slot each."""
    found = Hosts(tmp_path)
    (tmp_path / "hostfile").write_text("one slots=1\ntwo slots=1\n")
    monkeypatch.setenv("PATH", f"{found.programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    yield found
    found.close()


def started_here() -> set[int]:
    return set(descendants(os.getpid()))


def run(tmp_path: Path, behaviour: str) -> None:
    config = tmp_path / "run.json"
    exit_directory = tmp_path / "exit"
    values = {"behaviour": behaviour, "directory": str(tmp_path), "exit_directory": str(exit_directory)}
    config.write_text(json.dumps(values))
    supervise(
        command("tests.launch._gloo_rank", config, 2),
        log=tmp_path / "log",
        exit_directory=exit_directory,
        env={**environment(), **rank_environment(1), "DS_ACCELERATOR": "cpu"},
        stop_grace=3.0,
        timeout=120,
        ranks=2,
    )


def train(tmp_path: Path, data: Path, launch: dict[str, Any], on_poll: Any = stages.nothing, **values: Any) -> Path:
    """Train on two ranks as the stage does; returns the run's directory."""
    changed = _runs.config(launch={"launcher": "deepspeed", "stop_grace": 2.0, **launch}, **values)
    directory = tmp_path / "run"
    directory.mkdir()
    stages.train(_runs.job(changed, data, directory, ranks=2), on_poll)
    return directory


def test_two_ranks_of_this_machine_train_and_write_nowhere_else(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    before = started_here()
    directory = train(tmp_path, data, {"hostfile": str(tmp_path / "hosts")})
    assert _runs.events(directory)[-1]["reason"] == "finished"
    assert "iteration        6/       6" in stages.attempt_log(_runs.job(_runs.config(), data, directory)).read_text()
    assert started_here() <= before
    assert [str(path) for name in ("home", "tmp") for path in (tmp_path / name).rglob("*") if path.is_file()] == []


def test_a_killed_rank_is_a_lost_rank_though_its_peer_complains_too(tmp_path: Path) -> None:
    before = started_here()
    # The launcher looks once a second: when both have ended by then, it may report the one that only lost its peer.
    lost = r"(rank 1 was ended by SIGKILL|rank 1 ended) without giving a reason.*retry resumes"
    with pytest.raises(RankLostError, match=lost):
        run(tmp_path, "killed")
    assert started_here() <= before


def test_the_reason_of_a_rank_passes_through(tmp_path: Path) -> None:
    with pytest.raises(DataFormatError, match=r"rank 1: tokens\.bin is damaged"):
        run(tmp_path, "raises")


def test_two_hosts_train(data: Path, tmp_path: Path, hosts: Hosts) -> None:
    directory = train(tmp_path, data, {"hostfile": str(tmp_path / "hostfile")})
    assert _runs.events(directory)[-1]["reason"] == "finished"
    assert sorted(line.count("--node_rank=0") for line in hosts.lines) == [0, 1]
    log = (directory / "logs" / "attempt-001.log").read_text()
    assert "one: " in log


def test_cancelling_ends_the_ranks_of_the_hosts(data: Path, tmp_path: Path, hosts: Hosts) -> None:
    long = _runs.config().train.model_dump() | {"train_iters": 90, "eval_interval": 1000, "micro_batch_size": 1}
    events, alive = tmp_path / "run" / "events.jsonl", list[str]()

    def cancel() -> None:
        if events.exists() and b"step" in events.read_bytes():
            alive.extend(processes_of(tmp_path / "run"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, data, {"hostfile": str(tmp_path / "hostfile")}, cancel, train=long)
    assert len([line for line in alive if "--node_rank" not in line]) >= 2, alive
    # Nothing of a host descends from the job's guard: it is the hosts' own guards that end this.
    wait_until(lambda: not processes_of(tmp_path / "run"), 2.0 + 5, "ranks of the hosts ended")


def processes_of(directory: Path) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it ended while we looked
            continue
        if str(directory / "run.json") in line:
            found.append(line)
    return found


def test_a_host_that_fails_ends_the_job(data: Path, tmp_path: Path, hosts: Hosts) -> None:
    # The run is for two ranks and its job file says three: each rank says so by itself.
    changed = _runs.config(launch={"launcher": "deepspeed", "hostfile": str(tmp_path / "hostfile")})
    (tmp_path / "run").mkdir()
    with pytest.raises(Exception, match=r"rank [01]: the job is for 3 ranks and 2 were started"):
        stages.train(_runs.job(changed, data, tmp_path / "run", ranks=3))


def test_missing_programs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    arguments: dict[str, Any] = {"environment": {}, "grace": 2.0}
    with pytest.raises(LaunchError, match=r"ranks of one, two are started by pdsh over ssh, and pdsh is not installed"):
        command_on({"one": 1, "two": 1}, "m", Path("c.json"), **arguments)
    (tmp_path / "pdsh").write_text("#!/bin/sh\n")
    (tmp_path / "pdsh").chmod(0o755)
    with pytest.raises(LaunchError, match="and ssh is not installed: install it"):
        command_on({"one": 1, "two": 1}, "m", Path("c.json"), **arguments)
    for host, refused in (("localhost", nullcontext()), ("one", pytest.raises(LaunchError, match="ranks of one are"))):
        (tmp_path / "hosts").write_text(f"{host} slots=1\n")
        with refused:
            check_launcher(LaunchConfig(launcher="deepspeed", hostfile=str(tmp_path / "hosts")))


def test_what_the_hosts_are_told(hosts: Hosts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_0 100%")
    monkeypatch.setenv("MASTER_PORT", "29501")
    for name in ("GLOO_SOCKET_IFNAME", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)
    job = _runs.job(_runs.config(), tmp_path, tmp_path, ranks=2, threads_per_rank=3)
    launch = _runs.config(launch={"launcher": "deepspeed", "hostfile": str(tmp_path / "hostfile")}).launch
    start = start_ranks(launch, "megacore.launch.pretrain", job, tmp_path / "100%.json", {"MEGACORE_X": "y"})
    line = start.command[-1]
    assert start.command[:-1] == ["pdsh", "-S", "-R", "ssh", "-f", "2", "-w", "one,two"]
    assert "'NCCL_IB_HCA=mlx5_0 100%%'" in line, "pdsh would take %' for one of its own"
    assert "OMP_NUM_THREADS=3" in line
    assert "MEGACORE_X=y" in line
    assert "GLOO_SOCKET_IFNAME" not in line, "loopback reaches no other machine"
    assert "DS_ACCELERATOR" not in line, "each machine finds out by itself"
    assert " --master_addr=127.0.0.1 --master_port=29501 --node_rank=%n --module megacore.launch.pretrain" in line
    assert line.endswith("/100%%.json")


def test_hidden_and_chosen_gpus_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import base64

    def devices() -> Any:
        (world,) = [word for word in command("m", Path("c.json"), 2) if word.startswith("--world_info=")]
        return json.loads(base64.urlsafe_b64decode(world.partition("=")[2]))["localhost"]

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices() == [0, 1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,GPU-1a,7")
    assert devices() == ["6", "GPU-1a"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices() == ["-1", "-1"]


def test_a_single_rank_here_needs_no_launcher(tmp_path: Path) -> None:
    job = _runs.job(_runs.config(), tmp_path, tmp_path)
    launch = _runs.config(launch={"launcher": "deepspeed"}).launch
    assert "deepspeed.launcher.launch" not in start_ranks(launch, "m", job, tmp_path / "run.json").command
