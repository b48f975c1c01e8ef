"""Deletable files of a workspace: stale temporaries, unused artifacts and old downloads."""

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
"""Stages that write in place and resume."""
REBUILDABLE = tuple(stage for stage in FOLDERS if stage not in RUNS)
"""Stages whose artifacts can be rebuilt in minutes. Runs are never deleted by age."""
_CACHES = {"pretrained": "[!.]*", "dataset": "datasets/*/*"}
"""Glob patterns of complete models and data sets below the downloads of these stages."""
_TEMPORARY = ".tmp-"
_SETTLED = 3600.0
"""Age in seconds after which a temporary without a lock counts as stale."""


@dataclass(frozen=True)
class Removable:
    """A file or directory that may be deleted."""

    path: Path
    reason: str
    size: int
    """Size in bytes."""


def stale_temporaries(workspace: Workspace) -> list[Removable]:
    """Return the temporaries of builds and checkpoint saves that died.

    Temporaries of live processes are locked and left out.
    """
    removables = [
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
                    removables.append(_removable(path, "temporary of a build that ended"))
                elif name in {FOLDERS[stage] for stage in RUNS}:
                    removables += [
                        _removable(part, "temporary of a save that ended") for part in _inside(path)
                    ]
    return removables


def old_artifacts(workspace: Workspace, days: float) -> list[Removable]:
    """Return the old artifacts of `REBUILDABLE` stages that nothing needs.

    An artifact is old if it was built over `days` days ago. It is needed if it is, directly or
    indirectly, an input of a newer artifact or of a run.
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
    queue += [path for path in _inputs_of_unfinished_runs(workspace) if path in manifests]
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
    """Return the downloaded files that were neither fetched nor resumed for `days` days.

    Artifacts hold hard links to these files, so deleting a download damages no artifact.
    """
    limit = time.time() - days * 86400
    removables = _old_caches(workspace, days)
    for place in sorted((workspace.folder("collect") / DOWNLOADS).glob("*")):
        files = list(place.iterdir())
        if any(file.stat().st_mtime >= limit for file in files):
            continue
        with ExitStack() as locks_held:
            locks = [file for file in files if file.name.endswith(".lock")]
            if all(locks_held.enter_context(_free(file)) for file in locks):
                removables.append(_removable(place, f"downloaded more than {days:g} days ago"))
    return removables


def _old_caches(workspace: Workspace, days: float) -> list[Removable]:
    """Return the cached models and data sets of fine-tunings, untouched for `days` days."""
    limit = time.time() - max(days * 86400, _SETTLED)
    removables = []
    for stage, pattern in _CACHES.items():
        for place in sorted((workspace.folder(stage) / DOWNLOADS).glob(pattern)):
            newest = max(path.lstat().st_mtime for path in (place, *place.rglob("*")))
            if newest < limit and place.is_dir():
                with _free(place.with_name(f".{place.name}.lock")) as free:
                    if free:
                        removables.append(
                            _removable(place, f"downloaded more than {days:g} days ago")
                        )
    return removables


def _inputs_of_unfinished_runs(workspace: Workspace) -> Iterator[Path]:
    """Yield the input directories that the job files of runs name.

    A run that is active or was interrupted has a job file but no manifest yet.
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
    """Delete each item. Raises WorkspaceError.

    Directories other than temporaries are renamed first, so that no reader sees them half deleted.
    """
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
    """Yield True if nobody holds the lock; the block then holds it."""
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
