"""Column and row parallel layers against torch.nn.Linear, for one rank and for two: y, dx, dw, db in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacore.errors import ParallelLayoutError
from megacore.parallel.mesh import ParallelGroup
from megacore.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tests._two_ranks import random


def _reference(in_features: int, out_features: int) -> dict[str, Tensor]:
    layer = nn.Linear(in_features, out_features, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(random("w", out_features, in_features))
        layer.bias.copy_(random("b", out_features))
    return _run(layer, in_features, out_features)


def _run(layer: nn.Module, in_features: int, out_features: int) -> dict[str, Tensor]:
    x = random("x", 2, 3, in_features).requires_grad_()
    y = layer(x)
    y.backward(random("g", 2, 3, out_features))
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **grads}  # type: ignore[dict-item]


@pytest.mark.parametrize("layer_type", [ColumnParallelLinear, RowParallelLinear])
def test_alone_it_is_the_serial_layer(layer_type: type[ColumnParallelLinear | RowParallelLinear]) -> None:
    layer = layer_type(6, 8).double()
    with torch.no_grad():
        layer.weight.copy_(random("w", 8, 6))
        layer.bias.copy_(random("b", 8))
    expected = _reference(6, 8)
    for name, value in _run(layer, 6, 8).items():
        assert torch.equal(value, expected[name]), name


def test_column_parallel(two_ranks: list[dict[str, Any]]) -> None:
    expected = _reference(6, 8)
    parts = [found["column"] for found in two_ranks]
    torch.testing.assert_close(torch.cat([part["y"] for part in parts], -1), expected["y"])
    for name in ("weight", "bias"):
        torch.testing.assert_close(torch.cat([part[name] for part in parts]), expected[name])
    for part in parts:
        torch.testing.assert_close(part["x"], expected["x"])


def test_row_parallel(two_ranks: list[dict[str, Any]]) -> None:
    expected = _reference(8, 6)
    parts = [found["row"] for found in two_ranks]
    torch.testing.assert_close(torch.cat([part["x"] for part in parts], -1), expected["x"])
    torch.testing.assert_close(torch.cat([part["weight"] for part in parts], -1), expected["weight"])
    for part in parts:
        torch.testing.assert_close(part["y"], expected["y"])
        torch.testing.assert_close(part["bias"], expected["bias"])


def test_features_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ParallelLayoutError, match=r"output features 7 .* tensor parallel size 2: use 8"):
        ColumnParallelLinear(6, 7, tp=ParallelGroup(None, 0, 2))
    with pytest.raises(ParallelLayoutError, match=r"input features 5 .* tensor parallel size 2: use 6"):
        RowParallelLinear(5, 6, tp=ParallelGroup(None, 0, 2))
