"""Gradient buckets: what they hold, when they travel, and what comes back."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from megacore.data_parallel.grad_sync import GradSync, plan_buckets
from megacore.parallel.mesh import ALONE, ParallelGroup
from tests._dist import run_distributed


class Tied(nn.Module):
    """Embedding and output share a weight; `unused` takes part in nothing."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.embedding = nn.Parameter(torch.randn(11, 4, generator=generator))
        self.linear = nn.Parameter(torch.randn(4, 4, generator=generator))
        self.unused = nn.Parameter(torch.randn(5, generator=generator))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.embedding[tokens] @ self.linear)
        return (hidden @ self.embedding.T).logsumexp(-1).mean()


def tokens(seed: int) -> Tensor:
    return torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(seed))


def reference(seeds: list[int]) -> dict[str, Tensor]:
    """Mean gradient over batches by plain autograd."""
    model = Tied()
    (sum(model(tokens(seed)) for seed in seeds) / len(seeds)).backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.floats(1e-4, 1e-2))
def test_buckets_hold_each_parameter_once_in_reverse_order_within_the_limit(sizes: list[int], megabytes: float) -> None:
    named = {f"p{i}": size for i, size in enumerate(sizes)}
    buckets = plan_buckets(named, megabytes)
    assert [name for bucket in buckets for name in bucket] == list(reversed(named))
    for bucket in buckets:
        assert len(bucket) == 1 or sum(named[name] for name in bucket) * 4 <= megabytes * 2**20
    for first, second in pairwise(buckets):
        assert (sum(named[n] for n in first) + named[second[0]]) * 4 > megabytes * 2**20


def test_fp32_gradients_are_views_of_flat_buffers_without_a_copy() -> None:
    model = Tied()
    sync = GradSync(dict(model.named_parameters()), ALONE, 25.0)
    sync.zero()
    with sync.micro_step(last=True):
        model(tokens(0)).backward()
    sync.finish()
    assert len(sync.buffers) == 1
    start, size = sync.buffers[0].data_ptr(), sync.buffers[0].nbytes
    for name, parameter in model.named_parameters():
        assert parameter.grad is sync.gradients[name]
        assert start <= parameter.grad.data_ptr() < start + size
    for name, expected in reference([0]).items():
        assert torch.equal(sync.gradients[name], expected), name


def test_micro_steps_accumulate_and_a_new_iteration_starts_from_zero() -> None:
    model = Tied()
    sync = GradSync(dict(model.named_parameters()), ALONE, 25.0)
    for _ in range(2):
        sync.zero()
        for seed in (0, 1):
            with sync.micro_step(last=seed == 1):
                (model(tokens(seed)) / 2).backward()
        sync.finish()
    for name, expected in reference([0, 1]).items():
        assert torch.allclose(sync.gradients[name], expected, atol=1e-7), name


def test_bf16_gradients_are_added_up_in_fp32() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    sync = GradSync({"w": weight}, ALONE, 25.0)
    sync.zero()
    for value in (1.0, 2.0**-9, 2.0**-9):
        with sync.micro_step(last=False):
            (weight * torch.tensor(value, dtype=torch.bfloat16)).sum().backward()
    assert weight.grad is None
    assert sync.gradients["w"].dtype == torch.float32
    assert torch.equal(sync.gradients["w"], torch.full((4,), 1.0 + 2.0**-8))


def count_all_reduces(model: nn.Module, sync: GradSync, seeds: list[int]) -> list[int]:
    """All-reduces begun by the end of each micro step's backward."""
    calls = 0
    original = dist.all_reduce

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    dist.all_reduce = counted
    try:
        sync.zero()
        counts = []
        for seed in seeds:
            with sync.micro_step(last=seed == seeds[-1]):
                (model(tokens(seed)) / len(seeds)).backward()
            counts.append(calls)
        sync.finish()
        return [*counts, calls]
    finally:
        dist.all_reduce = original


def on_two_ranks(bucket_mb: float) -> tuple[list[int], dict[str, Tensor], int]:
    rank = dist.get_rank()
    model = Tied()
    sync = GradSync(dict(model.named_parameters()), ParallelGroup(dist.group.WORLD, rank, 2), bucket_mb)
    counts = count_all_reduces(model, sync, [2 * rank, 2 * rank + 1])
    return counts, {name: gradient.clone() for name, gradient in sync.gradients.items()}, len(sync.buffers)


def cases_on_two_ranks() -> list[tuple[list[int], dict[str, Tensor], int]]:
    return [on_two_ranks(bucket_mb) for bucket_mb in (25.0, 1e-5)]


@pytest.fixture(scope="module")
def results() -> list[list[tuple[list[int], dict[str, Tensor], int]]]:
    return run_distributed(2, cases_on_two_ranks)


@pytest.mark.parametrize("case", [0, 1])
def test_two_ranks_hold_the_mean_of_all_micro_batches(results: list, case: int) -> None:
    expected = reference([0, 1, 2, 3])
    for rank in (0, 1):
        for name, gradient in results[rank][case][1].items():
            assert torch.allclose(gradient, expected[name], atol=1e-7), (rank, name)
            assert torch.equal(gradient, results[0][case][1][name])


def test_only_the_last_micro_step_communicates_and_it_does_before_backward_ends(results: list) -> None:
    counts, _, buckets = results[0][1]
    assert buckets == 3
    # `unused` is the first bucket and never full: the others wait for it, so that all ranks keep one order.
    assert counts == [0, 0, 3]


def overlapped() -> list[int]:
    rank = dist.get_rank()
    model = Tied()
    used = {name: p for name, p in model.named_parameters() if name != "unused"}
    sync = GradSync(used, ParallelGroup(dist.group.WORLD, rank, 2), 1e-5)
    return count_all_reduces(model, sync, [0, 1])


def test_buckets_travel_while_backward_runs() -> None:
    assert run_distributed(2, overlapped) == [[0, 2, 2]] * 2
