"""Attention in tiles equals torch's attention with the dense mask of the same spans."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.kernels import tiles
from megacore.kernels.attention import IMPLEMENTATIONS, reference
from megacore.kernels.choice import choose_kernels
from megacore.kernels.implementation import Setting, first_usable
from megacore.kernels.spans import Spans
from megacore.models.layers.attention_bias import attention_mask
from tests.kernels.test_spans import Allocations

CPU = torch.device("cpu")
TOKENS = 2 * tiles.TILE + 44


def documents(*lengths: int) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


LONG = documents(tiles.TILE + 1, TOKENS - tiles.TILE - 1)
SHORT = documents(*[20] * (TOKENS // 20))
PRESENT = torch.arange(TOKENS)[None] >= torch.tensor([[0], [TOKENS - 30]])
MASKS: dict[str, dict[str, Any]] = {
    "no document": {},
    "long documents, the same in both samples": {"documents": torch.stack([LONG, LONG])},
    "a long document between short ones": {
        "documents": documents(3, 40, TOKENS - 60, 17)[None].expand(2, -1)
    },
    "short documents": {"documents": torch.stack([SHORT, SHORT])},
    "other documents in each sample": {"documents": torch.stack([LONG, SHORT])},
    "documents of one token": {"documents": torch.arange(TOKENS)[None]},
    "a window": {"window": 50},
    "documents and a window": {"documents": torch.stack([LONG, SHORT]), "window": 50},
    "padding in front": {"present": PRESENT},
    "padding, both directions": {"present": PRESENT.flip(1), "causal": False},
    "only padding": {"present": PRESENT & PRESENT.flip(1)},
    "the last queries": {"queries": TOKENS - 100, "documents": torch.stack([LONG, SHORT])},
}


def inputs(queries: int, groups: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    random = torch.Generator().manual_seed(1)
    parts = [
        torch.randn(2, tokens, heads, 16, generator=random, dtype=dtype).transpose(1, 2)
        for heads, tokens in ((4, queries), (groups, TOKENS), (groups, TOKENS))
    ]
    upstream = torch.randn(2, 4, queries, 16, generator=random, dtype=dtype)
    return [part.requires_grad_() for part in parts], upstream


def results(attend: Any, leaves: list[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    output = attend(*leaves)
    return output, *torch.autograd.grad(output, leaves, upstream)


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("name", MASKS)
def test_outputs_and_gradients_equal_those_of_the_dense_mask(name: str, groups: int) -> None:
    rules = {"queries": TOKENS, "causal": True} | MASKS[name]
    spans = Spans.of(rules.pop("queries"), TOKENS, device=CPU, **rules)
    leaves, upstream = inputs(MASKS[name].get("queries", TOKENS), groups, torch.float64)
    options: dict[str, Any] = {"scale": 0.3, "spans": spans}
    expected = results(
        lambda *parts: reference(*parts, bias=None, dropout=0.0, causal=False, **options),
        leaves,
        upstream,
    )
    tiled = results(lambda *parts: tiles.attention(*parts, spans, scale=0.3), leaves, upstream)
    for computed, correct in zip(tiled, expected, strict=True):
        torch.testing.assert_close(computed, correct, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_no_query_of_a_document_sees_moves_nothing(dtype: torch.dtype) -> None:
    spans = Spans.of(TOKENS, TOKENS, causal=True, device=CPU, documents=LONG[None])
    leaves, upstream = inputs(TOKENS, 4, dtype)
    before = results(lambda *parts: tiles.attention(*parts, spans, scale=None), leaves, upstream)
    with torch.no_grad():
        for leaf in leaves:
            leaf[:, :, tiles.TILE + 1 :] += 1
    after = results(lambda *parts: tiles.attention(*parts, spans, scale=None), leaves, upstream)
    for old, new in zip(before, after, strict=True):
        assert old[:, :, : tiles.TILE + 1].equal(new[:, :, : tiles.TILE + 1])
        assert not old[:, :, tiles.TILE + 1 :].equal(new[:, :, tiles.TILE + 1 :])
        assert old.dtype == dtype


def test_the_number_of_scores_follows_the_documents() -> None:
    def computed(*lengths: int) -> int:
        (spans,) = [
            Spans.of(1024, 1024, causal=True, device=CPU, documents=documents(*lengths)[None])
        ]
        parts = tiles._tiles(spans.first, spans.last)
        return sum(
            (part.queries.stop - part.queries.start) * (part.keys.stop - part.keys.start)
            for part in parts
        )

    assert computed(*[256] * 4) == 4 * 256**2
    assert computed(*[64] * 16) == 8 * 128**2
    assert computed(1024) == 1024**2  # of which torch's kernel skips half


def test_memory_grows_with_the_tokens() -> None:
    def largest(tokens: int) -> int:
        places = (torch.arange(tokens) // 512)[None]
        spans = Spans.of(tokens, tokens, causal=True, device=CPU, documents=places, window=100)
        query = torch.zeros(1, 1, tokens, 8, requires_grad=True)
        with Allocations() as allocations:
            tiles.attention(query, query, query, spans, scale=None).sum().backward()
        return allocations.largest

    assert largest(4096) == 2 * largest(2048) == 4096 * 8 * 4


def test_cpus_take_spans_unless_weights_are_dropped_or_capped() -> None:
    kernels = choose_kernels(Setting(CPU, torch.float16))
    assert kernels.masks == "spans"
    assert kernels.names["attention"] == kernels.names["packed_attention"]
    assert kernels.names["attention"].endswith("masks in tiles")
    assert choose_kernels(Setting(CPU, torch.float16, softcapped=True)).masks == "dense"
    gpu = Setting(torch.device("cuda"), torch.float16)
    assert "tiles" not in first_usable(IMPLEMENTATIONS, gpu)[0]
    (query, key, value), _ = inputs(TOKENS, 4, torch.float32)
    rules: dict[str, Any] = {"documents": torch.stack([LONG, SHORT]), "causal": True}
    spans = Spans.of(TOKENS, TOKENS, device=CPU, **rules)
    bias, _ = attention_mask(queries=TOKENS, keys=TOKENS, dtype=torch.float32, device=CPU, **rules)
    options: dict[str, Any] = {"dropout": 0.5, "causal": False, "scale": None}
    torch.manual_seed(1)
    dropped = kernels.attention(query, key, value, bias=None, spans=spans, **options)
    torch.manual_seed(1)
    assert dropped.equal(reference(query, key, value, bias=bias, **options))


def test_a_compiled_layer_is_one_graph() -> None:
    spans = Spans.of(TOKENS, TOKENS, causal=True, device=CPU, documents=LONG[None])
    leaves, upstream = inputs(TOKENS, 2, torch.float32)

    def attend(*parts: Tensor) -> Tensor:
        return tiles.attention(*parts, spans, scale=None)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for new, old in zip(
        results(compiled, leaves, upstream), results(attend, leaves, upstream), strict=True
    ):
        assert new.equal(old)
