"""The schedules under test: up to 16 stages, 64 micro batches and 4 chunks per stage."""

from functools import cache
from typing import Literal, NamedTuple

from megacore.pipeline_parallel.schedules import Schedule, build_schedule


class Case(NamedTuple):
    kind: Literal["gpipe", "1f1b"]
    stages: int
    micro_batches: int
    chunks: int

    @property
    def schedule(self) -> Schedule:
        return _build(self, delayed=False)

    @property
    def delayed(self) -> Schedule:
        """The schedule with delayed weight gradients."""
        return _build(self, delayed=True)


@cache
def _build(case: Case, *, delayed: bool) -> Schedule:
    return build_schedule(*case, delayed=delayed)


def _micro_batches(stages: int) -> list[int]:
    """Return the smallest counts, those near the stages and twice the stages, and the largest."""
    near = {stages * factor + offset for factor in (1, 2) for offset in (-1, 0, 1)}
    return sorted(count for count in {1, 2, 3, 64} | near if 1 <= count <= 64)


def _grouped(stages: int) -> list[tuple[int, int]]:
    """Return pairs of micro batches and chunks.

    One and two groups occur with all numbers of chunks, the most groups with one of them.
    """
    few = [(stages * groups, chunks) for groups in (1, 2) for chunks in (2, 3, 4)]
    return [*few, (64 // stages * stages, 2 + (stages + 1) % 3)]


FLAT = [
    Case(kind, stages, micro_batches, 1)
    for kind in ("gpipe", "1f1b")
    for stages in range(1, 17)
    for micro_batches in _micro_batches(stages)
]
INTERLEAVED = [
    Case("1f1b", stages, micro_batches, chunks)
    for stages in range(2, 17)
    for micro_batches, chunks in _grouped(stages)
]
CASES = FLAT + INTERLEAVED
