"""Rank arithmetic: Megatron's order, and groups that partition the world."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacore.errors import ParallelLayoutError
from megacore.parallel.rank_layout import AXES, Coordinate, RankLayout

sizes = st.integers(1, 4)
layouts = st.builds(RankLayout, data=sizes, pipeline=sizes, tensor=sizes, context=sizes)


def test_groups_equal_megatrons_documented_example() -> None:
    # Megatron-LM's documented example: 16 ranks, tensor 2, pipeline 4.
    layout = RankLayout.of_world(16, tensor=2, pipeline=4)
    assert layout.data == 2
    assert layout.groups("tensor") == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
        [8, 9],
        [10, 11],
        [12, 13],
        [14, 15],
    ]
    assert layout.groups("data") == [
        [0, 2],
        [1, 3],
        [4, 6],
        [5, 7],
        [8, 10],
        [9, 11],
        [12, 14],
        [13, 15],
    ]
    assert layout.groups("pipeline") == [
        [0, 4, 8, 12],
        [1, 5, 9, 13],
        [2, 6, 10, 14],
        [3, 7, 11, 15],
    ]
    assert layout.groups("pipeline", "tensor")[0] == [0, 1, 4, 5, 8, 9, 12, 13]


def test_context_parallel_ranks_lie_between_those_of_tensor_and_data() -> None:
    # Megatron-LM's order tp-cp-dp-pp.
    layout = RankLayout.of_world(16, tensor=2, context=2, pipeline=2)
    assert layout.data == 2
    assert layout.groups("context")[:3] == [[0, 2], [1, 3], [4, 6]]
    assert layout.groups("data")[:3] == [[0, 4], [1, 5], [2, 6]]
    assert layout.groups("data", "context")[:2] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert layout.groups("pipeline")[0] == [0, 8]


@given(layouts)
def test_coordinates_and_ranks_are_inverse(layout: RankLayout) -> None:
    coordinates = [layout.coordinate(rank) for rank in range(layout.world_size)]
    assert [layout.rank(coordinate) for coordinate in coordinates] == list(range(layout.world_size))
    assert coordinates == [
        Coordinate(*place) for place in itertools.product(*map(range, layout.shape))
    ]


@given(layouts, st.sets(st.sampled_from(AXES)))
def test_groups_partition_the_world_and_share_the_other_coordinates(
    layout: RankLayout, axes: set[str]
) -> None:
    groups = layout.groups(*axes)
    assert sorted(itertools.chain(*groups)) == list(range(layout.world_size))
    for group in groups:
        assert group == sorted(group)
        places = [layout.coordinate(rank) for rank in group]
        for axis in AXES:
            length = getattr(layout, axis) if axis in axes else 1
            assert len({getattr(place, axis) for place in places}) == length


def test_ranks_that_do_not_divide_are_refused_with_the_numbers() -> None:
    with pytest.raises(
        ParallelLayoutError, match=r"10 ranks .* tensor 2 x pipeline 2 = 4 .* start 8 ranks"
    ):
        RankLayout.of_world(10, tensor=2, pipeline=2)
    for world_size, pipeline in ((4, 0), (0, 2)):
        with pytest.raises(ParallelLayoutError, match=f"{world_size} ranks .* pipeline {pipeline}"):
            RankLayout.of_world(world_size, pipeline=pipeline)
    with pytest.raises(ParallelLayoutError, match="tensor parallel size is 0"):
        RankLayout(tensor=0)
