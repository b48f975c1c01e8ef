"""Plan of a job on several hosts: commands, environment variables and rendezvous address."""

from pathlib import Path
from typing import Any

import pytest

from megacore.cluster.hosts import plan as plan_module
from megacore.cluster.hosts.network import free_port, interface_problem, interface_to, local_address
from megacore.cluster.hosts.plan import (
    Plan,
    endpoint,
    env_file_of,
    forwarded,
    meeting_addresses,
    read_env_file,
)
from megacore.cluster.hosts.ssh import Ssh
from megacore.config.launch import LaunchConfig
from megacore.errors import ConfigError, LaunchError


def plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "kind": "torchrun",
        "module": "megacore.ranks.pretrain",
        "job_file": "/runs/7/run.json",
        "hosts": {"one": 2, "two": 3},
        "devices": {"two": [0, 2, 3]},
        "ssh_config": None,
        "forward_env": ["NCCL_*", "EXACT"],
        "own_env": ["OMP_NUM_THREADS"],
        "env_file": None,
        "interface": "auto",
        "rdzv_endpoint": None,
        "host_timeout": 20.0,
        "stop_grace": 20.0,
        "stall_limit": None,
        "exit_directory": "/runs/7/exit",
        "copy_files": False,
        "retried": False,
    }
    return Plan(**values | changes)


def test_plan_round_trips(tmp_path: Path) -> None:
    plan().write(tmp_path / "hosts.json")
    assert Plan.read(tmp_path / "hosts.json") == plan()


def test_variables_are_selected_by_name_and_by_prefix(tmp_path: Path) -> None:
    environment = {
        "NCCL_DEBUG": "INFO",
        "NCC": "1",
        "EXACT": "2",
        "EXACTLY": "3",
        "OMP_NUM_THREADS": "4",
        "HOME": "/",
    }
    assert plan().variables(environment) == {
        "NCCL_DEBUG": "INFO",
        "EXACT": "2",
        "OMP_NUM_THREADS": "4",
    }
    (tmp_path / "env").write_text("NCCL_DEBUG=WARN\nMORE='a b'\n")
    from_file = plan(env_file=str(tmp_path / "env")).variables(environment)
    assert from_file == {
        "NCCL_DEBUG": "WARN",
        "EXACT": "2",
        "OMP_NUM_THREADS": "4",
        "MORE": "'a b'",
    }


def test_visible_gpus_are_forwarded_only_by_their_full_name() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_LAUNCH_BLOCKING": "1", "NCCL_IB_HCA": "mlx5"}
    assert forwarded(environment, LaunchConfig().forward_env, None) == {
        "CUDA_LAUNCH_BLOCKING": "1",
        "NCCL_IB_HCA": "mlx5",
    }
    assert forwarded(environment, ("*",), None).keys() == {"CUDA_LAUNCH_BLOCKING", "NCCL_IB_HCA"}
    assert forwarded(environment, ("CUDA_VISIBLE_DEVICES",), None) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert forwarded(environment, (), None) == {}


@pytest.mark.parametrize("line", ["no equals", "1A=2", "=x", "A B=secret", "A-B=secret"])
def test_invalid_line_of_an_env_file_is_refused_without_its_value(
    line: str, tmp_path: Path
) -> None:
    (tmp_path / "env").write_text(f"GOOD=1\n{line}\n")
    with pytest.raises(ConfigError, match=r"env, line 2 is not of the form NAME=VALUE") as caught:
        read_env_file(tmp_path / "env")
    assert "secret" not in str(caught.value)


def test_env_file_is_searched_in_working_directory_and_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    assert env_file_of(None) is None
    (tmp_path / "home" / ".deepspeed_env").touch()
    assert env_file_of(None) == str(tmp_path / "home" / ".deepspeed_env")
    (tmp_path / "work" / ".deepspeed_env").touch()
    assert env_file_of(None) == str(tmp_path / "work" / ".deepspeed_env")
    assert env_file_of("mine") == str(tmp_path / "work" / "mine")


def test_torchrun_command_has_rank_and_ports_of_its_host() -> None:
    command = plan().command(1, "10.0.0.1", 29500)
    assert command[1:3] == ["-m", "torch.distributed.run"]
    for word in (
        "--nnodes=2",
        "--node-rank=1",
        "--nproc-per-node=3",
        "--rdzv-backend=static",
        "--max-restarts=0",
    ):
        assert word in command
    assert {"--master-addr=10.0.0.1", "--master-port=29500"} <= set(command)
    assert command[-4:] == ["-m", "megacore.ranks.pretrain", "--config", "/runs/7/run.json"]
    assert plan().gpus("two") == {"CUDA_VISIBLE_DEVICES": "0,2,3"}
    assert plan().gpus("one") == {}


def test_deepspeed_command_has_all_hosts_and_the_rank_of_its_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import base64
    import json

    command = plan(kind="deepspeed").command(1, "10.0.0.1", 29500)
    assert {"--master_addr=10.0.0.1", "--master_port=29500", "--node_rank=1", "--module"} <= set(
        command
    )
    (world,) = [word for word in command if word.startswith("--world_info=")]
    assert json.loads(base64.urlsafe_b64decode(world.partition("=")[2])) == {
        "one": [0, 1],
        "two": [0, 2, 3],
    }


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, (None, None)),
        ("node-1", ("node-1", None)),
        ("node-1:29500", ("node-1", 29500)),
        ("[fd00::1]", ("fd00::1", None)),
        ("[fd00::1]:29500", ("fd00::1", 29500)),
    ],
)
def test_endpoint_is_split_into_host_and_port(
    setting: str | None, expected: tuple[str | None, int | None]
) -> None:
    assert endpoint(setting) == expected


@pytest.mark.parametrize(
    "setting",
    ["node-1:", ":29500", "node-1:0", "node-1:70000", "node-1:x", "fd00::1", "[fd00::1]29500"],
)
def test_invalid_endpoint_is_refused(setting: str) -> None:
    with pytest.raises(
        ConfigError, match=r"launch\.rdzv_endpoint is .*: write `host` or `host:port`"
    ):
        endpoint(setting)


def test_hosts_meet_at_the_first_host_or_the_configured_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config"
    config.write_text(
        "Host worker-1\n  HostName 127.0.0.21\nHost worker-2\n  HostName 127.0.0.22\n"
    )
    ssh = Ssh(config)
    assert meeting_addresses(ssh, ["worker-1", "worker-2"], None) == ("127.0.0.21", "127.0.0.22")
    assert meeting_addresses(ssh, ["worker-1", "worker-2"], "head:29500") == ("head", "127.0.0.22")
    assert meeting_addresses(ssh, ["worker-1"], None) == ("127.0.0.1", "127.0.0.1")
    monkeypatch.setattr(plan_module, "is_this_machine", lambda host: host == "worker-1")
    # The kernel's route from this host to 127.0.0.22 starts at 127.0.0.1.
    assert meeting_addresses(ssh, ["worker-1", "worker-2"], None) == ("127.0.0.1", "127.0.0.22")


def test_unreachable_host_is_reported_with_the_setting_that_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config"
    config.write_text("Host worker-2\n  HostName 0.0.0.256\n")
    monkeypatch.setattr(plan_module, "is_this_machine", lambda host: host == "worker-1")
    with pytest.raises(
        LaunchError, match=r"no way leads from here to worker-2 .*set launch\.rdzv_endpoint"
    ):
        meeting_addresses(Ssh(config), ["worker-1", "worker-2"], None)


def test_interface_and_address_follow_the_route_to_a_host() -> None:
    assert local_address("127.0.0.9") == "127.0.0.1"
    assert interface_to("127.0.0.9") == "lo"
    assert interface_problem("lo") is None
    assert str(interface_problem("lo,ib7")).startswith("it has no interface 'ib7' (it has ")
    assert 1024 < free_port() < 2**16
