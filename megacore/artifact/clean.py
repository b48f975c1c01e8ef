"""Finding what may be deleted from a workspace.

Temporaries of dead processes, and artifacts nobody needs.
"""

import fcntl
import itertools
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from megacore.artifact.build import remove_tree
from megacore.artifact.files import read_json, workspace_errors
from megacore.artifact.manifest import Manifest
from megacore.artifact.workspace import DOWNLOADS, FOLDERS, Workspace
from megacore.errors import ArtifactError

RUNS = ("train", "finetune")
"""Stages that write in place, and go on where they ended."""
REBUILDABLE = tuple(stage for stage in FOLDERS if stage not in RUNS)
"""Stages whose artifacts can be made again in minutes; trainings are never deleted by age."""
_CACHES = {"pretrained": "[!.]*", "dataset": "datasets/*/*"}
"""Below the downloads of these stages: what is whole by itself, a model or a data set."""
_TEMPORARY = ".tmp-"
_SETTLED = 3600.0
"""Seconds after which a temporary without a lock of its own belongs to nobody any more."""


@dataclass(frozen=True)
class Removable:
    """Something that can go."""

    path: Path
    reason: str
    size: int
    """Bytes."""


def stale_temporaries(workspace: Workspace) -> list[Removable]:
    """Temporaries of builds and checkpoint saves that died.

    Those of living ones are locked and left alone.
    """
    found = [
        _removable(path, "temporary of a write that ended")
        for pattern in ("*.tmp-*", ".write-test-*")
        for path in sorted(workspace.root.glob(pattern))
        if time.time() - path.stat().st_mtime > _SETTLED
    ]
    for name in dict.fromkeys(FOLDERS.values()):
        folder = workspace.root / name
        if not folder.is_dir():
            continue
        for path in sorted(folder.iterdir()):
            if path.name.startswith("."):
                continue
            key = path.name.split(_TEMPORARY)[0]
            with _free(folder / f".{key}.lock") as free:
                if not free:
                    continue
                if _TEMPORARY in path.name:
                    found.append(_removable(path, "temporary of a build that ended"))
                elif name in {FOLDERS[stage] for stage in RUNS}:
                    found += [
                        _removable(part, "temporary of a save that ended") for part in _inside(path)
                    ]
    return found


def old_artifacts(workspace: Workspace, days: float) -> list[Removable]:
    """Artifacts of `REBUILDABLE` stages that are old and that nothing needs.

    They were last built over `days` days ago and are no input of anything newer or trained.
    """
    limit = time.time() - days * 86400
    manifests = {
        path: manifest
        for stage in FOLDERS
        for path, manifest in _manifests(workspace.root / FOLDERS[stage])
    }
    by_digest = {manifest.digest: path for path, manifest in manifests.items()}
    queue = [
        path
        for path, manifest in manifests.items()
        if manifest.stage not in REBUILDABLE or path.stat().st_mtime >= limit
    ]
    queue += [path for path in _read_by_unfinished_runs(workspace) if path in manifests]
    needed: set[Path] = set()
    while queue:
        path = queue.pop()
        if path not in needed:
            needed.add(path)
            queue += [
                by_digest[digest]
                for digest in manifests[path].inputs.values()
                if digest in by_digest
            ]
    return [
        _removable(path, f"older than {days:g} days")
        for path in sorted(manifests)
        if path not in needed
    ]


def old_downloads(workspace: Workspace, days: float) -> list[Removable]:
    """Files of web servers that nobody has fetched or gone on with for `days` days.

    Artifacts have links to them.
    """
    limit = time.time() - days * 86400
    found = _old_caches(workspace, days)
    for place in sorted((workspace.folder("collect") / DOWNLOADS).glob("*")):
        files = list(place.iterdir())
        if any(file.stat().st_mtime >= limit for file in files):
            continue
        with ExitStack() as held:
            locks = [file for file in files if file.name.endswith(".lock")]
            if all(held.enter_context(_free(file)) for file in locks):
                found.append(_removable(place, f"downloaded more than {days:g} days ago"))
    return found


def _old_caches(workspace: Workspace, days: float) -> list[Removable]:
    """What a fine-tuning's models and rows were made from, untouched for `days` days."""
    limit = time.time() - max(days * 86400, _SETTLED)
    found = []
    for stage, pattern in _CACHES.items():
        for place in sorted((workspace.folder(stage) / DOWNLOADS).glob(pattern)):
            newest = max(path.lstat().st_mtime for path in (place, *place.rglob("*")))
            if newest < limit and place.is_dir():
                with _free(place.with_name(f".{place.name}.lock")) as free:
                    if free:
                        found.append(_removable(place, f"downloaded more than {days:g} days ago"))
    return found


def _read_by_unfinished_runs(workspace: Workspace) -> Iterator[Path]:
    """What a training that runs or was interrupted reads.

    It has no manifest that says so, but its job file.
    """
    for job in itertools.chain(
        *((workspace.root / FOLDERS[stage]).glob("*/run.json") for stage in RUNS)
    ):
        try:
            values = read_json(job)
            if "examples_directory" in values:
                yield Path(values["examples_directory"])
                yield Path(values["pretrained_directory"])
                continue
            yield from (Path(prefix).parent for prefix in values["token_prefixes"])
            yield Path(values["index_directory"])
            yield Path(values["tokenizer_directory"])
        except (OSError, ValueError, KeyError, TypeError):
            continue


def remove(items: list[Removable]) -> None:
    """Delete, each atomically. Raises WorkspaceError."""
    for item in items:
        with workspace_errors(item.path):
            if not item.path.is_dir() or _TEMPORARY in item.path.name:
                shutil.rmtree(item.path) if item.path.is_dir() else item.path.unlink()
            else:
                remove_tree(item.path)


def _manifests(folder: Path) -> Iterator[tuple[Path, Manifest]]:
    for path in sorted(folder.glob("[!.]*")):
        if _TEMPORARY in path.name:
            continue
        try:
            yield path, Manifest.read(path)
        except ArtifactError:
            continue


def _inside(run_directory: Path) -> list[Path]:
    return [
        path
        for path in sorted((*run_directory.glob("checkpoints/*"), *run_directory.glob("best/*")))
        if _TEMPORARY in path.name
    ]


def _removable(path: Path, reason: str) -> Removable:
    files = [path] if path.is_file() else [part for part in path.rglob("*") if part.is_file()]
    return Removable(path, reason, sum(file.lstat().st_size for file in files))


@contextmanager
def _free(lock_file: Path) -> Iterator[bool]:
    """Whether nobody holds the lock; it is held here meanwhile."""
    if not lock_file.exists():
        yield True
        return
    descriptor = os.open(lock_file, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(descriptor)
