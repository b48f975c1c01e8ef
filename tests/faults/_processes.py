"""Processes that are made to be killed: forked from a warm one, each with a session of its own,
none left behind."""

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

ROOT = Path(__file__).parents[2]
MARK = "MEGACORE_FAULT_CASE"
"""Environment variable that every program started by a case inherits."""
_WARM = "tests.faults._warm"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
_ENVIRONMENT = {
    **dict.fromkeys(_THREADS, "1"),
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
START_LIMIT = 120.0
"""Seconds in which the first child begins: the server imports everything first."""
_POLL = 0.005
_LOCK = threading.RLock()
"""multiprocessing reads how a child ended once: two threads must not ask at the same time."""


class HangError(AssertionError):
    """A process ran beyond its deadline; the message has the Python stacks of its threads."""


class Program:
    """A program of its own, with what is asked of a forked process."""

    def __init__(self, popen: "subprocess.Popen[bytes]") -> None:
        self._popen = popen
        self.pid: int | None = popen.pid

    def join(self, seconds: float | None = None) -> None:
        """As multiprocessing's."""
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(seconds)

    @property
    def exitcode(self) -> int | None:
        """Negative for a signal; None while it runs."""
        return self._popen.poll()


@dataclass
class Child:
    """A process that does one call or one command."""

    process: ForkServerProcess | Program
    token: str
    log: Path
    outcome: Path
    started: float = field(default_factory=time.monotonic)

    @property
    def pid(self) -> int:
        """Its id, and that of its session and its group."""
        assert self.process.pid is not None
        return self.process.pid

    def kill(self) -> None:
        """SIGKILL to its whole group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def kill_alone(self) -> None:
        """SIGKILL to this process and to nothing that it started."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, seconds: float) -> int | None:
        """Its exit code, or None when it still runs after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            with _LOCK:
                self.process.join(0)
                code = self.process.exitcode
            if code is not None or time.monotonic() >= deadline:
                return code
            time.sleep(_POLL)

    def finish(self, seconds: float) -> dict[str, Any]:
        """What the call returned or raised, once it has ended by itself; raises HangError."""
        if self.wait(seconds) is None:
            self._abort()
            raise HangError(f"still running after {seconds:.0f} s:\n{self.words()}")
        try:
            answer: dict[str, Any] = json.loads(self.outcome.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if isinstance(self.process, Program) and self.process.exitcode == 0:
                return {"value": None}
            answer = {
                "error": "Died",
                "message": f"exit code {self.process.exitcode}: {self.words()}",
            }
        return answer

    def value(self, seconds: float) -> Any:
        """What the call returned; an exception of it fails."""
        answer = self.finish(seconds)
        assert "value" in answer, f"{answer.get('error')}: {answer.get('message')}\n{self.words()}"
        return answer["value"]

    def words(self, characters: int = 4000) -> str:
        """The end of what it said."""
        try:
            return self.log.read_text(encoding="utf-8", errors="replace")[-characters:]
        except FileNotFoundError:
            return "(nothing)"

    def left(self) -> list[int]:
        """Ids of the living processes that it started or that share its session, itself
        included."""
        return [pid for pid in processes() if pid != os.getpid() and self._owns(pid)]

    def none_left(self, seconds: float) -> list[str]:
        """Wait until nothing is left; what is there after `seconds` is described, and killed."""
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
        """Let it write its stacks (faulthandler answers SIGABRT without the interpreter's lock),
        then end it."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGABRT)
        self.wait(5)
        self.kill()
        self.none_left(5)


class Nursery:
    """Starts children, from any thread."""

    def __init__(self, directory: Path) -> None:
        """Logs and outcomes go to `directory`."""
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
        """Call a module-level function in a new process; returns once the call has begun."""
        token = secrets.token_hex(8)
        log, outcome = self.directory / f"{token}.log", self.directory / f"{token}.json"
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=_child,
            args=(
                theirs,
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
        theirs.close()
        child = Child(process, token, log, outcome)
        self._children.append(child)
        assert ours.poll(START_LIMIT), f"no process began within {START_LIMIT} s"
        try:
            ours.recv_bytes()
        except EOFError:
            raise AssertionError(
                f"a process ended before it began: exit code {child.wait(5)}"
            ) from None
        ours.close()
        child.started = time.monotonic()
        return child

    def program(self, command: Sequence[str], environment: Mapping[str, str]) -> Child:
        """Start a command in a session of its own, from the repository."""
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
        """Kill whatever still runs: of cases that were interrupted."""
        for child in self._children:
            if child.wait(0) is None:
                child.kill()
                child.none_left(0)

    def call(self, function: Callable[..., Any], *arguments: Any, seconds: float = 60.0) -> Any:
        """What a function returns in a process of its own, which leaves nothing behind."""
        child = self.start(function, *arguments)
        value = child.value(seconds)
        assert not (left := child.none_left(5)), left
        return value


@contextmanager
def _server_environment() -> Iterator[None]:
    """The server inherits the environment in which the first process is started."""
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
    began: Any,
    token: str,
    log: str,
    outcome: str,
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """What each process does; it never returns."""
    code = 1
    try:
        os.setsid()
        _redirect(log)
        faulthandler.enable(all_threads=True)
        assert _WARM in sys.modules, f"the server could not import {_WARM}"
        # What a case starts by multiprocessing would import the tests' own main module first.
        vars(sys.modules["__main__"]).update(__spec__=None, __file__=None)
        os.environ.update(environment | {MARK: token})
        os.chdir(ROOT)
        began.send_bytes(b"x")
        began.close()
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
    """Ids of all processes that are no zombies."""
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
    return _stat(pid)[0] if _stat(pid) else ""


def session_of(pid: int) -> int:
    """The session of a process; 0 when it is gone."""
    fields = _stat(pid)
    return int(fields[3]) if fields else 0


def children_of(pid: int) -> list[int]:
    """Its children that are no zombies."""
    return [other for other in processes() if (fields := _stat(other)) and int(fields[1]) == pid]


def environment_of(pid: int) -> bytes:
    """The environment with which its program was started.

    Empty when it is gone or another user's.
    """
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def command_line(pid: int) -> str:
    """Its program and arguments."""
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
