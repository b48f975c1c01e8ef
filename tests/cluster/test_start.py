"""Which command starts a job, and what a dry run shows of it."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from megacore.cluster.start import Start, check_launcher, shown_commands, start_ranks
from megacore.errors import ConfigError, LaunchError
from megacore.jobs.run import RankJob, TrainJob
from tests.train import _runs


def start(tmp_path: Path, ranks: int = 2, **launch: Any) -> Start:
    job = _runs.job(_runs.config(), tmp_path, tmp_path, ranks=ranks, threads_per_rank=3)
    return start_ranks(
        _runs.config(launch=launch).launch, "megacore.ranks.pretrain", job, tmp_path / "run.json"
    )


def shown(tmp_path: Path, ranks: int = 2, **launch: Any) -> list[str]:
    job = RankJob(exit_directory=str(tmp_path / "exit"), ranks=ranks, threads_per_rank=3)
    found = _runs.config(launch=launch).launch
    return shown_commands(found, "megacore.ranks.pretrain", job, tmp_path / "run" / "run.json")


def hostfile(tmp_path: Path, text: str = "worker-1 slots=2\nworker-2 slots=2\n") -> str:
    (tmp_path / "hostfile").write_text(text)
    return str(tmp_path / "hostfile")


def test_this_machine_needs_no_agent(tmp_path: Path) -> None:
    found = start(
        tmp_path, hostfile=hostfile(tmp_path, "localhost slots=2\n"), nproc_per_node="auto"
    )
    assert "torch.distributed.run" in found.command
    assert (found.hosts, found.stop_margin) == ((), 0.0)
    assert found.env["GLOO_SOCKET_IFNAME"] == "lo"
    assert "CUDA_VISIBLE_DEVICES" not in found.env
    assert not (tmp_path / "hosts.json").exists()


def test_slots_by_number_are_the_gpus_of_this_machine(tmp_path: Path) -> None:
    listed = hostfile(tmp_path, "localhost slots=4\n")
    for kind in ("torchrun", "deepspeed"):
        found = start(
            tmp_path, kind=kind, hostfile=listed, include=["localhost:1,3"], nproc_per_node="auto"
        )
        assert found.env["CUDA_VISIBLE_DEVICES"] == "1,3"


def test_this_machine_alone_keeps_its_slots_and_variables_when_the_others_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = hostfile(tmp_path, f"worker-1 slots=4\n{socket.gethostname()} slots=4\n")
    chosen = {"include": ["worker-1:0,1", f"{socket.gethostname()}:2,3"], "nproc_per_node": "auto"}
    launch = _runs.config(launch={"hostfile": listed, "nnodes": "1:2", **chosen}).launch
    job = _runs.job(_runs.config(), tmp_path, tmp_path, ranks=2, hosts={socket.gethostname(): 2})
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".deepspeed_env").write_text("NCCL_DEBUG=INFO\n")
    env = start_ranks(launch, "m", job, tmp_path / "run.json").env
    assert (env["CUDA_VISIBLE_DEVICES"], env["NCCL_DEBUG"]) == ("2,3", "INFO")


def test_a_file_of_variables_that_is_named_counts_on_this_machine_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".deepspeed_env").write_text("NCCL_DEBUG=INFO\n")
    assert "NCCL_DEBUG" not in start(tmp_path).env, (
        "DeepSpeed's launcher does not read its file there either"
    )
    assert start(tmp_path, env_file=".deepspeed_env").env["NCCL_DEBUG"] == "INFO"


def test_a_single_rank_here_needs_no_launcher(tmp_path: Path) -> None:
    assert "deepspeed.launcher.launch" not in start(tmp_path, 1, kind="deepspeed").command


def test_several_machines_get_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    listed = hostfile(tmp_path)
    values: dict[str, Any] = {
        "include": ["worker-1:1", "worker-2"],
        "nproc_per_node": "auto",
        "ssh_config": "mine",
    }
    found = start(tmp_path, hostfile=listed, data_placement="node_local", **values)
    assert found.command[1:] == [
        "-m",
        "megacore.cluster.hosts.fanout",
        "--plan",
        str(tmp_path / "hosts.json"),
    ]
    assert found.hosts == ("worker-1", "worker-2")
    assert found.stop_margin > 0
    assert "GLOO_SOCKET_IFNAME" not in found.env, "loopback reaches no other machine"
    plan = json.loads((tmp_path / "hosts.json").read_text())
    assert plan["hosts"] == {"worker-1": 1, "worker-2": 2}
    assert plan["devices"] == {"worker-1": [1]}
    assert plan["copy_files"] is True
    assert plan["ssh_config"] == str(Path("mine").absolute())
    assert "OMP_NUM_THREADS" in plan["own_env"]
    assert "3" not in plan["own_env"], "names alone"


def test_the_hosts_of_the_job_go_before_those_of_the_file(tmp_path: Path) -> None:
    job = _runs.job(_runs.config(), tmp_path, tmp_path, ranks=2, hosts={"worker-2": 2}, attempt=3)
    launch = _runs.config(
        launch={"hostfile": hostfile(tmp_path), "nnodes": "1:2", "nproc_per_node": "auto"}
    ).launch
    assert start_ranks(launch, "m", job, tmp_path / "run.json").hosts == ("worker-2",)
    plan = json.loads((tmp_path / "hosts.json").read_text())
    assert (plan["hosts"], plan["retried"]) == ({"worker-2": 2}, True)


def test_a_job_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    job = _runs.job(_runs.config(), tmp_path, tmp_path)
    job.write(tmp_path / "run.json")
    values = json.loads((tmp_path / "run.json").read_text())
    del values["hosts"]
    for name in [*values["config"]["launch"]]:
        if name not in {"hostfile", "nproc_per_node", "stop_grace", "retries"}:
            del values["config"]["launch"][name]
    values["config"]["launch"]["launcher"] = "deepspeed"
    (tmp_path / "run.json").write_text(json.dumps(values))
    found = TrainJob.read(tmp_path / "run.json")
    assert (found.config.launch.kind, found.hosts) == ("deepspeed", {})


def test_what_is_missing_is_told_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(**launch: Any) -> None:
        check_launcher(_runs.config(launch={"nproc_per_node": "auto", **launch}).launch)

    (tmp_path / "empty").mkdir()
    listed = hostfile(tmp_path)
    with pytest.raises(ConfigError, match=r"rdzv_endpoint is 'x:y'"):
        check(hostfile=listed, rdzv_endpoint="x:y")
    with pytest.raises(ConfigError, match=r"env_file .*absent cannot be read"):
        check(env_file=str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=r"ssh_config .*absent is not there"):
        check(hostfile=listed, ssh_config=str(tmp_path / "absent"))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(
        LaunchError,
        match=r"worker-1, worker-2 are reached through ssh, which is not installed here",
    ):
        check(hostfile=listed)
    check(hostfile=hostfile(tmp_path, "localhost slots=2\n"))


def test_a_dry_run_shows_the_command_of_this_machine(tmp_path: Path) -> None:
    (line,) = shown(tmp_path)
    assert line.startswith("this machine: ")
    assert "-m torch.distributed.run --nnodes=1 --nproc-per-node=2" in line
    (line,) = shown(tmp_path, kind="deepspeed")
    assert "deepspeed.launcher.launch" in line
    assert "--master_port=<free port>" in line
    assert [*tmp_path.iterdir()] == []


def test_a_dry_run_shows_the_commands_of_each_host_and_no_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SECRET", "hidden")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "ssh").write_text(
        "Host worker-1\n  HostName 10.9.8.7\nHost worker-2\n  HostName 10.9.8.6\n"
    )
    listed = hostfile(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    values: dict[str, Any] = {"include": ["worker-1", "worker-2:1"], "nproc_per_node": "auto"}
    lines = shown(
        tmp_path,
        hostfile=listed,
        ssh_config=str(tmp_path / "ssh"),
        rdzv_endpoint="10.9.8.7:29500",
        **values,
    )
    assert [line.partition(":")[0] for line in lines[:-1]] == [
        "worker-1",
        "worker-1",
        "worker-2",
        "worker-2",
    ]
    assert lines[2].startswith("worker-2: ssh -F ")
    assert f"cd {os.getcwd()} && exec env" in lines[2]
    assert "megacore.cluster.hosts.agent" in lines[2]
    assert "--node-rank=1 --nproc-per-node=1" in lines[3]
    assert "--master-addr=10.9.8.7 --master-port=29500" in lines[3]
    assert "env CUDA_VISIBLE_DEVICES=1 " in lines[3]
    assert lines[-1].startswith("with the variables ")
    assert "NCCL_SECRET" in lines[-1]
    assert "hidden" not in "\n".join(lines)
    assert sorted(tmp_path.rglob("*")) == before
