"""Muon, compared with its formulas."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from megacore.config.load import parse_config
from megacore.config.optim import OptimConfig
from megacore.config.parallel import ParallelConfig
from megacore.config.spec import SpecialTokens
from megacore.data_parallel.grad_sync import GradSync
from megacore.models.stage import Stage
from megacore.optim.adam import WholeWeights
from megacore.optim.muon import (
    ROUNDS,
    MainWeightMuon,
    RowParts,
    newton_schulz,
    newton_schulz_flops,
    orthogonalized,
)
from megacore.parallel.collectives import Pending
from megacore.parallel.mesh import SINGLE_RANK, ProcessMesh
from megacore.plan import iteration

CONFIG = OptimConfig(name="muon", lr=1e-2, muon_momentum=0.9, adam_beta2=0.95)
SHAPES = {"tall": (40, 24), "wide": (24, 40), "kv": (24, 12), "norm": (24,), "table": (50, 24)}
MATRICES = {"tall": RowParts(), "wide": RowParts(), "kv": RowParts(2, 4)}
KV = {"k": [*range(4), *range(8, 12), *range(16, 20)], "v": [*range(4, 8), *range(12, 16)]}
KV["v"] += range(20, 24)


def drawn(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class Optimized:
    """Parameters with their optimizer."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.parameters = {name: nn.Parameter(value) for name, value in drawn(0).items()}
        self.sync = GradSync(self.parameters, ProcessMesh.serial(), ParallelConfig())
        self.optimizer = MainWeightMuon([self.sync], CONFIG, dtype, matrices=MATRICES)

    def step(self, number: int, scale: float = 1.0) -> None:
        self.sync.zero()
        for name, gradient in drawn(100 + number).items():
            self.sync.gradients[name].copy_(gradient * scale)
        self.optimizer.step(1e-2 / (number + 1), 0.1, scale=scale)


def reference(steps: int) -> dict[str, Tensor]:
    """Update the matrices by the formulas of Jordan et al. 2024 and Liu et al. 2025, in fp64."""
    weights = {name: value.double() for name, value in drawn(0).items()}
    momenta = {name: torch.zeros_like(value) for name, value in weights.items()}
    for step in range(steps):
        for name, gradient in drawn(100 + step).items():
            momenta[name] = 0.9 * momenta[name] + gradient
            direction, lr = gradient + 0.9 * momenta[name], 1e-2 / (step + 1)
            for rows in KV.values() if name == "kv" else [range(len(direction))]:
                if name not in MATRICES:
                    continue
                x = direction[rows] / direction[rows].norm()
                for _ in range(5):
                    x = 3.4445 * x + (-4.775 * x @ x.T + 2.0315 * (x @ x.T) @ (x @ x.T)) @ x
                weights[name][rows] *= 1 - lr * 0.1
                weights[name][rows] -= lr * 0.2 * math.sqrt(max(x.shape)) * x
    return {name: weights[name] for name in MATRICES}


def test_matrices_follow_the_formulas() -> None:
    optimized = Optimized()
    for step in range(4):
        optimized.step(step)
    for name, expected in reference(4).items():
        weight = optimized.parameters[name]
        torch.testing.assert_close(weight.double(), expected, rtol=1e-4, atol=1e-5, msg=name)


def test_low_precision_weights_are_rounded_from_fp32_main_weights() -> None:
    optimized = Optimized(torch.bfloat16)
    for step in range(4):
        optimized.step(step, scale=64.0)
    tensors = optimized.optimizer.tensors()
    for name, expected in reference(4).items():
        main = tensors[f"model.{name}"]
        assert isinstance(main, Tensor)
        assert torch.equal(optimized.parameters[name], main.bfloat16())
        torch.testing.assert_close(main.double(), expected, rtol=2e-2, atol=2e-3, msg=name)


def test_other_parameters_are_updated_by_adam() -> None:
    optimized = Optimized()
    optimized.step(0)
    first = drawn(0)
    for name, decay in (("norm", 0.0), ("table", 0.1)):
        expected = first[name] * (1 - 1e-2 * decay) - 1e-2 * drawn(100)[name].sign()
        torch.testing.assert_close(optimized.parameters[name].data, expected, rtol=0, atol=1e-6)


def test_weights_are_published_once_and_not_before_their_last_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    published: dict[str, Tensor] = {}

    def publish(part: WholeWeights) -> Pending:
        assert not any(main.name in published for main in part.weights)
        published.update({main.name: main.weight.clone() for main in part.weights})
        return Pending(SINGLE_RANK, (), lambda: part.weights[0].weight)

    monkeypatch.setattr(WholeWeights, "publish", publish)
    parameters = {name: nn.Parameter(value) for name, value in drawn(0).items()}
    chunks = (("tall", "kv"), ("table",), ("wide", "norm"))
    syncs = [
        GradSync({name: parameters[name] for name in chunk}, ProcessMesh.serial(), ParallelConfig())
        for chunk in chunks
    ]
    optimizer = MainWeightMuon(syncs, CONFIG, torch.float32, matrices=MATRICES)
    for sync in syncs:
        for gradient in sync.gradients.values():
            gradient.fill_(1.0)
    optimizer.step(1e-2, 0.1)
    assert published.keys() == parameters.keys()
    assert all(torch.equal(published[name], weight) for name, weight in parameters.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 64), (96, 32), (32, 96)])
def test_singular_values_of_an_update_are_near_one(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    left, values, right = torch.linalg.svd(
        torch.randn(shape, generator=generator), full_matrices=False
    )
    matrix = left @ torch.diag(values.clamp(min=0.1 * values[0])) @ right
    result = newton_schulz(matrix.to(dtype)).float()
    singular = torch.linalg.svdvals(result)
    assert singular.min() > 0.6
    assert singular.max() < 1.3
    assert (result - left @ right).norm() < 0.35 * (left @ right).norm()


@pytest.mark.parametrize("shape", [(512, 1200), (520, 600)])
def test_large_matrices_have_the_iterations_of_small_ones(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Polynomials of a wide matrix and triangles of symmetric products change the rounding only."""
    generator = torch.Generator().manual_seed(2)
    # Singular values from 1 to 1e-3, of which bf16 would lose the small ones in one polynomial.
    left, values, right = torch.linalg.svd(
        torch.randn(shape, generator=generator), full_matrices=False
    )
    matrix = left @ torch.diag(torch.logspace(0, -3, len(values))) @ right
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        results[dtype] = newton_schulz(matrix.to(dtype))
    monkeypatch.setattr("megacore.optim.muon.LARGE", 1000)
    plain = newton_schulz(matrix)
    torch.testing.assert_close(results[torch.float32], plain, rtol=1e-3, atol=1e-5)
    error, usual = (
        float((result.float() - plain).norm() / plain.norm())
        for result in (results[torch.bfloat16], newton_schulz(matrix.bfloat16()))
    )
    assert error < 1.2 * usual < 0.12


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (520, 1040), (520, 600)])
def test_operations_are_those_of_the_products(shape: tuple[int, int]) -> None:
    with FlopCounterMode(display=False) as counter:
        newton_schulz(torch.empty(shape, device="meta"))
    assert counter.get_total_flops() == newton_schulz_flops(*shape)


class Traffic(TorchDispatchMode):
    """Bytes that operations other than products and views read and write."""

    size = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        if name not in {"mm", "addmm", "bmm", "baddbmm"} and not function.is_view:
            read = tree_leaves((args, kwargs))[name == "copy_" :]  # which only writes its target
            for tensor in [*read, *tree_leaves(result)]:
                if isinstance(tensor, Tensor) and not name.startswith("new_empty"):
                    self.size += tensor.numel() * tensor.element_size()
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(256, 256), (1024, 256), (256, 1024)])
def test_the_planner_counts_the_traffic_of_an_update(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    parameters = {"matrix": nn.Parameter(torch.randn(shape))}
    sync = GradSync(parameters, ProcessMesh.serial(), ParallelConfig())
    optimizer = MainWeightMuon([sync], CONFIG, dtype, matrices={"matrix": RowParts()})
    sync.zero()
    with Traffic() as traffic:
        optimizer.step(1e-2, 0.1)
    assert traffic.size / math.prod(shape) == pytest.approx(iteration._MUON_BYTES, rel=0.01)
    assert iteration._OWNERS_ROUNDS == ROUNDS


def test_the_result_does_not_depend_on_fusing() -> None:
    fused = drawn(3)["kv"]
    result = orthogonalized(fused, RowParts(2, 4))
    for rows in KV.values():
        expected = newton_schulz(fused[rows])
        torch.testing.assert_close(result[rows], expected, rtol=1e-5, atol=1e-6)
    # As one matrix, it would be another update.
    assert not torch.allclose(result, orthogonalized(fused, RowParts()), atol=0.1)


def test_a_zero_gradient_gives_a_zero_update() -> None:
    assert torch.equal(newton_schulz(torch.zeros(4, 6)), torch.zeros(4, 6))


def test_matrices_have_one_moment_and_resume_bit_identically() -> None:
    uninterrupted, resumed = Optimized(torch.bfloat16), Optimized(torch.bfloat16)
    saved: dict[str, Tensor] = {}
    for step in range(4):
        uninterrupted.step(step)
        if step == 1:
            tensors = uninterrupted.optimizer.tensors()
            saved = {name: value.clone() for name, value in tensors.items()}  # type: ignore[union-attr]
    for name, tensor in resumed.optimizer.tensors().items():
        tensor.copy_(saved[name])  # type: ignore[union-attr]
    resumed.optimizer.write_back()
    resumed.optimizer.steps = 2
    for step in (2, 3):
        resumed.step(step)
    expected = uninterrupted.optimizer.tensors()
    for name, tensor in resumed.optimizer.tensors().items():
        assert torch.equal(tensor, expected[name]), name  # type: ignore[arg-type]
    others = SHAPES.keys() - MATRICES.keys()
    assert set(saved) == (
        {f"model.{name}" for name in SHAPES}
        | {f"optimizer.momentum.{name}" for name in MATRICES}
        | {f"optimizer.{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq") for name in others}
    )


@pytest.mark.parametrize("grouped", [False, True])
def test_matrices_of_a_model_are_the_projections_of_its_layers(grouped: bool) -> None:
    config = parse_config(
        {
            "name": "muon",
            "data": {
                "source": {"kind": "source_tree"},
                "tokenizer": {"kind": "hf", "name": "any"},
                "seq_length": 8,
            },
            "model": {
                "num_layers": 1,
                "hidden_size": 16,
                "num_attention_heads": 4,
                "activation": "swiglu",
                "untie_embeddings_and_output_weights": True,
                **({"num_query_groups": 2} if grouped else {}),
            },
            "optim": {"name": "muon"},
            "checkpoint": {"save_interval": 1},
        },
        origin="tests",
    )
    stage = Stage(config, 64, ProcessMesh.serial(), special_tokens=SpecialTokens(eod=0))
    attention = (
        {"query": RowParts(), "key_value": RowParts(2, 4)}
        if grouped
        else {"query_key_value": RowParts(3, 4)}
    )
    expected = {
        **{f"self_attention.{name}": parts for name, parts in attention.items()},
        "self_attention.dense": RowParts(),
        "mlp.dense_h_to_4h_gate": RowParts(),
        "mlp.dense_h_to_4h": RowParts(),
        "mlp.dense_4h_to_h": RowParts(),
    }
    prefixes = {name.split("self_attention")[0] for name in stage.matrices if "query" in name}
    (prefix,) = prefixes
    assert stage.matrices == {f"{prefix}{name}.weight": parts for name, parts in expected.items()}
    assert stage.matrices.keys() <= stage.named_parameters.keys()
