"""FlexAttention equals the dense mask, and its blocks are those that the definition gives.

On a CPU torch computes FlexAttention with stored scores, by the formula that its kernels of GPUs
implement. tests/gpu_emulated compiles these kernels.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from megacore.kernels.attention import reference
from megacore.kernels.flex import attention
from megacore.kernels.spans import BLOCK, Spans
from megacore.models.layers.attention_bias import alibi_slopes, attention_mask
from megacore.parallel.context import positions_of_rank
from megacore.parallel.mesh import ParallelGroup

CPU = torch.device("cpu")
TOKENS = 300
"""Not a multiple of a block."""
DOCUMENTS = (torch.rand(2, TOKENS, generator=torch.Generator().manual_seed(1)) < 0.02).cumsum(1)
PRESENT = torch.ones(2, TOKENS, dtype=torch.bool)
PRESENT[0, :140] = False
PRESENT[1, 7:] = False
RULES: dict[str, dict[str, Any]] = {
    "documents": {"causal": True, "documents": DOCUMENTS},
    "window": {"causal": True, "window": 40},
    "documents, window": {"causal": True, "documents": DOCUMENTS, "window": 40},
    "padding": {"causal": False, "present": PRESENT},
    "padding, causal": {"causal": True, "present": PRESENT},
}


@pytest.fixture(autouse=True)
def gradients(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch compute gradients of FlexAttention on a CPU, which it refuses."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # uncompiled
        yield
    torch._dynamo.reset()


def inputs(queries: int, keys: int = TOKENS, heads: int = 4, groups: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    sizes = ((heads, queries), (groups, keys), (groups, keys))
    return [torch.randn(2, *size, 16, generator=generator).requires_grad_() for size in sizes]


def check(actual: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    """Compare outputs and the gradients of queries, keys and values."""
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    upstream = torch.randn_like(expected)
    for one, other in zip(
        *(torch.autograd.grad(each, leaves, upstream) for each in (actual, expected)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_blocks_are_those_with_a_visible_pair(rules: dict[str, Any]) -> None:
    places = positions_of_rank(TOKENS, ParallelGroup(None, 1, 2), CPU)
    whole = Spans.of(TOKENS, TOKENS, device=CPU, **rules)
    for plain, queries in ((whole, TOKENS), (whole.at(places), len(places))):
        spans = plain.blocked(queries, TOKENS)
        key = torch.arange(TOKENS)
        sees = (key >= spans.first[..., None]) & (key <= spans.last[..., None])
        ends = (0, -TOKENS % BLOCK, 0, -queries % BLOCK)
        blocks = F.pad(sees, ends).unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
        some, full = blocks.any((2, 4)), blocks.all((2, 4))
        expected = (some & ~full, full, (some & ~full).mT, full.mT)
        assert spans.blocks is not None
        for numbers, columns, each in zip(
            spans.blocks[::2], spans.blocks[1::2], expected, strict=True
        ):
            listed = torch.arange(columns.shape[-1]) < numbers[..., None]
            dense = torch.zeros(columns.shape, dtype=torch.bool)
            dense.scatter_(3, columns.long(), listed)
            # Between the documents, windows and chunks of a block, spans may have a gap.
            assert (dense[:, 0] | ~each).all()
            assert dense[:, 0].sum() <= each.sum() + (queries < TOKENS) * 2
            if queries == TOKENS:
                assert dense[:, 0].equal(each)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_it_equals_the_dense_mask(rules: dict[str, Any]) -> None:
    leaves = inputs(TOKENS)
    spans = Spans.of(TOKENS, TOKENS, device=CPU, **rules)
    expected = reference(*leaves, bias=None, dropout=0.0, causal=False, scale=None, spans=spans)
    check(attention(*leaves, spans.blocked(TOKENS, TOKENS), scale=None), expected, leaves)


def test_it_equals_the_dense_mask_with_a_soft_cap() -> None:
    leaves = inputs(TOKENS)
    spans = Spans.of(TOKENS, TOKENS, device=CPU, **RULES["documents, window"])
    expected = reference(
        *leaves, bias=None, dropout=0.0, causal=False, scale=0.5, softcap=2.0, spans=spans
    )
    blocked = spans.blocked(TOKENS, TOKENS)
    check(attention(*leaves, blocked, scale=0.5, softcap=2.0), expected, leaves)


@pytest.mark.parametrize("queries", [TOKENS, 100])
def test_it_equals_the_dense_bias_of_alibi(queries: int) -> None:
    leaves = inputs(queries)
    rules: dict[str, Any] = {"queries": queries, "keys": TOKENS, "dtype": torch.float32}
    rules |= {"device": CPU, "causal": True, "documents": DOCUMENTS, "slopes": alibi_slopes(4)}
    bias, _ = attention_mask(**rules)
    nothing, spans = attention_mask(**rules, form="blocks")
    assert nothing is None
    assert bias is not None
    assert spans is not None
    expected = reference(*leaves, bias=bias, dropout=0.0, causal=False, scale=None)
    check(attention(*leaves, spans, scale=None), expected, leaves)


@pytest.mark.parametrize("rank", [0, 1])
def test_it_equals_the_dense_mask_on_a_rank_with_a_part_of_each_sequence(rank: int) -> None:
    places = positions_of_rank(TOKENS, ParallelGroup(None, rank, 2), CPU)
    leaves = inputs(len(places))
    spans = Spans.of(TOKENS, TOKENS, device=CPU, **RULES["documents"]).at(places)
    expected = reference(*leaves, bias=None, dropout=0.0, causal=False, scale=None, spans=spans)
    check(attention(*leaves, spans.blocked(len(places), TOKENS), scale=None), expected, leaves)


def test_a_mask_that_fused_attention_has_is_no_mask() -> None:
    rules: dict[str, Any] = {"queries": 8, "keys": 8, "causal": True, "form": "blocks"}
    rules |= {"dtype": torch.float32, "device": CPU}
    assert attention_mask(**rules) == (None, None)
    _, spans = attention_mask(**rules, softcapped=True)  # which has no soft cap
    assert spans is not None
    assert spans.blocks is not None


def test_other_documents_need_no_other_graph_and_another_batch_is_computed() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(attention, backend=backend, fullgraph=True)
    leaves = [each.detach() for each in inputs(TOKENS)]
    counts = []
    # The last one is the smaller last batch of an evaluation: its size becomes a variable.
    for rows in ([0, 1, 0], [1, 0, 1], [0, 1]):
        parts = [each[rows] for each in leaves]
        spans = Spans.of(TOKENS, TOKENS, device=CPU, causal=True, documents=DOCUMENTS[rows])
        expected = reference(*parts, bias=None, dropout=0.0, causal=False, scale=None, spans=spans)
        actual = compiled(*parts, spans.blocked(TOKENS, TOKENS), scale=None)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        counts.append(len(graphs))
    assert counts == [1, 1, 2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_its_kernels_equal_the_dense_mask_on_a_gpu(
    rules: dict[str, Any], softcap: float | None
) -> None:
    """In bf16, and twice with the same bits; the formula computes in fp32."""
    gpu = torch.device("cuda")
    leaves = [each.detach().to(gpu, torch.bfloat16).requires_grad_() for each in inputs(TOKENS)]
    exact = [each.detach().float().requires_grad_() for each in leaves]
    moved = {name: rule.to(gpu) if torch.is_tensor(rule) else rule for name, rule in rules.items()}
    spans = Spans.of(TOKENS, TOKENS, device=gpu, **moved)
    options: dict[str, Any] = {"bias": None, "dropout": 0.0, "causal": False, "scale": None}
    expected = reference(*exact, **options, softcap=softcap, spans=spans)
    blocked, compiled = spans.blocked(TOKENS, TOKENS), torch.compile(attention, fullgraph=True)
    upstream = torch.randn_like(expected)
    results = []
    for _ in range(2):
        actual = compiled(*leaves, blocked, scale=None, softcap=softcap)
        results.append([actual, *torch.autograd.grad(actual, leaves, upstream.bfloat16())])
    gradients = torch.autograd.grad(expected, exact, upstream)
    for one, again, other in zip(*results, [expected, *gradients], strict=True):
        assert torch.equal(one, again)
        # A gradient of few keys is a sum over all queries, whose terms are rounded to bf16.
        largest = float(other.abs().max())
        torch.testing.assert_close(one.float(), other, rtol=1e-2, atol=1e-2 * largest)
