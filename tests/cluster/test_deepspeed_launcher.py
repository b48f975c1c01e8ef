"""DeepSpeed's launcher on this host, and both launchers on two hosts, under the real guard."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megacore.cluster.start import local_deepspeed_command, rank_environment
from megacore.errors import DataFormatError, RankLostError
from megacore.launch.guard import descendants
from megacore.launch.supervise import supervise
from megacore.ranks import stages
from tests.cluster._hosts import Hosts
from tests.launch._processes import environment, gloo_job
from tests.train import _runs

pytest.importorskip("deepspeed")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    _runs.write_data(directory, _runs.config())
    return directory


def child_pids() -> set[int]:
    return set(descendants(os.getpid()))


def run(tmp_path: Path, behaviour: str) -> None:
    job = gloo_job(tmp_path, behaviour)
    supervise(
        local_deepspeed_command("tests.launch._gloo_rank", job, 2),
        log=tmp_path / "log",
        exit_directory=tmp_path / "exit",
        env={**environment(), **rank_environment(1), "DS_ACCELERATOR": "cpu"},
        stop_grace=3.0,
        timeout=120,
        ranks=2,
    )


def train(
    tmp_path: Path, data: Path, launch: dict[str, Any], on_poll: Any = stages.nothing, **values: Any
) -> Path:
    """Train on two ranks like the train stage, and return the run's directory."""
    changed = _runs.config(
        launch={"kind": "deepspeed", "stop_grace": 2.0, "nproc_per_node": "auto", **launch},
        **values,
    )
    directory = tmp_path / "run"
    directory.mkdir()
    stages.train(_runs.job(changed, data, directory, ranks=2), on_poll)
    return directory


@pytest.mark.slow
def test_two_local_ranks_train_and_leave_home_and_tmp_empty(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    before = child_pids()
    directory = train(tmp_path, data, {"hostfile": str(tmp_path / "hosts")})
    assert _runs.events(directory)[-1]["reason"] == "finished"
    assert (
        "iteration        6/       6"
        in _runs.job(_runs.config(), data, directory).attempt_log.read_text()
    )
    assert child_pids() <= before
    assert [
        str(path)
        for name in ("home", "tmp")
        for path in (tmp_path / name).rglob("*")
        if path.is_file()
    ] == []


@pytest.mark.slow
def test_killed_rank_is_reported_as_lost_despite_the_error_of_its_peer(tmp_path: Path) -> None:
    before = child_pids()
    # The launcher polls once a second and does not name the rank. If both ranks have ended by then,
    # it may report the rank that only lost its peer; if it ends that one before it could write its
    # reason, the killed rank is not known.
    lost = (
        r"((rank 1|a rank) was ended by SIGKILL|rank 1 ended) without giving a reason"
        r".*retry starts"
    )
    with pytest.raises(RankLostError, match=lost):
        run(tmp_path, "killed")
    assert child_pids() <= before


@pytest.mark.slow
def test_error_of_a_rank_is_raised_with_its_type(tmp_path: Path) -> None:
    with pytest.raises(DataFormatError, match=r"rank 1: tokens\.bin is damaged"):
        run(tmp_path, "raises")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torchrun", "deepspeed"])
def test_two_hosts_train_together(kind: str, data: Path, tmp_path: Path, hosts: Hosts) -> None:
    hostfile = str(hosts.hostfile("one", "two"))
    directory = train(
        tmp_path, data, {"kind": kind, "hostfile": hostfile, "ssh_config": str(hosts.ssh_config)}
    )
    events = _runs.events(directory)
    assert events[-1]["reason"] == "finished"
    assert [event["lm_loss"] for event in events if event["kind"] == "step"][-1] < 4
    log = (directory / "logs" / "attempt-001.log").read_text()
    assert "hosts: one (rank 0 through lo), two (rank 1 through lo); they meet at 127.0.0.1:" in log
    assert "one: " in log


def test_launcher_respects_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    import base64

    def devices() -> Any:
        (world,) = [
            word
            for word in local_deepspeed_command("m", Path("c.json"), 2)
            if word.startswith("--world_info=")
        ]
        return json.loads(base64.urlsafe_b64decode(world.partition("=")[2]))["localhost"]

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices() == [0, 1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,GPU-1a,7")
    assert devices() == ["6", "GPU-1a"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices() == ["-1", "-1"]
