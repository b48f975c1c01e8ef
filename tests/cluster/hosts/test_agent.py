"""The agent of one host, with the test as its head: its messages and the end of its ranks."""

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megacore.cluster.hosts.channel import Channel, Message
from megacore.hardware import shared_versions
from megacore.launch.guard import JOB_VARIABLE
from megacore.observe.heartbeat import beat_path, process_state
from tests._limits import HANG
from tests.launch._processes import alive, environment, none_alive, wait_until

RANKS = str(Path(__file__).parent.with_name("_host_ranks.py"))


class Head:
    """A head that starts an agent and sends beats while it waits for messages."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.mark = os.urandom(8).hex()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megacore.cluster.hosts.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environment(), JOB_VARIABLE: self.mark},
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.channel = Channel(self.process.stdout.fileno(), self.process.stdin.fileno())
        self.received: list[Message | str] = []
        self._unread: list[Message | str] = []

    def wait_for(self, kind: str) -> Message:
        deadline = time.monotonic() + HANG
        while time.monotonic() < deadline:
            self.channel.send("beat")
            self._unread += self.channel.receive()
            while self._unread:
                message = self._unread.pop(0)
                self.received.append(message)
                if not isinstance(message, str) and message["kind"] == kind:
                    return message
            time.sleep(0.05)
        raise AssertionError(f"no {kind} within {HANG} s, but {self.received}")

    def prepare(self, **changes: Any) -> Message:
        values = {"peer": "127.0.0.1", "interface": "auto", "port": True, "host_timeout": HANG}
        self.channel.send("prepare", **values | changes)
        return self.wait_for("hello")

    def start(self, behaviour: str, **changes: Any) -> None:
        exit_directory = self.directory / "exit"
        arguments = ["ranks", behaviour, str(self.directory), str(exit_directory), "2", "2"]
        values = {
            "command": [sys.executable, RANKS, *arguments],
            "environment": {},
            "grace": 5.0,
            "ranks": [2, 2],
            "exit_directory": str(exit_directory),
            "copy_files": False,
            "stall_limit": None,
        }
        self.channel.send("start", **values | changes)

    def ranks(self) -> list[int]:
        files = [self.directory / f"rank_{rank}.pid" for rank in (2, 3)]
        deadline = time.monotonic() + HANG
        while not all(file.exists() for file in files):
            assert time.monotonic() < deadline
            self.channel.send("beat")
            time.sleep(0.05)
        return [int(file.read_text()) for file in files]

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.kill()
        self.process.wait(timeout=HANG)
        self.process.stdout.close()


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    (tmp_path / "exit").mkdir()
    running_head = Head(tmp_path)
    yield running_head
    running_head.close()


def test_hello_contains_versions_interface_and_port(head: Head) -> None:
    hello = head.prepare()
    loaded = psutil.Process(head.process.pid).memory_maps()
    assert not any("torch" in file.path for file in loaded), "it would start slowly"
    assert hello["versions"] == shared_versions()
    assert hello["versions"]["torch"] != "none"
    assert (hello["interface"], hello["problem"]) == ("lo", None)
    assert 0 < hello["port"] < 2**16


def test_missing_interface_is_reported_as_a_problem(head: Head) -> None:
    assert "it has no interface 'eth77' (it has " in head.prepare(interface="lo,eth77")["problem"]


def test_agent_ends_if_its_head_closes_the_connection(head: Head) -> None:
    head.prepare()
    assert head.process.stdin is not None
    head.process.stdin.close()
    assert head.process.wait(timeout=HANG) == 0


def test_end_contains_the_exit_code_and_follows_the_log_lines(head: Head) -> None:
    head.prepare()
    head.start("quick")
    assert head.wait_for("end") | {"kind": "end"} == {"kind": "end", "code": 0, "memory": None}
    logs = [
        message
        for message in head.received
        if not isinstance(message, str) and message["kind"] == "log"
    ]
    lines = [line for log in logs for line in log["lines"]]
    assert sorted(lines) == ["rank 2 is here", "rank 3 is here"]
    assert head.process.wait(timeout=HANG) == 0


def test_missing_command_ends_with_code_127(head: Head) -> None:
    head.prepare()
    head.start("quick", command=["/nowhere/torchrun"])
    assert head.wait_for("end")["code"] == 127
    assert any("cannot start /nowhere/torchrun" in str(message) for message in head.received)


@pytest.mark.slow
@pytest.mark.parametrize("silent", [True, False])
def test_loss_of_the_head_ends_ranks_that_ignore_sigterm(head: Head, silent: bool) -> None:
    head.prepare()
    head.start("stubborn", grace=2 * HANG)
    pids = head.ranks()
    if silent:
        head.prepare(host_timeout=1.5)
    assert head.process.stdin is not None
    started = time.monotonic()
    if not silent:
        head.process.stdin.close()
    # 1.5 s of silence, then SIGTERM, and SIGKILL 5 s later, independent of the grace.
    none_alive(pids, HANG)
    assert time.monotonic() - started > 4
    assert head.process.wait(timeout=HANG) == 0


def test_sigkill_of_the_agent_ends_its_ranks(head: Head) -> None:
    head.prepare()
    head.start("waits")
    pids = head.ranks()
    head.process.kill()
    none_alive(pids, HANG)


def test_stop_with_grace_lets_the_ranks_save(head: Head) -> None:
    head.prepare()
    head.start("saves", grace=2 * HANG)
    pids = head.ranks()
    head.channel.send("stop", grace=2 * HANG)
    head.wait_for("end")
    assert not any(map(alive, pids))
    assert all((head.directory / f"rank_{rank}.saved").exists() for rank in (2, 3))


def test_stop_without_grace_kills_the_ranks(head: Head) -> None:
    head.prepare()
    head.start("stubborn", grace=2 * HANG)
    head.ranks()
    head.channel.send("stop", grace=0.0)
    assert head.wait_for("end")["code"] != 0


def test_notice_reaches_the_ranks(head: Head) -> None:
    head.prepare()
    head.start("notified")
    head.ranks()
    head.channel.send("notice")
    assert head.wait_for("end")["code"] == 0


def test_files_of_the_ranks_are_copied_and_stale_files_removed(head: Head) -> None:
    (head.directory / "exit" / "rank_2.json").write_text("old")
    (head.directory / "exit" / "rank_7.json").write_text("older")
    (head.directory / "exit" / "rank_2.json.tmp-1").write_text("unfinished")
    head.prepare()
    head.start("watched", copy_files=True)
    head.ranks()
    assert not (head.directory / "exit" / "rank_7.json").exists()
    files = {}
    while len(files) < 4 or b"forward-compute" not in files["rank_00003.beat"]:
        message = head.wait_for("file")
        files[message["name"]] = base64.b64decode(message["data"])
    assert sorted(files) == [
        "rank_00002.beat",
        "rank_00002.stack",
        "rank_00003.beat",
        "rank_00003.stack",
    ]


def test_no_file_is_copied_in_a_shared_workspace(head: Head) -> None:
    head.prepare()
    head.start("watched")
    beats = [beat_path(head.directory / "exit", rank) for rank in (2, 3)]
    wait_until(lambda: all(path.exists() for path in beats), HANG, "heartbeats")
    head.channel.send("states")
    head.wait_for("states")  # which the changed files would precede
    kinds = {message["kind"] for message in head.received if not isinstance(message, str)}
    assert "file" not in kinds


def test_stopped_ranks_are_reported_as_trouble_with_their_stacks(head: Head) -> None:
    head.prepare()
    head.start("watched-stopped", stall_limit=1.5)
    # The ranks may stop on either side of one look, and a later look reports both.
    while head.wait_for("trouble")["stalled"] != [2, 3]:
        pass
    pids = head.ranks()
    wait_until(lambda: {process_state(pid) for pid in pids} == {"T"}, HANG, "ranks stopped")
    head.channel.send("states")
    states = {state["rank"]: state for state in head.wait_for("states")["ranks"]}
    assert {state["state"] for state in states.values()} == {"stopped"}
    assert "SIGSTOP" in states[3]["stack"]


def test_agent_sends_beats_while_it_waits_for_a_file_of_the_workspace(head: Head) -> None:
    head.prepare()
    os.mkfifo(head.directory / "exit" / "rank_00099.beat")  # nobody can read it to its end
    head.start("waits", stall_limit=HANG)
    pids = head.ranks()
    for _ in range(5):
        head.wait_for("beat")
    head.channel.send("stop", grace=0.0)
    head.wait_for("end")
    assert not any(map(alive, pids))
    assert head.process.wait(timeout=HANG) == 0


def test_end_option_kills_only_processes_with_the_mark(head: Head, tmp_path: Path) -> None:
    head.prepare()
    head.start("stubborn")
    pids = head.ranks()
    os.kill(head.process.pid, signal.SIGSTOP)
    other = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env={JOB_VARIABLE: f"{head.mark}0"}
    )
    try:
        command = [sys.executable, "-m", "megacore.cluster.hosts.agent", "--end", head.mark]
        assert subprocess.run(command, timeout=HANG, check=False).returncode == 0
        none_alive([*pids, head.process.pid], HANG)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait(timeout=HANG)


def test_agent_ignores_input_that_is_no_message(head: Head) -> None:
    os.write(head.channel.outgoing, b'\x1e{"kind": 1}\nwelcome\n\x1e{broken\n')
    assert head.prepare()["problem"] is None


def test_message_in_pieces_is_separated_from_text(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    channel = Channel(reader, os.open(os.devnull, os.O_WRONLY))
    text = (
        b"Welcome to node 7\r\n\x1e"
        + json.dumps({"kind": "log", "lines": ["é\n"]}).encode()
        + b"\nrest"
    )
    seen: list[Any] = []
    for position in range(0, len(text), 7):
        os.write(writer, text[position : position + 7])
        seen += channel.receive()
    assert seen == ["Welcome to node 7", {"kind": "log", "lines": ["é\n"]}]
    os.close(writer)
    assert [*channel.receive()] == ["rest"]
    assert not channel.open
    os.close(reader)


def test_send_does_not_block_if_the_other_side_reads_nothing() -> None:
    reader, writer = os.pipe()
    channel = Channel(os.open(os.devnull, os.O_RDONLY), writer)
    for _ in range(64):
        channel.send("log", lines=["x" * 16384])
    assert channel.waiting > 2**19
    os.close(reader)
    channel.send("beat")
    assert channel.broken
    assert channel.waiting == 0
    os.close(writer)
