"""Whole tensors at owners, made of the parts that the ranks of a group have.

An operation on a whole matrix, such as Muon's, cannot be done by parts. Each matrix therefore has
an owner: it receives the parts of the matrix, and returns those of the result. The parts are the
shards of a distributed optimizer, or the slices of tensor parallelism.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.data_parallel.sharding import BucketLayout, Sharding
from megacore.parallel.collectives import Pending
from megacore.parallel.mesh import ParallelGroup

Lengths = Sequence[Mapping[tuple[str, int], int]]
"""Elements of a buffer for each rank of a group, in its order, by matrix and rank."""


class Division(Protocol):
    """Division of a matrix over the ranks of a group."""

    @property
    def length(self) -> int:
        """Number of elements of the whole matrix."""
        ...

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """Return a rank's part of the flat whole matrix, as a view, which may be empty."""
        ...


@dataclass(frozen=True)
class Runs:
    """Division of a flattened matrix into shards."""

    runs: Sequence[range]
    """Elements of each rank."""

    @property
    def length(self) -> int:
        """Number of elements of the whole matrix."""
        return sum(map(len, self.runs))

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """Return a rank's elements of the flat whole matrix, as a view."""
        return whole[self.runs[rank].start : self.runs[rank].stop]


@dataclass(frozen=True)
class Slices:
    """Even division of a matrix along one dimension."""

    shape: tuple[int, ...]
    """Shape of the whole matrix."""
    dim: int
    """Dimension that is divided."""
    count: int
    """Number of slices."""

    @property
    def length(self) -> int:
        """Number of elements of the whole matrix."""
        return self.shape[0] * self.shape[1]

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """Return a rank's slice of the flat whole matrix, as a view with two dimensions."""
        return whole.view(self.shape).chunk(self.count, self.dim)[rank]


def runs_of(layout: BucketLayout, names: Collection[str], sharding: Sharding) -> dict[str, Runs]:
    """Return the elements of a bucket's matrices in the shards of all replicas."""
    runs = {name: [range(0)] * sharding.replicas for name in layout.sizes if name in names}
    for rank in range(sharding.replicas):
        for piece in layout.within(sharding.updated(layout, rank)):
            if piece.name in runs:
                runs[piece.name][rank] = range(piece.start, piece.start + piece.length)
    return {name: Runs(each) for name, each in runs.items()}


def rounds_of(costs: Mapping[str, float], rounds: int) -> list[list[str]]:
    """Divide names in their order into at most `rounds` runs of similar cost."""
    share, total = sum(costs.values()) / rounds, 0.0
    divided: list[list[str]] = [[] for _ in range(rounds)]
    for name, cost in costs.items():
        divided[min(rounds - 1, int((total + cost / 2) / share))].append(name)
        total += cost
    return [names for names in divided if names]


def balanced(
    rounds: Iterable[Collection[str]], costs: Mapping[str, float], owners: int
) -> dict[str, int]:
    """Assign each name an owner so that after each round the owners' sums of costs are similar.

    The most expensive names of a round go first, each to the owner with the least sum so far.
    """
    sums = [0.0] * owners
    assigned = {}
    for names in rounds:
        for name in sorted(names, key=lambda name: (-costs[name], name)):
            assigned[name] = min(range(owners), key=lambda owner: (sums[owner], owner))
            sums[assigned[name]] += costs[name]
    return assigned


def staggered(rounds: Iterable[Iterator[None]]) -> None:
    """Run rounds that yield after they have started messages, each one step behind the previous.

    Between the start of a message and the wait for it there are steps of other rounds. The steps
    have the same order on all ranks if the rounds have as many.
    """
    active: deque[Iterator[None]] = deque()
    waiting = iter(rounds)
    while True:
        added = next(waiting, None)
        if added is not None:
            active.appendleft(added)
        elif not active:
            return
        for each in list(active):
            try:
                next(each)
            except StopIteration:
                active.remove(each)


class Owners:
    """Owners of some matrices among the ranks of a group.

    Every rank of the group must call `start_collect` and `start_return` of all its owners in the
    same order.
    """

    def __init__(
        self,
        divisions: Mapping[str, Division],
        owners: Mapping[str, int],
        group: ParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Plan the messages.

        Args:
            divisions: division of each matrix over the ranks, in the same order on all of them.
            owners: rank that owns each of these matrices.
            group: the ranks.
            dtype: type of the elements on their way.
            device: device of the parts.
        """
        self._divisions, self._group = divisions, group
        self._dtype, self._device = dtype, device
        self._names: list[list[str]] = [[] for _ in range(group.size)]
        for name in divisions:
            self._names[owners[name]].append(name)

    @cached_property
    def owned(self) -> BucketLayout:
        """Layout of this rank's matrices in a flat buffer."""
        names = self._names[self._group.rank]
        return BucketLayout({name: self._divisions[name].length for name in names})

    def without(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of other matrices."""
        return {name: part for name, part in parts.items() if name not in self._divisions}

    def start_collect(self, parts: Mapping[str, Tensor]) -> Pending:
        """Start sending this rank's part of each matrix to its owner.

        Args:
            parts: this rank's part of each matrix it has any of, in any shape; they are copied.

        Returns:
            Operation whose result is a flat buffer with the layout `owned`.
        """
        sent, received = self._empty(self._held), self._empty(self._arriving)
        for (name, _), view in _views(sent, self._held).items():
            view.copy_(parts[name].reshape(-1))

        def assemble() -> Tensor:
            flat = torch.empty(
                self.owned.length if self.owned.sizes else 0, dtype=self._dtype, device=self._device
            )
            wholes = self.views(flat)
            for (name, peer), view in _views(received, self._arriving).items():
                part = self._divisions[name].part(wholes[name], peer)
                part.copy_(view.view(part.shape))
            return flat

        return self._exchange(sent, self._held, received, self._arriving, assemble)

    def start_return(self, wholes: Mapping[str, Tensor]) -> Pending:
        """Start sending the parts of this rank's matrices, which are copied, to their ranks.

        The result of the operation is a flat buffer of this rank's parts, to which `returned` gives
        their names.
        """
        sent, received = self._empty(self._arriving), self._empty(self._held)
        for (name, peer), view in _views(sent, self._arriving).items():
            part = self._divisions[name].part(wholes[name].reshape(-1), peer)
            view.view(part.shape).copy_(part)
        return self._exchange(sent, self._arriving, received, self._held, lambda: received)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the matrices in a buffer with the layout `owned` by name, as flat views."""
        return {piece.name: piece.of(flat) for piece in self.owned.pieces}

    def returned(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the parts in the result of `start_return` by name, as flat views."""
        return {name: view for (name, _), view in _views(flat, self._held).items()}

    @cached_property
    def _held(self) -> Lengths:
        """Lengths of this rank's parts, by owner."""
        rank = self._group.rank
        return [
            {(name, owner): length for name in names if (length := self._length(name, rank))}
            for owner, names in enumerate(self._names)
        ]

    @cached_property
    def _arriving(self) -> Lengths:
        """Lengths of all parts of this rank's matrices, by the rank that has them."""
        return [
            {
                (name, peer): length
                for name in self._names[self._group.rank]
                if (length := self._length(name, peer))
            }
            for peer in range(self._group.size)
        ]

    def _length(self, name: str, rank: int) -> int:
        division = self._divisions[name]
        return division.part(torch.empty(division.length, device="meta"), rank).numel()

    def _exchange(
        self,
        sent: Tensor,
        sent_lengths: Lengths,
        received: Tensor,
        received_lengths: Lengths,
        finish: Callable[[], Tensor],
    ) -> Pending:
        """Start moving elements between all ranks, one message for each pair of them."""
        work = dist.all_to_all_single(
            received,
            sent,
            [sum(lengths.values()) for lengths in received_lengths],
            [sum(lengths.values()) for lengths in sent_lengths],
            group=self._group.group,
            async_op=True,
        )
        return Pending(self._group, [work], finish)

    def _empty(self, lengths: Lengths) -> Tensor:
        length = sum(sum(each.values()) for each in lengths)
        return torch.empty(length, dtype=self._dtype, device=self._device)


def _views(flat: Tensor, lengths: Lengths) -> dict[tuple[str, int], Tensor]:
    """Return consecutive elements of a flat buffer, by matrix and rank."""
    keys = [(key, length) for each in lengths for key, length in each.items()]
    parts = torch.split(flat, [length for _, length in keys])
    return {key: part for (key, _), part in zip(keys, parts, strict=True)}


@dataclass(frozen=True)
class Round:
    """Matrices that are collected, processed and returned together."""

    names: Sequence[str]
    """Matrices of all ranks."""
    hops: Sequence[Owners]
    """Owners in each group of ranks, from parts to whole matrices."""


def plan_rounds(
    costs: Mapping[str, float],
    levels: Iterable[tuple[Mapping[str, Division], ParallelGroup]],
    rounds: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Round]:
    """Divide matrices into rounds, and their cost over the ranks of all groups.

    Args:
        costs: cost of the operation on each matrix, in the order of the rounds.
        levels: division of matrices over the ranks of a group; those of the second level divide
            what ranks of the first collect. Levels without matrices do not count.
        rounds: largest number of rounds; each has a matrix for every owner. Without levels each
            matrix is a round.
        dtype: type of the elements on their way.
        device: device of the parts.
    """
    divided = [(divisions, group) for divisions, group in levels if divisions]
    if not divided:
        return [Round([name], ()) for name in costs]
    owners = math.prod(group.size for _, group in divided)
    runs = rounds_of(costs, max(1, min(rounds, len(costs) // owners)))
    assigned = balanced(runs, costs, owners)
    planned = []
    for names in runs:
        hops, stride, local = [], owners, names
        for divisions, group in divided:
            stride //= group.size
            ranks = {name: assigned[name] // stride % group.size for name in local}
            parts = {name: divisions[name] for name in local if name in divisions}
            hops.append(Owners(parts, ranks, group, dtype, device))
            local = [name for name in local if name not in parts or ranks[name] == group.rank]
        planned.append(Round(names, hops))
    return planned
