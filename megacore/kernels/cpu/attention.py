"""Attention on CPUs with AVX-512: softmax(q kᵀ · scale) v and its gradients.

No score matrix is stored. The backward pass keeps the inputs, the output and the log-sum-exp of
each query, and recomputes the weights (Dao et al. 2022). Results are bitwise the same for any
number of threads.
"""

from typing import Any

import torch
from torch import Tensor

from megacore.errors import ConfigError
from megacore.kernels.cpu import _kernels
from megacore.kernels.cpu.common import operator, runs
from megacore.kernels.spans import Spans

MAX_HEAD_DIM = 256
_DTYPES = tuple(dtype for dtype in (torch.bfloat16, torch.float32) if runs(dtype))
_BF16 = torch.bfloat16
_SpanPlace = tuple[int, int, int]
_OPERATORS = {1: "packed_attention", 3: "attention"}
"""Beginning of the operators' names by the number of inputs."""


def supports(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return True if `attention` accepts these tensors.

    They must be [b, n, s, d] of one dtype for which the CPU has the instructions, with d contiguous
    and at most 256.
    """
    return (
        query.device.type == "cpu"
        and query.dtype in _DTYPES
        and query.dtype == key.dtype == value.dtype
        and key.shape == value.shape
        and query.numel() > 0 < key.numel()
        and query.shape[0] == key.shape[0]
        and query.shape[1] % key.shape[1] == 0
        and query.shape[3] == key.shape[3] <= MAX_HEAD_DIM
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
    )


def supports_packed(mixed: Tensor) -> bool:
    """Return True if `packed_attention` accepts [b, s, n, 3, d]; see `supports`."""
    return supports(*_heads(mixed))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    scale: float | None,
    spans: Spans | None = None,
) -> Tensor:
    """Compute softmax(q kᵀ · scale) v; blocks of keys that no query sees are skipped.

    Args:
        query: [b, n, s_q, d], d contiguous, any other strides; bf16 or fp32.
        key: [b, g, s_k, d], n a multiple of g: n / g query heads share a key-value head (Ainslie
            et al. 2023).
        value: like `key`.
        causal: a query sees only the keys up to its own position; requires s_q = s_k.
        scale: factor on the scores; None means 1 / sqrt(d).
        spans: keys that each query sees, instead of `causal`.

    Returns:
        [b, n, s_q, d], a view of memory [b, s_q, n, d].

    Raises:
        ConfigError: the kernel does not accept these tensors (see `supports`).
    """
    out: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        causal, _scale(scale, query), *_parts(spans, query.shape[2]), query, key, value
    )
    return out


def packed_attention(
    mixed: Tensor, *, causal: bool, scale: float | None, spans: Spans | None = None
) -> Tensor:
    """Compute attention of packed queries, keys and values, with one packed gradient.

    Args:
        mixed: [b, s, n, 3, d], query, key and value of each head; d contiguous, any other strides.
        causal: a query sees only the keys up to its own position.
        scale: factor on the scores; None means 1 / sqrt(d).
        spans: keys that each query sees, instead of `causal`.

    Returns:
        [b, n, s, d], a view of memory [b, s, n, d].

    Raises:
        ConfigError: the kernel does not accept this tensor (see `supports_packed`).
    """
    out: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        causal, _scale(scale, mixed), *_parts(spans, mixed.shape[1]), mixed
    )
    return out


class _Attention(torch.autograd.Function):
    """Attention of query, key and value, or of one packed input."""

    @staticmethod
    def forward(
        ctx: Any,
        causal: bool,
        scale: float,
        first: Tensor | None,
        last: Tensor | None,
        *inputs: Tensor,
    ) -> Tensor:
        operator = getattr(torch.ops.megacore, f"{_OPERATORS[len(inputs)]}_forward")
        out, lse = operator(*inputs, causal, scale, first, last)
        ctx.save_for_backward(*inputs, out, lse, first, last)
        ctx.causal, ctx.scale = causal, scale
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        *saved, first, last = ctx.saved_tensors
        operator = getattr(torch.ops.megacore, f"{_OPERATORS[len(saved) - 2]}_backward")
        gradients = operator(grads[0], *saved, ctx.causal, ctx.scale, first, last)
        packed = isinstance(gradients, Tensor)
        return None, None, None, None, *((gradients,) if packed else gradients)


def _parts(spans: Spans | None, queries: int) -> tuple[Tensor | None, Tensor | None]:
    """Return first and last as contiguous [b or 1, s]."""
    if spans is None:
        return None, None
    return spans.first.expand(-1, queries).contiguous(), spans.last.expand(-1, queries).contiguous()


def _scale(scale: float | None, of: Tensor) -> float:
    return of.shape[-1] ** -0.5 if scale is None else scale


def _heads(mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split [b, s, n, 3, d] into query, key and value [b, n, s, d]."""
    query, key, value = mixed.permute(3, 0, 2, 1, 4).unbind(0)
    return query, key, value


def _empty_heads(like: Tensor) -> Tensor:
    """Return an uninitialized [b, n, s, d], a view of new memory [b, s, n, d]."""
    b, n, s, d = like.shape
    return like.new_empty((b, s, n, d)).transpose(1, 2)


def _place(x: Tensor) -> tuple[int, int, int, int]:
    b, n, s, _ = x.stride()
    return x.data_ptr(), b, n, s


def _sizes(query: Tensor, key: Tensor) -> tuple[int, int, int, int, int, int]:
    b, n, queries, d = query.shape
    return b, n, key.shape[1], queries, key.shape[2], d


def _fake_forward(query: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _empty_heads(query), query.new_empty(query.shape[:3], dtype=torch.float32)


@operator(
    "attention_forward(Tensor query, Tensor key, Tensor value, bool causal, float scale, "
    "Tensor? first=None, Tensor? last=None) -> (Tensor, Tensor)",
    fake=_fake_forward,
)
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float,
    first: Tensor | None = None,
    last: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if not supports(query, key, value) or (
        causal and first is None and query.shape[2] != key.shape[2]
    ):
        raise ConfigError(_refusal(query, key, value, causal))
    out = _empty_heads(query)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    spans = _span_place(first, last, query)
    _kernels.attention_forward(
        query.dtype == _BF16,
        _sizes(query, key),
        scale,
        causal,
        spans,
        _place(query),
        _place(key),
        _place(value),
        _place(out),
        lse.data_ptr(),
        torch.get_num_threads(),
    )
    return out, lse


@operator(
    "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor "
    "lse, bool causal, float scale, Tensor? first=None, Tensor? last=None) "
    "-> (Tensor, Tensor, Tensor)",
    fake=lambda grad, query, key, value, *rest: tuple(map(_empty_heads, (query, key, value))),
)
def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = _empty_heads(query), _empty_heads(key), _empty_heads(value)
    _run_backward(grad, (query, key, value), gradients, *rest)
    return gradients


@operator(
    "packed_attention_forward(Tensor mixed, bool causal, float scale, Tensor? first=None, "
    "Tensor? last=None) -> (Tensor, Tensor)",
    fake=lambda mixed, *options: _fake_forward(*_heads(mixed)),
)
def _packed_forward(mixed: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return _forward(*_heads(mixed), *options)


@operator(
    "packed_attention_backward(Tensor grad, Tensor mixed, Tensor out, Tensor lse, bool causal, "
    "float scale, Tensor? first=None, Tensor? last=None) -> Tensor",
    fake=lambda grad, mixed, *rest: mixed.new_empty(mixed.shape),
)
def _packed_backward(grad: Tensor, mixed: Tensor, *rest: Any) -> Tensor:
    gradient = mixed.new_empty(mixed.shape)
    _run_backward(grad, _heads(mixed), _heads(gradient), *rest)
    return gradient


def _run_backward(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    gradients: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    first: Tensor | None = None,
    last: Tensor | None = None,
) -> None:
    query, key, value = inputs
    if grad.stride(3) != 1:
        grad = grad.contiguous()
    _kernels.attention_backward(
        query.dtype == _BF16,
        _sizes(query, key),
        scale,
        causal,
        _span_place(first, last, query),
        (_place(grad), _place(query), _place(key), _place(value), _place(out)),
        lse.data_ptr(),
        (_place(gradients[0]), _place(gradients[1]), _place(gradients[2])),
        torch.get_num_threads(),
    )


def _span_place(first: Tensor | None, last: Tensor | None, query: Tensor) -> _SpanPlace:
    """Return the addresses of the spans, 0 if there are none, and their stride of b.

    Raises:
        ConfigError: they are not contiguous int32 [b or 1, s].
    """
    if first is None or last is None:
        return 0, 0, 0
    b, _, s, _ = query.shape
    for part in (first, last):
        if part.dtype != torch.int32 or part.shape != (len(first), s) or not part.is_contiguous():
            raise ConfigError(
                f"attention's CPU kernel does not take spans {tuple(part.shape)} {part.dtype} for "
                f"queries {tuple(query.shape)}: it needs contiguous int32 [{b} or 1, {s}]"
            )
    if len(first) not in (1, b):
        raise ConfigError(f"attention's spans are of {len(first)} samples, and the queries of {b}")
    return first.data_ptr(), last.data_ptr(), s if len(first) > 1 else 0


def _refusal(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> str:
    described = ", ".join(
        f"{name} {tuple(x.shape)} strides {x.stride()} {x.dtype} on {x.device}"
        for name, x in (("query", query), ("key", key), ("value", value))
    )
    return (
        f"attention's CPU kernel does not take {described}, causal {causal}: it needs one dtype "
        f"that this CPU has instructions for, d contiguous and at most {MAX_HEAD_DIM}, whole "
        "groups of heads, and as many keys as queries when causal"
    )
