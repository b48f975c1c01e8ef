"""Dividing layers of any cost over pipeline stages: the slowest stage sets the pace of all."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, permutations

import numpy as np
import numpy.typing as npt

from megacore.errors import ParallelLayoutError

_ROUNDING = 1e-9
"""Sums of costs that differ by less, relative to the cost of the whole model, count as equal."""


def partition(
    stacks: Sequence[Sequence[float]], stages: int, *, chunks: int = 1, first: float = 0.0, last: float = 0.0
) -> list[tuple[range, ...]]:
    """Divide stacks of layers, one after another, over `stages` x `chunks` parts of consecutive layers.

    Part c is on stage c mod `stages`. The largest stage's cost is as small as can be, and the stages then as even as
    can be (by the sum of squares); the same then for parts; among equals earlier parts have fewer layers, because
    earlier stages keep the activations of more micro batches. With one chunk per stage this is exact; with several no
    move of one layer between two parts improves it, which is exact too when all layers cost the same.

    Args:
        stacks: the cost of each layer of each stack, as in an encoder's and a decoder's.
        stages: pp.
        chunks: parts per stage (v).
        first: cost of what the first part holds beside layers.
        last: cost of what the last part holds beside layers; if it has any, the last part may be without layers.

    Returns:
        Of each part, the layers of each stack by their number in the stack, empty ranges included.

    Raises:
        ParallelLayoutError: fewer layers than parts.
    """
    costs, parts = [cost for stack in stacks for cost in stack], stages * chunks
    if len(costs) < parts:
        raise ParallelLayoutError(f"{len(costs)} layers cannot be divided over {parts} parts: each needs at least 1")
    problem = _Problem.of(costs, stages, chunks, first, last)
    sizes = problem.consecutive() if chunks == 1 else problem.improved(problem.spread())
    starts = list(accumulate((len(stack) for stack in stacks), initial=0))[:-1]
    return [
        tuple(
            range(min(max(begin - start, 0), len(stack)), min(max(end - start, 0), len(stack)))
            for start, stack in zip(starts, stacks, strict=True)
        )
        for begin, end in pairwise(accumulate(sizes, initial=0))
    ]


@dataclass(frozen=True)
class _Problem:
    """Costs to divide, relative to the cost of the whole model."""

    sums: tuple[float, ...]
    """Cost of the first 0, 1, 2, ... layers."""
    stages: int
    extra: tuple[float, ...]
    """What each part costs beside layers."""
    least: tuple[int, ...]
    """Layers that each part needs."""

    @classmethod
    def of(cls, costs: Sequence[float], stages: int, chunks: int, first: float, last: float) -> "_Problem":
        """The problem that `partition` describes."""
        parts, total = stages * chunks, (sum(costs) + first + last) or 1.0
        extra, least = [0.0] * parts, [1] * parts
        extra[0] += first / total
        extra[-1] += last / total
        if last > 0 and parts > 1:
            least[-1] = 0
        sums = tuple(accumulate((cost / total for cost in costs), initial=0.0))
        return cls(sums, stages, tuple(extra), tuple(least))

    def consecutive(self) -> tuple[int, ...]:
        """Layers of each part with the smallest largest part and, given that, the smallest sum of squares.

        Dynamic programming from the last part back: `best[i]` is for layers i to the end in the parts from here on.
        """
        sums = np.array(self.sums)
        count = np.arange(len(sums))[None, :] - np.arange(len(sums))[:, None]
        segment = sums[None, :] - sums[:, None]

        def costs(part: int, limit: float) -> npt.NDArray[np.float64]:
            """Of a part from layer i (rows) to before layer j (columns); infinite where that is not allowed."""
            cost = segment + self.extra[part]
            return np.where((count >= self.least[part]) & (cost <= limit), cost, np.inf)

        nothing = np.where(np.arange(len(sums)) == len(sums) - 1, 0.0, np.inf)
        best = nothing
        for part in reversed(range(len(self.extra))):
            best = np.maximum(costs(part, np.inf), best[None, :]).min(axis=1)
        limit = best[0] + _ROUNDING
        squares = [nothing]
        for part in reversed(range(len(self.extra))):
            squares.append((costs(part, limit) ** 2 + squares[-1][None, :]).min(axis=1))
        sizes, start = [], 0
        for part, after in enumerate(reversed(squares[:-1])):
            total = costs(part, limit)[start] ** 2 + after
            end = int(np.flatnonzero(total <= total.min() + _ROUNDING)[0])
            sizes.append(end - start)
            start = end
        return tuple(sizes)

    def spread(self) -> tuple[int, ...]:
        """Layers of each part as if all cost the same: each goes to the smallest part of the smallest stage."""
        layers, sizes = len(self.sums) - 1, list(self.least)
        for _ in range(layers - sum(sizes)):
            parts = [size * self.sums[-1] / layers + extra for size, extra in zip(sizes, self.extra, strict=True)]
            stages = [sum(parts[stage :: self.stages]) for stage in range(self.stages)]
            sizes[min(range(len(sizes)), key=lambda part: (stages[part % self.stages], parts[part], -part))] += 1
        return tuple(sizes)

    def improved(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Move one layer from a part to another, those between handing theirs on, as long as that helps."""
        while (better := min(self._neighbours(sizes), key=self._rating)) != sizes:
            sizes = better
        return sizes

    def _neighbours(self, sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """The division itself and those that one move leads to."""
        yield sizes
        for giver, taker in permutations(range(len(sizes)), 2):
            if sizes[giver] > self.least[giver]:
                yield tuple(size - (part == giver) + (part == taker) for part, size in enumerate(sizes))

    def _rating(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """How good a division is; less is better, in this order."""
        ends = accumulate(sizes, initial=0)
        parts = [
            self.sums[end] - self.sums[begin] + extra
            for (begin, end), extra in zip(pairwise(ends), self.extra, strict=True)
        ]
        stages = [sum(parts[stage :: self.stages]) for stage in range(self.stages)]
        values = (max(stages), sum(cost**2 for cost in stages), max(parts), sum(cost**2 for cost in parts))
        return *(round(value / _ROUNDING) for value in values), *sizes
