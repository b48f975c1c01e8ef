"""Which layers each chunk of a pipeline holds.

The slowest stage sets the pace of all, so layers are divided by what they cost, embedding and head counted: a head
over a large vocabulary costs as much as several layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import log
from typing import Literal

from megacore.config.run import RunConfig
from megacore.config.t5_stages import T5Stages
from megacore.config.train import Recompute
from megacore.errors import ParallelLayoutError
from megacore.observe.flops import TransformerShape, step_flops
from megacore.pipeline_parallel.balance import partition
from megacore.tokenizer import padded_vocab_size


@dataclass(frozen=True)
class ModelChunk:
    """A part of the model that is on one stage as a whole."""

    layers: range
    """Transformer layers, by their number in the model; of T5, the encoder's. May be empty beside the head."""
    has_embedding: bool
    """Whether it takes tokens; else the hidden states of the chunk before."""
    has_head: bool
    """Whether it has the final norm and the output layer, and gives losses; else hidden states."""
    decoder_layers: range = range(0)
    """Layers of T5's decoder; a chunk has these or the encoder's, and both only when it is the whole model."""

    @property
    def has_decoder_embedding(self) -> bool:
        """Whether it takes the decoder's tokens: T5's first chunk with layers of the decoder."""
        return len(self.decoder_layers) > 0 and self.decoder_layers.start == 0


def chunks_of(config: RunConfig, vocab_size: int) -> list[ModelChunk]:
    """The chunks of a configuration's model by their number in the model: chunk c is on stage c mod pp.

    A layer counts with its matrix products, forward, backward and, where all layers do that, recomputed; the head
    with the logits'; looking up an embedding costs next to nothing.

    Args:
        config: the run; `config.parallel` says stages, chunks per stage and the kind of partition.
        vocab_size: entries of the vocabulary, without padding.

    Raises:
        ParallelLayoutError: what `gpt_chunks` or `t5_chunks` refuses.
    """
    model, parallel, train = config.model, config.parallel, config.train
    padded = padded_vocab_size(vocab_size, model.make_vocab_size_divisible_by)
    shape = TransformerShape.of(config, padded)
    recompute: Recompute = "none" if train.recompute_num_layers else train.recompute
    stages, style = parallel.pipeline_model_parallel_size, parallel.pipeline_partition
    layer_cost = step_flops(shape.part(1, 0, head=False), 1, recompute)
    head_cost = step_flops(shape.part(0, 0, head=True), 1, "none")
    if config.family == "t5":
        return t5_chunks(
            T5Stages(
                model.num_layers, model.decoder_layers, stages, parallel.pipeline_model_parallel_split_rank, style
            ),
            encoder_cost=layer_cost,
            decoder_cost=step_flops(shape.part(0, 1, head=False), 1, recompute),
            head_cost=head_cost,
        )
    virtual = parallel.virtual_pipeline_model_parallel_size
    return gpt_chunks(model.num_layers, stages, virtual, style, layer_cost=layer_cost, head_cost=head_cost)


def gpt_chunks(
    num_layers: int,
    stages: int,
    chunks: int = 1,
    style: Literal["balanced", "uniform"] | Sequence[int] = "balanced",
    *,
    layer_cost: float = 1.0,
    embedding_cost: float = 0.0,
    head_cost: float = 0.0,
) -> list[ModelChunk]:
    """The chunks of a model with one list of equal layers, by their number in the model.

    Args:
        num_layers: of the model.
        stages: pp.
        chunks: per stage (v).
        style: balanced minimises the largest stage's cost, uniform gives every chunk the same number of layers, a
            list says each chunk's number.
        layer_cost: of one layer, in any unit.
        embedding_cost: of the embedding, in that unit; counts for balanced alone.
        head_cost: of final norm, output layer and loss.

    Raises:
        ParallelLayoutError: fewer layers than chunks, a number of layers that uniform cannot divide, or a list that
            has another length or sum.
    """
    if isinstance(style, str):
        _check_layers(num_layers, stages, chunks, style)
        if style == "uniform":
            sizes: Sequence[int] = (num_layers // (stages * chunks),) * (stages * chunks)
        else:
            costs = [layer_cost] * num_layers
            parts = partition([costs], stages, chunks=chunks, first=embedding_cost, last=head_cost)
            sizes = [len(layers) for (layers,) in parts]
    else:
        _check_list(style, num_layers, stages, chunks)
        sizes = style
    last = stages * chunks - 1
    ends = pairwise(accumulate(sizes, initial=0))
    return [ModelChunk(range(*bounds), index == 0, index == last) for index, bounds in enumerate(ends)]


def t5_chunks(
    asked: T5Stages, *, encoder_cost: float = 1.0, decoder_cost: float = 1.0, head_cost: float = 0.0
) -> list[ModelChunk]:
    """The chunks of an encoder and a decoder of equal layers each, by their stage.

    Where the split is left open, it is the one with the cheapest largest stage, and among those the one whose stages
    are most even (by the sum of squares).

    Args:
        asked: layers of both stacks, stages, and how they are divided.
        encoder_cost: of one layer of the encoder, in any unit.
        decoder_cost: of one layer of the decoder, in that unit.
        head_cost: of final norm, output layer and loss.

    Raises:
        ParallelLayoutError: no division of this kind can work.
    """
    problem = asked.problem()
    if problem is not None:
        raise ParallelLayoutError(": ".join(part for part in problem if part))
    if asked.stages == 1:
        return [ModelChunk(range(asked.encoder), True, True, range(asked.decoder))]

    def sizes(split: int) -> list[int]:
        last = [decoder_cost] * (asked.decoder - 1) + [decoder_cost + head_cost]
        return [
            *_t5_sizes(asked, [encoder_cost] * asked.encoder, range(split)),
            *_t5_sizes(asked, last, range(split, asked.stages)),
        ]

    def rating(split: int) -> tuple[float, float, int]:
        layers = [encoder_cost] * split + [decoder_cost] * (asked.stages - split)
        costs = [size * cost for size, cost in zip(sizes(split), layers, strict=True)]
        costs[-1] += head_cost
        return max(costs), sum(cost**2 for cost in costs), split

    split = min(asked.splits(), key=rating)
    found = sizes(split)
    encoder, decoder = _ranges(found[:split]), _ranges(found[split:])
    return [
        *(ModelChunk(layers, layers.start == 0, False) for layers in encoder),
        *(ModelChunk(range(0), False, layers.stop == asked.decoder, layers) for layers in decoder),
    ]


def _t5_sizes(asked: T5Stages, costs: Sequence[float], stages: range) -> Sequence[int]:
    """Layers of each of the stages of one stack, whose layers have these costs."""
    if isinstance(asked.style, tuple):
        return asked.style[stages.start : stages.stop]
    if asked.style == "uniform":
        return [len(costs) // len(stages)] * len(stages)
    return [len(layers) for (layers,) in partition([costs], len(stages))]


def _ranges(sizes: Sequence[int]) -> list[range]:
    return [range(*bounds) for bounds in pairwise(accumulate(sizes, initial=0))]


def _check_layers(num_layers: int, stages: int, chunks: int, style: str) -> None:
    """Refuse what cannot be divided, with the nearest that can."""
    parts = stages * chunks
    into = f"parallel.pipeline_model_parallel_size {stages}"
    if chunks > 1:
        into += f" x parallel.virtual_pipeline_model_parallel_size {chunks} = {parts} chunks"
    if num_layers < parts:
        raise ParallelLayoutError(
            f"model.num_layers {num_layers} is less than {into}: each chunk needs a layer, use at least {parts} layers "
            f"or {_nearest_layouts(num_layers, stages, chunks)}"
        )
    if style == "uniform" and num_layers % parts:
        below = num_layers // parts * parts
        raise ParallelLayoutError(
            f"model.num_layers {num_layers} is not a multiple of {into}, which parallel.pipeline_partition uniform "
            f"needs: use {below} or {below + parts} layers, {_nearest_layouts(num_layers, stages, chunks)}, or "
            "balanced"
        )


def _nearest_layouts(num_layers: int, stages: int, chunks: int) -> str:
    """The two nearest numbers of chunks that divide the layers, as `pipeline 5 or pipeline 2`."""
    possible = [
        (pipeline, virtual)
        for pipeline in range(1, num_layers + 1)
        for virtual in range(1, num_layers // pipeline + 1 if chunks > 1 and pipeline > 1 else 2)
        if num_layers % (pipeline * virtual) == 0
    ]
    possible.sort(key=lambda sizes: abs(log(sizes[0] / stages)) + abs(log(sizes[1] / chunks)))
    return " or ".join(
        f"pipeline {pipeline}{f' x virtual {virtual}' if chunks > 1 else ''}" for pipeline, virtual in possible[:2]
    )


def _check_list(sizes: Sequence[int], num_layers: int, stages: int, chunks: int) -> None:
    """A list says every chunk's layers; only beside the head there may be none."""
    parts, name = stages * chunks, f"parallel.pipeline_partition {list(sizes)}"
    if len(sizes) != parts:
        raise ParallelLayoutError(
            f"{name} has {len(sizes)} entries for parallel.pipeline_model_parallel_size {stages} x "
            f"parallel.virtual_pipeline_model_parallel_size {chunks} = {parts} chunks: give {parts}"
        )
    if min((*sizes[:-1], sizes[-1] + (parts > 1))) < 1:
        raise ParallelLayoutError(
            f"{name} has a chunk of {min(sizes)} layers: give each at least 1, or 0 to the last alone, beside the head"
        )
    if sum(sizes) != num_layers:
        raise ParallelLayoutError(
            f"{name} adds up to {sum(sizes)} layers and model.num_layers is {num_layers}: make it add up to that"
        )
