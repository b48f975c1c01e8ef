"""Cases of fault tests: a call is killed at a random moment, checked, repeated and compared."""

import json
import os
import random
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests._limits import HANG
from tests.faults._processes import Child, Nursery, children_of, command_line, environment_of

LATEST = 1.1
"""Latest moment of a kill, in multiples of the call's undisturbed duration."""
GRACE = 30.0
"""Seconds after a kill within which all processes must be gone; on idle cores it takes one."""
_STRAGGLER = 3.0
"""Seconds in which ranks without a launcher must notice the loss of another rank."""


def prepare_nothing(inputs: Path) -> None:
    """Do nothing: the kind reads no inputs."""


@dataclass(frozen=True)
class Kind:
    """A call that is killed.

    Every function is at module level and runs in a separate process.
    """

    name: str
    run: Callable[[Path, Path, int], None]
    """(inputs, place, attempt): the call that is killed and repeated; writes only below `place`."""
    result: Callable[[Path, Path], Any]
    """(inputs, place): the JSON result that must be the same as without a kill."""
    visible: Callable[[Path, Path], list[str]]
    """(inputs, place): problems of outputs that look complete to a reader and are not."""
    prepare: Callable[[Path], None] = prepare_nothing
    """(inputs): writes the inputs of all cases, once."""
    serve: Callable[[Path], Any] | None = None
    """Context manager around all cases of the kind, such as a server; gets the inputs."""
    ranks: int = 1
    victims: tuple[str, ...] = ("all",)
    """Processes to kill, one entry per case: `all`, `rank here`, or a key of VICTIMS."""
    same_as: str | None = None
    """Kind whose undisturbed result is compared instead of an expensive separate run.

    `seconds` is required then.
    """
    seconds: float | None = None


@dataclass
class Outcome:
    """Result of one case."""

    kind: str
    seed: int
    moment: float
    """Moment of the kill, in seconds after the start of the call."""
    victim: str
    hit: bool = False
    """True if the kill ended the victim; otherwise the call had ended before."""
    error: str = ""
    """Name of the error of a call whose process survived the kill."""
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """Id with which the case is repeated."""
        return f"{self.kind}-{self.seed}"


@dataclass(frozen=True)
class Reference:
    """Result of an undisturbed run."""

    seconds: float
    result: Any
    size: int = 0
    """Bytes of the output, each file rounded up to pages of 4096."""


class Bench:
    """Runner of cases with the state they share."""

    def __init__(self, directory: Path, nursery: Nursery, kinds: dict[str, Kind]) -> None:
        self.directory = directory
        self.nursery = nursery
        self.kinds = kinds
        self._references: dict[str, Reference] = {}
        self._locks = {name: threading.RLock() for name in kinds}
        self._servers: list[Any] = []

    def close(self) -> None:
        """End the servers and all processes of interrupted cases."""
        while self._servers:
            self._servers.pop().__exit__(None, None, None)
        self.nursery.close()

    def inputs(self, name: str) -> Path:
        """Return the directory of the inputs of a kind."""
        return self.directory / "inputs" / name

    def reference(self, name: str) -> Reference:
        """Return the undisturbed run of a kind, computed once, after its inputs."""
        with self._locks[name]:
            if name not in self._references:
                self._references[name] = self._undisturbed(self.kinds[name])
            return self._references[name]

    def _undisturbed(self, kind: Kind) -> Reference:
        inputs = self.inputs(kind.name)
        inputs.mkdir(parents=True)
        self.nursery.call(kind.prepare, inputs)
        if kind.serve is not None:
            server = kind.serve(inputs)
            server.__enter__()
            self._servers.append(server)
        if kind.same_as is not None:
            assert kind.seconds is not None
            return Reference(kind.seconds, self.reference(kind.same_as).result)
        references = []
        for number in range(2):
            place = self.directory / f"{kind.name}-undisturbed-{number}"
            place.mkdir()
            seconds = max([child.value(HANG) for child in self._start(kind, place, 1)])
            references.append(Reference(seconds, self.check(kind, place), size_of(place)))
            shutil.rmtree(place)
        first, second = references
        assert first.result == second.result, f"two undisturbed runs of {kind.name} differ"
        return min(first, second, key=lambda one: one.seconds)

    def check(self, kind: Kind, place: Path) -> Any:
        """Return the result of a case after checking its visible outputs."""
        return self.nursery.call(
            _checked_result, kind.visible, kind.result, self.inputs(kind.name), place
        )

    def _start(self, kind: Kind, place: Path, attempt: int) -> list[Child]:
        arguments = (kind.run, self.inputs(kind.name), place, attempt)
        if kind.ranks == 1:
            return [self.nursery.start(_call, *arguments)]
        common = {
            "WORLD_SIZE": str(kind.ranks),
            "LOCAL_WORLD_SIZE": str(kind.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        return [
            self.nursery.start(
                _call, *arguments, environment=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            )
            for rank in range(kind.ranks)
        ]

    def run(self, name: str, seed: int) -> Outcome:
        """Run one case; `faults` of the outcome are empty if it passes."""
        kind, reference = self.kinds[name], self.reference(name)
        draw = random.Random(f"{name}-{seed}")
        moment, victim = (
            draw.uniform(0, LATEST) * reference.seconds,
            kind.victims[seed % len(kind.victims)],
        )
        outcome = Outcome(name, seed, moment, victim)
        place = self.directory / f"{name}-{seed}"
        place.mkdir()
        started = time.monotonic()
        try:
            self._run(kind, reference, outcome, place, draw)
        except AssertionError as error:
            outcome.faults.append(f"{type(error).__name__}: {error}")
        outcome.seconds = round(time.monotonic() - started, 2)
        if not outcome.faults:
            shutil.rmtree(place)
        return outcome

    def _run(
        self, kind: Kind, reference: Reference, outcome: Outcome, place: Path, draw: random.Random
    ) -> None:
        children = self._start(kind, place, 1)
        time.sleep(outcome.moment)
        outcome.hit = kill(outcome.victim, children, draw)
        self._await(kind, outcome, children)
        for child in children:
            outcome.faults += child.none_left(GRACE)
        inputs = self.inputs(kind.name)
        outcome.faults += self.nursery.call(kind.visible, inputs, place)
        repeated = self._start(kind, place, 2)
        for child in repeated:
            answer = child.finish(HANG)
            if "value" not in answer:
                outcome.faults.append(
                    f"the repeated call failed: {answer['error']}: {answer['message']}"
                )
            outcome.faults += child.none_left(GRACE)
        if not outcome.faults and self.check(kind, place) != reference.result:
            outcome.faults.append(
                "the result of the repeated call differs from the undisturbed one"
            )

    def _await(self, kind: Kind, outcome: Outcome, children: list[Child]) -> None:
        """Wait for the end of the killed processes and of those that noticed it."""
        if outcome.victim in ("all", "rank here"):
            for child in children:
                if child.wait(_STRAGGLER) is None:
                    child.kill()  # like a launcher
                    child.wait(HANG)
            return
        for child in children:
            if child.wait(0) == -signal.SIGKILL:
                continue
            answer = child.finish(HANG)
            outcome.error = answer.get("error", "")
            if outcome.hit and outcome.error == "Died" and child.wait(0) == -signal.SIGKILL:
                outcome.error = ""
            elif outcome.error and outcome.error not in ("RankLostError", "WorkerLostError"):
                outcome.faults.append(f"the call raised {outcome.error}: {answer['message']}")


def _call(run: Callable[[Path, Path, int], None], inputs: Path, place: Path, attempt: int) -> float:
    """Run the call and return its seconds."""
    started = time.monotonic()
    run(inputs, place, attempt)
    return time.monotonic() - started


def _checked_result(
    visible: Callable[[Path, Path], list[str]],
    result: Callable[[Path, Path], Any],
    inputs: Path,
    place: Path,
) -> Any:
    problems = visible(inputs, place)
    assert not problems, problems
    # Convert to the form that is read from a file.
    return json.loads(json.dumps(result(inputs, place)))


def kill(victim: str, children: list[Child], draw: random.Random) -> bool:
    """Wait for the victim and kill it; return True if it was running."""
    if victim == "all":
        alive = any(child.wait(0) is None for child in children)
        for child in children:
            child.kill()
        return alive
    if victim == "rank here":
        chosen = draw.choice(children)
        alive = chosen.wait(0) is None
        chosen.kill()
        return alive
    (child,) = children
    while child.wait(0) is None:
        for pid in VICTIMS[victim](child):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                return True
        time.sleep(0.01)
    return False


def _call_process(child: Child) -> Iterator[int]:
    yield child.pid


def _workers(child: Child) -> Iterator[int]:
    """Yield the pool workers of the call, without multiprocessing's resource tracker."""
    yield from (
        pid for pid in children_of(child.pid) if "resource_tracker" not in command_line(pid)
    )


def _running_command(command: str, *, ranks: bool = False) -> Callable[[Child], Iterator[int]]:
    def find(child: Child) -> Iterator[int]:
        for pid in child.left():
            line = command_line(pid)
            if (
                command in line
                and "python" in line
                and (not ranks or b"\0RANK=" in b"\0" + environment_of(pid))
            ):
                yield pid

    return find


VICTIMS: dict[str, Callable[[Child], Iterator[int]]] = {
    "supervisor": _call_process,
    "worker": _workers,
    "guard": _running_command("-m megacore.launch.guard"),
    "torchrun": _running_command("python -m torch.distributed.run"),
    "rank": _running_command("-m megacore.ranks.pretrain", ranks=True),
}
"""Functions that find a single process to kill."""


def size_of(place: Path) -> int:
    """Return the bytes of all files in full pages; hard links count once."""
    files = [path for path in place.rglob("*") if path.is_file() and not path.is_symlink()]
    sizes = {path.stat().st_ino: path.stat().st_size for path in files}
    return sum(-(-size // 4096) * 4096 for size in sizes.values())


def free_port() -> int:
    """Return a port on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
