"""One case: a call is killed at a random moment, its leftovers are read, it is repeated and
compared."""

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

from tests.faults._processes import Child, Nursery, children_of, command_line, environment_of

LATEST = 1.1
"""Kills fall between the begin of a call and this many times its undisturbed duration."""
DEADLINE = 90.0
"""Seconds in which any call has to end by itself."""
_STRAGGLER = 3.0
"""Seconds that ranks get to notice, without a launcher, that another one is gone."""


def nothing(inputs: Path) -> None:
    """For kinds that read nothing."""


@dataclass(frozen=True)
class Kind:
    """Something that is killed.

    Every function is at module level and runs in a process of its own.
    """

    name: str
    run: Callable[[Path, Path, int], None]
    """(inputs, place, attempt): the call that is killed and repeated; it writes below `place`
    alone."""
    result: Callable[[Path, Path], Any]
    """(inputs, place): what has to be the same as without a kill, as JSON."""
    visible: Callable[[Path, Path], list[str]]
    """(inputs, place): what a reader would take for whole and is not; empty when all is well."""
    prepare: Callable[[Path], None] = nothing
    """(inputs): makes what all cases read, once."""
    serve: Callable[[Path], Any] | None = None
    """A context manager around all cases of the kind, such as a server; gets the directory of the
    inputs."""
    ranks: int = 1
    victims: tuple[str, ...] = ("all",)
    """Of which one is killed: `all` processes of the call, or one that VICTIMS describes."""
    grace: float = 1.0
    """Seconds within which everything has to be gone after the kill."""
    same_as: str | None = None
    """The kind whose undisturbed result counts, and `seconds` is given: where a run of its own is
    expensive."""
    seconds: float | None = None
    deadline: float = DEADLINE


@dataclass
class Outcome:
    """What became of one case."""

    kind: str
    seed: int
    moment: float
    """Seconds after the begin of the call."""
    victim: str
    hit: bool = False
    """Whether the victim died of it; else the call had ended before."""
    error: str = ""
    """What the call raised where its process outlived the kill."""
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """How the case is repeated."""
        return f"{self.kind}-{self.seed}"


@dataclass(frozen=True)
class Reference:
    """An undisturbed run."""

    seconds: float
    result: Any
    size: int = 0
    """Bytes of what it leaves, each file in whole pages of 4096."""


class Bench:
    """Runs cases; keeps what they share."""

    def __init__(self, directory: Path, nursery: Nursery, kinds: dict[str, Kind]) -> None:
        self.directory = directory
        self.nursery = nursery
        self.kinds = kinds
        self._references: dict[str, Reference] = {}
        self._locks = {name: threading.RLock() for name in kinds}
        self._servers: list[Any] = []

    def close(self) -> None:
        """End the servers, and whatever an interrupted case has left running."""
        while self._servers:
            self._servers.pop().__exit__(None, None, None)
        self.nursery.close()

    def inputs(self, name: str) -> Path:
        """Where the inputs of a kind lie."""
        return self.directory / "inputs" / name

    def reference(self, name: str) -> Reference:
        """The undisturbed run of a kind, made once; its inputs before."""
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
        found = []
        for number in range(2):
            place = self.directory / f"{kind.name}-undisturbed-{number}"
            place.mkdir()
            seconds = max([child.value(kind.deadline) for child in self._start(kind, place, 1)])
            found.append(Reference(seconds, self.check(kind, place), size_of(place)))
            shutil.rmtree(place)
        first, second = found
        assert first.result == second.result, f"two undisturbed runs of {kind.name} differ"
        return min(first, second, key=lambda one: one.seconds)

    def check(self, kind: Kind, place: Path) -> Any:
        return self.nursery.call(_looked, kind.visible, kind.result, self.inputs(kind.name), place)

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
        """One case; `faults` of the outcome are empty when all is well."""
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
            outcome.faults += child.none_left(kind.grace)
        inputs = self.inputs(kind.name)
        outcome.faults += self.nursery.call(kind.visible, inputs, place)
        again = self._start(kind, place, 2)
        for child in again:
            answer = child.finish(kind.deadline)
            if "value" not in answer:
                outcome.faults.append(
                    f"the repeated call failed: {answer['error']}: {answer['message']}"
                )
            outcome.faults += child.none_left(kind.grace)
        if not outcome.faults and self.check(kind, place) != reference.result:
            outcome.faults.append(
                "the result of the repeated call differs from the undisturbed one"
            )

    def _await(self, kind: Kind, outcome: Outcome, children: list[Child]) -> None:
        """The end of what was killed, and of what noticed it."""
        if outcome.victim in ("all", "rank here"):
            for child in children:
                if child.wait(_STRAGGLER) is None:
                    child.kill()  # as a launcher does
                    child.wait(_STRAGGLER)
            return
        for child in children:
            if child.wait(0) == -signal.SIGKILL:
                continue
            answer = child.finish(kind.deadline)
            outcome.error = answer.get("error", "")
            if outcome.hit and outcome.error == "Died" and child.wait(0) == -signal.SIGKILL:
                outcome.error = ""
            elif outcome.error and outcome.error not in ("RankLostError", "WorkerLostError"):
                outcome.faults.append(f"the call raised {outcome.error}: {answer['message']}")


def _call(run: Callable[[Path, Path, int], None], inputs: Path, place: Path, attempt: int) -> float:
    """The seconds that the call took."""
    started = time.monotonic()
    run(inputs, place, attempt)
    return time.monotonic() - started


def _looked(
    visible: Callable[[Path, Path], list[str]],
    result: Callable[[Path, Path], Any],
    inputs: Path,
    place: Path,
) -> Any:
    problems = visible(inputs, place)
    assert not problems, problems
    # As it comes back from a file.
    return json.loads(json.dumps(result(inputs, place)))


def kill(victim: str, children: list[Child], draw: random.Random) -> bool:
    """Kill what `victim` describes, waiting for it to be there; whether anything lived."""
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


def _own(child: Child) -> Iterator[int]:
    yield child.pid


def _workers(child: Child) -> Iterator[int]:
    """Processes that a pool of the call has forked or spawned to work, not the one that keeps
    account of semaphores."""
    yield from (
        pid for pid in children_of(child.pid) if "resource_tracker" not in command_line(pid)
    )


def _running(what: str, *, ranks: bool = False) -> Callable[[Child], Iterator[int]]:
    def find(child: Child) -> Iterator[int]:
        for pid in child.left():
            line = command_line(pid)
            if (
                what in line
                and "python" in line
                and (not ranks or b"\0RANK=" in b"\0" + environment_of(pid))
            ):
                yield pid

    return find


VICTIMS: dict[str, Callable[[Child], Iterator[int]]] = {
    "supervisor": _own,
    "worker": _workers,
    "guard": _running("-m megacore.launch.guard"),
    "torchrun": _running("python -m torch.distributed.run"),
    "rank": _running("-m megacore.ranks.pretrain", ranks=True),
}
"""How to find the process that is killed alone."""


def size_of(place: Path) -> int:
    """Bytes of all files, in whole pages; one with two names counts once."""
    files = [path for path in place.rglob("*") if path.is_file() and not path.is_symlink()]
    sizes = {path.stat().st_ino: path.stat().st_size for path in files}
    return sum(-(-size // 4096) * 4096 for size in sizes.values())


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
