"""AdamW with main weights, compared with torch's AdamW."""

import pytest
import torch
from torch import Tensor, nn

from megacore.checkpoint.shard import TensorShard
from megacore.config.optim import OptimConfig
from megacore.config.parallel import ParallelConfig
from megacore.data_parallel.grad_sync import GradSync
from megacore.optim.adam import MainWeightAdamW, has_weight_decay
from megacore.parallel.mesh import ParallelGroup, ProcessMesh
from megacore.tensor_parallel.partition import Partition

CONFIG = OptimConfig(lr=1e-2, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8)
SHAPES = {"a.weight": (4, 6), "a.bias": (6,), "norm.weight": (6,)}


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in SHAPES.items()
    }


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def test_only_matrices_that_are_no_bias_decay() -> None:
    assert has_weight_decay("a.weight", 2)
    assert not has_weight_decay("norm.weight", 1)
    assert not has_weight_decay("a.bias", 2)


class Optimized:
    """Parameters in two chunks with their optimizer."""

    def __init__(
        self, dtype: torch.dtype = torch.float32, partitions: dict[str, Partition] | None = None
    ) -> None:
        self.parameters = parameters()
        serial = ProcessMesh.serial(), ParallelConfig()
        chunks = (("a.weight", "a.bias"), ("norm.weight",))
        self.syncs = [
            GradSync({name: self.parameters[name] for name in names}, *serial) for names in chunks
        ]
        self.optimizer = MainWeightAdamW(self.syncs, CONFIG, dtype, partitions)

    def set_gradients(self, step: int, factor: float = 1.0) -> None:
        for sync in self.syncs:
            sync.zero()
            for name, view in sync.gradients.items():
                view.copy_(gradients(step)[name] * factor)

    def tensors(self) -> dict[str, Tensor]:
        tensors = self.optimizer.tensors()
        assert all(isinstance(tensor, Tensor) for tensor in tensors.values())
        return tensors  # type: ignore[return-value]


def reference(steps: int, max_norm: float = 0.0) -> dict[str, nn.Parameter]:
    weights = parameters()
    groups = [
        {"params": [weights["a.weight"]]},
        {"params": [weights["a.bias"], weights["norm.weight"]]},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for step in range(steps):
        for group, weight_decay in zip(
            optimizer.param_groups, (0.1 * (step + 1), 0.0), strict=True
        ):
            group["lr"], group["weight_decay"] = 1e-2 / (step + 1), weight_decay
        for name, gradient in gradients(step).items():
            weights[name].grad = gradient
        if max_norm:
            torch.nn.utils.clip_grad_norm_(weights.values(), max_norm)
        optimizer.step()
    return weights


def test_fp32_equals_torch_bit_for_bit_without_a_copy() -> None:
    optimized = Optimized()
    for step in range(4):
        optimized.set_gradients(step)
        optimized.optimizer.step(1e-2 / (step + 1), 0.1 * (step + 1))
    assert optimized.optimizer.steps == 4
    for name, expected in reference(4).items():
        assert torch.equal(optimized.parameters[name], expected), name
        assert (
            optimized.tensors()[f"model.{name}"].data_ptr() == optimized.parameters[name].data_ptr()
        )


def test_low_precision_weights_are_rounded_copies_of_fp32_main_weights() -> None:
    optimized = Optimized(torch.bfloat16)
    for step in range(4):
        optimized.set_gradients(step)
        optimized.optimizer.step(1e-2 / (step + 1), 0.1 * (step + 1))
    for name, expected in reference(4).items():
        assert torch.equal(optimized.tensors()[f"model.{name}"], expected), name
        assert optimized.parameters[name].dtype == torch.bfloat16
        assert torch.equal(optimized.parameters[name], expected.to(torch.bfloat16))


@pytest.mark.parametrize("max_norm", [0.5, 1e3])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_clipping_and_unscaling_are_part_of_the_update(max_norm: float, scale: float) -> None:
    optimized = Optimized()
    for step in range(4):
        optimized.set_gradients(step, scale)
        norm = optimized.optimizer.grad_norm(scale=scale)
        optimized.optimizer.step(
            1e-2 / (step + 1), 0.1 * (step + 1), norm=norm, max_norm=max_norm, scale=scale
        )
    for name, expected in reference(4, max_norm).items():
        torch.testing.assert_close(
            optimized.parameters[name], expected, rtol=1e-6, atol=1e-6, msg=name
        )


def test_the_norm_covers_all_chunks_and_excludes_the_scale() -> None:
    optimized = Optimized()
    optimized.set_gradients(0, 8.0)
    expected = torch.cat([gradient.flatten() for gradient in gradients(0).values()]).double().norm()
    assert float(optimized.optimizer.grad_norm(scale=8.0)) == pytest.approx(
        float(expected), rel=1e-6
    )
    assert optimized.optimizer.grad_norm().dtype == torch.float32


@pytest.mark.parametrize(("tensor_rank", "stage"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_one_rank_adds_what_several_hold_to_the_norm(tensor_rank: int, stage: int) -> None:
    """`a.weight` is divided over tensor-parallel ranks, and two stages have `a.bias`."""
    mesh = ProcessMesh(tensor_parallel=ParallelGroup(rank=tensor_rank, size=2, name="tensor"))
    shared = {"a.bias": ParallelGroup(rank=stage, size=2, name="embedding")}
    sync = GradSync(parameters(), mesh, ParallelConfig(), shared=shared)
    partitions = {"a.weight": Partition(dim=0, rank=tensor_rank, size=2)}
    optimizer = MainWeightAdamW([sync], CONFIG, torch.float32, partitions)
    for number, name in enumerate(SHAPES):
        sync.gradients[name].fill_(10.0**number)
    expected = 24.0 + 600.0 * (tensor_rank == stage == 0) + 60_000.0 * (tensor_rank == 0)
    assert float(optimizer.grad_norm() ** 2) == pytest.approx(expected, rel=1e-6)


def test_a_non_finite_gradient_makes_the_norm_non_finite() -> None:
    for value in (torch.inf, torch.nan):
        optimized = Optimized()
        optimized.set_gradients(0)
        optimized.syncs[1].gradients["norm.weight"][3] = value
        assert not optimized.optimizer.grad_norm().isfinite()


def test_restored_tensors_and_step_count_continue_bit_identically() -> None:
    uninterrupted = Optimized(torch.bfloat16)
    for step in range(4):
        uninterrupted.set_gradients(step)
        uninterrupted.optimizer.step(1e-2, 0.1)
        if step == 1:
            saved = {name: tensor.clone() for name, tensor in uninterrupted.tensors().items()}
    resumed = Optimized(torch.bfloat16)
    for name, tensor in resumed.tensors().items():
        tensor.copy_(saved[name])
    resumed.optimizer.write_back()
    assert torch.equal(resumed.parameters["a.bias"], saved["model.a.bias"].bfloat16())
    resumed.optimizer.steps = 2
    for step in (2, 3):
        resumed.set_gradients(step)
        resumed.optimizer.step(1e-2, 0.1)
    for name, tensor in uninterrupted.tensors().items():
        assert torch.equal(tensor, resumed.tensors()[name]), name
    assert set(saved) == {
        f"{kind}.{name}"
        for kind in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
        for name in SHAPES
    }


def test_tensor_parallel_shards_have_global_shapes_and_offsets() -> None:
    optimized = Optimized(
        partitions={"a.weight": Partition(dim=1, rank=2, size=3), "a.bias": Partition(0, 0, 2)}
    )
    tensors = optimized.optimizer.tensors()
    weight, bias = tensors["model.a.weight"], tensors["optimizer.exp_avg.a.bias"]
    assert isinstance(weight, TensorShard)
    assert isinstance(bias, TensorShard)
    assert (weight.shape, list(weight.pieces)) == ((4, 18), [(0, 12)])
    assert (bias.shape, list(bias.pieces)) == ((12,), [(0,)])
    assert (
        weight.pieces[torch.Size((0, 12))].data_ptr() == optimized.parameters["a.weight"].data_ptr()
    )
    assert isinstance(tensors["model.norm.weight"], Tensor)
