"""AdamW in C++, compared with float64 and with torch's fused kernel."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.errors import ConfigError
from megacore.kernels.adamw import AdamTensors, Hyperparameters
from megacore.kernels.cpu import adam
from megacore.kernels.cpu.common import runs_fp32

pytestmark = pytest.mark.skipif(not runs_fp32(), reason="the CPU has no AVX-512")

SIZES = (1, 15, 16, 17, 100, 8192, 8193, 20011)
VALUES = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
State = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def state(sizes: Sequence[int] = SIZES) -> State:
    """Return weights, gradients and moments as in the middle of training."""
    generator = torch.Generator().manual_seed(1)

    def random(scale: float) -> list[Tensor]:
        return [scale * torch.randn(size, generator=generator) for size in sizes]

    return random(1.0), random(0.1), random(0.03), [values.square() for values in random(0.1)]


def adamw_(*tensors: Any, divisor: float = 1.0, **values: Any) -> None:
    """Make an update with hyperparameters by name."""
    exact = torch.tensor(divisor, dtype=torch.float64)
    adam.adamw_(AdamTensors(*tensors), Hyperparameters(**values), exact)


def float64(
    parts: State, step: int, divisor: float
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return weights and moments after an update by algorithm 2 of Loshchilov and Hutter."""
    results: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    beta1, beta2 = VALUES["beta1"], VALUES["beta2"]
    for tensors in zip(*parts, strict=True):
        weight, gradient, first, second = (tensor.double() for tensor in tensors)
        gradient = gradient / divisor
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        change = first / (1 - beta1**step) / ((second / (1 - beta2**step)).sqrt() + VALUES["eps"])
        weight = weight - VALUES["lr"] * (change + VALUES["weight_decay"] * weight)
        for result, values in zip(results, (weight, first, second), strict=True):
            result.append(values)
    return results


@pytest.mark.parametrize("step", [1, 7, 100_000])
@pytest.mark.parametrize("divisor", [1.0, 3.7])
def test_updates_equal_float64(step: int, divisor: float) -> None:
    parts = state()
    expected = float64(parts, step, divisor)
    weights, gradients, first, second = parts
    before = [gradient.clone() for gradient in gradients]
    adamw_(weights, gradients, first, second, None, step=step, divisor=divisor, **VALUES)
    for actual, exact in zip((weights, first, second), expected, strict=True):
        for updated, expected_tensor in zip(actual, exact, strict=True):
            torch.testing.assert_close(updated.double(), expected_tensor, rtol=1e-6, atol=1e-7)
    assert all(gradient.equal(old) for gradient, old in zip(gradients, before, strict=True))


@pytest.mark.parametrize("divisor", [1.0, 3.7])
def test_updates_stay_close_to_torch(divisor: float) -> None:
    """Fifty updates from zero moments differ only by rounding."""
    ours, theirs = state((1000,)), state((1000,))
    generator = torch.Generator().manual_seed(2)
    for moments in (*ours[2:], *theirs[2:]):
        moments[0].zero_()
    for step in range(1, 51):
        gradient = torch.randn(1000, generator=generator)
        ours[1][0].copy_(gradient)
        theirs[1][0].copy_(gradient)
        adamw_(*ours, None, step=step, divisor=divisor, **VALUES)
        torch._fused_adamw_(
            *theirs,
            [],
            [torch.tensor(float(step))],
            amsgrad=False,
            maximize=False,
            grad_scale=torch.tensor(divisor),
            **VALUES,
        )
        for actual, expected in zip((ours[0], *ours[2:]), (theirs[0], *theirs[2:]), strict=True):
            torch.testing.assert_close(actual[0], expected[0], rtol=2e-6, atol=1e-7)


def test_division_into_shards_does_not_change_the_bits() -> None:
    """Single elements, and shards cut at odd places, have the bits of undivided tensors."""
    undivided, cut = state((5000,)), state((5000,))
    pieces = [1] * 40 + [7, 16, 33, 1000, 3904]
    adamw_(*undivided, None, step=3, divisor=1.9, **VALUES)
    shards = tuple([shard for tensor in part for shard in tensor.split(pieces)] for part in cut)
    adamw_(*shards, None, step=3, divisor=1.9, **VALUES)
    for one, other in zip(undivided, cut, strict=True):
        assert one[0].equal(other[0])


def test_threads_do_not_change_the_result() -> None:
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        parts = state()
        targets = [torch.empty(size, dtype=torch.bfloat16) for size in SIZES]
        adamw_(*parts, targets, step=3, **VALUES)
        results.append([tensor for part in (*parts, targets) for tensor in part])
    assert all(one.equal(two) for one, two in zip(*results, strict=True))


def test_published_weights_are_rounded_as_by_torch() -> None:
    parts = state()
    targets = [torch.empty(size, dtype=torch.bfloat16) for size in SIZES]
    adamw_(*parts, targets, step=2, **VALUES)
    assert all(
        target.equal(weight.to(torch.bfloat16))
        for target, weight in zip(targets, parts[0], strict=True)
    )


def test_ties_are_rounded_to_even() -> None:
    """An update with lr 0 publishes the weights: ties, the largest numbers, infinities, NaN."""
    bits = [
        0x3F808000,
        0x3F818000,
        0x3F808001,
        0x3F817FFF,
        -0x407F8000,
        0x7F7FFFFF,
        0x7F800000,
        -0x00800000,
        0x7F812345,
    ]
    weight = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    before, zeros, target = weight.clone(), torch.zeros(9), torch.empty(9, dtype=torch.bfloat16)
    values = {**VALUES, "lr": 0.0}
    adamw_([weight], [zeros], [zeros.clone()], [zeros.clone()], [target], step=1, **values)
    assert weight[:8].equal(before[:8])
    torch.testing.assert_close(target, before.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)
    assert target.view(torch.int16)[:2].tolist() == [0x3F80, 0x3F82]


def test_an_update_restores_the_floating_point_modes_of_the_cpu() -> None:
    parts = state((8,))
    adamw_(*parts, None, step=1, **VALUES)
    assert (torch.tensor([1e-40]) * 1.0).item() != 0.0


def test_moments_below_the_smallest_normal_number_become_zero() -> None:
    parts = state((40,))
    for values in (parts[1][0], parts[2][0], parts[3][0]):
        values.fill_(1e-38)
    adamw_(*parts, None, step=1000, divisor=1e9, **VALUES)
    assert parts[2][0].eq(0).all()
    assert parts[3][0].eq(0).all()


def test_compiled_results_are_identical() -> None:
    def update(
        weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, target: Tensor
    ) -> Tensor:
        adamw_([weight], [gradient * 2], [first], [second], [target], step=2, **VALUES)
        return weight + 1

    eager, graph = (
        [*(part[0] for part in state((100,))), torch.empty(100, dtype=torch.bfloat16)]
        for _ in range(2)
    )
    compiled = torch.compile(update, fullgraph=True, backend="aot_eager")
    assert compiled(*graph).equal(update(*eager))
    assert all(one.equal(other) for one, other in zip(graph, eager, strict=True))


def test_unsupported_arguments_are_refused() -> None:
    weights, gradients, first, second = state((30,))
    with pytest.raises(ConfigError, match=r"30 elements of torch\.float32"):
        adamw_(weights, [gradients[0][:29]], first, second, None, step=1, **VALUES)
    with pytest.raises(ConfigError, match="bfloat16"):
        adamw_(weights, gradients, first, second, first, step=1, **VALUES)
    with pytest.raises(ConfigError, match="one length"):
        adamw_(weights, gradients, first, [], None, step=1, **VALUES)
