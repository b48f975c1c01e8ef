"""Column and row parallel layers compared with torch.nn.Linear on 1, 2 and 4 ranks, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacore.errors import ParallelLayoutError
from megacore.parallel.mesh import ParallelGroup
from megacore.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tests._tensor_ranks import joined, random

Ranks = list[dict[str, Any]]


def _linear(in_features: int, out_features: int) -> dict[str, Tensor]:
    layer = nn.Linear(in_features, out_features, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(random("w", out_features, in_features))
        layer.bias.copy_(random("b", out_features))
    return _run(layer, in_features, out_features)


def _run(layer: nn.Module, in_features: int, out_features: int) -> dict[str, Tensor]:
    x = random("x", 2, 4, in_features).requires_grad_()
    y = layer(x)
    y.backward(random("g", 2, 4, out_features))
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **grads}  # type: ignore[dict-item]


@pytest.mark.parametrize("layer_type", [ColumnParallelLinear, RowParallelLinear])
def test_one_rank_equals_torch_linear(
    layer_type: type[ColumnParallelLinear | RowParallelLinear],
) -> None:
    layer = layer_type(6, 8).double()
    with torch.no_grad():
        layer.weight.copy_(random("w", 8, 6))
        layer.bias.copy_(random("b", 8))
    expected = _linear(6, 8)
    for name, value in _run(layer, 6, 8).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("sequence", [False, True])
def test_column_parallel_equals_torch_linear(ranks: Ranks, sequence: bool) -> None:
    parts = [rank["column"][sequence] for rank in ranks]
    expected = _linear(6, 8)
    dims = {"y": -1, "weight": 0, "bias": 0, "x": 1 if sequence else None}
    for name, dim in dims.items():
        torch.testing.assert_close(joined(parts, name, dim), expected[name])


@pytest.mark.parametrize("sequence", [False, True])
def test_row_parallel_equals_torch_linear(ranks: Ranks, sequence: bool) -> None:
    parts = [rank["row"][sequence] for rank in ranks]
    expected = _linear(8, 6)
    dims = {"y": 1 if sequence else None, "weight": 1, "bias": None, "x": -1}
    for name, dim in dims.items():
        torch.testing.assert_close(joined(parts, name, dim), expected[name])


@pytest.mark.parametrize("sequence", [False, True])
def test_several_weights_on_one_input_equal_torch_linear(ranks: Ranks, sequence: bool) -> None:
    parts = [rank["two_weights"][sequence] for rank in ranks]
    leaves = {
        "w": random("w", 8, 6),
        "b": random("b", 8),
        "v": random("v", 4, 6),
        "x": random("x", 2, 4, 6),
    }
    w, b, v, x = (leaf.requires_grad_() for leaf in leaves.values())
    outputs = {"y": nn.functional.linear(x, w, b), "u": nn.functional.linear(x, v)}
    torch.autograd.backward(list(outputs.values()), [random("g", 2, 4, 8), random("g", 2, 4, 4)])
    for name, output in outputs.items():
        torch.testing.assert_close(joined(parts, name, -1), output.detach())
    for name, leaf in leaves.items():
        dim = 0 if name != "x" else 1 if sequence else None
        torch.testing.assert_close(joined(parts, name, dim), leaf.grad)


def test_a_frozen_weight_gets_no_gradient() -> None:
    layer, x = ColumnParallelLinear(6, 8).double(), random("x", 2, 3, 6)
    with torch.no_grad():
        layer.weight.copy_(random("w", 8, 6))
    layer.weight.requires_grad_(False)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(layer.bias.grad, torch.full((8,), 6.0, dtype=torch.float64))


def test_features_that_do_not_divide_are_refused() -> None:
    with pytest.raises(
        ParallelLayoutError, match=r"output features 7 .* tensor parallel size 2: use 8"
    ):
        ColumnParallelLinear(6, 7, tp=ParallelGroup(None, 0, 2))
    with pytest.raises(
        ParallelLayoutError, match=r"input features 5 .* tensor parallel size 2: use 6"
    ):
        RowParallelLinear(5, 6, tp=ParallelGroup(None, 0, 2))
