"""AdamW by every implementation that runs here, compared with its formula in float64.

Apex is tested with a stand-in.
"""

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.kernels.adamw import IMPLEMENTATIONS, AdamTensors, AdamW, Hyperparameters
from megacore.kernels.implementation import Setting

CPU = torch.device("cpu")
RUNNING = [each for each in IMPLEMENTATIONS if each.usable(Setting(CPU, torch.bfloat16))]
SHAPES = [(5, 7), (33,), (4096, 3)]
STEPS, DIVISOR = 3, 4.0


def draw(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def hyperparameters(step: int) -> Hyperparameters:
    return Hyperparameters(lr=1e-2, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8, step=step)


def exact(steps: int) -> list[Tensor]:
    weights = [weight.double() for weight in draw(0)]
    moments = [[torch.zeros_like(weight) for weight in weights] for _ in range(2)]
    for step in range(1, steps + 1):
        hyper = hyperparameters(step)
        for weight, first, second, gradient in zip(weights, *moments, draw(step), strict=True):
            scaled = gradient.double() / DIVISOR
            weight.mul_(1 - hyper.lr * hyper.weight_decay)
            first.lerp_(scaled, 1 - hyper.beta1)
            second.lerp_(scaled.square(), 1 - hyper.beta2)
            denominator = second.sqrt() / math.sqrt(1 - hyper.beta2**step) + hyper.eps
            weight.sub_(hyper.lr / (1 - hyper.beta1**step) * first / denominator)
    return weights


def run(update: AdamW, targets: list[Tensor] | None) -> list[Tensor]:
    weights = draw(0)
    first, second = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    for step in range(1, STEPS + 1):
        update(
            AdamTensors(weights, draw(step), first, second, targets),
            hyperparameters(step),
            torch.tensor(DIVISOR),
        )
    return weights


@pytest.mark.parametrize("publishes", [False, True])
@pytest.mark.parametrize("implementation", RUNNING, ids=lambda each: each.name)
def test_updates_equal_the_formula(implementation: Any, publishes: bool) -> None:
    targets = [torch.zeros(shape, dtype=torch.bfloat16) for shape in SHAPES] if publishes else None
    weights = run(implementation.load(), targets)
    for weight, expected in zip(weights, exact(STEPS), strict=True):
        torch.testing.assert_close(weight.double(), expected, rtol=2e-6, atol=2e-6)
    for target, weight in zip(targets or [], weights, strict=False):
        assert torch.equal(target, weight.bfloat16())


def test_apex_receives_the_arguments_of_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in has the arguments of amp_C.multi_tensor_adam_capturable and uses torch."""

    def multi_tensor_adam_capturable(
        chunk: int,
        overflow: Tensor,
        lists: list[list[Tensor]],
        lr: Tensor,
        beta1: float,
        beta2: float,
        eps: float,
        step: Tensor,
        mode: int,
        bias_correction: int,
        weight_decay: float,
        inverse_scale: Tensor,
    ) -> None:
        assert (overflow.item(), overflow.dtype, mode, bool(bias_correction)) == (
            0,
            torch.int32,
            1,
            True,
        )
        gradients, weights, first, second = lists
        hyper = Hyperparameters(float(lr), weight_decay, beta1, beta2, eps, int(step))
        tensors = AdamTensors(weights, gradients, first, second, None)
        IMPLEMENTATIONS[-1].load()(tensors, hyper, inverse_scale.reciprocal().view(()))

    module = ModuleType("amp_C")
    module.multi_tensor_adam_capturable = multi_tensor_adam_capturable  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "amp_C", module)
    targets = [torch.zeros(shape, dtype=torch.float16) for shape in SHAPES]
    weights = run(IMPLEMENTATIONS[0].load(), targets)
    for weight, target, expected in zip(weights, targets, exact(STEPS), strict=True):
        torch.testing.assert_close(weight.double(), expected, rtol=2e-6, atol=2e-6)
        assert torch.equal(target, weight.half())
