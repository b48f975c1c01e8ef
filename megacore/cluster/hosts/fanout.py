"""The head of a job over several machines.

It starts an agent on each through ssh, and ends them all together.

    python -m megacore.cluster.hosts.fanout --plan FILE

It runs under the job's guard. First every agent must say hello; only then ranks start. From then on
the job ends everywhere when one machine is lost (silent for `launch.host_timeout`, or its
connection ended), when the ranks of one failed and the others did not end by themselves within
FAIL_LIMIT, when an agent sees a rank that stands still or is gone, and on SIGTERM. What the ranks
write goes to stdout as `host: text`.

It starts in tens of milliseconds: no torch is imported.
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
from megacore.cluster.hosts.plan import Plan
from megacore.errors import HostLostError, LaunchError, MegacoreError, MemoryExhaustedError
from megacore.launch.exit_reason import write_launcher_reason
from megacore.launch.guard import JOB_VARIABLE, KILL_LIMIT
from megacore.launch.rank_table import LauncherReport, StateReport, write_report
from megacore.launch.watch import STANDSTILL, Trouble

HELLO_LIMIT = 45.0
"""Seconds in which all agents must have said hello."""
FAIL_LIMIT = 10.0
"""Seconds in which ranks must have noticed that those of another machine failed."""
TROUBLE_SPREADS = 1.5
"""Seconds in which the agents of all machines notice that ranks stand still, one of which the
others wait for."""
STATES_LIMIT = 6.0
"""Seconds in which the agents must have said where their ranks stand."""
SILENCE = 3.0
"""Seconds without a word after which a machine may be the one by which the ranks of others fail."""
END_LIMIT = 10.0
"""Seconds in which what is left on a machine whose connection ended must have been ended."""
SILENT_END_LIMIT = 5.0
"""The same for one that fell silent: it hardly hears another connection, and the job's end waits
for it."""
RESUMES = "a retry resumes from the last complete checkpoint"

_POLL = 0.2
_NAMED = 4
_HELPS = (
    "correct launch.hostfile or ssh, and let the repository and its environment lie at the same "
    "paths on all machines"
)


def main(arguments: list[str]) -> int:
    """Run a job over several machines; returns what to exit with."""
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
    """Runs one plan."""

    def __init__(self, plan: Plan, environment: dict[str, str]) -> None:
        """Reach nobody yet; `environment` is this process's."""
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
        """To the end of all ranks. Raises MegacoreError for what cannot be started."""
        variables = self._plan.variables(self._environment)
        variables.pop(JOB_VARIABLE, None)  # each machine has a mark of its own
        self._hosts = self._set.connect()
        self._until(lambda: all(host.hello or host.done for host in self._hosts), HELLO_LIMIT)
        if self._ends_by is None:
            start = self._set.start_messages(self._hosts, variables)
            _say(self._set.summary(self._hosts))
            for host, message in zip(self._hosts, start, strict=True):
                host.channel.send("start", **message)
                host.started = True
        self._until(lambda: all(host.done for host in self._hosts), None)
        self._set.wait_for_the_rest()
        return 128 + signal.SIGTERM if self._terminated and self._code == 0 else self._code

    def close(self) -> None:
        """Close whatever connection is left."""
        for host in self._hosts:
            host.close()

    def _until(self, done: Callable[[], bool], limit: float | None) -> None:
        """Serve the connections until `done`, or the job is ending and its time is over."""
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
            # it was this process that stood still
            host.heard += pause if pause > STANDSTILL else 0.0
            if not host.lost:  # by what another one has just said
                self._listen(host)
        self._look(now)

    def _listen(self, host: Connection) -> None:
        host.channel.flush()
        for line in host.read_errors():
            _say(f"{host.name}: {line}")
        for said in host.channel.receive():
            host.heard = time.monotonic()
            if isinstance(said, str):
                _say(f"{host.name}: {said}")
            elif not host.lost:
                self._understand(host, said)
        if not host.channel.open and not host.done:
            self._lose(host, host.why_it_ended())

    def _understand(self, host: Connection, said: Message) -> None:
        try:
            self._take(host, said)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            # it runs other code, or is not in order
            what = f"{type(error).__name__}: {error} in its {said['kind']!r}"
            self._lose(host, f"its agent says what this machine does not understand ({what:.200})")

    def _take(self, host: Connection, said: Message) -> None:
        kind = said["kind"]
        if kind not in ("hello", BEAT) and not host.started:
            raise ValueError("it was told to start nothing yet")
        if kind == "log":
            _say(*(f"{host.name}: {line}" for line in said["lines"]))
        elif kind == "hello":
            host.hello = {name: said[name] for name in ("versions", "interface", "port", "problem")}
        elif (
            kind == "file"
            and self._plan.copy_files
            and not host.here
            and host.may_write(said["name"])
        ):
            _copy(self._directory / said["name"], base64.b64decode(said["data"]))
        elif kind == "end":
            self._ended(host, int(said["code"]), said["memory"])
        elif kind == "failed":
            host.code = LaunchError.exit_code
            self._end(LaunchError(f"the ranks of {host.name} cannot be started: {said['reason']}"))
        elif kind == "trouble":
            self._take_trouble(Trouble(tuple(said["stalled"]), tuple(said["lost"])))
        elif kind == "states":
            host.states = [
                (int(state.pop("rank")), StateReport(**state)) for state in said["ranks"]
            ]

    def _take_trouble(self, trouble: Trouble) -> None:
        """Ask all machines where their ranks stand.

        Those that see trouble, too, say so before long.
        """
        if self._trouble is None:
            self._trouble = trouble, time.monotonic()
            for host in self._running():
                host.channel.send("states")
        else:
            known, since = self._trouble
            stalled, lost = {*known.stalled, *trouble.stalled}, {*known.lost, *trouble.lost}
            self._trouble = Trouble(tuple(sorted(stalled)), tuple(sorted(lost))), since

    def _ended(self, host: Connection, code: int, memory: str | None) -> None:
        host.code = code
        if code == 0 or self._ends_by is not None:
            return
        self._code = self._code or code
        self._failed_at = self._failed_at or time.monotonic()
        if memory is not None:
            out = (
                f"a rank on {host.name} ran out of main memory: the kernel's out-of-memory killer "
                "ended it"
            )
            _write_reason(self._directory, MemoryExhaustedError(f"{out}, with {memory} to be had"))

    def _look(self, now: float) -> None:
        """What has to happen because time went by, or a signal came."""
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
            told = now - since > TROUBLE_SPREADS and all(
                host.states is not None for host in self._running()
            )
            if told or now - since > STATES_LIMIT:
                self._report(trouble)

    def _why_silent(self, host: Connection, now: float) -> str:
        """With the others that fell silent with it: it may be this machine that is cut off."""
        limit = self._plan.host_timeout
        since = max(SILENCE, limit - 2 * BEAT_INTERVAL)
        others = [
            each.name for each in self._running() if each is not host and now - each.heard > since
        ]
        named = [
            *others[:_NAMED],
            *([f"{len(others) - _NAMED} more"] if len(others) > _NAMED else []),
        ]
        nor = f", nor from {', '.join(named)}," if named else ""
        return f"nothing was heard from it{nor} for launch.host_timeout = {limit:g} s"

    def _end_unless_one_is_silent(self, now: float) -> None:
        """A machine that fell silent is waited for: it explains others' failures, or returns."""
        if all(now - host.heard <= SILENCE for host in self._running()):
            self._end(None)

    def _running(self, *, all_of_them: bool = False) -> list[Connection]:
        """Machines whose ranks run; `all_of_them`: whose connection does."""
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
            self._set.end_what_is_left(host, end_limit)
        if self._ends_by is not None:
            return  # it was asked to end, and did so in its own way
        error = f"lost host {host.name}: {why}; {RESUMES}" if host.started else ""
        self._end(HostLostError(error) if error else self._unreachable(host, why))

    def _unreachable(self, host: Connection, why: str) -> LaunchError:
        """A machine that was there before may come back."""
        text = f"host {host.name} cannot take part: {why}"
        return HostLostError(text) if self._plan.retried else LaunchError(f"{text}: {_HELPS}")

    def _end(self, error: MegacoreError | None, *, grace: float | None = None) -> None:
        """End the ranks of all machines: after SIGTERM and `grace` seconds, or at once."""
        if error is not None:
            _write_reason(self._directory, error)
            # else it stands above the table of ranks
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
    """A reason that cannot be written must not keep the ranks from being ended."""
    try:
        write_launcher_reason(directory, error)
    except MegacoreError as unwritable:
        _say(str(error), str(unwritable))


def _say(*lines: str) -> None:
    """Into the log, in whole lines."""
    data = "".join(f"{line}\n" for line in lines).encode()
    while data:
        data = data[os.write(1, data) :]


def _copy(path: Path, data: bytes) -> None:
    """Write the copy of a host's file, or say why that is not possible."""
    try:
        replace_file(path, data, durable=False)
    except OSError as error:
        _say(f"cannot write {path}: {error.strerror}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
