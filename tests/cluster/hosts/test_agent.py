"""One host's agent, with the test as its head.

What it says, and that its ranks end whatever becomes of the head.
"""

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

import pytest

from megacore.cluster.hosts.agent import versions
from megacore.cluster.hosts.channel import Channel, Message
from megacore.launch.guard import JOB_VARIABLE
from tests.launch._processes import alive, environment, none_alive

RANKS = str(Path(__file__).parent.with_name("_host_ranks.py"))


class Head:
    """Talks with an agent, and beats for as long as it is asked to wait."""

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
        self.heard: list[Message | str] = []
        self._unread: list[Message | str] = []

    def wait_for(self, kind: str, seconds: float = 15.0, *, beat: bool = True) -> Message:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if beat:
                self.channel.send("beat")
            self._unread += self.channel.receive()
            while self._unread:
                said = self._unread.pop(0)
                self.heard.append(said)
                if not isinstance(said, str) and said["kind"] == kind:
                    return said
            time.sleep(0.05)
        raise AssertionError(f"no {kind} within {seconds} s, but {self.heard}")

    def prepare(self, **changes: Any) -> Message:
        values = {"peer": "127.0.0.1", "interface": "auto", "port": True, "host_timeout": 1.5}
        self.channel.send("prepare", **values | changes)
        return self.wait_for("hello")

    def start(self, behaviour: str, **changes: Any) -> None:
        exit_directory = self.directory / "exit"
        words = ["ranks", behaviour, str(self.directory), str(exit_directory), "2", "2"]
        values = {
            "command": [sys.executable, RANKS, *words],
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
        deadline = time.monotonic() + 15
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
        self.process.wait(timeout=10)
        self.process.stdout.close()


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    (tmp_path / "exit").mkdir()
    found = Head(tmp_path)
    yield found
    found.close()


def test_hello_says_what_the_host_is(head: Head) -> None:
    started = time.monotonic()
    hello = head.prepare()
    assert time.monotonic() - started < 3, "it loads nothing heavy"
    assert hello["versions"] == versions()
    assert hello["versions"]["torch"] != "none"
    assert (hello["interface"], hello["problem"]) == ("lo", None)
    assert 0 < hello["port"] < 2**16


def test_an_interface_that_is_not_there_is_a_problem(head: Head) -> None:
    assert "it has no interface 'eth77' (it has " in head.prepare(interface="lo,eth77")["problem"]


def test_an_agent_without_a_head_ends(head: Head) -> None:
    head.prepare()
    assert head.process.stdin is not None
    head.process.stdin.close()
    assert head.process.wait(timeout=5) == 0


def test_the_end_says_the_code(head: Head) -> None:
    head.prepare()
    head.start("quick")
    assert head.wait_for("end") | {"kind": "end"} == {"kind": "end", "code": 0, "memory": None}
    logged = [said for said in head.heard if not isinstance(said, str) and said["kind"] == "log"]
    lines = [line for said in logged for line in said["lines"]]
    assert sorted(lines) == ["rank 2 is here", "rank 3 is here"]
    assert head.process.wait(timeout=5) == 0


def test_a_command_that_is_not_there(head: Head) -> None:
    head.prepare()
    head.start("quick", command=["/nowhere/torchrun"])
    assert head.wait_for("end")["code"] == 127
    assert any("cannot start /nowhere/torchrun" in str(said) for said in head.heard)


@pytest.mark.parametrize("silent", [True, False])
def test_a_head_that_is_gone_ends_stubborn_ranks(head: Head, silent: bool) -> None:
    head.prepare()
    head.start("stubborn")
    pids = head.ranks()
    assert head.process.stdin is not None
    if not silent:
        head.process.stdin.close()
    # 1.5 s of silence, then SIGTERM, and SIGKILL after 5 s, whatever the grace is.
    assert none_alive(pids, 10) > 4
    assert head.process.wait(timeout=5) == 0


def test_a_killed_agent_takes_its_ranks_along(head: Head) -> None:
    head.prepare()
    head.start("waits")
    pids = head.ranks()
    head.process.kill()
    none_alive(pids, 5)


def test_it_stops_with_the_grace_and_without(head: Head) -> None:
    head.prepare()
    head.start("saves")
    pids = head.ranks()
    head.channel.send("stop", grace=4.0)
    head.wait_for("end")
    assert not any(map(alive, pids))
    assert all((head.directory / f"rank_{rank}.saved").exists() for rank in (2, 3))


def test_it_stops_at_once(head: Head) -> None:
    head.prepare()
    head.start("stubborn")
    head.ranks()
    started = time.monotonic()
    head.channel.send("stop", grace=0.0)
    assert head.wait_for("end")["code"] != 0
    assert time.monotonic() - started < 3


def test_a_notice_reaches_the_ranks(head: Head) -> None:
    head.prepare()
    head.start("notified")
    head.ranks()
    head.channel.send("notice")
    assert head.wait_for("end")["code"] == 0


def test_files_are_copied_to_another_workspace_and_old_ones_forgotten(head: Head) -> None:
    (head.directory / "exit" / "rank_2.json").write_text("old")
    (head.directory / "exit" / "rank_7.json").write_text("older")
    (head.directory / "exit" / "rank_2.json.tmp-1").write_text("unfinished")
    head.prepare()
    head.start("watched", copy_files=True)
    head.ranks()
    assert not (head.directory / "exit" / "rank_7.json").exists()
    found = {}
    while len(found) < 4:
        said = head.wait_for("file")
        found[said["name"]] = base64.b64decode(said["data"])
    assert sorted(found) == [
        "rank_00002.beat",
        "rank_00002.stack",
        "rank_00003.beat",
        "rank_00003.stack",
    ]
    assert b"forward-compute" in found["rank_00003.beat"]


def test_no_file_is_copied_in_a_shared_workspace(head: Head) -> None:
    head.prepare()
    head.start("watched")
    head.ranks()
    with pytest.raises(AssertionError, match="no file"):
        head.wait_for("file", 2.5)


def test_a_rank_that_is_gone_is_reported_with_the_stacks_of_the_others(head: Head) -> None:
    head.prepare()
    head.start("watched-stopped", stall_limit=1.5)
    trouble = head.wait_for("trouble")
    assert trouble["stalled"] == [2, 3]
    head.channel.send("states")
    states = {state["rank"]: state for state in head.wait_for("states")["ranks"]}
    assert {state["state"] for state in states.values()} == {"stopped"}
    assert "SIGSTOP" in states[3]["stack"]


def test_what_carries_a_mark_is_killed_and_nothing_else(head: Head, tmp_path: Path) -> None:
    head.prepare()
    head.start("stubborn")
    pids = head.ranks()
    os.kill(head.process.pid, signal.SIGSTOP)
    other = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], env={JOB_VARIABLE: f"{head.mark}0"}
    )
    try:
        words = [sys.executable, "-m", "megacore.cluster.hosts.agent", "--end", head.mark]
        assert subprocess.run(words, timeout=20, check=False).returncode == 0
        none_alive([*pids, head.process.pid], 3)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait(timeout=10)


def test_the_agent_reads_nothing_but_messages(head: Head) -> None:
    os.write(head.channel.outgoing, b'\x1e{"kind": 1}\nwelcome\n\x1e{broken\n')
    assert head.prepare()["problem"] is None


def test_messages_survive_noise_and_pieces(tmp_path: Path) -> None:
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


def test_a_side_that_takes_nothing_blocks_nobody() -> None:
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
