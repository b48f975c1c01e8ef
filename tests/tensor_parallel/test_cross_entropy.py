"""Cross entropy against torch's for 1, 2 and 4 ranks, with logits too large for a plain exp."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.tensor_parallel import cross_entropy, vocab_parallel_cross_entropy
from tests._tensor_ranks import LOSSES, VOCAB, ids, joined, random


def _reference(smoothing: float, z_loss: float) -> tuple[Tensor, Tensor]:
    logits = (200 * random("l", 2, 5, VOCAB)).requires_grad_()
    loss = F.cross_entropy(logits.flatten(0, 1), ids(2, 5).flatten(), reduction="none", label_smoothing=smoothing)
    loss = loss.view(2, 5) + z_loss * logits.logsumexp(-1).square()
    loss.backward(random("g", 2, 5))
    assert logits.grad is not None
    return loss.detach(), logits.grad


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients(ranks: list[dict[str, Any]], name: str) -> None:
    expected_loss, expected_grad = _reference(*LOSSES[name])
    parts = [found["cross_entropy"][name] for found in ranks]
    torch.testing.assert_close(joined(parts, "loss", None), expected_loss)
    torch.testing.assert_close(joined(parts, "logits", -1), expected_grad)


@pytest.mark.parametrize("rows_per_block", [1, 3, 100])
@pytest.mark.parametrize("name", LOSSES)
def test_blocks_of_any_size(name: str, rows_per_block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "_CACHED_ELEMENTS", rows_per_block * VOCAB // torch.get_num_threads())
    smoothing, z_loss = LOSSES[name]
    leaf = (200 * random("l", 2, 5, VOCAB)).requires_grad_()
    loss = vocab_parallel_cross_entropy(leaf * 1.0, ids(2, 5), label_smoothing=smoothing, z_loss=z_loss)
    loss.backward(random("g", 2, 5))
    expected_loss, expected_grad = _reference(smoothing, z_loss)
    torch.testing.assert_close(loss.detach(), expected_loss)
    torch.testing.assert_close(leaf.grad, expected_grad)


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
