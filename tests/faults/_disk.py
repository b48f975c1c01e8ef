"""A disk that fills up.

A small file system in memory, or, where none may be mounted, a limit on the size of files.
"""

import random
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.faults._cases import Bench, Kind, Outcome

PAGE = 4096
ROOMY = 256 << 20


@dataclass(frozen=True)
class Disk:
    """A directory on a small disk."""

    path: Path
    mounted: bool

    def resize(self, size: int) -> None:
        """Give it this many bytes."""
        if self.mounted:
            subprocess.run(
                ["mount", "-o", f"remount,size={size}", str(self.path)],
                check=True,
                capture_output=True,
            )


@contextmanager
def small_disk(path: Path, size: int) -> Iterator[Disk]:
    """A file system of `size` bytes at `path`.

    An ordinary directory where mounting is not allowed.
    """
    path.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    mounted = (
        shutil.which("mount") is not None
        and subprocess.run(command, capture_output=True).returncode == 0
    )
    try:
        yield Disk(path, mounted)
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(path)], check=True, capture_output=True)


def run_on_full_disk(bench: Bench, kind: Kind, seed: int) -> Outcome:
    """The call on a disk that has room for a part of its output: refused in a sentence, then
    repeated with room."""
    reference = bench.reference(kind.name)
    draw = random.Random(f"disk-{kind.name}-{seed}")
    size = max(PAGE, int(reference.size * draw.uniform(0.02, 0.9)) // PAGE * PAGE)
    outcome = Outcome(f"disk-{kind.name}", seed, 0.0, f"disk of {size} of {reference.size} bytes")
    inputs, place = bench.inputs(kind.name), bench.directory / f"disk-{kind.name}-{seed}"
    started = time.monotonic()
    with small_disk(place, size) as disk:
        limit = None if disk.mounted else size // 4
        answer = bench.nursery.start(_limited, kind.run, inputs, place, limit).finish(kind.deadline)
        outcome.error = str(answer.get("error", ""))
        if outcome.error != "WorkspaceError":
            outcome.faults.append(
                f"a full disk gave {outcome.error or 'no error'}: "
                f"{answer.get('message', '')[:1500]}"
            )
        elif (problem := _wording(str(answer["message"]), str(place))) is not None:
            outcome.faults.append(problem)
        outcome.hit = True
        outcome.faults += bench.nursery.call(kind.visible, inputs, place)
        disk.resize(ROOMY)
        again = bench.nursery.start(_limited, kind.run, inputs, place, None, 2).finish(
            kind.deadline
        )
        if "value" not in again:
            outcome.faults.append(
                f"with room, the repeated call failed: {again['error']}: {again['message'][:1500]}"
            )
        elif bench.check(kind, place) != reference.result:
            outcome.faults.append(
                "the result of the repeated call differs from the undisturbed one"
            )
    outcome.seconds = round(time.monotonic() - started, 2)
    if not outcome.faults:
        shutil.rmtree(place)
    return outcome


def _limited(
    run: Callable[[Path, Path, int], None],
    inputs: Path,
    place: Path,
    limit: int | None,
    attempt: int = 1,
) -> None:
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    run(inputs, place, attempt)


def _wording(message: str, place: str) -> str | None:
    """One sentence that names the place, the reason, and what to do."""
    reasons = ("No space left on device", "File too large", "are to come and")
    if "\n" in message or not any(reason in message for reason in reasons) or place not in message:
        return f"the message is not a sentence that names the place and the reason: {message!r}"
    return None
