"""Spans equal dense masks, and kernels equal themselves with the dense mask."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megacore.kernels.attention import reference
from megacore.kernels.spans import Spans
from megacore.models.layers.attention_bias import attention_mask

CPU = torch.device("cpu")
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 3], [0, 1, 1, 1, 1, 1, 1, 1, 2, 2]])
PRESENT = torch.tensor([[False] * 2 + [True] * 8, [True] * 7 + [False] * 3])


def visible(spans: Spans, keys: int) -> Tensor:
    """Return the bool mask [b, s, keys] of the definition of spans."""
    key = torch.arange(keys)
    return (key >= spans.first[..., None]) & (key <= spans.last[..., None])


def expected(
    *, causal: bool, documents: Tensor | None, present: Tensor | None, window: int | None
) -> Tensor:
    distance = torch.arange(10)[None, :] - torch.arange(10)[:, None]
    sees = torch.ones(2, 10, 10, dtype=torch.bool)
    if causal:
        sees &= distance <= 0
    if window is not None:
        sees &= distance > -window
    if documents is not None:
        sees &= documents[:, :, None] == documents[:, None, :]
    if present is not None:
        sees &= present[:, None, :]
    return sees


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("present", [None, PRESENT])
@pytest.mark.parametrize("window", [None, 3])
def test_spans_equal_the_dense_mask(
    causal: bool, documents: Tensor | None, present: Tensor | None, window: int | None
) -> None:
    sees = expected(causal=causal, documents=documents, present=present, window=window)
    rules = {"causal": causal, "documents": documents, "present": present, "window": window}
    spans = Spans.of(10, 10, device=CPU, **rules)  # type: ignore[arg-type]
    assert visible(spans, 10).expand_as(sees).equal(sees)
    places = torch.tensor([1, 8, 9])
    assert visible(spans.at(places), 10).expand(2, -1, -1)[:, -1].equal(sees[:, 9])
    assert visible(spans.at(places), 10).expand(2, -1, -1)[:, 0].equal(sees[:, 1])
    last = Spans.of(4, 10, device=CPU, **rules)  # type: ignore[arg-type]
    assert visible(last, 10).expand(2, 4, 10).equal(sees[:, 6:])


def test_padding_between_tokens_is_an_error() -> None:
    present = torch.tensor([[True, True, False, True], [False] * 4])
    Spans.of(4, 4, causal=False, device=CPU, present=present[1:])
    with pytest.raises(AssertionError, match="padding between tokens"):
        Spans.of(4, 4, causal=False, device=CPU, present=present)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_query_that_sees_nothing_has_output_and_gradient_zero(softcap: float | None) -> None:
    query, key, value = (torch.randn(2, 2, 10, 4, requires_grad=True) for _ in range(3))
    spans = Spans.of(10, 10, causal=True, device=CPU, present=PRESENT)
    context = reference(
        query,
        key,
        value,
        bias=None,
        dropout=0.0,
        causal=False,
        scale=None,
        softcap=softcap,
        spans=spans,
    )
    context.backward(torch.randn_like(context))
    assert query.grad is not None
    assert key.grad is not None
    assert not context[0, :, :2].any()
    assert not query.grad[0, :, :2].any()
    assert context[:, :, 2:7].all()
    assert torch.isfinite(query.grad).all()
    assert not key.grad[0, :, :2].any()
    assert not key.grad[1, :, 7:].any()


class Allocations(TorchDispatchMode):
    """Bytes of all results of torch's operations; views count with their whole storage."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                size = leaf.untyped_storage().nbytes()
                self.largest, self.total = max(self.largest, size), self.total + size
        return result


@pytest.mark.parametrize("window", [None, 100])
def test_masks_of_documents_allocate_memory_in_proportion_to_the_tokens(window: int | None) -> None:
    """Compare 2,048, 4,096 and 8,192 tokens; a dense mask of them grows with the square."""

    def allocated(tokens: int, *, spanned: bool = True) -> Allocations:
        documents = (torch.arange(tokens) // 512)[None]
        with Allocations() as allocations:
            attention_mask(
                queries=tokens,
                keys=tokens,
                causal=True,
                dtype=torch.float32,
                device=CPU,
                documents=documents,
                window=window,
                form="spans" if spanned else "dense",
            )
        return allocations

    small, middle, large = (allocated(tokens) for tokens in (2048, 4096, 8192))
    assert large.total <= 2.01 * middle.total <= 2.01 * 2.01 * small.total
    assert large.largest <= 8 * 8192, "a number per token"
    assert allocated(1024, spanned=False).largest >= 4 * 1024**2
