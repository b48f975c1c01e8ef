"""Loss over a fixed set of samples, shared among the data-parallel ranks."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.data.gpt_dataset import GPTDataset
from megacore.data.sampler import PrefetchingIterator
from megacore.observe.logging import perplexity
from megacore.parallel.mesh import ParallelGroup
from megacore.train.step import to_device


@dataclass(frozen=True)
class Evaluation:
    """Mean loss over every target token of some samples."""

    loss: float
    """Nats per token."""
    samples: int
    tokens: int

    @property
    def ppl(self) -> float:
        """Perplexity."""
        return perplexity(self.loss)


def evaluate(
    token_losses: Callable[[Tensor], Tensor],
    dataset: GPTDataset,
    *,
    samples: int,
    micro_batch_size: int,
    group: ParallelGroup,
    device: torch.device,
) -> Evaluation:
    """Mean loss of the first `samples` samples; each is scored once, whatever the number of ranks.

    Args:
        token_losses: ids [b, s + 1] -> fp32 losses [b, s].
        dataset: one split.
        samples: at least 1 and at most the data set's length.
        micro_batch_size: samples per forward pass; the last pass may have fewer.
        group: the ranks that share the work; all get the same result.
        device: of the model.
    """
    batches = batches_of_rank(samples, micro_batch_size, group.rank, group.size)
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    with PrefetchingIterator(dataset.gather, batches) as loaded:
        for batch in loaded:
            losses = token_losses(to_device(batch, device))
            totals[0] += losses.double().sum()
            totals[1] += losses.numel()
    if group.size > 1:
        dist.all_reduce(totals, group=group.group)
    loss, tokens = totals.tolist()
    return Evaluation(loss / tokens, samples, int(tokens))


def batches_of_rank(samples: int, micro_batch_size: int, rank: int, size: int) -> list[list[int]]:
    """Samples 0 … samples-1 in runs of `micro_batch_size`, dealt out in turn: every sample goes to one rank."""
    starts = range(rank * micro_batch_size, samples, size * micro_batch_size)
    return [list(range(start, min(start + micro_batch_size, samples))) for start in starts]
