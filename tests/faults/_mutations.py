"""Damage to one file at a time, and what its reader makes of it, in one process with bounded
memory."""

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

MEMORY = 2 << 30
"""Bytes that readers may have beside what the process has already."""
HANG = 15.0
"""Seconds that reading one damaged file may take."""
_HEAD = 512
"""Bytes at the begin of a file in which half of the flipped bits lie: there is what decides about
the rest."""


@dataclass(frozen=True)
class Form:
    """A kind of file, and how it is read."""

    name: str
    make: Callable[[Path], Sequence[Path]]
    """Writes what is whole below an empty directory; returns the files that are damaged."""
    read: Callable[[Path], Any]
    """Reads all of it; the value can be compared."""
    mutations: int
    """In CI; of all its files together."""
    covered: bool = False
    """Whether a hash says what is right: then each change must be noticed."""
    heals: bool = False
    """Whether the value must be the right one whatever was damaged."""
    also: tuple[str, ...] = ()
    """What a sentence may name instead of the file: another of several that disagree, or what a
    listing named."""


@dataclass(frozen=True)
class Finding:
    """A reader that did what it must not."""

    form: str
    seed: int
    file: str
    damage: str
    problem: str

    def __str__(self) -> str:
        return f"{self.form}-{self.seed}: {self.file} {self.damage}: {self.problem}"


def damaged(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """The content with one change, and what that is."""
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
    for place, bit in bits:
        changed[place] ^= 1 << bit
    return bytes(changed), "flipped " + ", ".join(
        f"bit {bit} of byte {place}" for place, bit in bits
    )


def run_form(
    form: Form, directory: Path, seeds: Sequence[int], progress: Callable[[str], None]
) -> dict[str, Any]:
    """Damage the files of a form once per seed; counts of what happened, and findings."""
    directory.mkdir(parents=True)
    files = list(form.make(directory))
    whole = {path: path.read_bytes() for path in files}
    right = form.read(directory)
    counts: Counter[str] = Counter()
    findings: list[Finding] = []
    for seed in seeds:
        draw = random.Random(f"{form.name}-{seed}")
        path = draw.choice(files)
        content, damage = damaged(whole[path], draw)
        if content == whole[path]:
            counts["same"] += 1
            continue
        _replace(path, content)
        progress(f"{form.name}-{seed}: {path.name} {damage}")
        faulthandler.dump_traceback_later(HANG, exit=True)
        began = time.monotonic()
        outcome, problem = _read(form, directory, path, right)
        faulthandler.cancel_dump_traceback_later()
        counts[outcome] += 1
        if problem is not None:
            findings.append(Finding(form.name, seed, path.name, damage, problem))
        if time.monotonic() - began > HANG / 3:
            findings.append(
                Finding(
                    form.name, seed, path.name, damage, f"took {time.monotonic() - began:.1f} s"
                )
            )
        _replace(path, whole[path])
    assert form.read(directory) == right, f"{form.name}: what is whole again reads differently"
    return {
        "form": form.name,
        "counts": dict(counts),
        "findings": [str(finding) for finding in findings],
    }


def _replace(path: Path, content: bytes) -> None:
    """A new file: one that is mapped into memory must not change below a reader that an earlier
    damage left open."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def _read(form: Form, directory: Path, path: Path, right: Any) -> tuple[str, str | None]:
    """What happened, and what is wrong with that."""
    try:
        value = form.read(directory)
    except MegacoreError as error:
        if form.heals:
            return "refused", f"was refused though it can be mended: {error}"
        return "refused", _wording(form, str(error), path)
    except BaseException as error:
        return "crashed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if value == right:
        return "right", "the damage was not noticed" if form.covered else None
    if form.covered or form.heals:
        return "other", "another value was taken for right"
    return "other", None


def _wording(form: Form, message: str, path: Path) -> str | None:
    """A sentence is one line and names the file."""
    if "\n" in message:
        return f"the message has several lines: {message!r}"
    named = any(name in message for name in (path.name, *form.also))
    return None if named else f"the message does not name the file: {message}"


def run_forms(
    forms: str, directory: Path, begin: int, factor: float, progress: Path
) -> list[dict[str, Any]]:
    """All forms of a module (`package.module:NAME`), in a process of their own."""
    import importlib

    module, _, name = forms.partition(":")
    chosen: Sequence[Form] = getattr(importlib.import_module(module), name)
    limit_memory()
    descriptor = os.open(progress, os.O_WRONLY | os.O_CREAT, 0o644)

    def note(what: str) -> None:
        os.pwrite(descriptor, what.encode()[:511].ljust(511) + b"\n", 0)

    reports = []
    for form in chosen:
        seeds = range(begin, begin + max(1, round(form.mutations * factor)))
        started = time.monotonic()
        report = run_form(form, directory / form.name, seeds, note)
        report["seconds"] = round(time.monotonic() - started, 2)
        reports.append(report)
        progress.with_suffix(".jsonl").open("a", encoding="utf-8").write(json.dumps(report) + "\n")
    return reports


def limit_memory() -> None:
    """What a reader allocates beyond MEMORY fails instead of the machine."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    size = next(int(line.split()[1]) for line in lines if line.startswith("VmSize:")) << 10
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """One digest of all tensors, names and shapes included."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
