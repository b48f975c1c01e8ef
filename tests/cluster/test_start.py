"""Commands that start a job, and their display in a dry run."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from megacore.cluster.start import Start, check_launcher, dry_run_commands, start_here, start_ranks
from megacore.config.launch import LaunchConfig
from megacore.errors import ConfigError, LaunchError
from megacore.hardware import DEVICE_VARIABLE, Gpu, Hardware
from megacore.jobs.model import ResultJob
from megacore.jobs.run import RankJob, TrainJob
from megacore.launch.failure import REPEATS, RESUMES
from tests.train import _runs


def start(tmp_path: Path, ranks: int = 2, **launch: Any) -> Start:
    job = _runs.job(_runs.config(), tmp_path, tmp_path, ranks=ranks, threads_per_rank=3)
    return start_ranks(
        _runs.config(launch=launch).launch, "megacore.ranks.pretrain", job, tmp_path / "run.json"
    )


def dry_run(tmp_path: Path, ranks: int = 2, **launch: Any) -> list[str]:
    job = RankJob(exit_directory=str(tmp_path / "exit"), ranks=ranks, threads_per_rank=3)
    launch_config = _runs.config(launch=launch).launch
    return dry_run_commands(
        launch_config, "megacore.ranks.pretrain", job, tmp_path / "run" / "run.json"
    )


def hostfile(tmp_path: Path, text: str = "worker-1 slots=2\nworker-2 slots=2\n") -> str:
    (tmp_path / "hostfile").write_text(text)
    return str(tmp_path / "hostfile")


def test_local_job_starts_without_agents(tmp_path: Path) -> None:
    started = start(
        tmp_path, hostfile=hostfile(tmp_path, "localhost slots=2\n"), nproc_per_node="auto"
    )
    assert "torch.distributed.run" in started.command
    assert (started.hosts, started.stop_margin) == ((), 0.0)
    assert started.env["GLOO_SOCKET_IFNAME"] == "lo"
    assert "CUDA_VISIBLE_DEVICES" not in started.env
    assert not (tmp_path / "hosts.json").exists()


def test_ranks_must_use_gpus_where_the_hosts_have_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert DEVICE_VARIABLE not in start(tmp_path).env
    hardware = Hardware(8, 2**36, (Gpu("H100", 80 * 2**30),))
    monkeypatch.setattr("megacore.cluster.start.hardware_of", lambda launch: hardware)
    assert start(tmp_path).env[DEVICE_VARIABLE] == "cuda"
    monkeypatch.setattr("megacore.cluster.start.check_ssh", lambda hosts: None)
    launch = {"hostfile": hostfile(tmp_path), "nproc_per_node": "auto"}
    assert start(tmp_path, ranks=4, **launch).env[DEVICE_VARIABLE] == "cuda"
    assert DEVICE_VARIABLE in json.loads((tmp_path / "hosts.json").read_text())["own_env"]


@pytest.mark.parametrize(
    ("launch", "requests"),
    [
        ({"kind": "slurm"}, True),
        ({"kind": "slurm", "allow_cpu": True}, False),
        ({"kind": "slurm", "slurm": {"gpus_per_node": 0}}, False),  # whole nodes, perhaps with GPUs
        ({"kind": "slurm", "allow_cpu": True, "slurm": {"gpus_per_node": 4}}, True),
        ({"kind": "kubernetes"}, True),
        ({"kind": "torchrun"}, False),
    ],
)
def test_scheduler_is_asked_for_gpus(launch: dict[str, Any], requests: bool) -> None:
    assert LaunchConfig.model_validate(launch).requests_gpus is requests


def test_included_slots_select_gpus_of_the_local_host(tmp_path: Path) -> None:
    hosts = hostfile(tmp_path, "localhost slots=4\n")
    for kind in ("torchrun", "deepspeed"):
        started = start(
            tmp_path, kind=kind, hostfile=hosts, include=["localhost:1,3"], nproc_per_node="auto"
        )
        assert started.env["CUDA_VISIBLE_DEVICES"] == "1,3"


def test_gpus_that_a_scheduler_hid_on_this_host_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = hostfile(tmp_path, "localhost slots=4\n")
    hardware = Hardware(8, 2**36, (Gpu("H100", 80 * 2**30),) * 2)
    monkeypatch.setattr(Hardware, "detect", lambda: hardware)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, 2")
    values: dict[str, Any] = {"hostfile": hosts, "nproc_per_node": "auto"}
    for refused in (check, lambda **launch: start(tmp_path, **launch)):
        with pytest.raises(ConfigError, match=r"GPU 3 of localhost, and CUDA_VISIBLE_DEVICES here"):
            refused(**values, include=["localhost:1,3"])
    chosen = start(tmp_path, **values, include=["localhost:1,2"])
    assert chosen.env["CUDA_VISIBLE_DEVICES"] == "1,2"
    check(**values)


def test_job_reduced_to_the_local_host_has_its_slots_and_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = hostfile(tmp_path, f"worker-1 slots=4\n{socket.gethostname()} slots=4\n")
    selection = {
        "include": ["worker-1:0,1", f"{socket.gethostname()}:2,3"],
        "nproc_per_node": "auto",
    }
    launch = _runs.config(launch={"hostfile": hosts, "nnodes": "1:2", **selection}).launch
    job = _runs.job(_runs.config(), tmp_path, tmp_path, ranks=2, hosts={socket.gethostname(): 2})
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".deepspeed_env").write_text("NCCL_DEBUG=INFO\n")
    env = start_ranks(launch, "m", job, tmp_path / "run.json").env
    assert (env["CUDA_VISIBLE_DEVICES"], env["NCCL_DEBUG"]) == ("2,3", "INFO")


def test_configured_env_file_applies_to_a_local_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".deepspeed_env").write_text("NCCL_DEBUG=INFO\n")
    assert "NCCL_DEBUG" not in start(tmp_path).env, (
        "DeepSpeed's launcher does not read its file there either"
    )
    assert start(tmp_path, env_file=".deepspeed_env").env["NCCL_DEBUG"] == "INFO"


def test_single_local_rank_starts_without_the_deepspeed_launcher(tmp_path: Path) -> None:
    assert "deepspeed.launcher.launch" not in start(tmp_path, 1, kind="deepspeed").command


def test_agents_watch_no_ranks_that_write_no_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megacore.cluster.start.check_ssh", lambda hosts: None)
    launch = LaunchConfig(hostfile=hostfile(tmp_path), nproc_per_node="auto")
    job = ResultJob(
        exit_directory=str(tmp_path / "exit"), ranks=4, threads_per_rank=1, output="result.json"
    )
    start_ranks(launch, "megacore.ranks.zeroshot", job, tmp_path / "job.json")
    assert json.loads((tmp_path / "hosts.json").read_text())["stall_limit"] is None
    start(tmp_path, ranks=4, hostfile=launch.hostfile, nproc_per_node="auto")
    assert json.loads((tmp_path / "hosts.json").read_text())["stall_limit"] == 600.0


def test_several_hosts_get_a_plan_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    hosts = hostfile(tmp_path)
    values: dict[str, Any] = {
        "include": ["worker-1:1", "worker-2"],
        "nproc_per_node": "auto",
        "ssh_config": "mine",
    }
    started = start(tmp_path, hostfile=hosts, data_placement="node_local", **values)
    assert started.command[1:] == [
        "-m",
        "megacore.cluster.hosts.fanout",
        "--plan",
        str(tmp_path / "hosts.json"),
    ]
    assert started.hosts == ("worker-1", "worker-2")
    assert started.stop_margin > 0
    assert "GLOO_SOCKET_IFNAME" not in started.env, "loopback reaches no other machine"
    plan = json.loads((tmp_path / "hosts.json").read_text())
    assert plan["hosts"] == {"worker-1": 1, "worker-2": 2}
    assert plan["devices"] == {"worker-1": [1]}
    assert plan["copy_files"] is True
    assert plan["ssh_config"] == str(Path("mine").absolute())
    assert "OMP_NUM_THREADS" in plan["own_env"]
    assert "3" not in plan["own_env"], "names only, no values"


@pytest.mark.parametrize("engine", ["native", "deepspeed"])
def test_hosts_compare_the_versions_of_packages_that_the_run_uses(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megacore.cluster.batch.start.check_batch", lambda launch: None)
    for name in ("sbatch", "plan"):
        launch: dict[str, Any] = {"hostfile": hostfile(tmp_path), "nproc_per_node": "auto"}
        if name == "sbatch":
            launch = {"kind": "slurm", "nnodes": 2, "nproc_per_node": 2}
        run = _runs.config(engine, launch=launch)
        job = _runs.job(run, tmp_path, tmp_path, ranks=4)
        start_ranks(run.launch, "megacore.ranks.pretrain", job, tmp_path / "run.json")
    packages = ["megacore", "torch"] + ["deepspeed"] * (engine == "deepspeed")
    for path in ("batch/spec.json", "hosts.json"):
        assert json.loads((tmp_path / path).read_text())["packages"] == packages


@pytest.mark.parametrize("hosts", ["localhost slots=2\n", "worker-1 slots=1\nworker-2 slots=1\n"])
def test_only_a_retry_of_a_training_resumes_from_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: str
) -> None:
    monkeypatch.setattr("megacore.cluster.start.check_ssh", lambda hosts: None)
    launch = _runs.config(
        launch={"hostfile": hostfile(tmp_path, hosts), "nproc_per_node": "auto"}
    ).launch
    job = RankJob(exit_directory=str(tmp_path / "exit"), ranks=2, threads_per_rank=1)
    again = {
        module: start_ranks(launch, f"megacore.ranks.{module}", job, tmp_path / "run.json").again
        for module in ("pretrain", "finetune", "evaluate")
    }
    assert again == {"pretrain": RESUMES, "finetune": RESUMES, "evaluate": REPEATS}
    assert start_here("megacore.ranks.convert", job, tmp_path / "run.json").again == REPEATS


def test_hosts_of_the_job_precede_the_hostfile(tmp_path: Path) -> None:
    job = _runs.job(_runs.config(), tmp_path, tmp_path, ranks=2, hosts={"worker-2": 2}, attempt=3)
    launch = _runs.config(
        launch={"hostfile": hostfile(tmp_path), "nnodes": "1:2", "nproc_per_node": "auto"}
    ).launch
    assert start_ranks(launch, "m", job, tmp_path / "run.json").hosts == ("worker-2",)
    plan = json.loads((tmp_path / "hosts.json").read_text())
    assert (plan["hosts"], plan["retried"]) == ({"worker-2": 2}, True)


def test_job_file_of_an_earlier_version_is_readable(tmp_path: Path) -> None:
    job = _runs.job(_runs.config(), tmp_path, tmp_path)
    job.write(tmp_path / "run.json")
    values = json.loads((tmp_path / "run.json").read_text())
    del values["hosts"]
    for name in [*values["config"]["launch"]]:
        if name not in {"hostfile", "nproc_per_node", "stop_grace", "retries"}:
            del values["config"]["launch"][name]
    values["config"]["launch"]["launcher"] = "deepspeed"
    del values["config"]["parallel"]["data_parallel_sharding"]
    values["config"]["parallel"]["use_distributed_optimizer"] = True
    (tmp_path / "run.json").write_text(json.dumps(values))
    job_read = TrainJob.read(tmp_path / "run.json")
    assert (job_read.config.launch.kind, job_read.hosts) == ("deepspeed", {})
    assert job_read.config.parallel.data_parallel_sharding == "optimizer"


def check(**launch: Any) -> None:
    check_launcher(_runs.config(launch={"nproc_per_node": "auto", **launch}).launch)


def test_invalid_rdzv_endpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rdzv_endpoint is 'x:y'"):
        check(hostfile=hostfile(tmp_path), rdzv_endpoint="x:y")


def test_missing_env_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env_file .*absent cannot be read"):
        check(env_file=str(tmp_path / "absent"))


def test_missing_ssh_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ssh_config .*absent is not there"):
        check(hostfile=hostfile(tmp_path), ssh_config=str(tmp_path / "absent"))


def test_missing_ssh_is_refused_only_if_other_hosts_take_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(
        LaunchError,
        match=r"worker-1, worker-2 are reached through ssh, which is not installed here",
    ):
        check(hostfile=hostfile(tmp_path))
    check(hostfile=hostfile(tmp_path, "localhost slots=2\n"))


def test_dry_run_shows_the_local_command_and_writes_nothing(tmp_path: Path) -> None:
    (line,) = dry_run(tmp_path)
    assert line.startswith("this machine: ")
    assert "-m torch.distributed.run --nnodes=1 --nproc-per-node=2" in line
    (line,) = dry_run(tmp_path, kind="deepspeed")
    assert "deepspeed.launcher.launch" in line
    assert "--master_port=<free port>" in line
    assert [*tmp_path.iterdir()] == []


def test_dry_run_shows_commands_of_each_host_without_values_of_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SECRET", "hidden")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "ssh").write_text(
        "Host worker-1\n  HostName 10.9.8.7\nHost worker-2\n  HostName 10.9.8.6\n"
    )
    hosts = hostfile(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    values: dict[str, Any] = {"include": ["worker-1", "worker-2:1"], "nproc_per_node": "auto"}
    lines = dry_run(
        tmp_path,
        hostfile=hosts,
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
