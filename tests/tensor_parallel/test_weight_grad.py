"""Gradients accumulated directly into main gradients, compared with autograd's."""

from typing import Any

import pytest
import torch

from megacore.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding
from megacore.tensor_parallel.linear import expose_sinks, matmul_gradient
from tests._gpt_ranks import Sink
from tests._tensor_ranks import ids, random


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_main_gradients_of_a_model_equal_autograd(
    ranks: list[dict[str, Any]], recompute: str
) -> None:
    for rank in ranks:
        sinks = rank["sinks"][recompute]
        for name, expected in sinks["expected"].items():
            has_sink = (
                name.endswith("weight") and "layernorm" not in name and "position" not in name
            )
            assert sinks["contributions"][name] == 2 * has_sink * (
                2 if "word_embeddings" in name else 1
            ), name
            assert (name in sinks["autograd"]) != has_sink, name
            gradient = sinks["main"][name] if has_sink else sinks["autograd"][name]
            torch.testing.assert_close(
                gradient, expected, rtol=1e-5, atol=1e-6 * expected.abs().max().item()
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_products_accumulate_in_fp32(dtype: torch.dtype) -> None:
    dy, x = random("g", 64, 8).to(dtype), random("x", 64, 6).to(dtype)
    sink = Sink(torch.empty(8, 6))
    for _ in range(300):
        assert matmul_gradient(sink, dy, x) is None
    once = matmul_gradient(None, dy, x)
    assert once is not None
    assert once.dtype == dtype
    torch.testing.assert_close(sink.main_grad, 300 * once.float(), rtol=1e-5, atol=1e-4)


def test_half_precision_lookups_accumulate_in_fp32() -> None:
    layer = VocabParallelEmbedding(128, 6).bfloat16()
    sink = layer.weight.grad_sink = Sink(layer.weight)  # type: ignore[assignment]
    grad = random("g", 2, 5, 6).bfloat16()
    for _ in range(300):
        layer(ids(2, 5)).backward(grad)
    assert layer.weight.grad is None
    expected = torch.zeros(128, 6).index_add_(0, ids(2, 5).flatten(), grad.flatten(0, 1).float())
    torch.testing.assert_close(sink.main_grad, 300 * expected, rtol=1e-5, atol=1e-4)


def test_a_graph_whose_only_gradient_is_in_a_sink_adds_it() -> None:
    layer = ColumnParallelLinear(6, 8, bias=False)
    sink = layer.weight.grad_sink = Sink(layer.weight)  # type: ignore[assignment]
    expose_sinks(layer.parameters())
    graph = torch.compile(layer, backend="aot_eager")
    x, dy = random("x", 3, 6).float(), random("g", 3, 8).float()
    for _ in range(2):
        graph(x).backward(dy)
    torch.testing.assert_close(sink.main_grad, 2 * dy.t() @ x)
    assert sink.contributions == 2
    assert layer.weight.grad is None


def test_a_graph_adds_nothing_for_a_frozen_weight() -> None:
    layer = ColumnParallelLinear(6, 8, bias=False)
    torch.nn.init.normal_(layer.weight)
    sink = layer.weight.grad_sink = Sink(layer.weight)  # type: ignore[assignment]
    layer.weight.requires_grad_(False)
    expose_sinks(layer.parameters())
    x, dy = random("x", 3, 6).float().requires_grad_(), random("g", 3, 8).float()
    torch.compile(layer, backend="aot_eager")(x).backward(dy)
    torch.testing.assert_close(x.grad, dy @ layer.weight)
    assert sink.contributions == 0
