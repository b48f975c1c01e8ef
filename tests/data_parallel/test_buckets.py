"""Assignment of parameters to buckets, and division of buckets into shards."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from megacore.data_parallel.buckets import ALIGNMENT, BucketLayout, plan_buckets

SIZES = st.lists(st.integers(1, 100), min_size=1, max_size=12)


def named(sizes: list[int]) -> dict[str, int]:
    return {f"p{i}": size for i, size in enumerate(sizes)}


def shards(layout: BucketLayout) -> list[range]:
    part = layout.length // layout.shards
    return [range(rank * part, (rank + 1) * part) for rank in range(layout.shards)]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.floats(1e-4, 1e-2))
def test_buckets_contain_each_parameter_once_in_reverse_order_within_the_limit(
    sizes: list[int], megabytes: float
) -> None:
    parameters = named(sizes)
    buckets = plan_buckets(parameters, megabytes)
    assert [item for bucket in buckets for item in bucket.items()] == list(
        reversed(parameters.items())
    )
    for bucket in buckets:
        assert len(bucket) == 1 or sum(bucket.values()) * 4 <= megabytes * 2**20
    for first, second in pairwise(buckets):
        assert (sum(first.values()) + next(iter(second.values()))) * 4 > megabytes * 2**20


@given(SIZES, st.integers(1, 5))
def test_shards_contain_every_element_once_and_cut_at_multiples_of_the_alignment(
    sizes: list[int], count: int
) -> None:
    layout = BucketLayout(named(sizes), count)
    assert layout.length % (count * ALIGNMENT) == 0
    assert layout.length - sum(sizes) < ALIGNMENT * (len(sizes) + count)
    seen: dict[str, list[int]] = {name: [] for name in layout.sizes}
    for shard in shards(layout):
        for piece in layout.within(shard):
            assert piece.offset + piece.length <= len(shard)
            assert piece.start % ALIGNMENT == (shard.start + piece.offset) % ALIGNMENT == 0
            unsharded = next(p for p in layout.pieces if p.name == piece.name)
            assert shard.start + piece.offset == unsharded.offset + piece.start
            seen[piece.name] += range(piece.start, piece.start + piece.length)
    assert seen == {name: list(range(size)) for name, size in layout.sizes.items()}


@given(SIZES, st.integers(1, 4), st.data())
def test_runs_cover_exactly_the_chosen_parameters(
    sizes: list[int], count: int, data: st.DataObject
) -> None:
    layout = BucketLayout(named(sizes), count)
    chosen = data.draw(st.sets(st.sampled_from(sorted(layout.sizes))))
    for shard in shards(layout):
        covered = [
            index for run in layout.runs(shard, chosen) for index in range(run.start, run.stop)
        ]
        assert len(covered) == len(set(covered))
        for piece in layout.within(shard):
            elements = set(range(piece.offset, piece.offset + piece.length))
            assert elements <= set(covered) if piece.name in chosen else not elements & set(covered)


def test_adjacent_parameters_form_one_run() -> None:
    layout = BucketLayout({"a": 5, "b": 40, "c": 7, "d": 3})
    assert list(layout.runs(range(layout.length), {"a", "b", "d"})) == [slice(0, 56), slice(80, 83)]
