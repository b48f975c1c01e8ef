"""The sum of squares for the gradient norm, by every implementation that runs here."""

import pytest
import torch

from megacore.kernels.implementation import Setting
from megacore.kernels.sum_of_squares import IMPLEMENTATIONS, SumOfSquares

CPU = torch.device("cpu")
RUNNING = [each for each in IMPLEMENTATIONS if each.usable(Setting(CPU, torch.float32))]


@pytest.fixture(params=RUNNING, ids=lambda each: each.name)
def sum_of_squares(request: pytest.FixtureRequest) -> SumOfSquares:
    return request.param.load()  # type: ignore[no-any-return]


def test_elements_in_and_after_full_blocks_are_summed(sum_of_squares: SumOfSquares) -> None:
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(size, generator=generator) for size in (1, 7, 4096, 4099, 3 * 4096)]
    expected = sum(float(gradient.double().square().sum()) for gradient in gradients)
    total = sum_of_squares(gradients, CPU)
    assert total.dtype == torch.float64
    assert float(total) == pytest.approx(expected, rel=1e-6)
    assert float(sum_of_squares([], CPU)) == 0.0


def test_millions_of_elements_lose_no_precision(sum_of_squares: SumOfSquares) -> None:
    gradient = torch.randn(3_000_000, generator=torch.Generator().manual_seed(1))
    exact = float(gradient.double().norm())
    assert float(sum_of_squares([gradient], CPU).sqrt()) == pytest.approx(exact, rel=1e-7)
