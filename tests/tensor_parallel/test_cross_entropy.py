"""Cross entropy against torch's, for one rank and for two, with logits too large for a plain exp."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.tensor_parallel import cross_entropy, vocab_parallel_cross_entropy
from tests._two_ranks import VOCAB, ids, random


def _reference() -> tuple[Tensor, Tensor]:
    logits = (200 * random("l", 2, 5, VOCAB)).requires_grad_()
    loss = F.cross_entropy(logits.flatten(0, 1), ids(2, 5).flatten(), reduction="none").view(2, 5)
    loss.backward(random("g", 2, 5))
    assert logits.grad is not None
    return loss.detach(), logits.grad


@pytest.mark.parametrize("rows_per_block", [1, 3, 100])
def test_alone(rows_per_block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "_CACHED_ELEMENTS", rows_per_block * VOCAB)
    leaf = (200 * random("l", 2, 5, VOCAB)).requires_grad_()
    loss = vocab_parallel_cross_entropy(leaf * 1.0, ids(2, 5))
    loss.backward(random("g", 2, 5))
    expected_loss, expected_grad = _reference()
    torch.testing.assert_close(loss.detach(), expected_loss)
    torch.testing.assert_close(leaf.grad, expected_grad)


def test_two_ranks(two_ranks: list[dict[str, Any]]) -> None:
    expected_loss, expected_grad = _reference()
    parts = [found["cross_entropy"] for found in two_ranks]
    for part in parts:
        torch.testing.assert_close(part["loss"], expected_loss)
    torch.testing.assert_close(torch.cat([part["logits"] for part in parts], -1), expected_grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_computed_in_fp32_and_kept(dtype: torch.dtype) -> None:
    logits = random("l", 2, 5, VOCAB).to(dtype).requires_grad_()
    before = logits.detach().clone()
    loss = vocab_parallel_cross_entropy(logits, ids(2, 5))
    loss.mean().backward()
    expected = F.cross_entropy(before.float().flatten(0, 1), ids(2, 5).flatten(), reduction="none").view(2, 5)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.detach(), expected)
    assert torch.equal(logits, before)
    assert logits.grad is not None
    assert logits.grad.dtype == dtype


def test_a_second_backward_is_refused() -> None:
    leaf = random("l", 2, 5, VOCAB).requires_grad_()
    loss = vocab_parallel_cross_entropy(leaf * 1.0, ids(2, 5)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        loss.backward()
