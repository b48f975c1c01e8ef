"""Main weights and moments divided over replicas (ZeRO-1; Rajbhandari et al. 2020, arXiv:1910.02054).

Each replica sums, updates and keeps in fp32 its shard of every bucket alone; then all gather the weights. An
all-reduce of gradients would move as much.
"""

import torch
from torch import Tensor, nn

from megacore.data_parallel.buckets import Piece
from megacore.data_parallel.flat import start_all_gather_
from megacore.data_parallel.grad_sync import Bucket, GradSync
from megacore.optim.main_weights import MainWeight
from megacore.parallel.collectives import Pending


class ShardedWeights:
    """The model's weights of one bucket in a flat buffer, and this rank's shard of them in fp32.

    Shards begin at multiples of the alignment within every parameter: the fused AdamW rounds an element in its vector
    loop and in the remainder after it differently, and so updates each as it would without shards.
    """

    def __init__(self, sync: GradSync, bucket: Bucket, dtype: torch.dtype) -> None:
        """Take over the parameters of a bucket, fp32, and move them, cast to `dtype`, into a flat buffer."""
        self._replicas = sync.mesh.data_parallel
        device = bucket.buffer.device
        self._buffer = torch.zeros(bucket.layout.length, dtype=dtype, device=device)
        shard = self._buffer[bucket.shard.start : bucket.shard.stop]
        # An fp32 model's own weights are the main weights.
        whole_precision = dtype == torch.float32
        main = shard if whole_precision else torch.zeros_like(shard, dtype=torch.float32)
        exp_avg, exp_avg_sq = torch.zeros_like(main), torch.zeros_like(main)
        pieces = list(bucket.layout.within(bucket.shard))
        for piece in pieces:
            piece.of(main).copy_(_run(sync.parameters[piece.name], piece))
        for whole in bucket.layout.pieces:
            parameter = sync.parameters[whole.name]
            view = whole.of(self._buffer).view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view
        self.weights = [
            MainWeight(
                piece.name,
                piece.start,
                piece.of(main),
                piece.of(bucket.reduced),
                piece.of(exp_avg),
                piece.of(exp_avg_sq),
                None if whole_precision else piece.of(shard),
            )
            for piece in pieces
        ]

    def publish(self) -> Pending:
        """Begin to gather the other ranks' shards."""
        return start_all_gather_(self._buffer, self._replicas)


def _run(parameter: nn.Parameter, piece: Piece) -> Tensor:
    return parameter.data.flatten()[piece.start : piece.start + piece.length]
