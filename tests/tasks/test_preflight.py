"""Checks of a pretraining before its first stage."""

from pathlib import Path

import pytest

from megacore.cluster.hosts import hardware
from megacore.cluster.hosts.ssh import HostResult
from megacore.errors import ConfigError, HostsSilentError
from tasks import preflight
from tests.train import _runs


def test_hosts_that_do_not_answer_leave_only_memory_and_days_unchecked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose stages are cached needs no hosts."""
    (tmp_path / "hosts").write_text("worker-1 slots=2\n")
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path))
    monkeypatch.setattr(
        hardware,
        "run_on_hosts",
        lambda ssh, hosts, words, timeout: [
            HostResult(host, 255, b"", "No route to host") for host in hosts
        ],
    )
    launch = {"hostfile": str(tmp_path / "hosts"), "nproc_per_node": "auto"}
    config = _runs.config(launch=launch)
    assert preflight.check_machine(config).startswith(
        "memory and days are not checked: no host of launch.hostfile tells its GPUs and memory"
    )
    with pytest.raises(HostsSilentError, match=r"worker-1: ssh cannot reach it"):
        preflight.launch_commands(config, {})
    missing = {**launch, "ssh_config": str(tmp_path / "none")}
    with pytest.raises(ConfigError, match=r"launch\.ssh_config"):
        preflight.check_machine(_runs.config(launch=missing))
