"""The agent: the process on each host of a job that starts, watches and ends the host's ranks.

    python -m megacore.cluster.hosts.agent
    python -m megacore.cluster.hosts.agent --end MARK

ssh starts the agent on each host. The head of the job and the agent exchange messages over the
agent's stdin and stdout (`channel`). The agent

* describes this host (hello),
* starts the ranks' command under a guard (start),
* passes on the output of the ranks (log),
* watches their heartbeats (trouble, states),
* copies their small files to a head with another workspace (file),
* reports the exit code of the command (end).

Both sides send a beat every second. When the connection ends, or the head is silent for
`launch.host_timeout`, the ranks get SIGTERM and, HEADLESS_GRACE seconds later, SIGKILL. If the
agent itself is killed, the guard's stdin closes and the guard ends the ranks.

With --end the agent kills the processes with a job's mark. The head requests this through a new
connection after it lost the old one.

The agent imports no torch, so it starts in tens of milliseconds.
"""

import argparse
import base64
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from megacore.cluster.hosts.channel import BEAT, BEAT_INTERVAL, FULL, Channel, Message, WakeUp, wait
from megacore.cluster.hosts.network import (
    INTERFACE_VARIABLES,
    free_port,
    interface_problem,
    interface_to,
)
from megacore.hardware import shared_versions
from megacore.launch.guard import catches, descendants, end_all, guarded, marked, send_signal
from megacore.launch.rank_table import rank_states
from megacore.launch.watch import KillCounter, RankWatch, Trouble, memory_text
from megacore.paths import glob

HEADLESS_GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL for ranks whose head is gone."""
RANK_FILE = re.compile(r"rank_(\d+)\.(?:json|beat|stack)", re.ASCII)
"""Names of the files that the head accepts from an agent: a rank's reason, heartbeat and stacks."""

_POLL = 0.2
_LINE = 65536


def main(arguments: list[str]) -> int:
    """Serve a head until the ranks of this host are gone, or end the processes with a mark."""
    parser = argparse.ArgumentParser(
        prog="megacore.cluster.hosts.agent", description="Ranks of a job on this machine."
    )
    parser.add_argument(
        "--end", metavar="MARK", help="kill the processes that carry this mark, and nothing else"
    )
    options = parser.parse_args(arguments)
    if options.end is not None:
        return 1 if end_all(lambda: marked(options.end), 0.0, reap=lambda: None) else 0
    outgoing = os.dup(1)
    os.dup2(2, 1)  # printed text must not mix with the messages
    return Agent(Channel(0, outgoing)).serve()


class Agent:
    """The agent of one head."""

    def __init__(self, head: Channel) -> None:
        """Prepare to serve `head`; no rank starts before its start message."""
        self._head = head
        self._heard = self._beaten = time.monotonic()
        self._host_timeout = 30.0
        self._interface: str | None = None
        self._ranks: HostRanks | None = None
        self._stopping = self._headless = False
        self._kill_at: float | None = None
        self._wake = WakeUp()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._asked_to_stop)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the head sends a message instead

    def _asked_to_stop(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True

    def serve(self) -> int:
        """Serve until the ranks are gone, or until the head is gone before they start.

        Returns:
            The exit code, always 0.
        """
        while True:
            self._wait()
            for message in self._head.receive():
                self._heard = time.monotonic()
                if not isinstance(message, str):
                    self._obey(message)
            self._look_after_the_head()
            if self._ranks is None:
                if self._stopping or self._headless:
                    return 0
            elif self._look_after_the_ranks(self._ranks):
                return 0

    def _wait(self) -> None:
        output = (
            self._ranks.output if self._ranks is not None and self._head.waiting < FULL else None
        )
        readable = [self._wake.descriptor, *([self._head.incoming] if self._head.open else [])]
        readable += [] if output is None else [output]
        wait(readable, [self._head.outgoing] if self._head.waiting else [], _POLL)
        self._wake.clear()
        self._head.flush()

    def _look_after_the_head(self) -> None:
        now = time.monotonic()
        if now - self._beaten >= BEAT_INTERVAL:
            self._beaten = now
            self._head.send(BEAT)
        silent = now - self._heard > self._host_timeout
        if not self._headless and (silent or not self._head.open or self._head.broken):
            self._headless = self._head.broken = True
            self._kill_at = min(self._kill_at or now + HEADLESS_GRACE, now + HEADLESS_GRACE)

    def _look_after_the_ranks(self, ranks: "HostRanks") -> bool:
        """Serve the ranks; return True if they are gone and the head was informed, or is gone."""
        now = time.monotonic()
        ranks.kills.look()
        ended = ranks.ended
        if (ended or self._head.waiting < FULL) and (lines := ranks.read(last=ended)):
            self._head.send("log", lines=lines)
        if ended:
            self._copy_files(ranks)
            self._head.send(
                "end",
                code=ranks.code,
                memory=memory_text() if ranks.code and ranks.kills.rose else None,
            )
            self._say_it_all()
            return True
        if self._stopping or self._headless:
            ranks.stop()
            if self._kill_at is not None and now > self._kill_at:
                ranks.kill()
            return False
        if ranks.watch_due(now):
            self._copy_files(ranks)
            if trouble := ranks.watch.look():
                self._head.send("trouble", stalled=trouble.stalled, lost=trouble.lost)
        return False

    def _say_it_all(self) -> None:
        """Send the remaining messages within the host timeout."""
        deadline = time.monotonic() + self._host_timeout
        while self._head.waiting and not self._headless and time.monotonic() < deadline:
            time.sleep(0.01)
            self._head.flush()

    def _copy_files(self, ranks: "HostRanks") -> None:
        for name, data in ranks.changed_files():
            self._head.send("file", name=name, data=base64.b64encode(data).decode("ascii"))

    def _obey(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "prepare":
            self._host_timeout = float(message["host_timeout"])
            self._head.send("hello", **self._hello(message))
        elif kind == "start":
            self._start(message)
        elif kind == "stop":
            self._stopping = True
            if message["grace"] is not None:
                self._kill_at = time.monotonic() + float(message["grace"])
        elif kind == "notice" and self._ranks is not None:
            self._ranks.notify()
        elif kind == "states" and self._ranks is not None:
            states = self._ranks.states()
            self._copy_files(self._ranks)
            self._head.send("states", ranks=states)

    def _hello(self, message: Message) -> Message:
        """Return the hello message; its `problem` says why this host cannot take part, if so."""
        problem, requested = None, message["interface"]
        if requested != "auto":
            self._interface, problem = requested, interface_problem(requested)
        elif message["peer"] is not None:
            self._interface = interface_to(message["peer"])
        return {
            "host": socket.gethostname(),
            "versions": shared_versions(),
            "interface": self._interface,
            "port": free_port() if message["port"] else None,
            "problem": problem,
        }

    def _start(self, message: Message) -> None:
        environment = {**os.environ, **message["environment"]}
        if self._interface is not None:
            for name in INTERFACE_VARIABLES:
                environment.setdefault(name, self._interface)
        try:
            self._ranks = HostRanks(message, environment)
        except OSError as error:
            self._head.send(
                "failed", reason=f"{message['command'][0]}: {error.strerror}: {error.filename}"
            )
            self._say_it_all()
            self._stopping = True


class HostRanks:
    """The ranks of this host, under a guard."""

    def __init__(self, message: Message, environment: dict[str, str]) -> None:
        """Start the ranks that a start message describes. Raises OSError."""
        first, count = message["ranks"]
        self._numbers = range(first, first + count)
        self._directory = Path(message["exit_directory"])
        self._copies: dict[str, bytes] | None = {} if message["copy_files"] else None
        if self._copies is not None:
            self._clear()
        self.kills = KillCounter()
        self.watch = _Looks(
            RankWatch(self._directory, stall_limit=message["stall_limit"], only=self._numbers)
        )
        self._looked = time.monotonic()
        self._text = b""
        self._guard = subprocess.Popen(
            guarded(message["command"], message["grace"]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        assert self._guard.stdout is not None
        os.set_blocking(self._guard.stdout.fileno(), False)

    @property
    def output(self) -> int | None:
        """File descriptor of the ranks' output; None after its end."""
        assert self._guard.stdout is not None
        return None if self._guard.stdout.closed else self._guard.stdout.fileno()

    @property
    def ended(self) -> bool:
        """True if all ranks are gone."""
        return self._guard.poll() is not None

    @property
    def code(self) -> int:
        """Exit code of the guard after its end: 128 + n for signal n."""
        code = self._guard.returncode
        return 128 - code if code < 0 else code

    def read(self, *, last: bool) -> list[str]:
        """Return the lines of output since the last call.

        With `last` this includes an incomplete last line.
        """
        assert self._guard.stdout is not None
        while self.output is not None:
            try:
                part = os.read(self._guard.stdout.fileno(), _LINE)
            except BlockingIOError:
                break
            if not part:
                self._guard.stdout.close()
            self._text += part
            if not last and len(self._text) > 4 * _LINE:
                break
        lines = self._text.split(b"\n")
        self._text = b"" if last or len(lines[-1]) > _LINE else lines.pop()
        return [line.decode("utf-8", errors="replace") for line in lines if line]

    def stop(self) -> None:
        """Close the guard's stdin, so that the guard ends the ranks."""
        assert self._guard.stdin is not None
        if not self._guard.stdin.closed:
            self._guard.stdin.close()

    def kill(self) -> None:
        """Send SIGKILL to all processes.

        The guard adopts orphans, so it is killed only after it has no descendants.
        """
        guard = self._guard.pid
        for pid in sorted(descendants(os.getpid()), key=lambda pid: pid == guard):
            if pid != guard or not descendants(guard):
                send_signal(pid, signal.SIGKILL)

    def notify(self) -> None:
        """Send SIGUSR1 to the guard, which passes it on."""
        if catches(self._guard.pid, signal.SIGUSR1):
            send_signal(self._guard.pid, signal.SIGUSR1)

    def watch_due(self, now: float) -> bool:
        """Return True if the next check of the ranks is due, and then restart the interval."""
        due = now - self._looked >= BEAT_INTERVAL
        self._looked = now if due else self._looked
        return due

    def states(self) -> list[Message]:
        """Return the state of each rank, with its stacks."""
        states = rank_states(self._directory, None, stacks=True, only=self._numbers)
        return [
            {"rank": state.rank, "state": state.state, "idle": state.idle, "stack": state.stack}
            for state in states
        ]

    def changed_files(self) -> list[tuple[str, bytes]]:
        """Return name and content of the ranks' small files that changed since the last call.

        The list is empty if the head can read the files itself.
        """
        if self._copies is None:
            return []
        changed = []
        for path in sorted(glob(self._directory, "rank_*")):
            match = RANK_FILE.fullmatch(path.name)
            if match is not None and int(match[1]) in self._numbers:
                with contextlib.suppress(OSError):
                    data = path.read_bytes()
                    if self._copies.get(path.name) != data:
                        self._copies[path.name] = data
                        changed.append((path.name, data))
        return changed

    def _clear(self) -> None:
        """Remove the files of an earlier attempt's ranks, which must not count for these ranks."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for path in glob(self._directory, "rank_*"):
            if RANK_FILE.fullmatch(path.name):
                path.unlink(missing_ok=True)


class _Looks:
    """Checks of a watch in a thread, so that the agent does not wait for the workspace's files.

    Otherwise this host would seem lost while a file server does not answer.
    """

    def __init__(self, watch: RankWatch) -> None:
        self._watch = watch
        self._thread: threading.Thread | None = None
        self._trouble: Trouble | None = None

    def look(self) -> Trouble | None:
        """Return the trouble that the last check found, if it has ended, and start the next one."""
        if self._thread is not None and self._thread.is_alive():
            return None
        trouble = self._trouble
        self._thread = threading.Thread(target=self._check, name="watch", daemon=True)
        self._thread.start()
        return trouble

    def _check(self) -> None:
        self._trouble = self._watch.look()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
