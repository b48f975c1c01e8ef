"""Damaged files and their readers, in one process with bounded memory."""

import faulthandler
import hashlib
import json
import os
import random
import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megacore.errors import MegacoreError
from tests._limits import HANG

MEMORY = 2 << 30
"""Bytes that readers may allocate in addition to the memory of the process."""
SLOW = 5.0
"""Seconds of processor time that reading one damaged file may take."""
_HEAD = 512
"""Bytes at the start of a file, which get half of the flipped bits.

They usually determine how the rest is read.
"""


@dataclass(frozen=True)
class Form:
    """A kind of file and its reader."""

    name: str
    make: Callable[[Path], Sequence[Path]]
    """Writes intact files to an empty directory; returns those to damage."""
    read: Callable[[Path], Any]
    """Reads all files; the value can be compared."""
    mutations: int
    """Number of mutations in CI, over all files."""
    covered: bool = False
    """True if a hash protects the files, so that each change must be detected."""
    heals: bool = False
    """True if the value must be the expected one despite any damage."""
    also: tuple[str, ...] = ()
    """Names that a message may contain instead of the file's, such as a related file."""


@dataclass(frozen=True)
class Finding:
    """A forbidden behaviour of a reader."""

    form: str
    seed: int
    file: str
    damage: str
    problem: str

    def __str__(self) -> str:
        return f"{self.form}-{self.seed}: {self.file} {self.damage}: {self.problem}"


def damaged(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Return the content with one change, and a description of the change."""
    if not content or draw.random() < 0.35:
        end = draw.randrange(len(content)) if content else 0
        return content[:end], f"cut after {end} of {len(content)} bytes"
    changed = bytearray(content)
    head = min(_HEAD, len(content)) if draw.random() < 0.5 else len(content)
    if draw.random() < 0.15:
        start = draw.randrange(head)
        length = min(draw.randrange(1, 65), len(content) - start)
        changed[start : start + length] = bytes(length)
        return bytes(changed), f"zeroed from {start} to {start + length}"
    bits = [(draw.randrange(head), draw.randrange(8)) for _ in range(draw.choice((1, 1, 1, 3)))]
    for position, bit in bits:
        changed[position] ^= 1 << bit
    return bytes(changed), "flipped " + ", ".join(
        f"bit {bit} of byte {position}" for position, bit in bits
    )


def run_form(
    form: Form, directory: Path, seeds: Sequence[int], progress: Callable[[str], None]
) -> dict[str, Any]:
    """Damage the files of a form once per seed; return counts and findings."""
    directory.mkdir(parents=True)
    files = list(form.make(directory))
    intact = {path: path.read_bytes() for path in files}
    expected = form.read(directory)
    counts: Counter[str] = Counter()
    findings: list[Finding] = []
    for seed in seeds:
        draw = random.Random(f"{form.name}-{seed}")
        path = draw.choice(files)
        content, damage = damaged(intact[path], draw)
        if content == intact[path]:
            counts["same"] += 1
            continue
        _replace(path, content)
        progress(f"{form.name}-{seed}: {path.name} {damage}")
        faulthandler.dump_traceback_later(HANG, exit=True)
        started = time.process_time()
        outcome, problem = _read(form, directory, path, expected)
        faulthandler.cancel_dump_traceback_later()
        counts[outcome] += 1
        if problem is not None:
            findings.append(Finding(form.name, seed, path.name, damage, problem))
        seconds = time.process_time() - started
        if seconds > SLOW:
            findings.append(
                Finding(form.name, seed, path.name, damage, f"took {seconds:.1f} s of a processor")
            )
        _replace(path, intact[path])
    assert form.read(directory) == expected, f"{form.name}: the restored files read differently"
    return {
        "form": form.name,
        "counts": dict(counts),
        "findings": [str(finding) for finding in findings],
    }


def _replace(path: Path, content: bytes) -> None:
    """Write a new file in place of the old one.

    An earlier reader may still have the old one mapped into memory.
    """
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def _read(form: Form, directory: Path, path: Path, expected: Any) -> tuple[str, str | None]:
    """Return what happened, and the problem with it, if any."""
    try:
        value = form.read(directory)
    except MegacoreError as error:
        if form.heals:
            return "refused", f"was refused though it can be repaired: {error}"
        return "refused", _wording(form, str(error), path)
    except BaseException as error:
        return "crashed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if value == expected:
        return "right", "the damage was not noticed" if form.covered else None
    if form.covered or form.heals:
        return "other", "another value was taken for right"
    return "other", None


def _wording(form: Form, message: str, path: Path) -> str | None:
    """Return what is wrong with a message, which must be one line that names the file."""
    if "\n" in message:
        return f"the message has several lines: {message!r}"
    named = any(name in message for name in (path.name, *form.also))
    return None if named else f"the message does not name the file: {message}"


def run_forms(
    forms: str, directory: Path, begin: int, factor: float, progress: Path
) -> list[dict[str, Any]]:
    """Run all forms of `package.module:NAME`, in a separate process."""
    import importlib

    module, _, name = forms.partition(":")
    chosen: Sequence[Form] = getattr(importlib.import_module(module), name)
    limit_memory()
    descriptor = os.open(progress, os.O_WRONLY | os.O_CREAT, 0o644)

    def write_progress(description: str) -> None:
        os.pwrite(descriptor, description.encode()[:511].ljust(511) + b"\n", 0)

    reports = []
    for form in chosen:
        seeds = range(begin, begin + max(1, round(form.mutations * factor)))
        started = time.monotonic()
        report = run_form(form, directory / form.name, seeds, write_progress)
        report["seconds"] = round(time.monotonic() - started, 2)
        reports.append(report)
        progress.with_suffix(".jsonl").open("a", encoding="utf-8").write(json.dumps(report) + "\n")
    return reports


def limit_memory() -> None:
    """Limit the memory, so that larger allocations fail instead of the machine."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    size = next(int(line.split()[1]) for line in lines if line.startswith("VmSize:")) << 10
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return one digest of all tensors, names and shapes included."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
