"""Loss over a fixed set of samples, shared among the ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.data.sampler import PrefetchingIterator
from megacore.data.samples import Dataset
from megacore.errors import DataFormatError
from megacore.observe.logging import perplexity
from megacore.parallel.mesh import ProcessMesh
from megacore.train.step import loaded, reader


@dataclass(frozen=True)
class Evaluation:
    """Mean loss over every target token of some samples that counts."""

    loss: float
    """Nats per token."""
    samples: int
    tokens: int

    @property
    def ppl(self) -> float:
        """Perplexity."""
        return perplexity(self.loss)


class LossSum(Protocol):
    """Sum of the losses of all labels that count, and their number (see `megacore.engine.base.Engine.loss_sum`)."""

    def __call__(self, batches: Iterator[Tensor], sizes: Sequence[int]) -> Tensor:
        """Ids [b, s + 1] of micro batches and their b -> fp64 [2], zeros on all pipeline stages but the last."""
        ...


def evaluate(
    loss_sum: LossSum,
    dataset: Dataset,
    *,
    samples: int,
    micro_batch_size: int,
    mesh: ProcessMesh,
    device: torch.device,
) -> Evaluation:
    """Mean loss of the first `samples` samples; each is scored once, whatever the layout.

    Args:
        loss_sum: of this rank's part of the model.
        dataset: one split.
        samples: at least 1 and at most the data set's length.
        micro_batch_size: samples per forward pass; the last pass may have fewer.
        mesh: the ranks that share the work; all get the same result.
        device: of the model.

    Raises:
        DataFormatError: none of the samples has a label that counts.
    """
    replicas = mesh.data_parallel
    batches = batches_of_rank(samples, micro_batch_size, replicas.rank, replicas.size)
    with PrefetchingIterator(reader(dataset, device), batches) as read:
        total = loss_sum(loaded(read, device, mesh), [len(batch) for batch in batches])
    for group in (replicas, mesh.pipeline_parallel):
        if group.size > 1:
            dist.all_reduce(total, group=group.group)
    loss, tokens = total.tolist()
    if tokens == 0:
        raise DataFormatError(
            f"none of {samples} samples has a token to predict: each is a document of one token or of padding alone; "
            "use longer documents, or data.packing packed"
        )
    return Evaluation(loss / tokens, samples, int(tokens))


def batches_of_rank(samples: int, micro_batch_size: int, rank: int, size: int) -> list[range]:
    """Samples 0 … samples-1 in runs of `micro_batch_size`, dealt out in turn: every sample goes to one rank."""
    starts = range(rank * micro_batch_size, samples, size * micro_batch_size)
    return [range(start, min(start + micro_batch_size, samples)) for start in starts]
