"""Clipping by the global norm."""

import math

import pytest
import torch

from megacore.optim.grad_clip import clip_by_norm_, global_norm


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(7, generator=generator), torch.randn(3, 5, generator=generator)]


def test_the_norm_is_over_all_elements() -> None:
    expected = math.sqrt(sum(float(g.double().pow(2).sum()) for g in gradients()))
    assert float(global_norm(gradients())) == pytest.approx(expected, rel=1e-6)


def test_a_large_gradient_is_scaled_to_the_limit_and_keeps_its_direction() -> None:
    grads = gradients()
    clip_by_norm_(grads, global_norm(grads), 0.5)
    assert float(global_norm(grads)) == pytest.approx(0.5, rel=1e-5)
    ratios = torch.cat([(new / old).flatten() for new, old in zip(grads, gradients(), strict=True)])
    assert torch.allclose(ratios, ratios[0].expand_as(ratios))


def test_a_small_gradient_keeps_its_bits() -> None:
    grads = gradients()
    clip_by_norm_(grads, global_norm(grads), 1e3)
    assert all(torch.equal(new, old) for new, old in zip(grads, gradients(), strict=True))


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e3])
def test_the_loss_scale_is_divided_out_in_the_same_pass(max_norm: float) -> None:
    plain, scaled = gradients(), [g * 1024 for g in gradients()]
    norm = global_norm(plain)
    clip_by_norm_(plain, norm, max_norm)
    clip_by_norm_(scaled, norm, max_norm, scale=1024.0)
    assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(plain, scaled, strict=True))
