"""A job on two hosts through a real sshd: its start, its failures and its end on both hosts."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megacore.cluster.hosts.connection import HostSet
from megacore.cluster.hosts.plan import Plan
from megacore.errors import (
    ConfigError,
    DataFormatError,
    HostLostError,
    LaunchError,
    MegacoreError,
    RankLostError,
    RankStalledError,
)
from megacore.hardware import shared_versions
from megacore.launch.exit_reason import read_launcher_reason
from megacore.launch.supervise import supervise
from tests._limits import HANG
from tests.cluster._hosts import Hosts
from tests.launch._processes import REPOSITORY, alive, none_alive, rank_pids, wait_until

HEAD = str(Path(__file__).parent.with_name("_host_ranks.py"))


def plan(machines: Hosts, directory: Path, behaviour: str, **changes: Any) -> Plan:
    values: dict[str, Any] = {
        "kind": "torchrun",
        "module": behaviour,
        "job_file": str(directory / "run.json"),
        "hosts": {"one": 1, "two": 1},
        "devices": {},
        "ssh_config": str(machines.ssh_config),
        "forward_env": ["NCCL_*", "PYTHON*", "MEGACORE_*"],
        "own_env": [],
        "env_file": None,
        "interface": "auto",
        "rdzv_endpoint": None,
        "host_timeout": HANG,
        "stop_grace": 2.0,
        "stall_limit": None,
        "exit_directory": str(directory / "exit"),
        "copy_files": False,
        "retried": False,
    }
    return Plan(**values | changes)


def run(
    machines: Hosts,
    directory: Path,
    behaviour: str,
    on_poll: Callable[[], None] = lambda: None,
    **changes: Any,
) -> str:
    """Run two fake ranks, one on each host, and return the log."""
    written = plan(machines, directory, behaviour, **changes)
    written.write(directory / "hosts.json")
    supervise(
        [sys.executable, HEAD, "head", "--plan", str(directory / "hosts.json")],
        log=directory / "log",
        exit_directory=directory / "exit",
        env={"PYTHONPATH": str(REPOSITORY)},
        stop_grace=written.stop_grace,
        stop_margin=3.0,
        poll_interval=0.05,
        stall_limit=written.stall_limit,
        ranks=sum(written.hosts.values()),
        hosts=tuple(written.hosts),
        on_poll=on_poll,
    )
    return (directory / "log").read_text()


def agent_of(rank: int) -> int:
    """Return the process id of the agent that started a rank."""
    pid = rank
    while b"megacore.cluster.hosts.agent" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        assert pid > 1
    return pid


class OnceRunning:
    """A poll callback that runs an action once both ranks run."""

    def __init__(self, directory: Path, action: Callable[[list[int]], None]) -> None:
        self.directory, self.action = directory, action
        self.pids: list[int] = []

    def __call__(self) -> None:
        if not self.pids and all(
            (self.directory / f"rank_{rank}.pid").exists() for rank in range(2)
        ):
            self.pids = rank_pids(self.directory)
            self.action(self.pids)


def test_log_lines_of_the_ranks_have_the_name_of_their_host(hosts: Hosts, tmp_path: Path) -> None:
    log = run(hosts, tmp_path, "quick")
    assert "hosts: one (rank 0 through lo), two (rank 1 through lo); they meet at 127.0.0.1:" in log
    assert "one: rank 0 is here\n" in log
    assert "two: rank 1 is here\n" in log


def test_ranks_get_only_the_forwarded_environment_variables(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "two words\n; $(touch pwned)")
    monkeypatch.setenv("SOME_SECRET", "hidden")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("OWN_NAME", "value")
    (tmp_path / "variables").write_text("# a comment\nDATA_TOKEN=a b=c\n\n")
    changes = {
        "env_file": str(tmp_path / "variables"),
        "own_env": ["OWN_NAME"],
        "devices": {"two": [3]},
    }
    run(hosts, tmp_path, "quick", **changes)
    first, second = (json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(2))
    assert second["NCCL_DEBUG"] == "two words\n; $(touch pwned)"
    assert second["OWN_NAME"] == "value"
    assert second["DATA_TOKEN"] == "a b=c"
    assert "SOME_SECRET" not in second
    assert (second["GLOO_SOCKET_IFNAME"], second["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")
    assert second["CUDA_VISIBLE_DEVICES"] == "3"
    assert (
        "CUDA_VISIBLE_DEVICES" not in first
        or first["CUDA_VISIBLE_DEVICES"] == os.environ["CUDA_VISIBLE_DEVICES"]
    )
    assert first["MEGACORE_JOB"] != second["MEGACORE_JOB"]
    assert "a b=c" not in (tmp_path / "hosts.json").read_text()


def test_interface_in_the_environment_is_not_replaced(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=ib0")
    run(hosts, tmp_path, "quick")
    assert json.loads((tmp_path / "rank_1.json").read_text())["NCCL_SOCKET_IFNAME"] == "=ib0"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"hosts": {"one": 1, "gone": 1}},
            LaunchError,
            r"host gone cannot take part: ssh cannot reach it: .*refused",
        ),
        (
            {"hosts": {"one": 1, "gone": 1}, "retried": True},
            HostLostError,
            r"host gone cannot take part",
        ),
        (
            {"interface": "eth77"},
            LaunchError,
            r"host one cannot take part: it has no interface 'eth77' \(it has lo",
        ),
        (
            {"rdzv_endpoint": "here:port"},
            ConfigError,
            r"rdzv_endpoint is 'here:port': write `host` or `host:port`",
        ),
        (
            {"env_file": "/nowhere/env"},
            ConfigError,
            r"launch\.env_file /nowhere/env cannot be read: No such file",
        ),
    ],
)
def test_no_rank_starts_when_a_host_cannot_take_part(
    changes: dict[str, Any], error: type[MegacoreError], message: str, hosts: Hosts, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message) as caught:
        run(hosts, tmp_path, "quick", **changes)
    assert type(caught.value) is error
    assert list(tmp_path.glob("rank_*")) == []


def test_killed_agent_is_reported_as_a_lost_host(hosts: Hosts, tmp_path: Path) -> None:
    once = OnceRunning(tmp_path, lambda pids: os.kill(agent_of(pids[1]), signal.SIGKILL))
    with pytest.raises(
        HostLostError, match=r"lost host two: the connection to it ended; a retry starts"
    ):
        run(hosts, tmp_path, "stubborn", once)
    assert not any(map(alive, once.pids))


@pytest.mark.slow
def test_frozen_agent_is_reported_as_a_lost_host_and_its_ranks_end(
    hosts: Hosts, tmp_path: Path
) -> None:
    once = OnceRunning(tmp_path, lambda pids: os.kill(agent_of(pids[1]), signal.SIGSTOP))
    with pytest.raises(
        HostLostError, match=r"lost host two: nothing was heard from it for .*host_timeout = 6 s"
    ):
        run(hosts, tmp_path, "waits", once, host_timeout=6.0)
    assert not any(map(alive, once.pids))


@pytest.mark.slow
def test_silent_host_is_the_reason_despite_ranks_that_fail_after_it(
    hosts: Hosts, tmp_path: Path
) -> None:
    def freeze_one_and_fail_the_other(pids: list[int]) -> None:
        os.kill(agent_of(pids[0]), signal.SIGSTOP)
        time.sleep(3.0)
        os.kill(pids[1], signal.SIGKILL)

    once = OnceRunning(tmp_path, freeze_one_and_fail_the_other)
    with pytest.raises(
        HostLostError,
        match=r"lost host one: nothing was heard from it for launch.host_timeout = 6 s",
    ):
        run(hosts, tmp_path, "waits", once, host_timeout=6.0)
    assert not any(map(alive, once.pids))


@pytest.mark.slow
def test_hosts_that_are_silent_at_the_same_time_are_all_named(hosts: Hosts, tmp_path: Path) -> None:
    once = OnceRunning(
        tmp_path, lambda pids: [os.kill(agent_of(pid), signal.SIGSTOP) for pid in pids] and None
    )
    with pytest.raises(
        HostLostError,
        match=r"lost host (one|two): nothing was heard from it, nor from (one|two), for",
    ):
        run(hosts, tmp_path, "waits", once, host_timeout=5.0)
    assert not any(map(alive, once.pids))


def fake_ssh(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Install a fake ssh that runs `script` for any host."""
    (directory / "bin").mkdir()
    program = directory / "bin" / "ssh"
    program.write_text(
        f'#!/bin/sh\ncase "$*" in *" -G "*) echo hostname 127.0.0.1; exit;; esac\n{script}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory / 'bin'}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            r"""printf '\036{"kind": "hello"}\n'; exec sleep 600""",
            r"does not understand \(KeyError: 'versions' in its 'hello'",
        ),
        (
            r"""printf '\036{"kind": "end", "code": 0}\n'; exec sleep 600""",
            r"does not understand \(ValueError: .* 'end'",
        ),
        ("exit 0", "its agent ended, as it does when it hears nothing from this machine"),
        (
            "echo exec: python: not found >&2; exit 127",
            "its agent ended with code 127: exec: python: not found",
        ),
    ],
)
def test_host_with_an_invalid_agent_is_named(
    script: str, message: str, hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ssh(tmp_path, monkeypatch, script)
    with pytest.raises(LaunchError, match=f"host strange cannot take part: .*{message}"):
        run(hosts, tmp_path, "quick", hosts={"strange": 1})


def test_an_ssh_that_only_closes_the_connection_is_named(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megacore.cluster.hosts.connection._END_SECONDS", 0.1)
    fake_ssh(tmp_path, monkeypatch, "exec sleep 600 >&-")
    with pytest.raises(LaunchError, match="strange cannot take part: its ssh closed the connec"):
        run(hosts, tmp_path, "quick", hosts={"strange": 1})


def test_end_of_processes_on_a_lost_host_has_a_time_limit(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ssh(tmp_path, monkeypatch, "exec sleep 600")
    host_set = HostSet(plan(hosts, tmp_path, "quick", hosts={"strange": 1}), {})
    (connection,) = host_set.connect()
    started = time.monotonic()
    host_set.kill_remaining(connection, 0.5)
    host_set.wait_for_kills()
    assert 0.4 < time.monotonic() - started < HANG
    connection.close()
    connection.process.wait(timeout=HANG)
    connection.channel.send("beat")
    assert connection.channel.waiting == 0, "other files may use its descriptors by now"


def test_host_may_write_only_the_files_of_its_ranks(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ssh(tmp_path, monkeypatch, "exec sleep 600")
    first, second = HostSet(
        plan(hosts, tmp_path, "quick", hosts={"strange": 1, "other": 2}), {}
    ).connect()
    try:
        names = [f"rank_{rank}.json" for rank in ("0", "00001", "2", "3")]
        assert [first.may_write(name) for name in names] == [True, False, False, False]
        assert [second.may_write(name) for name in names] == [False, True, True, False]
        assert not any(
            map(
                second.may_write,
                ["../rank_1.json", "rank_1.json/../x", "launcher_reason.json", "rank_1.py"],
            )
        )
    finally:
        for connection in (first, second):
            connection.close()
            connection.process.wait(timeout=HANG)


def test_sigkill_of_the_head_ends_the_ranks(hosts: Hosts, tmp_path: Path) -> None:
    def kill_the_head(pids: list[int]) -> None:
        plan_name = b"hosts.json"
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            line = path.read_bytes()
            if plan_name in line and str(tmp_path).encode() in line and b"guard" not in line:
                os.kill(int(path.parent.name), signal.SIGKILL)

    once = OnceRunning(tmp_path, kill_the_head)
    with pytest.raises(RankLostError, match="SIGKILL"):
        run(hosts, tmp_path, "stubborn", once)
    none_alive(once.pids, HANG)


@pytest.mark.slow
def test_frozen_head_ends_the_ranks(hosts: Hosts, tmp_path: Path) -> None:
    stopped: list[int] = []

    def freeze_the_head(pids: list[int]) -> None:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            line = path.read_bytes()
            if b"hosts.json" in line and str(tmp_path).encode() in line and b"guard" not in line:
                stopped.append(int(path.parent.name))
                os.kill(stopped[-1], signal.SIGSTOP)
        none_alive(pids, HANG)
        os.kill(stopped[0], signal.SIGCONT)

    once = OnceRunning(tmp_path, freeze_the_head)
    with pytest.raises(HostLostError):
        run(hosts, tmp_path, "waits", once, host_timeout=6.0)
    assert stopped


def test_failed_rank_ends_the_ranks_of_other_hosts(hosts: Hosts, tmp_path: Path) -> None:
    once = OnceRunning(tmp_path, lambda pids: None)
    with pytest.raises(RankLostError, match=r"exited with code 9 without giving a reason"):
        run(hosts, tmp_path, "fails", once)
    pids = [int((tmp_path / f"rank_{rank}.pid").read_text()) for rank in range(2)]
    assert not any(map(alive, pids))


def test_reason_of_a_rank_is_raised_from_another_host(hosts: Hosts, tmp_path: Path) -> None:
    with pytest.raises(DataFormatError, match=r"rank 1: tokens\.bin is damaged"):
        run(hosts, tmp_path, "reasons")
    assert read_launcher_reason(tmp_path / "exit") is None


@pytest.mark.slow
def test_stalled_rank_on_another_host_is_reported_with_stacks(hosts: Hosts, tmp_path: Path) -> None:
    with pytest.raises(
        RankStalledError,
        match=r"rank.* 1 .*furthest behind is rank 1 on .* in phase forward-compute",
    ):
        run(hosts, tmp_path, "watched-stopped", stall_limit=2.0)
    text = (tmp_path / "log-ranks.txt").read_text()
    assert "Python stacks of rank 0" in text
    assert "waits" in text or "rank_main" in text
    assert "the process is stopped (SIGSTOP), so it cannot write one" in text


def test_cancelled_job_lets_the_ranks_save(hosts: Hosts, tmp_path: Path) -> None:
    def cancel(pids: list[int]) -> None:
        raise KeyboardInterrupt

    once = OnceRunning(tmp_path, cancel)
    with pytest.raises(KeyboardInterrupt):
        run(hosts, tmp_path, "saves", once, stop_grace=2 * HANG)
    assert [(tmp_path / f"rank_{rank}.saved").exists() for rank in range(2)] == [True, True]
    assert not any(map(alive, once.pids))


def test_sigusr1_to_the_flow_reaches_the_ranks_of_all_hosts(hosts: Hosts, tmp_path: Path) -> None:
    once = OnceRunning(tmp_path, lambda pids: os.kill(os.getpid(), signal.SIGUSR1))
    run(hosts, tmp_path, "notified", once)
    assert once.pids
    assert not any(map(alive, once.pids))


def test_all_lines_of_a_large_output_are_logged_in_order(hosts: Hosts, tmp_path: Path) -> None:
    log = run(hosts, tmp_path, "floods").splitlines()
    for rank, host in enumerate(("one", "two")):
        lines = [line for line in log if line.startswith(f"{host}: line ")]
        assert lines == [f"{host}: line {number} of rank {rank}" for number in range(20000)]


def test_single_remote_host_runs_all_ranks(hosts: Hosts, tmp_path: Path) -> None:
    log = run(hosts, tmp_path, "quick", hosts={"two": 2})
    assert "hosts: two (ranks 0-1 through lo); they meet at 127.0.0.1:" in log


@pytest.mark.slow
def test_lost_host_of_one_job_does_not_end_another_job(hosts: Hosts, tmp_path: Path) -> None:
    directories = [tmp_path / name for name in ("first", "second")]
    for directory in directories:
        directory.mkdir()

    def run_first() -> None:
        with pytest.raises(RankLostError):  # the signals below end it
            run(hosts, directories[0], "waits")

    thread = threading.Thread(target=run_first, daemon=True)
    thread.start()
    pids = rank_pids(directories[0])
    once = OnceRunning(directories[1], lambda pids: os.kill(agent_of(pids[1]), signal.SIGKILL))
    with pytest.raises(HostLostError):
        run(hosts, directories[1], "waits", once)
    assert all(map(alive, pids))
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not thread.is_alive(), HANG, "the first job ended")


def test_host_with_a_different_torch_is_refused_and_named(hosts: Hosts, tmp_path: Path) -> None:
    host_set = HostSet(plan(hosts, tmp_path, "quick"), {})
    connections = host_set.connect()
    try:
        for connection in connections:
            connection.hello = {
                "versions": shared_versions(),
                "interface": "lo",
                "port": 29500,
                "problem": None,
            }
        messages = host_set.start_messages(connections, {"NCCL_DEBUG": "INFO"})
        assert [message["ranks"] for message in messages] == [[0, 1], [1, 1]]
        assert all("--master-port=29500" in message["command"] for message in messages)
        assert connections[1].hello is not None
        # without DeepSpeed's engine its version does not matter
        connections[1].hello["versions"] = shared_versions() | {"deepspeed": "0.1"}
        host_set.start_messages(connections, {})
        connections[1].hello["versions"] = shared_versions() | {"torch": "1.0"}
        with pytest.raises(
            LaunchError, match=r"host two has torch 1\.0 and this machine .*: install the same"
        ):
            host_set.start_messages(connections, {})
        connections[1].hello["versions"] = shared_versions() | {"deepspeed": "0.1"}
        host_set = HostSet(plan(hosts, tmp_path, "quick", packages=["torch", "deepspeed"]), {})
        with pytest.raises(LaunchError, match=r"host two has deepspeed 0\.1 and this machine has"):
            host_set.start_messages(connections, {})
    finally:
        for connection in connections:
            connection.close()
            connection.process.wait(timeout=HANG)
