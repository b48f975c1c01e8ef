"""The global norm and what clipping makes of it."""

import pytest
import torch

from megacore.optim.grad_clip import clip_divisor, sum_of_squares

CPU = torch.device("cpu")


def test_all_elements_count_in_blocks_and_beyond_them() -> None:
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(size, generator=generator) for size in (1, 7, 4096, 4099, 3 * 4096)]
    expected = sum(float(gradient.double().square().sum()) for gradient in gradients)
    found = sum_of_squares(gradients, CPU)
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(expected, rel=1e-6)
    assert float(sum_of_squares([], CPU)) == 0.0


def test_millions_of_elements_lose_no_precision() -> None:
    gradient = torch.randn(3_000_000, generator=torch.Generator().manual_seed(1))
    exact = float(gradient.double().norm())
    assert float(sum_of_squares([gradient], CPU).sqrt()) == pytest.approx(exact, rel=1e-7)


def test_a_large_gradient_is_divided_to_the_limit_and_a_small_one_is_not() -> None:
    norm = torch.tensor(2.0)
    assert float(norm / clip_divisor(norm, 0.5)) == pytest.approx(0.5, rel=1e-5)
    assert float(clip_divisor(norm, 1e3)) == 1.0
    assert float(clip_divisor(norm, 0.0)) == 1.0
