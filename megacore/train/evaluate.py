"""Loss over a fixed set of samples, shared among the ranks."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.config.run import RunConfig
from megacore.data.sampler import PrefetchingIterator
from megacore.data.samples import Dataset
from megacore.errors import DataFormatError
from megacore.models.base import (
    LM_LOSS,
    POSITION_BUCKETS,
    LossTotals,
    SampleSources,
    bucket_width,
)
from megacore.observe.logging import perplexity
from megacore.parallel.mesh import ProcessMesh
from megacore.train.step import loaded, reader

BetweenRounds = Callable[[float], float]
"""Function that evaluations call between two rounds on all ranks, with this rank's seconds of the
last round. It returns those of the slowest rank. It may raise an error, on all ranks alike, which
ends the evaluation."""
_ROUND_SECONDS = 1.0
"""Seconds of a round below which the next one is twice as long."""


class PositionLoss(NamedTuple):
    """Language model loss of a range of positions."""

    start: int
    """First position, from 0."""
    loss: float
    """Mean loss in nats per token."""
    tokens: int
    """Number of target tokens, more than 0."""


class SourceLoss(NamedTuple):
    """Language model loss of the samples of one source."""

    source: int
    """Number of the source among the run's."""
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
    by_source: tuple[SourceLoss, ...] = ()
    """Language model loss of each source with tokens; empty for samples of a single source. Their
    mean, weighted by the tokens, is `loss`."""

    @property
    def loss(self) -> float:
        """Language model loss in nats per token."""
        return self.losses[LM_LOSS]

    @property
    def ppl(self) -> float:
        """Perplexity."""
        return perplexity(self.loss)

    @property
    def position_rows(self) -> list[dict[str, float | None]]:
        """`by_position` for JSON: start, loss and tokens of each range; None for no finite loss."""
        return [
            {
                "start": each.start,
                "loss": each.loss if math.isfinite(each.loss) else None,
                "tokens": each.tokens,
            }
            for each in self.by_position
        ]


class Scored(Protocol):
    """This rank's part of the evaluated model: an engine or a `Stage`."""

    device: torch.device

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

    def loss_sum(
        self, batches: Iterator[Tensor], sizes: Sequence[int], totals: LossTotals
    ) -> Tensor:
        """Add the sums of the losses to `totals`, see `megacore.engine.base.Engine`."""
        ...


def evaluate(
    model: Scored,
    dataset: Dataset,
    *,
    samples: int,
    micro_batch_size: int,
    mesh: ProcessMesh,
    between: BetweenRounds | None = None,
) -> Evaluation:
    """Compute the mean losses of the first `samples` samples, each scored once in any layout.

    The result is the same, bit for bit, for any division into rounds.

    Args:
        model: this rank's part of the model.
        dataset: one split.
        samples: number of samples, from 1 to the data set's length.
        micro_batch_size: samples per forward pass; the last pass may have fewer.
        mesh: the ranks that share the work; all get the same result.
        between: function to call between rounds of about a second; None means one round.

    Raises:
        DataFormatError: no sample has a label that counts.
    """
    device, replicas = model.device, mesh.data_parallel
    batches = batches_of_rank(samples, micro_batch_size, replicas.rank, replicas.size)
    totals = LossTotals(len(model.loss_names), _sources_of(dataset, batches), device)
    longest = len(batches_of_rank(samples, micro_batch_size, 0, replicas.size))
    with PrefetchingIterator(
        reader(dataset, device), batches if model.reads_tokens else ()
    ) as read:
        ids = loaded(read, device, mesh)
        for number in _rounds(longest, mesh.pipeline_parallel.size, device, between):
            sizes = [len(batch) for batch in batches[number.start : number.stop]]
            total = model.loss_sum(islice(ids, len(sizes)), sizes, totals)
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
    first_source = terms + POSITION_BUCKETS
    return Evaluation(
        {name: loss / max(count, 1) for name, (loss, count) in sums.items()},
        samples,
        tokens,
        tuple(
            PositionLoss(number * width, loss / count, int(count))
            for number, (loss, count) in enumerate(rows[terms:first_source])
            if count
        ),
        tuple(
            SourceLoss(source, loss / count, int(count))
            for source, (loss, count) in zip(
                dataset.sources, rows[first_source:], strict=len(dataset.sources) > 1
            )
            if count
        ),
    )


def _rounds(
    count: int, stages: int, device: torch.device, between: BetweenRounds | None
) -> Iterator[range]:
    """Yield the micro batches of each round, the same on all ranks.

    A round begins when a pipeline is empty, so the first has one micro batch per stage, and the
    next ones are longer as long as they take less than about a second.
    """
    if between is None:
        yield range(count)
        return
    first, size = 0, stages
    while True:
        started = time.monotonic()
        yield range(first, min(first + size, count))
        first += size
        if first >= count:
            return
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the exchange that follows waits for the device anyway
        slowest = between(time.monotonic() - started)
        if slowest < _ROUND_SECONDS:
            size *= 2
        elif slowest > 2 * _ROUND_SECONDS:
            size = max(stages, size // 2)


def _sources_of(dataset: Dataset, batches: Sequence[range]) -> SampleSources | None:
    """Return the sources of the samples of micro batches; None if all are of one source."""
    if len(dataset.sources) < 2:
        return None
    numbers = [torch.from_numpy(dataset.source_places(batch)) for batch in batches]
    none = torch.empty(0, dtype=torch.int64)
    return SampleSources(torch.cat([none, *numbers]), len(dataset.sources))


def evaluated_samples(split: Dataset, config: RunConfig) -> int:
    """Return the number of a split's samples that define `valid_ppl` or `test_ppl`.

    They are the first ones of a pass of `one_epoch`. Training scores them for each checkpoint and
    the stage `evaluate` again, so that both report the same number.
    """
    limit = config.evaluate.max_samples
    return len(split) if limit is None else min(limit, len(split))


def batches_of_rank(samples: int, micro_batch_size: int, rank: int, size: int) -> list[range]:
    """Return this rank's micro batches of samples 0 … samples-1, dealt out round-robin.

    Every sample goes to exactly one rank.
    """
    starts = range(rank * micro_batch_size, samples, size * micro_batch_size)
    return [range(start, min(start + micro_batch_size, samples)) for start in starts]
