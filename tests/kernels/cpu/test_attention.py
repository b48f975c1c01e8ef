from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.errors import ConfigError
from megacore.kernels.attention import reference as attention_reference
from megacore.kernels.choice import choose_kernels, plain_kernels
from megacore.kernels.cpu.attention import attention, packed_attention, supports, supports_packed
from megacore.kernels.cpu.common import runs_bf16, runs_fp32
from megacore.kernels.implementation import Setting
from megacore.kernels.spans import Spans

BF16, FP32 = torch.bfloat16, torch.float32

needs_fp32 = pytest.mark.skipif(not runs_fp32(), reason="this CPU has no AVX-512")
needs_bf16 = pytest.mark.skipif(not runs_bf16(), reason="this CPU has no AVX512-BF16")
both_types = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(FP32, marks=needs_fp32, id="fp32"),
        pytest.param(BF16, marks=needs_bf16, id="bf16"),
    ],
)

# b, n, g, queries, keys, d, causal
SHAPES = {
    "d16": (2, 2, 2, 64, 64, 16, True),
    "d32": (2, 4, 4, 128, 128, 32, True),
    "d64": (1, 2, 2, 160, 160, 64, True),
    "d80": (1, 2, 2, 65, 65, 80, True),
    "d128": (1, 1, 1, 96, 96, 128, True),
    "d256": (1, 1, 1, 40, 40, 256, True),
    "d not a multiple of 8": (1, 2, 2, 50, 50, 13, True),
    "all keys": (2, 2, 2, 64, 64, 32, False),
    "odd lengths": (1, 2, 2, 77, 77, 24, True),
    "one token": (2, 2, 2, 1, 1, 32, True),
    "grouped": (2, 6, 2, 70, 70, 32, True),
    "one group": (1, 4, 1, 33, 33, 64, False),
    "more keys": (1, 2, 2, 37, 201, 32, False),
    "more queries": (1, 2, 1, 140, 9, 40, False),
    "several ranges of keys": (1, 2, 1, 1030, 1030, 16, True),
    "several ranges, all keys": (1, 1, 1, 70, 600, 16, False),
}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def inputs(
    b: int, n: int, g: int, queries: int, keys: int, d: int, dtype: torch.dtype, scale: float = 1.0
) -> tuple[list[Tensor], Tensor]:
    """Query, key and value that require gradients, and the gradient of the output."""
    generator = torch.Generator().manual_seed(b + n * queries + keys * d)
    shapes = [(b, n, queries, d), (b, g, keys, d), (b, g, keys, d), (b, n, queries, d)]
    *parts, grad = (torch.randn(shape, generator=generator).to(dtype) * scale for shape in shapes)
    return [part.requires_grad_() for part in parts], grad


def reference(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None = None
) -> Tensor:
    sharing = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(sharing, 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(
            ~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf
        )
    return scores.softmax(-1) @ value


def exact(
    parts: list[Tensor], grad: Tensor, causal: bool, scale: float | None = None
) -> list[Tensor]:
    """The output and the gradients in float64."""
    doubles = [part.detach().double().requires_grad_() for part in parts]
    out = reference(*doubles, causal, scale)
    return [out.detach(), *torch.autograd.grad(out, doubles, grad.double())]


def kernel_results(
    parts: list[Tensor], grad: Tensor, causal: bool, scale: float | None = None
) -> list[Tensor]:
    query, key, value = parts
    out = attention(query, key, value, causal=causal, scale=scale)
    return [out.detach(), *torch.autograd.grad(out, parts, grad)]


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the error relative to the norm of the expected tensor."""
    return float((actual.detach().double() - expected.detach()).norm() / expected.norm())


@needs_fp32
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_attention_equals_float64_in_fp32(shape: tuple[Any, ...]) -> None:
    parts, grad = inputs(*shape[:6], FP32)
    for actual, expected in zip(
        kernel_results(parts, grad, shape[6]), exact(parts, grad, shape[6]), strict=True
    ):
        torch.testing.assert_close(actual.double(), expected, rtol=2e-6, atol=2e-6)


@needs_bf16
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_attention_is_as_exact_as_torch_in_bf16(shape: tuple[Any, ...]) -> None:
    *sizes, causal = shape
    parts, grad = inputs(*sizes, BF16)
    out = F.scaled_dot_product_attention(*parts, is_causal=causal, enable_gqa=sizes[1] != sizes[2])
    torch_results = [out, *torch.autograd.grad(out, parts, grad)]
    for actual, torch_result, expected in zip(
        kernel_results(parts, grad, causal), torch_results, exact(parts, grad, causal), strict=True
    ):
        if expected.norm() == 0:
            assert actual.norm() < 1e-2  # one key: what remains is the output's rounding
        else:
            assert error(actual, expected) <= 1.5 * error(torch_result, expected) + 1e-4


@both_types
def test_the_error_of_every_query_is_small(dtype: torch.dtype) -> None:
    parts, grad = inputs(1, 2, 2, 150, 150, 32, dtype)
    for actual, expected in zip(
        kernel_results(parts, grad, True), exact(parts, grad, True), strict=True
    ):
        limit = 4e-6 if dtype == FP32 else 2e-2
        assert (
            float((actual.double() - expected).norm(dim=-1).max() / expected.norm(dim=-1).mean())
            < limit
        )


@both_types
@pytest.mark.parametrize("mean", [3, 50, 400], ids="documents of {} tokens".format)
@pytest.mark.parametrize(
    "shape",
    [
        (2, 4, 2, 1030, 1030, 32),
        (1, 1, 1, 70, 600, 16),
        (1, 2, 1, 37, 201, 32),
        (3, 2, 2, 140, 140, 13),
    ],
    ids=["grouped, several ranges of keys", "last of 600 queries", "d32", "d13"],
)
def test_spans_equal_the_dense_mask(dtype: torch.dtype, shape: tuple[int, ...], mean: int) -> None:
    b, *_, queries, keys, _ = shape
    generator = torch.Generator().manual_seed(mean)
    documents = (torch.rand(b, keys, generator=generator) < 1 / mean).cumsum(1)
    lengths = torch.randint(1, keys, (b, 1), generator=generator)
    masks: list[dict[str, Any]] = [
        {"causal": True, "documents": documents},
        {"causal": True, "documents": documents, "window": 100},
        {"causal": False, "documents": documents, "window": 5},
        {"causal": False, "present": torch.arange(keys) < lengths},
        {"causal": True, "documents": documents, "present": torch.arange(keys) >= lengths},
    ]
    for mask in masks:
        spans = Spans.of(queries, keys, device=torch.device("cpu"), **mask)
        parts, grad = inputs(*shape, dtype=dtype)
        out = attention(*parts, causal=False, scale=None, spans=spans)
        exact_parts = [part.detach().double().requires_grad_() for part in parts]
        expected = attention_reference(
            *exact_parts, bias=None, dropout=0.0, causal=False, scale=None, spans=spans
        )
        results = [out, *torch.autograd.grad(out, parts, grad)]
        exacts = [expected, *torch.autograd.grad(expected, exact_parts, grad.double())]
        for actual, wanted in zip(results, exacts, strict=True):
            tolerance = 1e-5 if dtype == FP32 else 2e-2
            assert (actual.double() - wanted).abs().max() <= tolerance * wanted.abs().max()


@both_types
@pytest.mark.parametrize("scale", [0.05, 0.7, -0.3])
def test_the_scale_is_applied(dtype: torch.dtype, scale: float) -> None:
    parts, grad = inputs(1, 2, 2, 40, 40, 32, dtype)
    for actual, expected in zip(
        kernel_results(parts, grad, True, scale), exact(parts, grad, True, scale), strict=True
    ):
        assert error(actual, expected) < (2e-6 if dtype == FP32 else 8e-3)


@both_types
def test_output_and_gradients_are_contiguous_by_token(dtype: torch.dtype) -> None:
    parts, grad = inputs(2, 4, 2, 24, 24, 16, dtype)
    for x in kernel_results(parts, grad, True):
        assert x.transpose(1, 2).is_contiguous()


@both_types
@pytest.mark.parametrize("causal", [True, False])
def test_strides_do_not_change_the_result(dtype: torch.dtype, causal: bool) -> None:
    parts, grad = inputs(2, 4, 2, 50, 50, 24, dtype)
    wide = torch.full((3, 50, 2, 6, 31), torch.nan, dtype=dtype)
    strided = []
    for i, part in enumerate(parts):
        view = wide[i].transpose(0, 1).permute(0, 2, 1, 3)[:, : part.shape[1], :, 3:27]
        strided.append(view.copy_(part.detach()).requires_grad_())
    assert not any(part.transpose(1, 2).is_contiguous() for part in strided)
    expected = kernel_results(parts, grad, causal)
    by_row = torch.empty(2, 4, 24, 50, dtype=dtype).transpose(2, 3).copy_(grad)
    for gradient in (grad.transpose(1, 2).contiguous().transpose(1, 2), by_row):
        for actual, expected_tensor in zip(
            kernel_results(strided, gradient, causal), expected, strict=True
        ):
            assert torch.equal(actual, expected_tensor)


@both_types
@pytest.mark.parametrize("causal", [True, False])
def test_packed_attention_equals_attention(dtype: torch.dtype, causal: bool) -> None:
    (mixed, _, _), _ = inputs(2, 70, 1, 3 * 4, 1, 32, dtype)
    mixed = mixed.detach().view(2, 70, 4, 3, 32).requires_grad_()
    grad = inputs(2, 4, 4, 70, 70, 32, dtype)[1]
    out = packed_attention(mixed, causal=causal, scale=None)
    (gradient,) = torch.autograd.grad(out, mixed, grad)
    parts = [part.detach().requires_grad_() for part in mixed.permute(3, 0, 2, 1, 4)]
    unpacked = kernel_results(parts, grad, causal)
    assert gradient.is_contiguous()
    assert torch.equal(out, unpacked[0])
    for part, expected in zip(gradient.permute(3, 0, 2, 1, 4), unpacked[1:], strict=True):
        assert torch.equal(part, expected)


@both_types
@pytest.mark.parametrize(
    "name", ["d32", "grouped", "one token", "several ranges of keys", "more keys"]
)
def test_threads_do_not_change_the_result(dtype: torch.dtype, name: str) -> None:
    *sizes, causal = SHAPES[name]
    parts, grad = inputs(*sizes, dtype)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(kernel_results(parts, grad, causal))
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


@both_types
def test_large_scores_give_finite_results(dtype: torch.dtype) -> None:
    parts, grad = inputs(1, 2, 2, 70, 70, 32, dtype, scale=300.0)
    actual, expected = kernel_results(parts, grad, True), exact(parts, grad, True)
    assert all(bool(x.isfinite().all()) for x in actual)
    assert error(actual[0], expected[0]) < 1e-2


@both_types
def test_a_score_of_minus_infinity_has_no_weight(dtype: torch.dtype) -> None:
    parts, grad = inputs(1, 1, 1, 40, 200, 16, dtype)
    query, key, _ = parts
    with torch.no_grad():
        query.fill_(1.0)
        key[:, :, 3:190] = -3e38
    actual = kernel_results(parts, grad, False)
    assert all(bool(x.isfinite().all()) for x in actual)
    rest = [x.detach()[:, :, [*range(3), *range(190, 200)]] for x in parts[1:]]
    assert (
        error(
            actual[0], reference(query.detach().double(), rest[0].double(), rest[1].double(), False)
        )
        < 1e-2
    )
    assert not actual[3][:, :, 3:190].any()


@both_types
def test_all_scores_of_minus_infinity_give_zero(dtype: torch.dtype) -> None:
    parts, grad = inputs(1, 1, 1, 5, 9, 16, dtype)
    with torch.no_grad():
        parts[0].fill_(1.0)
        parts[1].fill_(-3e38)
    out, _, _, grad_value = kernel_results(parts, grad, False)
    assert not out.any()
    assert not grad_value.any()


@both_types
def test_compiled_results_are_identical(dtype: torch.dtype) -> None:
    (x, _, _), grad = inputs(2, 20, 1, 4, 1, 3 * 16, dtype)
    grad = grad.detach()[..., :16].contiguous()

    def layer(x: Tensor) -> tuple[Tensor, Tensor]:
        mixed = (2 * x).view(2, 20, 4, 3, 16)
        query, key, value = mixed.permute(3, 0, 2, 1, 4).unbind(0)
        assert supports(query, key, value)
        assert supports_packed(mixed)
        packed = packed_attention(mixed, causal=True, scale=None).transpose(1, 2)
        return packed, attention(query, key[:, :2], value[:, :2], causal=True, scale=0.3).transpose(
            1, 2
        )

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = []
    for function in (layer, compiled):
        first, second = function(x)
        results.append((first, second, *torch.autograd.grad([first, second], x, [grad, grad])))
    for eager, other in zip(*results, strict=True):
        assert torch.equal(eager, other)
        assert eager.stride() == other.stride()


@both_types
def test_operators_match_their_schemas(dtype: torch.dtype) -> None:
    parts, grad = inputs(2, 4, 2, 9, 9, 16, dtype)
    query, key, value = (part.detach() for part in parts)
    mixed = inputs(2, 9, 1, 4, 1, 48, dtype)[0][0].detach().view(2, 9, 4, 3, 16)
    operators = torch.ops.megacore
    tests = ("test_schema", "test_faketensor")
    documents = torch.tensor([[0] * 4 + [1] * 5, [0] * 9])
    spans = Spans.of(9, 9, causal=True, device=torch.device("cpu"), documents=documents)
    for options in ((True, 0.25), (True, 0.25, spans.first, spans.last)):
        forward = operators.attention_forward(query, key, value, *options)
        packed = operators.packed_attention_forward(mixed, *options)
        for operator, arguments in (
            (operators.attention_forward, (query, key, value, *options)),
            (operators.attention_backward, (grad, query, key, value, *forward, *options)),
            (operators.packed_attention_forward, (mixed, *options)),
            (operators.packed_attention_backward, (grad, mixed, *packed, *options)),
        ):
            torch.library.opcheck(operator.default, arguments, test_utils=tests)


@needs_fp32
@pytest.mark.parametrize(
    "shape", [(2, 9, 2, 3, 257), (0, 9, 2, 3, 16)], ids=["wide heads", "no samples"]
)
def test_unsupported_shapes_are_left_to_torch(shape: tuple[int, ...]) -> None:
    mixed = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    actual = choose_kernels(Setting(torch.device("cpu"), FP32)).packed_attention(
        mixed, causal=True, scale=None
    )
    torch.testing.assert_close(
        actual, plain_kernels().packed_attention(mixed, causal=True, scale=None)
    )


@needs_fp32
def test_log_sum_exp_equals_float64() -> None:
    (query, key, value), _ = inputs(1, 2, 2, 30, 30, 16, FP32)
    _, lse = torch.ops.megacore.attention_forward(
        query.detach(), key.detach(), value.detach(), False, 0.25
    )
    expected = (query.double() @ key.double().transpose(-1, -2) * 0.25).logsumexp(-1)
    torch.testing.assert_close(lse.double(), expected, rtol=1e-6, atol=1e-6)


@needs_fp32
def test_only_valid_types_shapes_and_strides_are_supported() -> None:
    (query, key, value), _ = inputs(2, 4, 2, 9, 7, 16, FP32)
    assert supports(query, key, value)
    assert not supports(query.double(), key.double(), value.double())
    assert not supports(query.to("meta"), key.to("meta"), value.to("meta"))
    assert not supports(query, key, value[:, :, :5])
    assert not supports(query, key[:1], value[:1])
    assert not supports(query[:, :3], key, value)
    assert not supports(query[:, :, :0], key, value)
    assert not supports(query.mT.contiguous().mT, key, value)
    wide = torch.empty(1, 1, 1, 257)
    assert not supports(wide, wide, wide)


@needs_fp32
def test_unsupported_arguments_are_refused() -> None:
    (query, key, value), _ = inputs(2, 4, 2, 9, 7, 16, FP32)
    with pytest.raises(ConfigError, match="as many keys as queries"):
        attention(query, key, value, causal=True, scale=None)
    with pytest.raises(ConfigError, match="does not take query"):
        attention(query.double(), key.double(), value.double(), causal=False, scale=None)
