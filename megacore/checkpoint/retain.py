"""Retention rules for checkpoints. Nothing here imports torch."""

import logging
import os
import re
import secrets
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megacore.artifact.files import delete_tree, sync_directory, workspace_errors
from megacore.checkpoint.format import (
    MARKER_NAME,
    STALE_SUFFIX,
    TRACKER_NAME,
    Marker,
    complete_checkpoints,
    exclusive_lock,
    iteration_of,
    verify,
)
from megacore.errors import CheckpointError
from megacore.paths import exists, glob, is_dir

if TYPE_CHECKING:
    from megacore.observe.recorder import Recorder

_REPLACED = "-replaced"
"""End of the stale name of a checkpoint until the one that replaces it has its name."""
_UNNAMED = re.compile(rf"(iter_\d{{7,}}){re.escape(STALE_SUFFIX)}[0-9a-f]{{8}}({_REPLACED})?")
"""Names of staged saves and replaced checkpoints, but not of those that are being deleted."""
_logger = logging.getLogger(__name__)


def apply_retention(
    root: Path,
    *,
    keep_last: int,
    keep_every: int | None = None,
    keep_best: bool = True,
    in_use: Path | None = None,
    losses: Mapping[int, float] | None = None,
    damaged: Collection[Path] = (),
) -> list[Path]:
    """Delete the complete checkpoints in `root` that no rule keeps; return them, oldest first.

    The rules keep the newest `keep_last`, those at multiples of `keep_every` iterations, the one
    with the lowest validation loss (the older on a tie) if `keep_best`, `in_use`, and those that
    are being read (`format.reading`). The newest is always kept, so the only complete one is never
    deleted. Incomplete ones are not touched, nor those of later iterations than `in_use`, which
    the rules ignore. `losses` are validation losses, by iteration, that were measured after the
    save and are in no marker. No rule keeps those of `damaged`, whose content a resume found to
    differ, and none of them takes the place of a sound one. Call it on one rank, while no save is
    in progress. Raises WorkspaceError if a checkpoint cannot be renamed; what is then left of it is
    deleted as `delete_stale` describes.
    """
    markers = complete_checkpoints(root)
    current = None if in_use is None else iteration_of(in_use)
    if current is not None:
        # A run that is at `current` skipped the later ones: their sizes are right, but not their
        # content, so they must not take the place of sound ones.
        markers = {path: marker for path, marker in markers.items() if marker.iteration <= current}
    oldest_first = sorted(markers, key=lambda path: markers[path].iteration)
    markers = {path: marker for path, marker in markers.items() if path not in damaged}
    newest_first = [path for path in reversed(oldest_first) if path in markers]
    kept = set(newest_first[: max(keep_last, 1)])
    if keep_every is not None:
        kept |= {path for path in markers if markers[path].iteration % keep_every == 0}
    measured = [
        (loss, marker.iteration, path)
        for path, marker in markers.items()
        if (loss := _loss(marker, losses or {})) is not None
    ]
    if keep_best and measured:
        kept.add(min(measured)[2])
    if in_use is not None:
        kept.add(root / in_use.name)
    with workspace_errors(root):
        return [path for path in oldest_first if path not in kept and _remove_unread(path)]


def _loss(marker: Marker, later: Mapping[int, float]) -> float | None:
    """Return the validation loss of a checkpoint, from its marker if it has one."""
    if marker.validation_loss is not None:
        return marker.validation_loss
    return later.get(marker.iteration)


def _remove_unread(directory: Path) -> bool:
    """Delete a checkpoint unless it is being read; return True if it was deleted."""
    with exclusive_lock(directory / MARKER_NAME) as unread:
        # A reader that has opened the marker before waits, and then notices the renaming.
        doomed = rename_to_stale(directory) if unread else None
    if doomed is not None:
        delete_stale(doomed)
    return doomed is not None


def publish(staging: Path, target: Path) -> None:
    """Rename the complete save `staging` to `target`, durably, and delete what it replaces.

    After a crash between the two renames, `remove_stale` finishes the second. Deletion is slow, so
    it comes last. Raises OSError.
    """
    replaced = _stale_path(target, _REPLACED) if exists(target) else None
    if replaced is not None:
        os.rename(target, replaced)
    try:
        os.rename(staging, target)
    except BaseException:
        if replaced is not None:
            os.rename(replaced, target)
        raise
    sync_directory(target.parent)
    if replaced is not None:
        delete_stale(replaced)


def rename_to_stale(directory: Path) -> Path:
    """Rename a checkpoint that is to be deleted, durably, and return its new path.

    A later deletion never leaves a visible, incomplete checkpoint.
    """
    doomed = _stale_path(directory, "-deleted")
    os.rename(directory, doomed)
    sync_directory(directory.parent)
    return doomed


def _stale_path(directory: Path, end: str) -> Path:
    return directory.with_name(f"{directory.name}{STALE_SUFFIX}{secrets.token_hex(4)}{end}")


def clean_up_and_report(
    root: Path,
    recorder: "Recorder",
    report: Callable[[Path, Marker], None],
    progress: Callable[[], None] | None = None,
) -> None:
    """Remove the remains of a crash in `root` and record the missing events of checkpoints.

    `report` records a checkpoint. If it raises CheckpointError, the checkpoint is left out: only
    sizes were checked, and resuming detects the damage and skips it. `progress` is called while a
    copied checkpoint's content is read. Call it on one rank.
    """
    if is_dir(root):
        remove_stale(root)
    markers = complete_checkpoints(root, progress=progress)
    present = {marker.iteration: path for path, marker in markers.items()}
    reported = recorder.reported_checkpoints()
    for iteration in sorted(present.keys() - reported.keys()):
        path = present[iteration]
        with suppress(CheckpointError):
            report(path, markers[path])
    for iteration in sorted(reported.keys() - present.keys()):
        recorder.event("checkpoint_deleted", iteration=iteration, path=reported[iteration])


def delete_stale(path: Path) -> bool:
    """Delete a file or directory with a stale name; return True if it is gone.

    A failure is logged and does no harm, because no reader takes the name for a checkpoint: NFS
    keeps a file that another process has open, and a disk may fail at old files. `remove_stale`
    tries again at the next save or resume.
    """
    try:
        if is_dir(path):
            delete_tree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        _logger.warning(
            "cannot delete %s yet (%s); the next save or resume tries again", path, error
        )
        return False
    return True


def remove_stale(root: Path) -> list[Path]:
    """Delete the remains of a crash in `root` and return those that are gone.

    These are staged saves, half-deleted checkpoints and partial tracker files. Complete saves that
    a crash left without their name get it first. Only the run that owns `root` may call it, and
    not during a save. One that cannot be deleted stays, with a warning.

    Raises WorkspaceError if a complete save cannot be renamed, FileAccessError if it cannot be read
    now.
    """
    name_complete_saves(root)
    trackers = list(glob(root, f"{TRACKER_NAME}{STALE_SUFFIX}*"))
    return [path for path in [*stale_directories(root), *trackers] if delete_stale(path)]


def name_complete_saves(root: Path) -> None:
    """Give the complete saves in `root` that a crash left without their name that name.

    Raises WorkspaceError, FileAccessError.
    """
    for target, path in unnamed_saves(root).items():
        with workspace_errors(root):
            os.rename(path, target)
            sync_directory(root)
        _logger.warning("%s is complete, but a crash left it as %s: renamed it", target, path.name)


def unnamed_saves(root: Path) -> dict[Path, Path]:
    """Return the complete saves that lack their name, by the path that they should have.

    `publish` was interrupted before them, so no directory has that path. If neither of its two
    directories has it, it is that of the new save: the replaced one may be damaged. Raises
    FileAccessError.
    """
    saves: dict[Path, Path] = {}
    for path in sorted(stale_directories(root), key=lambda path: path.name.endswith(_REPLACED)):
        match = _UNNAMED.fullmatch(path.name)
        if match is None or (target := root / match[1]) in saves or exists(target):
            continue
        with suppress(CheckpointError):
            verify(path, "quick")
            saves[target] = path
    return saves


def stale_directories(root: Path) -> list[Path]:
    """Return the staged saves, replaced and half-deleted checkpoints in `root`."""
    return list(glob(root, f"iter_*{STALE_SUFFIX}*"))
