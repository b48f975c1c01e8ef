"""Contents of gradient buckets, the time of their reduction, and the result."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from megacore.config.parallel import ParallelConfig
from megacore.data_parallel.grad_sync import GradSync
from megacore.data_parallel.sharding import ALIGNMENT, BucketLayout, plan_buckets
from megacore.parallel.mesh import SINGLE_RANK, ProcessMesh
from tests.data_parallel import _ranks
from tests.data_parallel._modules import Mixed, total_gradients

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


Results = list[dict[str, Any]]
SERIAL = ProcessMesh.serial()
TOLERANCE = {"fp32": 1e-6, "bf16": 2.0**-7}
"""Absolute tolerance of sums below 1: bf16 rounds each summand and each sum to 8 bits."""


def serial_sync(model: Mixed) -> GradSync:
    return GradSync(dict(model.named_parameters()), SERIAL, ParallelConfig())


def test_fp32_gradients_are_views_of_flat_buffers_without_a_copy() -> None:
    model = Mixed()
    sync = serial_sync(model)
    _ranks.backward(model, sync, [0])
    sync.finish()
    (bucket,) = sync.buckets
    start, size = bucket.buffer.data_ptr(), bucket.buffer.nbytes
    for name, parameter in model.named_parameters():
        assert parameter.grad is sync.gradients[name]
        assert start <= parameter.grad.data_ptr() < start + size
        assert parameter.grad.data_ptr() % 64 == start % 64
    for name, expected in total_gradients([0]).items():
        torch.testing.assert_close(sync.gradients[name], expected, rtol=0, atol=1e-7, msg=name)


def test_micro_steps_accumulate_and_a_new_iteration_starts_from_zero() -> None:
    model = Mixed()
    sync = serial_sync(model)
    for _ in range(2):
        _ranks.backward(model, sync, [0, 1])
        sync.finish()
    for name, expected in total_gradients([0, 1]).items():
        torch.testing.assert_close(sync.gradients[name], expected, rtol=0, atol=1e-7, msg=name)


def test_low_precision_gradients_accumulate_in_fp32() -> None:
    weight = nn.Parameter(torch.ones(4))
    sync = GradSync({"w": weight}, SERIAL, ParallelConfig())
    # The optimizer does so after the buckets were built.
    weight.data = weight.data.bfloat16()
    sync.zero()
    for value in (1.0, 2.0**-9, 2.0**-9):
        with sync.micro_step(last=False):
            (weight * torch.tensor(value, dtype=torch.bfloat16)).sum().backward()
    assert weight.grad is None
    assert sync.gradients["w"].dtype == torch.float32
    assert torch.equal(sync.gradients["w"], torch.full((4,), 1.0 + 2.0**-8))


def test_sinks_of_a_half_precision_model_leave_no_gradient_behind() -> None:
    model = Mixed()
    sync = serial_sync(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    _ranks.backward(model, sync, [0])
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, expected in total_gradients([0]).items():
        assert (sync.gradients[name] - expected).norm() <= 0.05 * expected.norm(), name


def results_of(two_replicas: Results, four_ranks: Results, count: int) -> Results:
    return two_replicas if count == 2 else four_ranks


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("way", _ranks.WAYS)
def test_replicas_sum_the_gradients_of_all_micro_batches(
    two_replicas: Results, four_ranks: Results, count: int, way: str
) -> None:
    results = results_of(two_replicas, four_ranks, count)
    expected = total_gradients(list(range(2 * count)))
    tolerance = TOLERANCE[_ranks.WAYS[way].grad_reduce_dtype]
    for name in expected:
        assert joined(results, way, name).shape == expected[name].shape
        torch.testing.assert_close(
            joined(results, way, name), expected[name], rtol=tolerance, atol=tolerance, msg=name
        )


def joined(results: Results, way: str, name: str) -> Tensor:
    """Assemble a gradient from the ranks' parts of it.

    Ranks that all have the whole gradient must have the same bits.
    """
    gradients = [result[f"gradients, {way}"][name] for result in results]
    if _ranks.WAYS[way].data_parallel_sharding == "none":
        assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
        return gradients[0]
    flat = torch.full_like(gradients[0], torch.nan).flatten()
    for rank, gradient in enumerate(gradients):
        for start, length in owned(way, name, rank, len(results)):
            flat[start : start + length] = gradient.flatten()[start : start + length]
    return flat.view(gradients[0].shape)


def owned(way: str, name: str, rank: int, replicas: int) -> list[tuple[int, int]]:
    """Compute independently which elements of a parameter a rank sums if it is sharded."""
    sizes = {name: parameter.numel() for name, parameter in Mixed().named_parameters()}
    pieces = []
    for planned in plan_buckets(sizes, _ranks.WAYS[way].grad_reduce_bucket_mb):
        layout = BucketLayout(planned, replicas)
        part = layout.length // replicas
        shard = range(rank * part, (rank + 1) * part)
        pieces += [
            (piece.start, piece.length) for piece in layout.within(shard) if piece.name == name
        ]
    return pieces


def test_buckets_are_reduced_only_in_the_last_micro_step(
    two_replicas: Results,
) -> None:
    # Three buckets. From the second iteration on, it is known that `unused` gets no gradient and
    # `tied` gets two, so buckets are reduced before the backward pass ends.
    for result in two_replicas:
        assert result["reductions"] == [[0, 0, 3], [0, 3, 3], [0, 0, 3, 3], [3, 3]]


def test_waiting_for_reductions_is_timed(two_replicas: Results) -> None:
    assert two_replicas[0]["phases"]["data-parallel wait"] > 0


def test_a_gradient_after_the_reduction_of_its_bucket_is_refused(two_replicas: Results) -> None:
    assert "came after its bucket was full" in two_replicas[0]["late_contribution"]


def test_one_process_does_not_communicate(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("communicated")

    for name in (
        "all_reduce",
        "broadcast",
        "isend",
        "irecv",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
    ):
        monkeypatch.setattr(f"torch.distributed.{name}", refuse)
    model = Mixed()
    sync = GradSync(
        dict(model.named_parameters()),
        SERIAL,
        ParallelConfig(
            data_parallel_sharding="optimizer", grad_reduce_dtype="bf16", grad_reduce_bucket_mb=1e-4
        ),
        partial=frozenset({"bias"}),
        shared={"tied": SINGLE_RANK},
    )
    assert not sync.sharded
    expected = total_gradients([3])
    _ranks.backward(model, sync, [3])
    sync.finish()
    for name, gradient in sync.gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-7)
