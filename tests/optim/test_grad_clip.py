"""The divisor that limits the global norm of gradients."""

import pytest
import torch

from megacore.optim.adam import clip_divisor


def test_only_norms_above_the_limit_are_reduced_to_it() -> None:
    norm = torch.tensor(2.0)
    assert float(norm / clip_divisor(norm, 0.5)) == pytest.approx(0.5, rel=1e-5)
    assert float(clip_divisor(norm, 1e3)) == 1.0
    assert float(clip_divisor(norm, 0.0)) == 1.0
