"""Collective actions such as choosing a checkpoint: an error on one rank is raised on all.

Single processes and tools without ranks use `format` directly.
"""

import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from megacore.artifact.files import unreadable
from megacore.checkpoint.format import (
    MARKER_NAME,
    Marker,
    check_tracker,
    checkpoint_directories,
    marker_problem,
    passed_over,
    reading,
    refuse,
    verify,
)
from megacore.errors import (
    ERROR_TYPES,
    CheckpointError,
    FileAccessError,
    LaunchError,
    MegacoreError,
)

T = TypeVar("T")
_THREADS = 4
_logger = logging.getLogger(__name__)


class RankGroup:
    """Ranks that save together; a single rank if torch.distributed is not initialized.

    Objects are exchanged through `group` (None: the default group). A group with only the NCCL back
    end moves them through the current CUDA device, which each rank must have set; a gloo group
    needs none.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.distributed = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank(group) if self.distributed else 0
        self.size: int = dist.get_world_size(group) if self.distributed else 1

    def everywhere(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank and return the results in rank order, on every rank.

        A rank whose action fails raises the original error. The others raise the first failing
        rank's error, as the same MegacoreError or as CheckpointError. Results must be picklable.
        """
        value: T | None = None
        failure: Exception | None = None
        try:
            value = action()
        except Exception as error:
            failure = error
        outcome = (value, _describe(failure))
        outcomes: list[Any] = [outcome]
        if self.distributed:
            outcomes = [None] * self.size
            dist.all_gather_object(outcomes, outcome, group=self.group)
        if failure is not None:
            raise failure
        for rank, (_, description) in enumerate(outcomes):
            if description is not None:
                raise _restored(rank, *description)
        return [result for result, _ in outcomes]

    def on_first(self, action: Callable[[], T]) -> T:
        """Run `action` on the first rank; every rank returns its result or raises its error."""
        results: list[Any] = self.everywhere(action if self.rank == 0 else _nothing)
        return results[0]  # type: ignore[no-any-return]


def _nothing() -> Any:
    return None


def _describe(error: Exception | None) -> tuple[str, str] | None:
    """Return the class name (of the nearest MegacoreError, if it is one) and the message."""
    if error is None:
        return None
    names = [base.__name__ for base in type(error).__mro__]
    return next((name for name in names if name in ERROR_TYPES), names[0]), str(error)


def _restored(rank: int, name: str, message: str) -> MegacoreError:
    """Build another rank's error from its class name and message."""
    if name in ERROR_TYPES:
        return ERROR_TYPES[name](message)
    return CheckpointError(f"rank {rank} failed: {name}: {message}")


def latest_complete_together(
    root: Path, ranks: RankGroup, *, log: Callable[[str], None] = _logger.warning
) -> Path | None:
    """Choose a checkpoint like `format.latest_complete`; only the first rank logs. Collective."""
    chosen = None
    for directory in reversed(ranks.on_first(lambda: checkpoint_directories(root))):
        try:
            verify_together(directory, ranks)
        except CheckpointError as error:
            if ranks.rank == 0:
                log(passed_over(error))
            continue
        chosen = directory
        break
    if ranks.rank == 0:
        check_tracker(root, chosen, log)
    return chosen


def verify_together(directory: Path, ranks: RankGroup) -> Marker:
    """Compare every hash like `format.verify`; return the marker on every rank. Collective.

    Raises CheckpointError that names the missing or damaged file. Raises LaunchError if the
    complete checkpoint is missing on another host than the first rank's: skipping it would lose
    work. Raises FileAccessError on every rank if one rank cannot read a file now.
    """

    def look() -> tuple[Marker, str | None]:
        with reading(directory):
            marker = Marker.read(directory)
            return marker, marker_problem(directory, marker) or marker.quick_problem(directory)[0]

    marker, problem = ranks.on_first(look)
    refuse(directory, problem)
    absent = [host for host in ranks.everywhere(lambda: _without(directory)) if host is not None]
    if absent:  # damaged files are on no other host if each has a separate workspace
        ranks.on_first(lambda: verify(directory))
        raise LaunchError(
            f"{directory} is not on host {absent[0]}, though the first rank's host has it: "
            "mount the same file system on every host, or set launch.data_placement to node_local"
        )
    assigned = shares(marker, ranks.size)[ranks.rank]
    threads = max(1, min(_THREADS, (os.cpu_count() or 1) // ranks.size))

    def compare() -> tuple[dict[str, str], str]:
        try:
            with reading(directory):
                return marker.differing(directory, assigned, threads=threads), ""
        except FileAccessError as error:  # raised below, on all ranks alike
            return {}, str(error)

    outcomes = ranks.everywhere(compare)
    if faults := [fault for _, fault in outcomes if fault]:
        raise FileAccessError(faults[0])
    problems = {name: problem for each, _ in outcomes for name, problem in each.items()}
    refuse(directory, next((problems[name] for name in marker.files if name in problems), None))
    return marker


def _without(directory: Path) -> str | None:
    """Return this rank's host name if the host does not have the checkpoint."""
    marker = directory / MARKER_NAME
    try:
        marker.stat()
    except OSError as error:
        if (fault := unreadable(error, marker)) is not None:
            raise fault from error
        return socket.gethostname()
    return None


def shares(marker: Marker, size: int) -> list[list[str]]:
    """Divide the files among `size` ranks for hashing, by about equal bytes; return the names."""
    load = [0] * size
    names: list[list[str]] = [[] for _ in range(size)]
    for name, record in sorted(marker.files.items(), key=lambda item: (-item[1].size, item[0])):
        least = load.index(min(load))
        load[least] += record.size
        names[least].append(name)
    return names
