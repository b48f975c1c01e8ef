"""AdamW over main weights against torch's own."""

import torch
from torch import nn

from megacore.config.optim import OptimConfig
from megacore.optim.adam import MainWeightAdamW

CONFIG = OptimConfig(lr=1e-2, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8)
SHAPES = {"a.weight": (4, 6), "a.bias": (6,), "norm.weight": (6,)}


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def reference(steps: int) -> dict[str, nn.Parameter]:
    own = parameters()
    groups = [
        {"params": [own["a.weight"]], "weight_decay": 0.1},
        {"params": [own["a.bias"], own["norm.weight"]], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        for name, gradient in gradients(step).items():
            own[name].grad = gradient
        optimizer.step()
    return own


def test_fp32_equals_torch_bit_for_bit() -> None:
    own = parameters()
    optimizer = MainWeightAdamW(own, CONFIG, torch.float32)
    for step in range(4):
        optimizer.step(gradients(step), 1e-2 / (step + 1))
    for name, expected in reference(4).items():
        assert torch.equal(own[name], expected), name
        assert optimizer.main_weights[name].data_ptr() == own[name].data_ptr()


def test_low_precision_weights_are_rounded_copies_of_fp32_main_weights() -> None:
    own = parameters()
    optimizer = MainWeightAdamW(own, CONFIG, torch.bfloat16)
    for step in range(4):
        optimizer.step(gradients(step), 1e-2 / (step + 1))
    for name, expected in reference(4).items():
        assert torch.equal(optimizer.main_weights[name], expected), name
        assert own[name].dtype == torch.bfloat16
        assert torch.equal(own[name], expected.to(torch.bfloat16))


def test_restored_tensors_and_step_count_continue_bit_identically() -> None:
    whole = MainWeightAdamW(parameters(), CONFIG, torch.bfloat16)
    for step in range(4):
        whole.step(gradients(step), 1e-2)
        if step == 1:
            saved = {name: tensor.clone() for name, tensor in whole.tensors().items()}
    resumed = MainWeightAdamW(parameters(), CONFIG, torch.bfloat16)
    for name, tensor in resumed.tensors().items():
        tensor.copy_(saved[name])
    resumed.steps = 2
    for step in (2, 3):
        resumed.step(gradients(step), 1e-2)
    for name, tensor in whole.tensors().items():
        assert torch.equal(tensor, resumed.tensors()[name]), name
    assert "optimizer.exp_avg_sq.a.bias" in saved
