"""Processes to be killed, forked from a warm server, each in a separate session."""

import faulthandler
import json
import multiprocessing
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests._limits import HANG

ROOT = Path(__file__).parents[2]
MARK = "MEGACORE_FAULT_CASE"
"""Environment variable that all programs of a case inherit."""
_WARM = "tests._warm"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
_ENVIRONMENT = {
    **dict.fromkeys(_THREADS, "1"),
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
_POLL = 0.005
_LOCK = threading.RLock()
"""Lock of exit codes: multiprocessing reads each once, so two threads must not ask together."""


class HangError(AssertionError):
    """A process that ran beyond its deadline; the message has its threads' Python stacks."""


class Program:
    """A separate program with the interface of a forked process."""

    def __init__(self, popen: "subprocess.Popen[bytes]") -> None:
        self._popen = popen
        self.pid: int | None = popen.pid

    def join(self, seconds: float | None = None) -> None:
        """Wait for the end, like multiprocessing's `join`."""
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(seconds)

    @property
    def exitcode(self) -> int | None:
        """Exit code, negative for a signal, None while the program runs."""
        return self._popen.poll()


@dataclass
class Child:
    """A process that runs one call or one command."""

    process: ForkServerProcess | Program
    token: str
    log: Path
    outcome: Path
    started: float = field(default_factory=time.monotonic)

    @property
    def pid(self) -> int:
        """Id of the process, its session and its group."""
        assert self.process.pid is not None
        return self.process.pid

    def kill(self) -> None:
        """Send SIGKILL to the whole process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def kill_process(self) -> None:
        """Send SIGKILL to this process only, not to its children."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, seconds: float) -> int | None:
        """Return the exit code, or None if the process still runs after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            with _LOCK:
                self.process.join(0)
                code = self.process.exitcode
            if code is not None or time.monotonic() >= deadline:
                return code
            time.sleep(_POLL)

    def finish(self, seconds: float) -> dict[str, Any]:
        """Wait for the end of the call and return its value or error.

        Raise HangError if it takes longer.
        """
        if self.wait(seconds) is None:
            self._abort()
            raise HangError(f"still running after {seconds:.0f} s:\n{self.log_end()}")
        try:
            answer: dict[str, Any] = json.loads(self.outcome.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if isinstance(self.process, Program) and self.process.exitcode == 0:
                return {"value": None}
            answer = {
                "error": "Died",
                "message": f"exit code {self.process.exitcode}: {self.log_end()}",
            }
        return answer

    def value(self, seconds: float) -> Any:
        """Return the value of the call; fail if it raised."""
        answer = self.finish(seconds)
        assert "value" in answer, (
            f"{answer.get('error')}: {answer.get('message')}\n{self.log_end()}"
        )
        return answer["value"]

    def log_end(self, characters: int = 4000) -> str:
        """Return the end of the log."""
        try:
            return self.log.read_text(encoding="utf-8", errors="replace")[-characters:]
        except FileNotFoundError:
            return "(nothing)"

    def left(self) -> list[int]:
        """Return the ids of the running processes of this session or started by the child."""
        return [pid for pid in processes() if pid != os.getpid() and self._owns(pid)]

    def none_left(self, seconds: float) -> list[str]:
        """Wait until no process is left.

        Kill those that remain after `seconds` and return their descriptions.
        """
        deadline = time.monotonic() + seconds
        while left := self.left():
            if time.monotonic() > deadline:
                described = [f"process {pid} is left over: {command_line(pid)}" for pid in left]
                for pid in left:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return described
            time.sleep(0.02)
        return []

    def _owns(self, pid: int) -> bool:
        return session_of(pid) == self.pid or f"{MARK}={self.token}".encode() in environment_of(
            pid
        ).split(b"\0")

    def _abort(self) -> None:
        """Let the process write its stacks, then end it.

        faulthandler handles SIGABRT without the interpreter's lock.
        """
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGABRT)
        self.wait(5)
        self.kill()
        self.none_left(5)


class Nursery:
    """Starter of child processes, usable from any thread."""

    def __init__(self, directory: Path) -> None:
        """Write logs and outcomes to `directory`."""
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([_WARM])
        self._children: list[Child] = []

    def start(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Call a module-level function in a new process; return once the call has started."""
        token = secrets.token_hex(8)
        log, outcome = self.directory / f"{token}.log", self.directory / f"{token}.json"
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=_child,
            args=(
                sender,
                token,
                str(log),
                str(outcome),
                dict(environment or {}),
                function,
                arguments,
            ),
        )
        with _LOCK, _server_environment():
            process.start()
        sender.close()
        child = Child(process, token, log, outcome)
        self._children.append(child)
        assert receiver.poll(HANG), f"no process began within {HANG:.0f} s"
        try:
            receiver.recv_bytes()
        except EOFError:
            raise AssertionError(
                f"a process ended before it began: exit code {child.wait(HANG)}"
            ) from None
        receiver.close()
        child.started = time.monotonic()
        return child

    def program(self, command: Sequence[str], environment: Mapping[str, str]) -> Child:
        """Start a command in a separate session, in the repository."""
        token = secrets.token_hex(8)
        log = self.directory / f"{token}.log"
        with open(log, "ab") as output:
            popen = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **environment, MARK: token},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        child = Child(Program(popen), token, log, self.directory / f"{token}.json")
        self._children.append(child)
        return child

    def close(self) -> None:
        """Kill the remaining processes of interrupted cases."""
        for child in self._children:
            if child.wait(0) is None:
                child.kill()
                child.none_left(0)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the value of a function in a separate process, which must leave none behind."""
        child = self.start(function, *arguments)
        value = child.value(HANG)
        assert not (left := child.none_left(HANG)), left
        return value


@contextmanager
def _server_environment() -> Iterator[None]:
    """Set the environment that the fork server inherits from the first start."""
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    changed = {**_ENVIRONMENT, "PYTHONPATH": path}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _child(
    started: Any,
    token: str,
    log: str,
    outcome: str,
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """Run the call in the new process; never return."""
    code = 1
    try:
        os.setsid()
        _redirect(log)
        faulthandler.enable(all_threads=True)
        assert _WARM in sys.modules, f"the server could not import {_WARM}"
        # Processes that a case starts by multiprocessing would import pytest's main module first.
        vars(sys.modules["__main__"]).update(__spec__=None, __file__=None)
        os.environ.update(environment | {MARK: token})
        os.chdir(ROOT)
        started.send_bytes(b"x")
        started.close()
        answer = {"value": function(*arguments)}
        code = 0
    except BaseException as error:
        traceback.print_exc()
        answer = {"error": type(error).__name__, "message": str(error)}
    try:
        temporary = Path(f"{outcome}.tmp")
        temporary.write_text(json.dumps(answer), encoding="utf-8")
        temporary.rename(outcome)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _redirect(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.close(null)


def processes() -> list[int]:
    """Return the ids of all processes except zombies."""
    return [
        int(name)
        for name in os.listdir("/proc")
        if name.isdigit() and _state(int(name)) not in ("Z", "X", "")
    ]


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _state(pid: int) -> str:
    fields = _stat(pid)
    return fields[0] if fields else ""


def session_of(pid: int) -> int:
    """Return the session of a process, or 0 if it is gone."""
    fields = _stat(pid)
    return int(fields[3]) if fields else 0


def children_of(pid: int) -> list[int]:
    """Return the ids of the children of a process except zombies."""
    return [other for other in processes() if (fields := _stat(other)) and int(fields[1]) == pid]


def environment_of(pid: int) -> bytes:
    """Return the environment with which a process was started.

    It is empty if the process is gone or belongs to another user.
    """
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def command_line(pid: int) -> str:
    """Return the program and arguments of a process."""
    try:
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
            .strip()
        )
    except OSError:
        return ""
