"""Division of layers over chunks, compared with brute force, and refusals with the numbers."""

import itertools
from collections.abc import Iterator, Sequence

import pytest

from megacore.config.t5_stages import T5Stages
from megacore.errors import ParallelLayoutError
from megacore.pipeline_parallel.partition import (
    ModelChunk,
    chunks_of,
    gpt_chunks,
    partition,
    t5_chunks,
)
from tests._tiny import tiny_config


def divisions(layers: int, parts: int, *, empty_last: bool) -> Iterator[tuple[int, ...]]:
    """Yield every division of `layers` layers over `parts` parts."""
    for bounds in itertools.combinations_with_replacement(range(layers + 1), parts - 1):
        sizes = tuple(end - begin for begin, end in itertools.pairwise((0, *bounds, layers)))
        if min(sizes[:-1], default=1) >= 1 and sizes[-1] >= (0 if empty_last and parts > 1 else 1):
            yield sizes


def stage_costs(
    costs: Sequence[float], sizes: Sequence[int], stages: int, last: float
) -> tuple[list[float], list[float]]:
    """Return the cost of every stage and of every part."""
    ends = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    parts = [sum(costs[begin:end]) for begin, end in ends]
    parts[-1] += last
    return [sum(parts[stage::stages]) for stage in range(stages)], parts


def sizes_of(chunks: Sequence[ModelChunk]) -> tuple[int, ...]:
    return tuple(len(chunk.layers) for chunk in chunks)


@pytest.mark.parametrize("last", [0.0, 0.6, 2.7, 9.0])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_unequal_layers_are_divided_as_well_as_brute_force_does(stages: int, last: float) -> None:
    costs = [1.0, 2.5, 0.5, 3.0, 1.0, 1.0, 2.0, 0.25]
    sizes = partition(costs, stages, last=last)
    best = min(
        max(stage_costs(costs, each, stages, last)[0])
        for each in divisions(len(costs), stages, empty_last=last > 0)
    )
    assert max(stage_costs(costs, sizes, stages, last)[0]) == pytest.approx(best)


@pytest.mark.parametrize("head", [0.0, 0.5, 1.0, 2.7, 6.2])
@pytest.mark.parametrize(
    ("layers", "stages", "chunks"),
    [(4, 2, 2), (7, 2, 2), (9, 2, 3), (9, 3, 2), (12, 3, 2), (10, 2, 4)],
)
def test_interleaved_stages_are_as_even_as_brute_force_finds(
    layers: int, stages: int, chunks: int, head: float
) -> None:
    sizes = sizes_of(gpt_chunks(layers, stages, chunks, layer_cost=1.0, head_cost=head))

    def largest(each: Sequence[int]) -> float:
        return round(max(stage_costs([1.0] * layers, each, stages, head)[0]), 9)

    assert largest(sizes) == min(
        map(largest, divisions(layers, stages * chunks, empty_last=head > 0))
    )


@pytest.mark.parametrize(
    ("layers", "stages", "chunks", "head", "sizes"),
    [
        (4, 1, 1, 2.7, (4,)),
        (4, 2, 1, 0.0, (2, 2)),
        (4, 2, 1, 2.7, (3, 1)),
        (4, 2, 1, 4.6, (4, 0)),
        (4, 2, 2, 2.7, (1, 1, 2, 0)),
        (4, 4, 1, 0.5, (1, 1, 1, 1)),
        (10, 4, 1, 0.0, (2, 2, 3, 3)),
        (24, 8, 1, 4.1, (3, 3, 3, 3, 4, 4, 4, 0)),
        (24, 4, 2, 4.1, (3, 3, 3, 3, 4, 4, 4, 0)),
        (12, 2, 3, 0.0, (2, 2, 2, 2, 2, 2)),
    ],
)
def test_balanced_partition_counts_the_head(
    layers: int, stages: int, chunks: int, head: float, sizes: tuple[int, ...]
) -> None:
    assert sizes_of(gpt_chunks(layers, stages, chunks, head_cost=head)) == sizes


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e15])
def test_the_unit_of_costs_does_not_matter(unit: float) -> None:
    chunks = gpt_chunks(22, 3, 2, layer_cost=unit, head_cost=2.7 * unit)
    assert chunks == gpt_chunks(22, 3, 2, head_cost=2.7)


@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (3, 3)])
def test_chunks_cover_the_model_in_order(stages: int, chunks: int) -> None:
    model = gpt_chunks(12, stages, chunks, head_cost=2.0)
    assert len(model) == stages * chunks
    assert [layer for chunk in model for layer in chunk.layers] == list(range(12))
    assert [chunk.has_embedding for chunk in model] == [True] + [False] * (stages * chunks - 1)
    assert [chunk.has_head for chunk in model] == [False] * (stages * chunks - 1) + [True]


def test_interleaved_stages_of_unequal_layers_are_nearly_even() -> None:
    costs = [1.0] * 16 + [1.5] * 16
    loads, _ = stage_costs(costs, partition(costs, 4, chunks=2, last=3.0), 4, 3.0)
    assert max(loads) - sum(loads) / 4 <= 0.5


def test_uniform_gives_every_chunk_the_same_number() -> None:
    assert sizes_of(gpt_chunks(12, 2, 3, "uniform", head_cost=50.0)) == (2,) * 6


def test_listed_sizes_are_used_unchanged() -> None:
    assert sizes_of(gpt_chunks(12, 2, 2, (1, 5, 6, 0))) == (1, 5, 6, 0)


@pytest.mark.parametrize(
    ("layers", "stages", "chunks", "style", "message"),
    [
        (
            10,
            4,
            1,
            "uniform",
            (
                r"num_layers 10 .*size 4, .*uniform needs: use 8 or 12 layers, pipeline 5 or "
                r"pipeline 2"
            ),
        ),
        (
            10,
            2,
            2,
            "uniform",
            r"10 .*size 2 x .*size 2 = 4 chunks.*8 or 12 layers, pipeline 2 x virtual 1 or",
        ),
        (
            3,
            4,
            1,
            "balanced",
            r"num_layers 3 is less than .* 4: .* at least 4 layers or pipeline 3 or pipeline 1",
        ),
        (3, 4, 1, "uniform", r"num_layers 3 is less than .* 4: .* at least 4 layers"),
        (8, 2, 2, (4, 4), r"\[4, 4\] has 2 entries for .* 2 x .* 2 = 4 chunks: give 4"),
        (8, 2, 1, (3, 4), r"\[3, 4\] adds up to 7 layers and model\.num_layers is 8"),
        (8, 2, 1, (9, -1), r"\[9, -1\] has a chunk of -1 layers"),
        (8, 2, 1, (0, 8), r"\[0, 8\] has a chunk of 0 layers"),
    ],
)
def test_impossible_divisions_are_refused_with_the_numbers(
    layers: int, stages: int, chunks: int, style: str | tuple[int, ...], message: str
) -> None:
    with pytest.raises(ParallelLayoutError, match=message):
        gpt_chunks(layers, stages, chunks, style)  # type: ignore[arg-type]


def test_128_layers_over_64_chunks_are_balanced() -> None:
    sizes = sizes_of(gpt_chunks(128, 16, 4, head_cost=2.5))
    loads, parts = stage_costs([1.0] * 128, sizes, 16, 2.5)
    assert (max(loads), max(parts)) == (9.0, 3.0)


def chunks_with(
    stages: int,
    chunks: int = 1,
    style: object = "balanced",
    *,
    layers: int = 6,
    recompute: str = "none",
    recompute_num_layers: int | None = None,
) -> list[ModelChunk]:
    train = {"recompute": recompute, "recompute_num_layers": recompute_num_layers}
    config = tiny_config(num_layers=layers, train=train)
    values = {
        "pipeline_model_parallel_size": stages,
        "virtual_pipeline_model_parallel_size": chunks,
        "pipeline_partition": style,
    }
    return chunks_of(
        config.model_copy(update={"parallel": config.parallel.model_copy(update=values)}), 512
    )


def test_layers_are_divided_by_their_operations() -> None:
    # A layer has 24 h^2 + 4 s h = 26,624 operations per token, the head 2 h v = 32,768, which is
    # 1.23 layers.
    assert sizes_of(chunks_with(1)) == (6,)
    assert sizes_of(chunks_with(2)) == (4, 2)
    assert sizes_of(chunks_with(3)) == (2, 3, 1)
    assert sizes_of(chunks_with(2, chunks=2)) == (2, 2, 2, 0)
    assert sizes_of(chunks_with(2, style="uniform")) == (3, 3)
    assert sizes_of(chunks_with(2, style=(5, 1))) == (5, 1)


def test_layers_that_recompute_cost_more() -> None:
    # Their forward pass is computed twice: the head costs 0.92 of a layer.
    assert sizes_of(chunks_with(2, layers=4)) == (3, 1)
    assert sizes_of(chunks_with(2, layers=4, recompute="full")) == (2, 2)
    # Of one layer in each chunk only, all chunks recompute as much.
    some = chunks_with(2, layers=4, recompute="full", recompute_num_layers=1)
    assert sizes_of(some) == (3, 1)


def both_stacks(chunks: Sequence[ModelChunk]) -> list[tuple[int, int]]:
    return [(len(chunk.layers), len(chunk.decoder_layers)) for chunk in chunks]


@pytest.mark.parametrize("head", [0.0, 0.6, 5.0])
@pytest.mark.parametrize("decoder_cost", [0.3, 1.0, 1.7])
@pytest.mark.parametrize(("encoder", "decoder"), [(6, 6), (2, 9), (7, 1)])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_two_stacks_are_divided_as_well_as_brute_force_does(
    encoder: int, decoder: int, stages: int, decoder_cost: float, head: float
) -> None:
    t5_stages = T5Stages(encoder, decoder, stages)
    sizes = both_stacks(t5_chunks(t5_stages, decoder_cost=decoder_cost, head_cost=head))

    def costs(split: int) -> Iterator[float]:
        for first in divisions(encoder, split, empty_last=False):
            for second in divisions(decoder, stages - split, empty_last=False):
                loads = [*first, *(size * decoder_cost for size in second)]
                loads[-1] += head
                yield max(loads)

    best = min(cost for split in range(1, stages) for cost in costs(split))
    loads = [first + second * decoder_cost for first, second in sizes]
    loads[-1] += head
    assert max(loads) == pytest.approx(best)
    assert all((first == 0) != (second == 0) for first, second in sizes)


def test_stages_of_two_stacks_are_even_among_equally_slow_divisions() -> None:
    """The head's stage is the slowest for both splits: 11, after 3, 3, 1, 1 or 2, 2, 2, 1."""
    assert both_stacks(t5_chunks(T5Stages(6, 3, 5), head_cost=10.0)) == [
        *[(2, 0)] * 3,
        (0, 2),
        (0, 1),
    ]


def test_a_stage_of_t5_has_one_stack_and_the_first_of_each_embeds() -> None:
    assert t5_chunks(T5Stages(5, 4, 4, split=3)) == [
        ModelChunk(range(1), True, False),
        ModelChunk(range(1, 3), False, False),
        ModelChunk(range(3, 5), False, False),
        ModelChunk(range(0), False, True, range(4)),
    ]
    chunks = t5_chunks(T5Stages(2, 4, 3, split=1))
    assert [chunk.has_decoder_embedding for chunk in chunks] == [False, True, False]
    (whole,) = t5_chunks(T5Stages(2, 3, 1))
    assert whole == ModelChunk(range(2), True, True, range(3))
    assert whole.has_decoder_embedding


def test_t5_takes_uniform_and_listed_stages() -> None:
    assert both_stacks(t5_chunks(T5Stages(6, 3, 3, style="uniform"))) == [(3, 0), (3, 0), (0, 3)]
    assert both_stacks(t5_chunks(T5Stages(4, 4, 3, split=1, style="uniform"))) == [
        (4, 0),
        (0, 2),
        (0, 2),
    ]
    assert both_stacks(t5_chunks(T5Stages(5, 4, 4, style=(2, 3, 3, 1)))) == [
        (2, 0),
        (3, 0),
        (0, 3),
        (0, 1),
    ]


def test_t5_stages_that_cannot_be_uniform_are_refused() -> None:
    with pytest.raises(
        ParallelLayoutError, match=r"5 and .*num_decoder_layers 3 cannot be divided evenly over"
    ):
        t5_chunks(T5Stages(5, 3, 3, style="uniform"))
