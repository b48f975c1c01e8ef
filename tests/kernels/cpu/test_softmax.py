from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.errors import ConfigError
from megacore.kernels.attention import reference as plain_attention
from megacore.kernels.cpu.common import runs_fp32
from megacore.kernels.cpu.softmax import scaled_masked_softmax
from tests.kernels.cpu._pointwise import both_types, check_compiled, check_threads, random
from tests.kernels.cpu._pointwise import check as check_rounded

attention = partial(plain_attention, softmax=scaled_masked_softmax)
check = partial(check_rounded, rounding_tolerance=2e-3)


def reference(
    scores: Tensor, bias: Tensor | None, *, scale: float, causal: bool = False, dropout: float = 0.0
) -> Tensor:
    scores = scores * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        queries, keys = scores.shape[-2:]
        unseen = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(
            keys - queries + 1
        )
        scores = scores.masked_fill(unseen, -torch.inf)
    weights = scores.softmax(-1)
    return F.dropout(weights, dropout) if dropout else weights


def seeded(function: Callable[[], Tensor]) -> Tensor:
    torch.manual_seed(5)
    return function()


@both_types
@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (2, 3, 17, 17), (1, 2, 5, 250), (3, 1, 1, 33)])
@pytest.mark.parametrize("causal", [False, True])
def test_softmax_without_a_bias_equals_float64(
    dtype: torch.dtype, shape: tuple[int, ...], causal: bool
) -> None:
    check(
        lambda scores: scaled_masked_softmax(scores, None, scale=0.5, causal=causal),
        lambda scores: reference(scores, None, scale=0.5, causal=causal),
        [random(*shape, dtype=dtype)],
    )


@both_types
@pytest.mark.parametrize("causal", [False, True])
def test_a_trained_bias_gets_its_gradient(dtype: torch.dtype, causal: bool) -> None:
    check(
        lambda scores, bias: scaled_masked_softmax(scores, bias, scale=0.5, causal=causal),
        lambda scores, bias: reference(scores, bias, scale=0.5, causal=causal),
        [random(4, 3, 17, 19, dtype=dtype), random(1, 3, 17, 19, dtype=dtype)],
    )


@both_types
@pytest.mark.parametrize("shape", [(2, 1, 1, 9), (2, 3, 7, 9), (1, 1, 7, 9), (1, 3, 1, 9)])
def test_biases_and_masks_of_any_shape_equal_float64(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    bias = random(*shape, dtype=dtype).detach()
    bias[..., 4:6] = -torch.inf
    check(
        lambda scores: scaled_masked_softmax(scores, bias, scale=0.5),
        lambda scores: reference(scores, bias.double(), scale=0.5),
        [random(2, 3, 7, 9, dtype=dtype)],
    )
    strided = bias.transpose(-1, -2).contiguous().transpose(-1, -2)
    scores = random(2, 3, 7, 9, dtype=dtype).detach()
    assert torch.equal(
        scaled_masked_softmax(scores, strided, scale=0.5),
        scaled_masked_softmax(scores, bias, scale=0.5),
    )


@both_types
def test_queries_before_the_first_key_see_nothing(dtype: torch.dtype) -> None:
    scores = random(2, 3, 5, 3, dtype=dtype).detach()
    actual = scaled_masked_softmax(scores, None, scale=0.5, causal=True)
    assert not actual[:, :, :2].any()
    expected = reference(scores.double(), None, scale=0.5, causal=True)[:, :, 2:]
    torch.testing.assert_close(actual[:, :, 2:].double(), expected, rtol=4e-3, atol=1e-6)


@both_types
def test_a_bias_is_broadcast_over_keys(dtype: torch.dtype) -> None:
    scores, bias = (
        random(2, 3, 7, 9, dtype=dtype).detach(),
        random(2, 3, 7, 1, dtype=dtype).detach(),
    )
    actual = scaled_masked_softmax(scores, bias, scale=0.5)
    assert torch.equal(
        actual, scaled_masked_softmax(scores, bias.expand_as(scores).contiguous(), scale=0.5)
    )


@both_types
def test_dropout_draws_the_mask_of_torch(dtype: torch.dtype) -> None:
    scores, bias = random(2, 3, 17, 19, dtype=dtype), random(1, 3, 17, 19, dtype=dtype)
    mask = seeded(lambda: F.dropout(torch.ones_like(scores), 0.3)) > 0
    check(
        lambda x, b: seeded(
            lambda: scaled_masked_softmax(x, b, scale=0.5, causal=True, dropout=0.3)
        ),
        lambda x, b: reference(x, b, scale=0.5, causal=True) * mask / 0.7,
        [scores, bias],
    )


@both_types
def test_large_scores_and_fully_masked_queries_are_exact(dtype: torch.dtype) -> None:
    scores = (
        torch.tensor([[1e4, 0.0, 1e4], [-1e4, -1e4, -1e30], [1.0, 2.0, 3.0]])
        .to(dtype)
        .view(1, 1, 3, 3)
    )
    bias = torch.zeros(1, 1, 3, 3, dtype=dtype)
    bias[..., 2, :] = -torch.inf
    actual = scaled_masked_softmax(scores, bias, scale=1.0)
    assert actual.tolist() == [[[[0.5, 0.0, 0.5], [0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]]]


@both_types
def test_attention_draws_the_dropout_of_torchs_attention(dtype: torch.dtype) -> None:
    query, key, value = (
        random(2, 33, 4, 16, dtype=dtype, seed=i).detach().transpose(1, 2) for i in range(3)
    )
    bias = random(1, 4, 33, 33, dtype=dtype).detach()
    for score_bias, causal in ((bias, False), (None, True)):
        actual = seeded(
            lambda b=score_bias, c=causal: attention(
                query, key, value, bias=b, dropout=0.3, causal=c, scale=None
            )
        )
        expected = seeded(
            lambda b=score_bias, c=causal: F.scaled_dot_product_attention(
                query.float(), key.float(), value.float(), b if b is None else b.float(), 0.3, c
            )
        )
        half = dtype == torch.bfloat16
        torch.testing.assert_close(
            actual.float(), expected, rtol=3e-2 if half else 2e-5, atol=3e-2 if half else 2e-6
        )


@pytest.mark.skipif(not runs_fp32(), reason="this CPU has no AVX-512")
@pytest.mark.parametrize("shape", [(1, 4, 21, 21), (2, 4, 21, 21), (2, 1, 1, 21)])
@pytest.mark.parametrize("groups", [4, 2])
def test_attention_with_a_trained_bias_equals_float64(groups: int, shape: tuple[int, ...]) -> None:
    leaves = [
        random(2, heads, 21, 16, dtype=torch.float32, seed=i)
        for i, heads in enumerate((4, groups, groups))
    ]
    check(
        lambda q, k, v, b: attention(q, k, v, bias=b, dropout=0.0, causal=False, scale=0.3),
        lambda q, k, v, b: (
            reference(q @ k.repeat_interleave(4 // groups, 1).transpose(-1, -2), b, scale=0.3)
            @ v.repeat_interleave(4 // groups, 1)
        ),
        [*leaves, random(*shape, dtype=torch.float32)],
    )


@both_types
def test_threads_do_not_change_the_result(dtype: torch.dtype) -> None:
    leaves = [random(4, 3, 77, 77, dtype=dtype), random(1, 3, 77, 77, dtype=dtype)]
    grad = random(4, 3, 77, 77, dtype=dtype, seed=3).detach()
    check_threads(
        lambda x, b: seeded(
            lambda: scaled_masked_softmax(x, b, scale=0.5, causal=True, dropout=0.1)
        ),
        leaves,
        grad,
    )


@both_types
def test_compiled_results_are_identical(dtype: torch.dtype) -> None:
    leaves = [random(2, 3, 9, 9, dtype=dtype), random(1, 3, 9, 9, dtype=dtype)]
    grad = random(2, 3, 9, 9, dtype=dtype, seed=3).detach()
    check_compiled(lambda x, b: scaled_masked_softmax(x, b, scale=0.5, causal=True), leaves, grad)


def test_a_trained_bias_of_another_shape_is_refused() -> None:
    bias = torch.zeros(1, 1, 4, 4, requires_grad=True)
    with pytest.raises(ConfigError, match=r"\[1, 3, 4, 4\], not \[1, 1, 4, 4\]"):
        scaled_masked_softmax(torch.zeros(2, 3, 4, 4), bias, scale=1.0)
