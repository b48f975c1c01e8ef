"""Dropout of a part of sequences, which drops what the whole would drop there."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from megacore.kernels.attention import reference
from megacore.kernels.dropout import SequencePart, bias_dropout_add, dropout
from megacore.parallel.context import dropout_part
from megacore.parallel.mesh import ParallelGroup


def seeded(function: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the result, and the numbers that are drawn next."""
    torch.manual_seed(3)
    return function(), torch.rand(3)


def parts(tokens: int) -> list[SequencePart]:
    found = [dropout_part(tokens // 2, ParallelGroup(None, rank, 2))[1] for rank in range(2)]
    return [part for part in found if part is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_drops_the_elements_of_the_whole(dtype: torch.dtype) -> None:
    x, residual, bias = torch.randn(2, 16, 5), torch.randn(2, 16, 5), torch.randn(5)
    exact = 1e-6 if dtype == torch.float32 else 2e-2  # the factor of the whole is rounded
    x, residual, bias = x.to(dtype), residual.to(dtype), bias.to(dtype)
    for part in parts(16):
        whole, expected_next = seeded(lambda: dropout(x, 0.4))
        actual, drawn_next = seeded(lambda part=part: dropout(part.of(x), 0.4, part))
        torch.testing.assert_close(actual, part.of(whole), rtol=exact, atol=exact)
        assert torch.equal(drawn_next, expected_next)
        whole, _ = seeded(lambda: bias_dropout_add(x, bias, residual, 0.4))
        actual, _ = seeded(
            lambda part=part: bias_dropout_add(part.of(x), bias, part.of(residual), 0.4, part)
        )
        torch.testing.assert_close(actual, part.of(whole), rtol=exact, atol=exact)


@pytest.mark.parametrize("attend", [reference, partial(reference, softcap=2.0)])
def test_queries_of_a_part_drop_the_weights_of_the_whole(attend: Callable[..., Tensor]) -> None:
    """With grouped heads; gradients too."""
    sizes = (2, 4, 16, 8), (2, 2, 16, 8), (2, 2, 16, 8)
    query, key, value = (torch.randn(*size, requires_grad=True) for size in sizes)
    bias = torch.full((16, 16), -torch.inf).triu(1)[None, None]

    def run(query: Tensor, bias: Tensor, part: SequencePart | None) -> tuple[Tensor, Tensor]:
        options = {"dropout": 0.4, "causal": False, "scale": None, "part": part}
        return seeded(lambda: attend(query, key, value, bias=bias, **options))

    whole, expected_next = run(query, bias, None)
    outputs = []
    for part in parts(16):
        output, drawn_next = run(part.of(query), part.of(bias), part)
        torch.testing.assert_close(output, part.of(whole))
        assert torch.equal(drawn_next, expected_next)
        outputs.append(output)
    leaves = query, key, value
    expected = torch.autograd.grad(whole.square().sum(), leaves)
    actual = torch.autograd.grad(sum(output.square().sum() for output in outputs), leaves)  # type: ignore[arg-type]
    torch.testing.assert_close(actual, expected)
