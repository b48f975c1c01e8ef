"""The head of a job on several hosts, which starts an agent on each through ssh and ends them all.

    python -m megacore.cluster.hosts.fanout --plan FILE

The head runs under the job's guard. The ranks start after every agent has sent its hello. From then
on the job ends on all hosts when

* a host is lost: it is silent for `launch.host_timeout`, or its connection has ended,
* the ranks of one host failed and the others did not end within FAIL_LIMIT,
* an agent reports a rank that is stalled or gone,
* the head receives SIGTERM.

The output of the ranks goes to stdout as `host: text`. The head imports no torch, so it starts in
tens of milliseconds.
"""

import argparse
import base64
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from megacore.artifact.files import replace_file
from megacore.cluster.hosts.channel import BEAT, BEAT_INTERVAL, Message, WakeUp, wait
from megacore.cluster.hosts.connection import Connection, HostSet
from megacore.cluster.hosts.plan import Plan, after_retry
from megacore.errors import HostLostError, LaunchError, MegacoreError, MemoryExhaustedError
from megacore.launch.exit_reason import write_launcher_reason
from megacore.launch.guard import JOB_VARIABLE, KILL_LIMIT
from megacore.launch.rank_table import LauncherReport, StateReport, write_report
from megacore.launch.watch import STANDSTILL, Trouble

HELLO_LIMIT = 45.0
"""Seconds for all agents to send their hello."""
FAIL_LIMIT = 10.0
"""Seconds for the ranks to notice that the ranks of another host have failed, and to end."""
TROUBLE_SPREADS = 1.5
"""Seconds for the agents of all hosts to notice their stalled ranks: one stalled rank also stalls
the ranks that wait for it."""
STATES_LIMIT = 6.0
"""Seconds for the agents to report the states of their ranks."""
SILENCE = 3.0
"""Seconds without a message after which a host may be the cause of other hosts' failures."""
END_LIMIT = 10.0
"""Seconds to end the processes that are left on a host whose connection ended."""
SILENT_END_LIMIT = 5.0
"""Seconds to end the processes on a host that fell silent.

It is shorter than END_LIMIT, because such a host rarely accepts another connection and the end of
the job waits for it.
"""

_POLL = 0.2
_NAMED = 4
_HELPS = (
    "correct launch.hostfile or ssh, and put the repository and its environment at the same paths "
    "on all machines"
)


def main(arguments: list[str]) -> int:
    """Run a job on several hosts and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="megacore.cluster.hosts.fanout", description="Ranks of a job on several machines."
    )
    parser.add_argument("--plan", type=Path, required=True, help="what is started where, as JSON")
    options = parser.parse_args(arguments)
    plan = Plan.read(options.plan)
    head = Head(plan, dict(os.environ))
    try:
        return head.run()
    except MegacoreError as error:
        _write_reason(plan.exit_directory, error)
        _say(str(error))
        return error.exit_code
    finally:
        head.close()


class Head:
    """The head of one plan's job."""

    def __init__(self, plan: Plan, environment: dict[str, str]) -> None:
        """Keep `plan` and this process's `environment`; no host is contacted yet."""
        self._plan, self._environment = plan, environment
        self._directory = Path(plan.exit_directory)
        self._set = HostSet(plan, environment)
        self._hosts: list[Connection] = []
        self._wake = WakeUp()
        self._terminated = self._notified = False
        self._code = 0
        self._failed_at: float | None = None
        self._trouble: tuple[Trouble, float] | None = None
        self._ends_by: float | None = None
        self._beaten = self._stepped = time.monotonic()
        signal.signal(signal.SIGTERM, self._terminate)
        signal.signal(signal.SIGINT, self._terminate)
        signal.signal(signal.SIGUSR1, self._notify)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self._terminated = True

    def _notify(self, number: int, frame: FrameType | None) -> None:
        self._notified = True

    def run(self) -> int:
        """Run the job to the end of all ranks and return the exit code.

        Raises:
            MegacoreError: the job cannot be started.
        """
        variables = self._plan.variables(self._environment)
        variables.pop(JOB_VARIABLE, None)  # each host has a separate mark
        self._hosts = self._set.connect()
        self._until(lambda: all(host.hello or host.done for host in self._hosts), HELLO_LIMIT)
        if self._ends_by is None:
            start = self._set.start_messages(self._hosts, variables)
            _say(self._set.summary(self._hosts))
            for host, message in zip(self._hosts, start, strict=True):
                host.channel.send("start", **message)
                host.started = True
        self._until(lambda: all(host.done for host in self._hosts), None)
        self._set.wait_for_kills()
        return 128 + signal.SIGTERM if self._terminated and self._code == 0 else self._code

    def close(self) -> None:
        """Close all connections."""
        for host in self._hosts:
            host.close()

    def _until(self, done: Callable[[], bool], limit: float | None) -> None:
        """Serve the connections until `done` returns True or the job's time to end is over.

        With a `limit` in seconds, also return as soon as the job is ending.

        Raises:
            LaunchError: a host did not say hello within `limit` seconds.
        """
        deadline = None if limit is None else time.monotonic() + limit
        while not done():
            self._step()
            now = time.monotonic()
            if self._ends_by is not None and (now > self._ends_by or limit is not None):
                return
            if deadline is not None and now > deadline:
                silent = next(host for host in self._hosts if not (host.hello or host.done))
                raise self._unreachable(silent, f"it did not answer within {limit:g} s")

    def _step(self) -> None:
        listening = [host for host in self._hosts if not host.lost and host.channel.open]
        readable = [self._wake.descriptor, *(host.channel.incoming for host in listening)]
        wait(readable, [host.channel.outgoing for host in listening if host.channel.waiting], _POLL)
        self._wake.clear()
        now = time.monotonic()
        pause, self._stepped = now - self._stepped, now
        for host in listening:
            # A long pause means that this process was suspended, not that the host was silent.
            host.heard += pause if pause > STANDSTILL else 0.0
            if not host.lost:  # another host's message may have ended the job
                self._listen(host)
        self._look(now)

    def _listen(self, host: Connection) -> None:
        host.channel.flush()
        for line in host.read_errors():
            _say(f"{host.name}: {line}")
        for message in host.channel.receive():
            host.heard = time.monotonic()
            if isinstance(message, str):
                _say(f"{host.name}: {message}")
            elif not host.lost:
                self._understand(host, message)
        if not host.channel.open and not host.done:
            self._lose(host, host.why_it_ended())

    def _understand(self, host: Connection, message: Message) -> None:
        try:
            self._take(host, message)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            # The host runs other code or is faulty.
            problem = f"{type(error).__name__}: {error} in its {message['kind']!r}"
            self._lose(
                host,
                f"its agent sent a message that this machine does not understand ({problem:.200})",
            )

    def _take(self, host: Connection, message: Message) -> None:
        kind = message["kind"]
        if kind not in ("hello", BEAT) and not host.started:
            raise ValueError("it was not told to start anything yet")
        if kind == "log":
            _say(*(f"{host.name}: {line}" for line in message["lines"]))
        elif kind == "hello":
            host.hello = {
                name: message[name] for name in ("versions", "interface", "port", "problem")
            }
        elif (
            kind == "file"
            and self._plan.copy_files
            and not host.here
            and host.may_write(message["name"])
        ):
            _copy(self._directory / message["name"], base64.b64decode(message["data"]))
        elif kind == "end":
            self._ended(host, int(message["code"]), message["memory"])
        elif kind == "failed":
            host.code = LaunchError.exit_code
            self._end(
                LaunchError(f"the ranks of {host.name} cannot be started: {message['reason']}")
            )
        elif kind == "trouble":
            self._take_trouble(Trouble(tuple(message["stalled"]), tuple(message["lost"])))
        elif kind == "states":
            host.states = [
                (int(state.pop("rank")), StateReport(**state)) for state in message["ranks"]
            ]

    def _take_trouble(self, trouble: Trouble) -> None:
        """Ask all hosts for the states of their ranks; add trouble that they report later."""
        if self._trouble is None:
            self._trouble = trouble, time.monotonic()
            for host in self._running():
                host.channel.send("states")
        else:
            earlier, since = self._trouble
            stalled, lost = {*earlier.stalled, *trouble.stalled}, {*earlier.lost, *trouble.lost}
            self._trouble = Trouble(tuple(sorted(stalled)), tuple(sorted(lost))), since

    def _ended(self, host: Connection, code: int, memory: str | None) -> None:
        host.code = code
        if code == 0 or self._ends_by is not None:
            return
        self._code = self._code or code
        self._failed_at = self._failed_at or time.monotonic()
        if memory is not None:
            summary = (
                f"a rank on {host.name} ran out of host memory: the kernel's out-of-memory killer "
                "ended it"
            )
            _write_reason(
                self._directory, MemoryExhaustedError(f"{summary}, with {memory} available")
            )

    def _look(self, now: float) -> None:
        """Do what elapsed time or a signal requires."""
        if now - self._beaten >= BEAT_INTERVAL:
            self._beaten = now
            for host in self._running(all_of_them=True):
                host.channel.send(BEAT)
        for host in self._running(all_of_them=True):
            if host.hello and now - host.heard > self._plan.host_timeout:
                self._lose(host, self._why_silent(host, now), SILENT_END_LIMIT)
        if self._terminated and self._ends_by is None:
            self._end(None, grace=self._plan.stop_grace)
        if self._notified and (running := self._running()):
            self._notified = False
            for host in running:
                host.channel.send("notice")
        if (
            self._failed_at is not None
            and now - self._failed_at > FAIL_LIMIT
            and self._ends_by is None
        ):
            self._end_unless_one_is_silent(now)
        if self._trouble is not None and self._ends_by is None:
            trouble, since = self._trouble
            all_reported = now - since > TROUBLE_SPREADS and all(
                host.states is not None for host in self._running()
            )
            if all_reported or now - since > STATES_LIMIT:
                self._report(trouble)

    def _why_silent(self, host: Connection, now: float) -> str:
        """Return the reason for the loss of a silent host, for an error message.

        The reason names other silent hosts: this host itself may be cut off.
        """
        limit = self._plan.host_timeout
        since = max(SILENCE, limit - 2 * BEAT_INTERVAL)
        others = [
            other.name
            for other in self._running()
            if other is not host and now - other.heard > since
        ]
        names = [
            *others[:_NAMED],
            *([f"{len(others) - _NAMED} more"] if len(others) > _NAMED else []),
        ]
        nor = f", nor from {', '.join(names)}," if names else ""
        return f"nothing was heard from it{nor} for launch.host_timeout = {limit:g} s"

    def _end_unless_one_is_silent(self, now: float) -> None:
        """End the job unless a host is silent, which may explain the failures or return."""
        if all(now - host.heard <= SILENCE for host in self._running()):
            self._end(None)

    def _running(self, *, all_of_them: bool = False) -> list[Connection]:
        """Return the hosts whose ranks run; with `all_of_them`, all hosts with a connection."""
        return [host for host in self._hosts if not host.done and (host.started or all_of_them)]

    def _report(self, trouble: Trouble) -> None:
        states = dict(state for host in self._hosts for state in host.states or [])
        try:
            write_report(self._directory, LauncherReport(trouble, states))
        except MegacoreError as unwritable:
            _say(str(unwritable))
        self._end(None)

    def _lose(self, host: Connection, why: str, end_limit: float = END_LIMIT) -> None:
        host.lost = True
        host.close()
        if host.started:
            self._set.kill_remaining(host, end_limit)
        if self._ends_by is not None:
            return  # the job is ending anyway
        again = after_retry(self._plan.module)
        error = f"lost host {host.name}: {why}; a retry {again}" if host.started else ""
        self._end(HostLostError(error) if error else self._unreachable(host, why))

    def _unreachable(self, host: Connection, why: str) -> LaunchError:
        """Return the error for a host that cannot take part.

        In a later attempt it is a HostLostError, because the host was reachable and may return.
        """
        message = f"host {host.name} cannot take part: {why}"
        return HostLostError(message) if self._plan.retried else LaunchError(f"{message}: {_HELPS}")

    def _end(self, error: MegacoreError | None, *, grace: float | None = None) -> None:
        """End the ranks of all hosts: with SIGTERM and `grace` seconds, or at once if None."""
        if error is not None:
            _write_reason(self._directory, error)
            # If ranks have started, the error is printed above the table of ranks.
            if not any(host.started for host in self._hosts):
                _say(str(error))
        self._code = self._code or (
            0 if self._terminated else 1 if error is None else error.exit_code
        )
        self._ends_by = time.monotonic() + (grace or 0.0) + KILL_LIMIT + 2.0
        for host in self._running(all_of_them=True):
            if host.started:
                host.channel.send("stop", grace=0.0 if grace is None else grace)
            else:
                host.lost = True
                host.close()


def _write_reason(directory: Path | str, error: MegacoreError) -> None:
    """Write the launcher's reason; if that fails, print it, so that the ranks are still ended."""
    try:
        write_launcher_reason(directory, error)
    except MegacoreError as unwritable:
        _say(str(error), str(unwritable))


def _say(*lines: str) -> None:
    """Print whole lines to the log."""
    data = "".join(f"{line}\n" for line in lines).encode()
    while data:
        data = data[os.write(1, data) :]


def _copy(path: Path, data: bytes) -> None:
    """Write the copy of a host's file, or print why it cannot be written."""
    try:
        replace_file(path, data, durable=False)
    except OSError as error:
        _say(f"cannot write {path}: {error.strerror}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
