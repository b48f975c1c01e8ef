"""The global norm and what clipping makes of it."""

import pytest
import torch

from megacore.optim.adam import clip_divisor


def test_a_large_gradient_is_divided_to_the_limit_and_a_small_one_is_not() -> None:
    norm = torch.tensor(2.0)
    assert float(norm / clip_divisor(norm, 0.5)) == pytest.approx(0.5, rel=1e-5)
    assert float(clip_divisor(norm, 1e3)) == 1.0
    assert float(clip_divisor(norm, 0.0)) == 1.0
