"""Choosing and verifying a checkpoint by all ranks, each of which hashes a share of the files.

The answer, and the error, is the same on every rank. A rank alone, and tools without ranks, use `format` itself.
"""

import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

from megacore.checkpoint.collective import RankGroup
from megacore.checkpoint.format import (
    MARKER_NAME,
    Marker,
    check_tracker,
    checkpoint_directories,
    misplaced,
    passed_over,
    reading,
    refuse,
    verify,
)
from megacore.errors import CheckpointError, LaunchError

_THREADS = 4
_logger = logging.getLogger(__name__)


def latest_complete_together(
    root: Path, ranks: RankGroup, *, log: Callable[[str], None] = _logger.warning
) -> Path | None:
    """As `format.latest_complete`; `log` is called on the first rank. Collective."""
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
    """As `format.verify`, every hash compared; the marker on every rank. Collective.

    Raises CheckpointError naming the file that is missing or damaged, and LaunchError where another machine than the
    first rank's has it not at all, although it is whole: passing it over would throw work away.
    """

    def look() -> tuple[Marker, str | None]:
        with reading(directory):
            marker = Marker.read(directory)
            return marker, misplaced(directory, marker) or marker.quick_problem(directory)[0]

    marker, problem = ranks.on_first(look)
    refuse(directory, problem)
    absent = [host for host in ranks.everywhere(lambda: _without(directory)) if host is not None]
    if absent:  # damaged files are on no other machine where each has a workspace of its own
        ranks.on_first(lambda: verify(directory))
        raise LaunchError(
            f"{directory} is not on host {absent[0]}, though the first rank's host has it: mount the same file system "
            "on every host, or set launch.data_placement to node_local"
        )
    own = shares(marker, ranks.size)[ranks.rank]
    threads = max(1, min(_THREADS, (os.cpu_count() or 1) // ranks.size))

    def compare() -> dict[str, str]:
        with reading(directory):
            return marker.differing(directory, own, threads=threads)

    found = {name: problem for each in ranks.everywhere(compare) for name, problem in each.items()}
    refuse(directory, next((found[name] for name in marker.files if name in found), None))
    return marker


def _without(directory: Path) -> str | None:
    """The name of this rank's machine, if it does not have the checkpoint."""
    return None if (directory / MARKER_NAME).exists() else socket.gethostname()


def shares(marker: Marker, size: int) -> list[list[str]]:
    """Names of the files that each of `size` ranks hashes: about the same bytes."""
    load = [0] * size
    names: list[list[str]] = [[] for _ in range(size)]
    for name, record in sorted(marker.files.items(), key=lambda item: (-item[1].size, item[0])):
        least = load.index(min(load))
        load[least] += record.size
        names[least].append(name)
    return names
