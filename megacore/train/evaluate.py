"""Loss over a fixed set of samples, shared among the ranks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.config.run import RunConfig
from megacore.data.sampler import PrefetchingIterator
from megacore.data.samples import Dataset
from megacore.errors import DataFormatError
from megacore.models.base import LM_LOSS, bucket_width
from megacore.observe.logging import perplexity
from megacore.parallel.mesh import ProcessMesh
from megacore.train.step import loaded, reader


class PositionLoss(NamedTuple):
    """Language model loss of a range of positions."""

    start: int
    """First position, from 0."""
    loss: float
    """Mean loss in nats per token."""
    tokens: int
    """Number of target tokens, more than 0."""


@dataclass(frozen=True)
class Evaluation:
    """Mean losses over the target tokens of some samples."""

    losses: Mapping[str, float]
    """Loss by name, in nats; `lm_loss` comes first."""
    samples: int
    tokens: int
    """Number of target tokens."""
    by_position: tuple[PositionLoss, ...] = ()
    """Language model loss by position in the sample, in ranges of equal width that have tokens."""

    @property
    def loss(self) -> float:
        """Language model loss in nats per token."""
        return self.losses[LM_LOSS]

    @property
    def ppl(self) -> float:
        """Perplexity."""
        return perplexity(self.loss)


class Scored(Protocol):
    """This rank's part of the evaluated model: an engine or a `Stage`."""

    @property
    def loss_names(self) -> tuple[str, ...]:
        """Names of the losses, `lm_loss` first."""
        ...

    @property
    def label_length(self) -> int:
        """Number of labels of a sample."""
        ...

    @property
    def reads_tokens(self) -> bool:
        """True if this rank needs the samples."""
        ...

    def loss_sum(self, batches: Iterator[Tensor], sizes: Sequence[int]) -> Tensor:
        """Return the sum and the token count of each loss, and of `lm_loss` by position.

        The result is fp64 [terms + POSITION_BUCKETS, 2]. `batches` has the ids [b, width] of micro
        batches, `sizes` the b of each. See `megacore.engine.base.Engine`.
        """
        ...


def evaluate(
    model: Scored,
    dataset: Dataset,
    *,
    samples: int,
    micro_batch_size: int,
    mesh: ProcessMesh,
    device: torch.device,
) -> Evaluation:
    """Compute the mean losses of the first `samples` samples, each scored once in any layout.

    Args:
        model: this rank's part of the model.
        dataset: one split.
        samples: number of samples, from 1 to the data set's length.
        micro_batch_size: samples per forward pass; the last pass may have fewer.
        mesh: the ranks that share the work; all get the same result.
        device: device of the model.

    Raises:
        DataFormatError: no sample has a label that counts.
    """
    replicas = mesh.data_parallel
    batches = batches_of_rank(samples, micro_batch_size, replicas.rank, replicas.size)
    with PrefetchingIterator(
        reader(dataset, device), batches if model.reads_tokens else ()
    ) as read:
        total = model.loss_sum(loaded(read, device, mesh), [len(batch) for batch in batches])
    for group in (mesh.data_context_parallel, mesh.pipeline_parallel):
        if group.size > 1:
            with mesh.time("world wait"):
                dist.all_reduce(total, group=group.group)
    terms, rows = len(model.loss_names), total.tolist()
    sums = dict(zip(model.loss_names, rows[:terms], strict=True))
    tokens = int(sums[LM_LOSS][1])
    if tokens == 0:
        raise DataFormatError(
            f"none of {samples} samples has a token to predict: each is a document of one token or "
            "only of padding; use longer documents, or data.packing packed"
        )
    width = bucket_width(model.label_length)
    return Evaluation(
        {name: loss / max(count, 1) for name, (loss, count) in sums.items()},
        samples,
        tokens,
        tuple(
            PositionLoss(number * width, loss / count, int(count))
            for number, (loss, count) in enumerate(rows[terms:])
            if count
        ),
    )


def evaluate_split(
    model: Scored,
    split: Dataset,
    config: RunConfig,
    *,
    micro_batch_size: int,
    mesh: ProcessMesh,
    device: torch.device,
) -> Evaluation:
    """Compute the losses that define `valid_ppl` and `test_ppl`.

    Training calls this for each checkpoint and the stage `evaluate` again, so that both report the
    same number.

    Args:
        model: this rank's part of the model.
        split: a data set of `one_epoch`.
        config: configuration of the run; its section `evaluate` limits the samples.
        micro_batch_size: samples per forward pass.
        mesh: the ranks that share the work; all get the same result.
        device: device of the model.

    Raises:
        DataFormatError: no sample has a label that counts.
    """
    return evaluate(
        model,
        split,
        samples=evaluated_samples(split, config),
        micro_batch_size=micro_batch_size,
        mesh=mesh,
        device=device,
    )


def evaluated_samples(split: Dataset, config: RunConfig) -> int:
    """Return the number of a split's samples that `evaluate.max_samples` selects."""
    limit = config.evaluate.max_samples
    return len(split) if limit is None else min(limit, len(split))


def batches_of_rank(samples: int, micro_batch_size: int, rank: int, size: int) -> list[range]:
    """Return this rank's micro batches of samples 0 … samples-1, dealt out round-robin.

    Every sample goes to exactly one rank.
    """
    starts = range(rank * micro_batch_size, samples, size * micro_batch_size)
    return [range(start, min(start + micro_batch_size, samples)) for start in starts]
