"""Saving together: staged, synced, marked, renamed. A crash at any instruction leaves the whole checkpoint or none."""

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from megacore.artifact.files import sync_directory, workspace_errors
from megacore.checkpoint.bring import bring_files, own_directory
from megacore.checkpoint.collective import RankGroup
from megacore.checkpoint.format import (
    METADATA_NAME,
    STALE_SUFFIX,
    STATE_NAME,
    FileRecord,
    Marker,
    directory_name,
    finite_or_none,
    write_tracker,
)
from megacore.checkpoint.retain import remove_stale, rename_away
from megacore.checkpoint.shard import ShardSavePlanner, TensorShard
from megacore.checkpoint.write import CheckpointWriter
from megacore.errors import CheckpointError, WorkspaceError


def save_checkpoint(
    root: Path,
    iteration: int,
    tensors: Mapping[str, torch.Tensor | TensorShard],
    state: Mapping[str, Any],
    *,
    validation_loss: float | None = None,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Save `tensors` and `state` as `root/iter_<iteration>` and return that path, on every rank.

    Collective over `group` (None: the default group, or one rank alone). Tensors are saved under their global
    names, and each rank may have other names. What several ranks hold alike, a plain tensor or the same rectangle
    of a TensorShard, is written by the one of them that has the least to write. `state` is JSON; the first rank's is
    written. An existing checkpoint of this iteration is replaced.

    Raises WorkspaceError (disk full, not writable) or CheckpointError, on every rank; nothing is left visible.
    """
    ranks = RankGroup(group)

    def check() -> str:
        check_types(tensors)
        return encode_state(state, iteration) if ranks.rank == 0 else ""

    # Apart from the writing, whose own collectives a rank that raised before them would leave waiting.
    text = ranks.everywhere(check)[0]
    path, _ = write_checkpoint(root, iteration, tensors, text, ranks, validation_loss=validation_loss)
    return path


def write_checkpoint(
    root: Path,
    iteration: int,
    tensors: Mapping[str, torch.Tensor | TensorShard],
    state: str,
    ranks: RankGroup,
    *,
    validation_loss: float | None,
    staged: Callable[[Path], None] = lambda _: None,
    progress: Callable[[], None] = lambda: None,
) -> tuple[Path, Marker]:
    """What `save_checkpoint` does once types are checked; returns path and marker, on every rank. Collective.

    A rank whose machine does not see the first rank's `root` writes beside its own, from where its files are brought.

    Args:
        root: directory of the checkpoints.
        iteration: optimizer steps done.
        tensors: what this rank may write.
        state: JSON; the first rank's is written.
        ranks: that save together.
        validation_loss: at this iteration.
        staged: called with the directory that grows, before anything is written.
        progress: called whenever this rank has finished a file, and a part of one was brought.
    """
    staging = own = ranks.on_first(lambda: _open_staging(root, iteration))
    try:
        own = ranks.everywhere(lambda: own_directory(staging, ranks))[ranks.rank]
        staged(own)
        records = ranks.everywhere(lambda: _write_tensors(own, tensors, ranks, progress))
        elsewhere = None if own == staging else own
        bring_files(staging, elsewhere, records[ranks.rank], ranks, progress=progress)
        rest = ranks.on_first(lambda: _write_state(staging, state))
        files = {name: record for own in [*records, rest] for name, record in own.items()}
        marker = Marker(iteration, finite_or_none(validation_loss), dict(sorted(files.items())))
        return ranks.on_first(lambda: _publish(staging, root, marker)), marker
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        if own != staging:
            shutil.rmtree(own, ignore_errors=True)


def check_types(tensors: Mapping[str, torch.Tensor | TensorShard]) -> None:
    """Raise CheckpointError for a value that is no tensor."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor | TensorShard):
            raise CheckpointError(f"{name} is {type(tensor).__name__}, not a tensor: put it into the state")


def encode_state(state: Mapping[str, Any], iteration: int) -> str:
    """The state as JSON. Raises CheckpointError."""
    try:
        return json.dumps(dict(state), indent=2, sort_keys=True) + "\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the state of {directory_name(iteration)} is not JSON: {error}") from error


def _open_staging(root: Path, iteration: int) -> Path:
    """Make the directory that all ranks write into; what earlier crashes left goes first."""
    with workspace_errors(root):
        try:
            root.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise WorkspaceError(f"cannot save into {root}: a file is in the way: move it away") from error
        remove_stale(root)
        staging = root / f"{directory_name(iteration)}{STALE_SUFFIX}{secrets.token_hex(4)}"
        staging.mkdir()
    return staging


def _write_tensors(
    staging: Path, tensors: Mapping[str, torch.Tensor | TensorShard], ranks: RankGroup, progress: Callable[[], None]
) -> dict[str, FileRecord]:
    """Write every rank's slices and `.metadata`, synced; this rank's files of slices. Collective."""
    writer = CheckpointWriter(staging, progress=progress)
    with workspace_errors(staging), _first_failure():
        # Beneath torch's `save`, whose warning about a single process could only be silenced for all threads at once.
        _save_state_dict(
            dict(tensors),
            storage_writer=writer,
            planner=ShardSavePlanner(),
            process_group=ranks.group,
            no_dist=not ranks.distributed,
        )
    return writer.records


@contextlib.contextmanager
def _first_failure() -> Iterator[None]:
    """Raise what the first failing rank met instead of DCP's BaseException around it."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        if isinstance(cause, OSError | KeyboardInterrupt):
            raise cause from error
        raise CheckpointError(f"rank {rank} could not save its tensors: {type(cause).__name__}: {cause}") from error


def _write_state(staging: Path, state: str) -> dict[str, FileRecord]:
    """Write the state, synced; it and the metadata, which is written by then."""
    with workspace_errors(staging):
        with open(staging / STATE_NAME, "w", encoding="utf-8") as file:
            file.write(state)
            file.flush()
            os.fsync(file.fileno())
        return {name: FileRecord.of(staging / name) for name in (METADATA_NAME, STATE_NAME)}


def _publish(staging: Path, root: Path, marker: Marker) -> Path:
    """Mark, rename into place, point the tracker to it."""
    unmarked = {path.name for path in staging.iterdir()} - set(marker.files)
    if unmarked:
        raise CheckpointError(f"{staging} holds files that no rank wrote: {', '.join(sorted(unmarked))}")
    target = root / directory_name(marker.iteration)
    with workspace_errors(staging):
        sync_directory(staging)
        marker.write(staging)
        # Deleting takes long, and a crash meanwhile would leave neither of the two: it comes last.
        replaced = rename_away(target) if target.exists() else None
        os.rename(staging, target)
        sync_directory(root)
    write_tracker(root, marker.iteration)
    if replaced is not None:
        with workspace_errors(root):
            shutil.rmtree(replaced)
    return target
