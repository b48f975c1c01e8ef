"""Attention and MLP on 1, 2 and 4 ranks, compared with torch.nn.

The output and the gradients of the input and of every parameter are compared in float64.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacore.errors import ParallelLayoutError
from megacore.models.build import build_model
from megacore.models.layers.attention_bias import RelativeBias, attention_mask
from megacore.parallel.mesh import SINGLE_RANK, ParallelGroup, ProcessMesh
from tests._tensor_ranks import HEADS, MLP_WEIGHTS, attention_reference, joined, random
from tests._tiny import tiny_config

Ranks = list[dict[str, Any]]
ROW_PARALLEL = ("dense", "dense_4h_to_h")


def _compare(parts: list[dict[str, Tensor]], expected: dict[str, Tensor], sequence: bool) -> None:
    for name, value in expected.items():
        if name in ("y", "x"):
            dim = 1 if sequence else None
        elif name.rsplit(".", 1)[0] in ROW_PARALLEL:
            dim = 1 if name.endswith("weight") else None
        else:
            dim = 0
        torch.testing.assert_close(
            joined(parts, name, dim), value, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("groups", [HEADS, 4, 2, 1])
def test_attention_equals_the_reference(ranks: Ranks, groups: int, sequence: bool) -> None:
    parts = [rank["attention"][groups, sequence] for rank in ranks]
    expected = attention_reference(groups)
    assert parts[0].keys() == expected.keys()
    _compare(parts, expected, sequence)


def test_the_attention_reference_equals_torch() -> None:
    reference = attention_reference(HEADS)
    theirs = nn.MultiheadAttention(16, HEADS, batch_first=True, dtype=torch.float64)
    weight = random("query", 16, 16), random("key_value", 32, 16).unflatten(0, (HEADS, 2, 2))
    bias = random("query bias", 16), random("key_value bias", 32).unflatten(0, (HEADS, 2, 2))
    with torch.no_grad():
        theirs.in_proj_weight.copy_(
            torch.cat([weight[0], *(part.flatten(0, 1) for part in weight[1].unbind(1))])
        )
        theirs.in_proj_bias.copy_(
            torch.cat([bias[0], *(part.flatten(0, 1) for part in bias[1].unbind(1))])
        )
        theirs.out_proj.weight.copy_(random("dense", 16, 16))
        theirs.out_proj.bias.copy_(random("dense bias", 16))
    x = random("x", 2, 8, 16).requires_grad_()
    y, _ = theirs(x, x, x, attn_mask=torch.ones(8, 8, dtype=torch.bool).triu(1), need_weights=False)
    y.backward(random("g", 2, 8, 16))
    torch.testing.assert_close(reference["y"], y.detach())
    torch.testing.assert_close(reference["x"], x.grad)
    torch.testing.assert_close(reference["dense.weight"], theirs.out_proj.weight.grad)


@pytest.mark.parametrize("sequence", [False, True])
def test_mlp_equals_torch(ranks: Ranks, sequence: bool) -> None:
    theirs = nn.Sequential(nn.Linear(6, 8), nn.GELU(approximate="tanh"), nn.Linear(8, 6)).double()
    names = dict(zip(MLP_WEIGHTS, ("0.weight", "0.bias", "2.weight", "2.bias"), strict=True))
    with torch.no_grad():
        for ours, name in names.items():
            theirs.get_parameter(name).copy_(MLP_WEIGHTS[ours])
    x = random("x", 2, 4, 6).requires_grad_()
    y = theirs(x)
    y.backward(random("g", 2, 4, 6))
    grads = {ours: theirs.get_parameter(name).grad for ours, name in names.items()}
    expected: dict[str, Any] = {"y": y.detach(), "x": x.grad, **grads}
    _compare([rank["mlp"][sequence] for rank in ranks], expected, sequence)


def test_heads_and_groups_that_do_not_divide_are_refused() -> None:
    three = replace(ProcessMesh.serial(), tensor_parallel=ParallelGroup(None, 0, 3))
    with pytest.raises(
        ParallelLayoutError, match=r"num_attention_heads 4 .* tensor parallel size 3: use 6"
    ):
        build_model(tiny_config(hidden_size=96, make_vocab_size_divisible_by=3), 510, three)
    four = tiny_config(
        hidden_size=96, num_attention_heads=12, num_query_groups=4, make_vocab_size_divisible_by=3
    )
    with pytest.raises(
        ParallelLayoutError,
        match=r"num_query_groups 4 cannot .* tensor parallel size 3: one must be",
    ):
        build_model(four, 510, three)


def test_the_gradient_of_a_relative_bias_is_summed_in_fp32() -> None:
    """A bucket sums thousands of positions, and a sum in bf16 stops growing at 256."""

    def gradient(dtype: torch.dtype) -> Tensor:
        table = RelativeBias(8, 16, 2, bidirectional=True, tp=SINGLE_RANK, device="cpu").to(dtype)
        nn.init.zeros_(table.weight)
        bias, _ = attention_mask(
            queries=96,
            keys=96,
            causal=False,
            dtype=dtype,
            device=torch.device("cpu"),
            learned=table(96, 96),
        )
        assert bias is not None
        assert bias.dtype == dtype
        bias.sum().backward()
        assert table.weight.grad is not None
        return table.weight.grad.float()

    expected = gradient(torch.float32)
    assert expected.max() > 2000
    torch.testing.assert_close(gradient(torch.bfloat16), expected, rtol=1e-2, atol=0)


def test_alibi_is_rounded_once() -> None:
    """bf16 cannot represent all distances above 256."""
    slopes = torch.tensor([0.01])

    def bias(dtype: torch.dtype) -> Tensor:
        result, _ = attention_mask(
            queries=1, keys=600, causal=True, dtype=dtype, device=torch.device("cpu"), slopes=slopes
        )
        assert result is not None
        return result

    assert torch.equal(bias(torch.bfloat16), bias(torch.float32).bfloat16())
