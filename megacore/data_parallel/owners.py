"""Whole tensors at owners, made of the shards that a distributed optimizer divides them into.

An operation on a whole matrix, such as Muon's, cannot be done by shards. Each matrix therefore has
an owner among the replicas: it receives the shards of the matrix, and returns those of the result.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.data_parallel.grad_sync import Bucket, BucketLayout, shard_of
from megacore.parallel.collectives import Pending
from megacore.parallel.mesh import ParallelGroup

Runs = Mapping[str, Sequence[range]]
"""Elements of each flattened matrix in the shard of each replica, by name; empty ranges too."""


def runs_of(bucket: Bucket, names: Collection[str], replicas: int) -> Runs:
    """Return the elements of a bucket's matrices in the shards of all replicas."""
    runs = {name: [range(0)] * replicas for name in bucket.layout.sizes if name in names}
    for rank in range(replicas):
        shard = shard_of(bucket.layout.length, ParallelGroup(rank=rank, size=replicas))
        for piece in bucket.layout.within(shard):
            if piece.name in runs:
                runs[piece.name][rank] = range(piece.start, piece.start + piece.length)
    return runs


def balanced(costs: Mapping[str, float], owners: int) -> dict[str, int]:
    """Assign each name an owner so that the owners' sums of costs are similar.

    The most expensive names go first, each to the owner with the least sum so far.
    """
    sums = [0.0] * owners
    assigned = {}
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        assigned[name] = min(range(owners), key=lambda owner: (sums[owner], owner))
        sums[assigned[name]] += costs[name]
    return assigned


class Owners:
    """Owners of matrices among the replicas of a distributed optimizer.

    Every replica must call `start_collect` and `start_return` in the same order.
    """

    def __init__(
        self,
        runs: Runs,
        costs: Mapping[str, float],
        group: ParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Assign the owners.

        Args:
            runs: elements of each matrix in every replica's shard, the same on all replicas.
            costs: cost of the operation on each matrix, which is divided evenly.
            group: the replicas.
            dtype: type of the elements on their way.
            device: device of the shards.
        """
        self._runs, self._group = runs, group
        self._dtype, self._device = dtype, device
        self._owner = balanced(costs, group.size)

    @cached_property
    def owned(self) -> BucketLayout:
        """Layout of this replica's matrices in a flat buffer."""
        return BucketLayout(self._sizes(self._owner, self._group.rank))

    @cached_property
    def held(self) -> BucketLayout:
        """Layout of this replica's shards of all matrices in a flat buffer."""
        lengths = {name: len(runs[self._group.rank]) for name, runs in self._runs.items()}
        return BucketLayout({name: length for name, length in lengths.items() if length})

    def start_collect(self, shards: Mapping[str, Tensor]) -> Pending:
        """Start sending each matrix's shards to its owner.

        Args:
            shards: this replica's elements of each matrix it has any of; they are copied.

        Returns:
            Operation whose result is a flat buffer with the layout `owned`.
        """
        source, target = self._empty(self.held), self._empty(self.owned)
        parts = self.views(source, self.held)
        for name, part in parts.items():
            part.copy_(shards[name])
        wholes = self.views(target, self.owned)
        return self._exchange(parts, wholes, target, returning=False)

    def start_return(self, wholes: Tensor) -> Pending:
        """Start sending the shards of a flat buffer with the layout `owned` to their replicas.

        The result of the operation is a flat buffer with the layout `held`.
        """
        target = self._empty(self.held)
        return self._exchange(
            self.views(target, self.held), self.views(wholes, self.owned), target, returning=True
        )

    @staticmethod
    def views(flat: Tensor, layout: BucketLayout) -> dict[str, Tensor]:
        """Return the tensors in a flat buffer by name, as flat views."""
        return {piece.name: piece.of(flat) for piece in layout.pieces}

    def _exchange(
        self,
        parts: Mapping[str, Tensor],
        wholes: Mapping[str, Tensor],
        target: Tensor,
        *,
        returning: bool,
    ) -> Pending:
        """Start moving shards between their replicas and the owners.

        Each pair of ranks takes the matrices in the same order.
        """
        operations = []
        rank = self._group.rank
        send, receive = (dist.irecv, dist.isend) if returning else (dist.isend, dist.irecv)
        for name, runs in self._runs.items():
            owner = self._owner[name]
            if owner == rank:
                for peer, run in enumerate(runs):
                    part = wholes[name][run.start : run.stop]
                    if peer != rank and len(run):
                        operations.append((receive, part, peer))
                    elif len(run):
                        copied = (parts[name], part) if returning else (part, parts[name])
                        copied[0].copy_(copied[1])
            elif len(runs[rank]):
                operations.append((send, parts[name], owner))
        messages = [
            dist.P2POp(operation, tensor, group=self._group.group, group_peer=peer)
            for operation, tensor, peer in operations
        ]
        works = dist.batch_isend_irecv(messages) if messages else []
        return Pending(self._group, works, lambda: target)

    def _empty(self, layout: BucketLayout) -> Tensor:
        length = layout.length if layout.sizes else 0
        return torch.empty(length, dtype=self._dtype, device=self._device)

    def _sizes(self, owners: Mapping[str, int], rank: int) -> dict[str, int]:
        return {
            name: sum(map(len, runs)) for name, runs in self._runs.items() if owners[name] == rank
        }
