"""Deletable files of a workspace: stale temporaries, unused artifacts and old downloads.

What is reached by a symbolic link is never deleted: another workspace may use it.
"""

import itertools
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacore.artifact.build import is_locked, rename_doomed, try_lock
from megacore.artifact.files import TEMPORARY, read_json, reason_of, workspace_errors
from megacore.artifact.manifest import MANIFEST_NAME, Manifest
from megacore.artifact.workspace import (
    BEST_NAME,
    CHECKPOINTS_NAME,
    DOWNLOADS,
    FOLDERS,
    RUN_FILE,
    Workspace,
)
from megacore.errors import ArtifactError, WorkspaceError
from megacore.observe.runs import is_training
from megacore.paths import exists, glob, is_dir, is_file, is_symlink, rglob

RUNS = ("train", "finetune")
"""Stages that write in place and resume."""
REBUILDABLE = tuple(stage for stage in FOLDERS if stage not in RUNS)
"""Stages whose artifacts can be rebuilt in minutes. Runs are never deleted by age."""
_CACHES = {"pretrained": "[!.]*", "dataset": "datasets/*/*"}
"""Glob patterns of complete models and data sets below the downloads of these stages."""
_SETTLED = 3600.0
"""Age in seconds after which a temporary without a lock counts as stale."""


@dataclass(frozen=True)
class Removable:
    """A file or directory that may be deleted."""

    path: Path
    reason: str
    size: int
    """Size in bytes."""
    owners: tuple[Path, ...] = ()
    """Artifacts, runs and downloads whose locks must be free to delete it."""
    mtime_ns: int = 0
    """Modification time when it was listed; a later one means that it is used again."""


def stale_temporaries(
    workspace: Workspace, unnamed_saves: Callable[[Path], Mapping[Path, Path]]
) -> list[Removable]:
    """Return the temporaries of builds, merges and checkpoint saves that died.

    Temporaries of live processes are locked and left out, and so are the values of `unnamed_saves`
    for a run's directories of saves: complete saves to which the run's next start gives their name
    (`megacore.checkpoint.retain.unnamed_saves`). Raises FileAccessError if a save cannot be read
    now.
    """
    limit, removables = time.time() - _SETTLED, list[Removable]()
    for pattern in ("*.tmp-*", ".write-test-*"):
        for path in sorted(glob(workspace.root, pattern)):
            if _changed(path) < limit:
                removables += _removable(path, "temporary of a write that ended")
    for name in dict.fromkeys(FOLDERS.values()):
        for path in _members(workspace, workspace.root / name):
            owner = path.with_name(path.name.split(TEMPORARY)[0])
            if path != owner:
                parts, reason = [path], "temporary of a build that ended"
            elif name in {FOLDERS[stage] for stage in RUNS}:
                parts = _temporary_saves(path, unnamed_saves)
                reason = "temporary of a save that ended"
            else:
                continue
            if parts and not is_locked(owner):
                for part in parts:
                    removables += _removable(part, reason, owner)
    return removables + _merged_shards(workspace)


def _merged_shards(workspace: Workspace) -> list[Removable]:
    """Return the shards of complete token files, which a kill between merge and deletion leaves.

    There are none if a manifest cannot be read, since its files may be those of the shards.
    """
    try:
        manifests = dict(_manifests(workspace.root / FOLDERS["tokenize"]))
    except WorkspaceError:
        return []
    merged = [(each.parameters, each.inputs) for each in manifests.values()]
    return [
        shard_files
        for path, shard in manifests.items()
        if shard.stage == "tokenize-shard"
        and (_without_segments(shard.parameters), shard.inputs) in merged
        and not is_locked(path)
        and not _is_linked(workspace, path)
        for shard_files in _removable(path, "shard of token files that are complete", path)
    ]


def _without_segments(parameters: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if name != "segments"}


def old_artifacts(workspace: Workspace, days: float) -> list[Removable]:
    """Return the artifacts of `REBUILDABLE` stages that nothing needs or used for `days` days.

    One hour is the minimum: a run that begins uses an artifact before it names it. An artifact is
    needed if it is, directly or indirectly, an input of a newer artifact or of a run. Inputs are
    compared by key, not by path: a workspace may have been moved or copied, and may be reached by
    several paths.

    Raises:
        WorkspaceError: what is needed is unknown: a manifest or a run's job file cannot be read, or
            an artifact is being built.
    """
    _refuse_during_builds(workspace)
    limit = _oldest(days)
    manifests = {
        path: manifest
        for name in dict.fromkeys(FOLDERS.values())
        for path, manifest in _manifests(workspace.root / name)
    }
    by_digest = {manifest.digest: path for path, manifest in manifests.items()}
    run_inputs = _inputs_of_runs(workspace)
    queue = [
        path
        for path, manifest in manifests.items()
        if manifest.stage not in REBUILDABLE or _changed(path) >= limit or path.name in run_inputs
    ]
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
        artifact
        for path in sorted(manifests)
        if path not in needed and not _is_linked(workspace, path)
        for artifact in _removable(path, f"not used for {days:g} days", path)
    ]


def _oldest(days: float) -> float:
    """Return the Unix time before which a file was not used for `days` days, at least one hour."""
    return time.time() - max(days * 86400, _SETTLED)


def old_downloads(workspace: Workspace, days: float) -> list[Removable]:
    """Return the downloaded files that were neither fetched nor resumed for `days` days.

    Artifacts hold hard links to these files, so deleting a download damages no artifact.
    """
    limit = _oldest(days)
    removables = _old_caches(workspace, days)
    for place in _members(workspace, workspace.folder("collect") / DOWNLOADS):
        files = list(place.iterdir()) if is_dir(place) else []
        if not files or any(_changed(file) >= limit for file in files):
            continue
        locked = [
            file.with_name(file.name[1:].removesuffix(".lock"))
            for file in files
            if file.name.startswith(".") and file.name.endswith(".lock")
        ]
        if not any(map(is_locked, locked)):
            reason = f"downloaded more than {days:g} days ago"
            removables += _removable(place, reason, *locked)
    return removables


def _old_caches(workspace: Workspace, days: float) -> list[Removable]:
    """Return the cached models and data sets of fine-tunings, untouched for `days` days."""
    limit = _oldest(days)
    removables = []
    for stage, pattern in _CACHES.items():
        for place in sorted(glob(workspace.folder(stage) / DOWNLOADS, pattern)):
            if not is_dir(place) or _is_linked(workspace, place):
                continue
            newest = max(map(_changed, (place, *rglob(place, "*"))))
            if newest < limit and not is_locked(place):
                reason = f"downloaded more than {days:g} days ago"
                removables += _removable(place, reason, place)
    return removables


def remove(items: list[Removable]) -> list[Removable]:
    """Delete those of the listed items that nothing uses, and return them.

    A run that uses an artifact changes its modification time first. Raises WorkspaceError if an
    item cannot be deleted.
    """
    removed = []
    for item in items:
        with workspace_errors(item.path):  # also what the locks raise
            try:
                if _remove_unused(item):
                    removed.append(item)
            except FileNotFoundError:  # another process removed it
                continue
    return removed


def _remove_unused(item: Removable) -> bool:
    """Delete an item unless it is in use; return True if it is deleted.

    Directories other than temporaries are renamed under their locks, so that no reader sees them
    half deleted, and deleted without them: the locks of downloads are files of the directory, where
    NFS keeps what is open.
    """
    with ExitStack() as held:
        free = all(held.enter_context(try_lock(owner)) for owner in item.owners)
        if not free or item.path.lstat().st_mtime_ns != item.mtime_ns:
            return False
        if not is_dir(item.path):
            item.path.unlink()
            return True
        if TEMPORARY in item.path.name:
            shutil.rmtree(item.path)
            return True
        doomed = rename_doomed(item.path)
    shutil.rmtree(doomed)
    return True


def _refuse_during_builds(workspace: Workspace) -> None:
    """Raise WorkspaceError while an artifact's or a run's inputs are not named yet.

    An artifact names them at the end of its build; a run when its ranks start, for which it may
    have to wait for days.
    """
    for run in _run_directories(workspace):
        begins = not os.path.lexists(run / RUN_FILE) or exists(run / MANIFEST_NAME)
        if begins and is_locked(run):
            raise WorkspaceError(
                f"{run} waits for its start and does not name the artifacts that it needs yet, so "
                "nothing was removed: try again when it trains"
            )
    for name in dict.fromkeys(FOLDERS.values()):
        for path in glob(workspace.root / name, f"[!.]*{TEMPORARY}*"):
            owner = path.with_name(path.name.split(TEMPORARY)[0])
            if is_locked(owner):
                raise WorkspaceError(
                    f"{owner} is being built from artifacts that it does not name yet, so nothing "
                    "was removed: try again when it is complete"
                )


def _inputs_of_runs(workspace: Workspace) -> set[str]:
    """Return the keys of the artifacts that the job files of runs name.

    A run that is active or was interrupted has a job file but no manifest yet. An input's key is
    the name of a directory of its path.
    """
    keys: set[str] = set()
    # A symbolic link to a share that is not mounted counts as unreadable, not as missing.
    runs = _run_directories(workspace)
    jobs = [run / RUN_FILE for run in runs if os.path.lexists(run / RUN_FILE)]
    for job in jobs:
        try:
            values: dict[str, Any] = read_json(job)
        except (OSError, ValueError) as error:
            raise _unknown_inputs(job, f"cannot be read ({reason_of(error)})") from error
        try:
            if "examples_directory" in values:
                paths = [values["examples_directory"], values["pretrained_directory"]]
            else:
                paths = [*values["token_prefixes"], values["index_directory"]]
                paths.append(values["tokenizer_directory"])
            keys.update(*(Path(path).parts for path in paths))
        except (KeyError, TypeError, AttributeError) as error:
            raise _unknown_inputs(job, "was not written by this version of megacore") from error
    return keys


def _run_directories(workspace: Workspace) -> Iterator[Path]:
    """Return the directories of all runs."""
    folders = [glob(workspace.root / FOLDERS[stage], "[!.]*") for stage in RUNS]
    return itertools.chain(*folders)


def _unknown_inputs(job: Path, reason: str) -> WorkspaceError:
    return WorkspaceError(
        f"{job} {reason}, so the inputs of this run are unknown, and nothing was removed: delete "
        f"{job.parent} if you do not need the run"
    )


def _manifests(folder: Path) -> Iterator[tuple[Path, Manifest]]:
    """Yield the complete artifacts of a folder with their manifests. Raises WorkspaceError."""
    for path in sorted(glob(folder, "[!.]*")):
        if TEMPORARY in path.name or not exists(path / MANIFEST_NAME):
            continue
        try:
            yield path, Manifest.read(path)
        except ArtifactError as error:
            if not exists(path):  # another process removed it meanwhile
                continue
            raise WorkspaceError(
                f"nothing was removed, because the inputs of an artifact are unknown: {error}"
            ) from error


def _members(workspace: Workspace, folder: Path) -> list[Path]:
    """Return the visible files and directories of a folder that no symbolic link leads to."""
    return [path for path in sorted(glob(folder, "[!.]*")) if not _is_linked(workspace, path)]


def _is_linked(workspace: Workspace, path: Path) -> bool:
    """Return True if a path below the workspace's root is or passes a symbolic link."""
    below = path.relative_to(workspace.root)
    return any(is_symlink(workspace.root / part) for part in (below, *below.parents[:-1]))


def _temporary_saves(
    run_directory: Path, unnamed_saves: Callable[[Path], Mapping[Path, Path]]
) -> list[Path]:
    """Return the temporaries of checkpoint saves, or none while ranks without a task are alive."""
    roots = [run_directory / name for name in (BEST_NAME, CHECKPOINTS_NAME)]
    parts = [path for root in roots for path in sorted(glob(root, f"*{TEMPORARY}*"))]
    if not parts or is_training(run_directory):
        return []
    complete = {path for root in roots for path in unnamed_saves(root).values()}
    return [path for path in parts if path not in complete]


def _changed(path: Path) -> float:
    """Return the Unix time of a path's last change; infinity if it is removed meanwhile."""
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return math.inf


def _removable(path: Path, reason: str, *owners: Path) -> list[Removable]:
    """Return the item for a path; none if another process removes it meanwhile."""
    parts = rglob(path, "*") if is_dir(path) and not is_symlink(path) else [path]
    try:
        size = sum(part.lstat().st_size for part in parts if is_file(part))
        return [Removable(path, reason, size, owners, path.lstat().st_mtime_ns)]
    except FileNotFoundError:
        return []
