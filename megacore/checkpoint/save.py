"""Saving together: staged, synced, marked, renamed. A crash at any instruction leaves the whole checkpoint or none."""

import contextlib
import os
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megacore.artifact.files import sync_directory, workspace_errors, write_json
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
from megacore.checkpoint.retain import remove_directory, remove_stale
from megacore.checkpoint.shard import ShardSavePlanner, TensorShard
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
    # Apart from the writing, whose own collectives a rank that raised before them would leave waiting.
    ranks.everywhere(lambda: _check_types(tensors))
    staging = ranks.on_first(lambda: _open_staging(root, iteration))
    try:
        ranks.everywhere(lambda: _write_tensors(staging, tensors, ranks))
        records = ranks.everywhere(lambda: _finish_rank(staging, state, ranks.rank))
        files = {name: record for own in records for name, record in own.items()}
        marker = Marker(iteration, finite_or_none(validation_loss), files)
        return ranks.on_first(lambda: _publish(staging, root, marker))
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise


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


def _check_types(tensors: Mapping[str, torch.Tensor | TensorShard]) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor | TensorShard):
            raise CheckpointError(f"{name} is {type(tensor).__name__}, not a tensor: put it into the state")


def _write_tensors(staging: Path, tensors: Mapping[str, torch.Tensor | TensorShard], ranks: RankGroup) -> None:
    """Write every rank's slices and `.metadata`, synced. Collective."""
    with workspace_errors(staging), _first_failure(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(
            dict(tensors),
            storage_writer=_Writer(staging, sync_files=True),
            planner=ShardSavePlanner(),
            process_group=ranks.group,
            no_dist=not ranks.distributed,
        )


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


class _Writer(FileSystemWriter):
    """Names no absolute path in the metadata, and reports a full disk as what it is."""

    def storage_meta(self) -> StorageMeta | None:
        """Nothing: a checkpoint may be moved."""
        return None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's slices. Raises the OSError that torch's zip writer hides behind a RuntimeError."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # The context does not survive the way to the other ranks: raise the cause itself.
            hidden = error.__context__
            if isinstance(hidden, OSError):
                raise hidden from None
            raise


def _finish_rank(staging: Path, state: Mapping[str, Any], rank: int) -> dict[str, FileRecord]:
    """Size and hash of the files that this rank wrote; the first also writes the state."""
    names = [path.name for path in staging.glob(f"__{rank}_*.distcp")]
    if rank == 0:
        try:
            write_json(staging / STATE_NAME, dict(state))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the state of {staging.name} is not JSON: {error}") from error
        names += [METADATA_NAME, STATE_NAME]
    with workspace_errors(staging):
        return {name: FileRecord.of(staging / name) for name in sorted(names)}


def _publish(staging: Path, root: Path, marker: Marker) -> Path:
    """Mark, rename into place, point the tracker to it."""
    unmarked = {path.name for path in staging.iterdir()} - set(marker.files)
    if unmarked:
        raise CheckpointError(f"{staging} holds files that no rank wrote: {', '.join(sorted(unmarked))}")
    target = root / directory_name(marker.iteration)
    with workspace_errors(staging):
        sync_directory(staging)
        marker.write(staging)
        if target.exists():
            remove_directory(target)
        os.rename(staging, target)
        sync_directory(root)
    write_tracker(root, marker.iteration)
    return target
