"""Which checkpoints stay. Nothing here imports torch."""

import os
import secrets
import shutil
from pathlib import Path

from megacore.artifact.files import sync_directory, workspace_errors
from megacore.checkpoint.format import (
    MARKER_NAME,
    STALE_SUFFIX,
    TRACKER_NAME,
    complete_checkpoints,
    exclusive_lock,
    iteration_of,
)


def apply_retention(
    root: Path,
    *,
    keep_last: int,
    keep_every: int | None = None,
    keep_best: bool = True,
    in_use: Path | None = None,
) -> list[Path]:
    """Delete the complete checkpoints below `root` that no rule keeps; return them, oldest first.

    Kept are the newest `keep_last`, those at multiples of `keep_every` iterations, the one with the
    lowest validation loss (the older on a tie) if `keep_best`, the one `in_use`, and for this time
    those that somebody reads (`format.reading`). The newest is always kept, so the only complete
    one is never deleted. Incomplete ones are left alone. Call it on one rank, while no save is
    under way. Raises WorkspaceError.
    """
    markers = complete_checkpoints(root)
    newest_first = sorted(markers, key=lambda path: markers[path].iteration, reverse=True)
    kept = set(newest_first[: max(keep_last, 1)])
    if keep_every is not None:
        kept |= {path for path in markers if markers[path].iteration % keep_every == 0}
    measured = [path for path in markers if markers[path].validation_loss is not None]
    if keep_best and measured:
        kept.add(
            min(measured, key=lambda path: (markers[path].validation_loss, markers[path].iteration))
        )
    if in_use is not None:
        kept.add(root / in_use.name)
    with workspace_errors(root):
        return [
            path for path in reversed(newest_first) if path not in kept and _remove_unread(path)
        ]


def _remove_unread(directory: Path) -> bool:
    """Delete a checkpoint unless somebody reads it; return True if it was deleted."""
    with exclusive_lock(directory / MARKER_NAME) as unread:
        # A reader that opened the marker before waits, and then finds that it has moved.
        doomed = rename_away(directory) if unread else None
    if doomed is not None:
        shutil.rmtree(doomed)
    return doomed is not None


def rename_away(directory: Path) -> Path:
    """Give a checkpoint the name of something stale, durably, and return its new path.

    What is deleted after that is never seen by half.
    """
    doomed = directory.with_name(f"{directory.name}{STALE_SUFFIX}{secrets.token_hex(4)}-deleted")
    os.rename(directory, doomed)
    sync_directory(directory.parent)
    return doomed


def remove_stale(root: Path) -> list[Path]:
    """Delete what a crash left below `root`: staged saves, half-deleted checkpoints, torn trackers.

    Only the one run that owns `root` may call it, while it saves nothing.
    """
    stale = [path for path in root.glob(f"iter_*{STALE_SUFFIX}*") if iteration_of(path) is None]
    for path in stale:
        shutil.rmtree(path)
    trackers = list(root.glob(f"{TRACKER_NAME}{STALE_SUFFIX}*"))
    for path in trackers:
        path.unlink()
    return stale + trackers
