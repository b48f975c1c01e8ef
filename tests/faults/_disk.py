"""Disks that fill up: a small tmpfs, or a limit of the file size where mounting is not allowed."""

import random
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests._limits import HANG
from tests.faults._cases import Bench, Kind, Outcome

PAGE = 4096
ROOMY = 256 << 20


@dataclass(frozen=True)
class Disk:
    """A directory on a small disk."""

    path: Path
    mounted: bool

    def resize(self, size: int) -> None:
        """Set the size of the disk in bytes."""
        if self.mounted:
            subprocess.run(
                ["mount", "-o", f"remount,size={size}", str(self.path)],
                check=True,
                capture_output=True,
            )


@contextmanager
def small_disk(path: Path, size: int) -> Iterator[Disk]:
    """Mount a file system of `size` bytes at `path`.

    Yield an ordinary directory where mounting is not allowed.
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
    """Run a call on a disk with too little room, then again with enough.

    The first call must be refused in one sentence.
    """
    reference = bench.reference(kind.name)
    draw = random.Random(f"disk-{kind.name}-{seed}")
    size = max(PAGE, int(reference.size * draw.uniform(0.02, 0.9)) // PAGE * PAGE)
    outcome = Outcome(f"disk-{kind.name}", seed, 0.0, f"disk of {size} of {reference.size} bytes")
    inputs, place = bench.inputs(kind.name), bench.directory / f"disk-{kind.name}-{seed}"
    started = time.monotonic()
    with small_disk(place, size) as disk:
        limit = None if disk.mounted else size // 4
        answer = bench.nursery.start(_limited, kind.run, inputs, place, limit).finish(HANG)
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
        repeated = bench.nursery.start(_limited, kind.run, inputs, place, None, 2).finish(HANG)
        if "value" not in repeated:
            outcome.faults.append(
                f"with room, the repeated call failed: {repeated['error']}: "
                f"{repeated['message'][:1500]}"
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
    """Return what is wrong with a message that must name the place and the reason."""
    reasons = ("No space left on device", "File too large", "are still to be downloaded and")
    if "\n" in message or not any(reason in message for reason in reasons) or place not in message:
        return f"the message is not a sentence that names the place and the reason: {message!r}"
    return None
