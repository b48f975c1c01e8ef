"""Commands on other hosts: input, time limit and interruption."""

import os
import resource
import time
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from megacore.cluster.hosts import ssh
from megacore.cluster.hosts.ssh import Ssh, run_on_hosts
from tests._limits import HANG


def test_each_host_gets_its_command_and_its_stdin() -> None:
    commands = {"localhost": ["cat"], "127.0.0.1": ["sh", "-c", "echo no >&2; exit 3"]}
    first, second = run_on_hosts(
        Ssh(), [*commands], commands, stdin={"localhost": b"in", "127.0.0.1": b""}, timeout=HANG
    )
    assert (first.output, first.problem) == (b"in", None)
    assert second.problem == "the command ended with code 3: no"


def test_host_that_exceeds_the_time_limit_has_a_problem() -> None:
    (result,) = run_on_hosts(Ssh(), ["localhost"], ["sleep", "600"], timeout=0.2)
    assert result.problem == "it did not answer in time"


def test_limit_on_open_files_is_raised_for_many_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd")))
    monkeypatch.setattr(ssh, "_OTHER_FILES", used)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, highest))
    try:
        results = run_on_hosts(Ssh(), ["localhost"] * 20, ["true"], timeout=HANG)
        raised, unchanged = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, highest))
    assert [result.problem for result in results] == [None] * 20
    assert raised > used + 3 * 20, "each connection has three pipes"
    assert unchanged == highest


def test_interruption_ends_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = ("localhost", "127.0.0.1")
    commands = {
        host: ["sh", "-c", 'touch "$0"; exec sleep 600', str(tmp_path / host)] for host in hosts
    }

    def interrupted(futures: Any, *, timeout: float) -> Any:
        if all((tmp_path / host).exists() for host in hosts):
            raise KeyboardInterrupt
        return wait(futures, timeout=0.01)

    monkeypatch.setattr(ssh, "wait", interrupted)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_on_hosts(Ssh(), hosts, commands, timeout=600)
    assert time.monotonic() - started < HANG
