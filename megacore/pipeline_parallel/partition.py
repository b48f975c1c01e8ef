"""Partition of a model's layers into pipeline chunks, and parameters shared by several stages.

The slowest stage determines the speed, so layers are divided by cost. Embedding and head count as
well: a head over a large vocabulary costs as much as several layers. The gradients of parameters
shared by several stages are summed, and the norm counts them once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, permutations
from math import log
from typing import Literal

import numpy as np
import numpy.typing as npt

from megacore.config.model import ModelConfig
from megacore.config.run import RunConfig
from megacore.config.t5_stages import T5Stages
from megacore.config.train import Recompute
from megacore.errors import ParallelLayoutError
from megacore.observe.flops import TransformerShape, step_flops

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
"""Token embedding table; in a tied model also the weight of the output layer (Press and Wolf
2017)."""
ENCODER_BIAS = "encoder.relative_attention_bias.weight"
"""T5's relative bias, shared by all layers of the encoder (Raffel et al. 2019)."""
DECODER_BIAS = "decoder.relative_attention_bias.weight"
"""T5's relative bias, shared by all layers of the decoder."""
_ROUNDING = 1e-9
"""Tolerance for equal sums of costs, relative to the cost of the whole model."""


@dataclass(frozen=True)
class ModelChunk:
    """Part of the model that is on one stage."""

    layers: range
    """Transformer layers, by their number in the model; the encoder's for T5. May be empty in the
    chunk with the head."""
    has_embedding: bool
    """True if the chunk takes tokens, False if it takes the hidden states of the previous chunk."""
    has_head: bool
    """True if the chunk has the final norm and output layer and returns losses, False if it returns
    hidden states."""
    decoder_layers: range = range(0)
    """Layers of T5's decoder. A chunk has either these or the encoder's layers, or both if it is
    the whole model."""

    @property
    def has_decoder_embedding(self) -> bool:
        """True if the chunk takes the decoder's tokens (T5's first chunk with decoder layers)."""
        return len(self.decoder_layers) > 0 and self.decoder_layers.start == 0


def chunks_of(config: RunConfig, vocab_size: int) -> list[ModelChunk]:
    """Return the chunks of a configuration's model, in the order of its layers.

    Chunk c is on stage c mod pp. The cost of a layer is that of its matrix products: forward,
    backward and, if all layers are recomputed, the recomputation. The head's cost is that of the
    logits. The lookup of an embedding costs almost nothing.

    Args:
        config: configuration of the run; `config.parallel` has the stages, chunks per stage and
            kind of partition.
        vocab_size: entries of the vocabulary, without padding.

    Raises:
        ParallelLayoutError: `gpt_chunks` or `t5_chunks` refuses the partition.
    """
    model, parallel, train = config.model, config.parallel, config.train
    shape = TransformerShape.of(config, model.padded_vocab_size(vocab_size))
    recompute: Recompute = "none" if train.recompute_num_layers else train.recompute
    stages, style = parallel.pipeline_model_parallel_size, parallel.pipeline_partition
    layer_cost = step_flops(shape.part(1, 0, head=False), 1, recompute)
    head_cost = step_flops(shape.part(0, 0, head=True), 1, "none")
    if config.family == "t5":
        return t5_chunks(
            T5Stages(
                model.num_layers,
                model.decoder_layers,
                stages,
                parallel.pipeline_model_parallel_split_rank,
                style,
            ),
            encoder_cost=layer_cost,
            decoder_cost=step_flops(shape.part(0, 1, head=False), 1, recompute),
            head_cost=head_cost,
        )
    virtual = parallel.virtual_pipeline_model_parallel_size
    return gpt_chunks(
        model.num_layers, stages, virtual, style, layer_cost=layer_cost, head_cost=head_cost
    )


def gpt_chunks(
    num_layers: int,
    stages: int,
    chunks: int = 1,
    style: Literal["balanced", "uniform"] | Sequence[int] = "balanced",
    *,
    layer_cost: float = 1.0,
    head_cost: float = 0.0,
) -> list[ModelChunk]:
    """Return the chunks of a model with one stack of equal layers, in the order of the layers.

    Args:
        num_layers: number of layers of the model.
        stages: number of stages (pp).
        chunks: chunks per stage (v).
        style: balanced minimizes the cost of the most expensive stage, uniform gives every chunk
            the same number of layers, and a list holds the number of layers of each chunk.
        layer_cost: cost of one layer, in any unit.
        head_cost: cost of final norm, output layer and loss, in that unit; used only by balanced.

    Raises:
        ParallelLayoutError: there are fewer layers than chunks, uniform cannot divide the number of
            layers, or a list has another length or sum.
    """
    if isinstance(style, str):
        _check_layers(num_layers, stages, chunks, style)
        if style == "uniform":
            sizes: Sequence[int] = (num_layers // (stages * chunks),) * (stages * chunks)
        else:
            sizes = _balanced(num_layers, stages, chunks, layer_cost, head_cost)
    else:
        _check_list(style, num_layers, stages, chunks)
        sizes = style
    last = stages * chunks - 1
    ends = pairwise(accumulate(sizes, initial=0))
    return [
        ModelChunk(range(*bounds), index == 0, index == last) for index, bounds in enumerate(ends)
    ]


@lru_cache(maxsize=1024)  # a search for a layout asks for each division many times
def _balanced(
    num_layers: int,
    stages: int,
    chunks: int,
    layer_cost: float,
    head_cost: float,
) -> tuple[int, ...]:
    """Return the balanced number of equal layers of each chunk; arguments as in `gpt_chunks`."""
    return partition([layer_cost] * num_layers, stages, chunks=chunks, last=head_cost)


def t5_chunks(
    division: T5Stages,
    *,
    encoder_cost: float = 1.0,
    decoder_cost: float = 1.0,
    head_cost: float = 0.0,
) -> list[ModelChunk]:
    """Return the chunks of an encoder and a decoder, each with equal layers, one for each stage.

    If the split is not specified, the most expensive stage is as cheap as possible and, among
    several such splits, the stages are as even as possible (by the sum of squares).

    Args:
        division: layers of both stacks, stages, and the kind of division.
        encoder_cost: cost of one layer of the encoder, in any unit.
        decoder_cost: cost of one layer of the decoder, in that unit.
        head_cost: cost of final norm, output layer and loss.

    Raises:
        ParallelLayoutError: no division of this kind is possible.
    """
    problem = division.problem()
    if problem is not None:
        raise ParallelLayoutError(": ".join(part for part in problem if part))
    if division.stages == 1:
        return [ModelChunk(range(division.encoder), True, True, range(division.decoder))]

    def sizes(split: int) -> list[int]:
        last = [decoder_cost] * (division.decoder - 1) + [decoder_cost + head_cost]
        return [
            *_t5_sizes(division, [encoder_cost] * division.encoder, range(split)),
            *_t5_sizes(division, last, range(split, division.stages)),
        ]

    def rating(split: int) -> tuple[float, float, int]:
        layers = [encoder_cost] * split + [decoder_cost] * (division.stages - split)
        costs = [size * cost for size, cost in zip(sizes(split), layers, strict=True)]
        costs[-1] += head_cost
        return max(costs), sum(cost**2 for cost in costs), split

    split = min(division.splits(), key=rating)
    layer_counts = sizes(split)
    encoder, decoder = _ranges(layer_counts[:split]), _ranges(layer_counts[split:])
    return [
        *(ModelChunk(layers, layers.start == 0, False) for layers in encoder),
        *(
            ModelChunk(range(0), False, layers.stop == division.decoder, layers)
            for layers in decoder
        ),
    ]


def _t5_sizes(division: T5Stages, costs: Sequence[float], stages: range) -> Sequence[int]:
    """Return the number of layers of each stage of one stack, whose layers have these costs."""
    if isinstance(division.style, tuple):
        return division.style[stages.start : stages.stop]
    if division.style == "uniform":
        return [len(costs) // len(stages)] * len(stages)
    return partition(costs, len(stages))


def _ranges(sizes: Sequence[int]) -> list[range]:
    return [range(*bounds) for bounds in pairwise(accumulate(sizes, initial=0))]


def _check_layers(num_layers: int, stages: int, chunks: int, style: str) -> None:
    """Refuse a number of layers that cannot be divided, and suggest the nearest that can."""
    parts = stages * chunks
    into = f"parallel.pipeline_model_parallel_size {stages}"
    if chunks > 1:
        into += f" x parallel.virtual_pipeline_model_parallel_size {chunks} = {parts} chunks"
    if num_layers < parts:
        raise ParallelLayoutError(
            f"model.num_layers {num_layers} is less than {into}: each chunk needs a layer, use at "
            f"least {parts} layers or {_nearest_layouts(num_layers, stages, chunks)}"
        )
    if style == "uniform" and num_layers % parts:
        below = num_layers // parts * parts
        raise ParallelLayoutError(
            f"model.num_layers {num_layers} is not a multiple of {into}, which "
            f"parallel.pipeline_partition uniform needs: use {below} or {below + parts} layers, "
            f"{_nearest_layouts(num_layers, stages, chunks)}, or balanced"
        )


def _nearest_layouts(num_layers: int, stages: int, chunks: int) -> str:
    """Return the two nearest numbers of chunks that divide the layers.

    The form is `pipeline 5 or pipeline 2`.
    """
    possible = [
        (pipeline, virtual)
        for pipeline in range(1, num_layers + 1)
        for virtual in range(1, num_layers // pipeline + 1 if chunks > 1 and pipeline > 1 else 2)
        if num_layers % (pipeline * virtual) == 0
    ]
    possible.sort(key=lambda sizes: abs(log(sizes[0] / stages)) + abs(log(sizes[1] / chunks)))
    return " or ".join(
        f"pipeline {pipeline}{f' x virtual {virtual}' if chunks > 1 else ''}"
        for pipeline, virtual in possible[:2]
    )


def _check_list(sizes: Sequence[int], num_layers: int, stages: int, chunks: int) -> None:
    """Check a list of every chunk's number of layers.

    Only the chunk with the head may have no layers.
    """
    parts, name = stages * chunks, f"parallel.pipeline_partition {list(sizes)}"
    if len(sizes) != parts:
        raise ParallelLayoutError(
            f"{name} has {len(sizes)} entries for parallel.pipeline_model_parallel_size {stages} x "
            f"parallel.virtual_pipeline_model_parallel_size {chunks} = {parts} chunks: give {parts}"
        )
    if min((*sizes[:-1], sizes[-1] + 1)) < 1:
        raise ParallelLayoutError(
            f"{name} has a chunk of {min(sizes)} layers: give each at least 1, or 0 only to the "
            "last, which has the head"
        )
    if sum(sizes) != num_layers:
        raise ParallelLayoutError(
            f"{name} adds up to {sum(sizes)} layers and model.num_layers is {num_layers}: make it "
            "add up to that"
        )


def copied_parameters(
    chunks: Sequence[ModelChunk], stages: int, model: ModelConfig
) -> dict[str, tuple[int, ...]]:
    """Return the stages of each parameter that several stages hold, by its global name.

    Args:
        chunks: chunks of the whole model, by their number in it.
        stages: number of stages (pp); chunk c is on stage c mod pp.
        model: the architecture.
    """
    holders: dict[str, list[int]] = {}
    for number, chunk in enumerate(chunks):
        for name in _candidates(model, chunk):
            holders.setdefault(name, []).append(number % stages)
    stages_by_name = {name: tuple(sorted(set(numbers))) for name, numbers in holders.items()}
    return {name: numbers for name, numbers in stages_by_name.items() if len(numbers) > 1}


def shared_stages(config: RunConfig, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Return every set of stages that share parameters, for the groups of a mesh.

    Raises ParallelLayoutError if the model cannot be divided.
    """
    stages = config.parallel.pipeline_model_parallel_size
    copied = copied_parameters(chunks_of(config, vocab_size), stages, config.model)
    return tuple(sorted(set(copied.values())))


def _candidates(model: ModelConfig, chunk: ModelChunk) -> Iterator[str]:
    """Yield the parameters of a chunk that other chunks may share."""
    tied = not model.untie_embeddings_and_output_weights
    if chunk.has_embedding or chunk.has_decoder_embedding or (chunk.has_head and tied):
        yield WORD_EMBEDDINGS
    if model.position_embedding_type == "relative":
        if chunk.layers:
            yield ENCODER_BIAS
        if chunk.decoder_layers:
            yield DECODER_BIAS


def partition(
    costs: Sequence[float], stages: int, *, chunks: int = 1, last: float = 0.0
) -> tuple[int, ...]:
    """Divide layers over `stages` x `chunks` parts, and return the number of layers of each.

    Part c is on stage c mod `stages`. The largest stage's cost is minimal; then the stages are as
    even as possible (by the sum of squares); then the same criteria apply to the parts. Among equal
    divisions, earlier parts have fewer layers, because earlier stages keep the activations of more
    micro batches. With one chunk per stage the result is exact. With several, no move of one layer
    between two parts improves it, which is also exact if all layers cost the same.

    Args:
        costs: cost of each layer; there are at least as many as parts.
        stages: number of stages (pp).
        chunks: parts per stage (v).
        last: cost of the last part in addition to its layers; if positive, the last part may have
            no layers.
    """
    assert len(costs) >= stages * chunks, "each part needs a layer"
    problem = _Problem.of(costs, stages, chunks, last)
    return problem.consecutive() if chunks == 1 else problem.improved(problem.spread())


@dataclass(frozen=True)
class _Problem:
    """Costs to divide, relative to the cost of the whole model."""

    sums: tuple[float, ...]
    """Cost of the first 0, 1, 2, ... layers."""
    stages: int
    extra: tuple[float, ...]
    """Cost of each part in addition to its layers."""
    least: tuple[int, ...]
    """Minimum number of layers of each part."""

    @classmethod
    def of(cls, costs: Sequence[float], stages: int, chunks: int, last: float) -> "_Problem":
        """Return the problem that `partition` describes."""
        parts, total = stages * chunks, (sum(costs) + last) or 1.0
        extra, least = [0.0] * parts, [1] * parts
        extra[-1] += last / total
        if last > 0:
            least[-1] = 0
        sums = tuple(accumulate((cost / total for cost in costs), initial=0.0))
        return cls(sums, stages, tuple(extra), tuple(least))

    def consecutive(self) -> tuple[int, ...]:
        """Return the layers per part that minimize the largest part, then the sum of squares.

        Uses dynamic programming from the last part to the first: `best[i]` is for layers i to the
        end in the current and the following parts.
        """
        sums = np.array(self.sums)
        count = np.arange(len(sums))[None, :] - np.arange(len(sums))[:, None]
        segment = sums[None, :] - sums[:, None]

        def costs(part: int, limit: float) -> npt.NDArray[np.float64]:
            """Return the cost of a part with layers i to j - 1 at [i, j]; infinite if invalid."""
            cost = segment + self.extra[part]
            return np.where((count >= self.least[part]) & (cost <= limit), cost, np.inf)

        terminal = np.where(np.arange(len(sums)) == len(sums) - 1, 0.0, np.inf)
        best = terminal
        for part in reversed(range(len(self.extra))):
            best = np.maximum(costs(part, np.inf), best[None, :]).min(axis=1)
        limit = best[0] + _ROUNDING
        squares = [terminal]
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
        """Return the number of layers of each part as if all layers cost the same.

        Each layer is added to the smallest part of the smallest stage.
        """
        layers, sizes = len(self.sums) - 1, list(self.least)
        for _ in range(layers - sum(sizes)):
            parts = [
                size * self.sums[-1] / layers + extra
                for size, extra in zip(sizes, self.extra, strict=True)
            ]
            stages = [sum(parts[stage :: self.stages]) for stage in range(self.stages)]
            sizes[
                min(
                    range(len(sizes)),
                    key=lambda part: (stages[part % self.stages], parts[part], -part),
                )
            ] += 1
        return tuple(sizes)

    def improved(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Move one layer at a time from part to part, as long as that improves the rating.

        The parts in between are shifted.
        """
        while (better := min(self._neighbours(sizes), key=self._rating)) != sizes:
            sizes = better
        return sizes

    def _neighbours(self, sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield the division itself, and every division that one move of a layer produces."""
        yield sizes
        for giver, taker in permutations(range(len(sizes)), 2):
            if sizes[giver] > self.least[giver]:
                yield tuple(
                    size - (part == giver) + (part == taker) for part, size in enumerate(sizes)
                )

    def _rating(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the rating of a division as values in order of importance; smaller is better."""
        ends = accumulate(sizes, initial=0)
        parts = [
            self.sums[end] - self.sums[begin] + extra
            for (begin, end), extra in zip(pairwise(ends), self.extra, strict=True)
        ]
        stages = [sum(parts[stage :: self.stages]) for stage in range(self.stages)]
        values = (
            max(stages),
            sum(cost**2 for cost in stages),
            max(parts),
            sum(cost**2 for cost in parts),
        )
        return *(round(value / _ROUNDING) for value in values), *sizes
