"""The output layer with its cross entropy, compared with torch on 1, 2 and 4 ranks.

The logits are too large for exp.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.kernels.choice import choose_kernels
from megacore.kernels.implementation import Setting
from megacore.tensor_parallel import linear_cross_entropy
from tests._gpt_ranks import Sink
from tests._tensor_ranks import LARGE, LOSSES, VOCAB, ids, joined, random


def _leaves() -> dict[str, Tensor]:
    leaves = {
        "hidden": random("x", 2, 4, 6),
        "weight": LARGE * random("w", VOCAB, 6),
        "bias": random("b", VOCAB),
    }
    return {name: leaf.requires_grad_() for name, leaf in leaves.items()}


def _reference(smoothing: float, z_loss: float) -> dict[str, Tensor]:
    """Compute loss and gradients by torch's own operations."""
    leaves = _leaves()
    logits = F.linear(leaves["hidden"], leaves["weight"], leaves["bias"])
    loss = F.cross_entropy(
        logits.flatten(0, 1), ids(2, 4).flatten(), reduction="none", label_smoothing=smoothing
    )
    loss = loss.view(2, 4) + z_loss * logits.logsumexp(-1).square()
    loss.backward(random("g", 2, 4))
    grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {"loss": loss.detach(), "scored": loss.detach()} | grads


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_equal_torch_cross_entropy(
    ranks: list[dict[str, Any]], name: str, sequence: bool
) -> None:
    expected = _reference(*LOSSES[name])
    parts = [rank["cross_entropy"][name, sequence] for rank in ranks]
    for kind in ("loss", "scored"):
        torch.testing.assert_close(joined(parts, kind, None), expected[kind])
    torch.testing.assert_close(joined(parts, "hidden", 1 if sequence else None), expected["hidden"])
    for kind in ("weight", "bias"):
        torch.testing.assert_close(joined(parts, kind, 0), expected[kind])


def test_labels_of_sequences_of_one_token_may_be_a_view_with_gaps() -> None:
    kernel = choose_kernels(Setting(torch.device("cpu"), torch.float32)).cross_entropy
    hidden, weight = random("x", 8, 1, 6).float(), random("w", VOCAB, 6).float()
    labels = ids(8, 2)[:, 1:]
    loss = linear_cross_entropy(hidden.requires_grad_(), weight, labels, kernel=kernel)
    torch.testing.assert_close(loss, linear_cross_entropy(hidden, weight, labels.clone()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_fp32(dtype: torch.dtype) -> None:
    hidden, weight = (
        random("x", 2, 4, 6).to(dtype).requires_grad_(),
        random("w", VOCAB, 6).to(dtype).requires_grad_(),
    )
    loss = linear_cross_entropy(hidden, weight, ids(2, 4))
    loss.mean().backward()
    exact_hidden, exact_weight = (
        leaf.detach().float().requires_grad_() for leaf in (hidden, weight)
    )
    logits = F.linear(hidden.detach(), weight.detach()).float()
    expected = F.cross_entropy(logits.flatten(0, 1), ids(2, 4).flatten(), reduction="none").view(
        2, 4
    )
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.detach(), expected)
    F.cross_entropy(
        F.linear(exact_hidden, exact_weight).flatten(0, 1), ids(2, 4).flatten()
    ).backward()
    for computed, exact in ((hidden, exact_hidden), (weight, exact_weight)):
        assert computed.grad is not None
        assert exact.grad is not None
        assert computed.grad.dtype == dtype
        tolerance = 0.02 * float(exact.grad.abs().max())
        torch.testing.assert_close(computed.grad.float(), exact.grad, rtol=0.02, atol=tolerance)


def test_small_probabilities_keep_their_gradients_in_fp16() -> None:
    """Check a probability of 1e-7: it has two bits in fp16, the weight's gradient has all bits."""
    hidden = torch.eye(1, 4).half().requires_grad_()
    weight = torch.zeros(VOCAB, 4)
    weight[0, 0] = 16.1
    weight = weight.half().requires_grad_()
    loss = linear_cross_entropy(hidden.unsqueeze(0), weight, torch.zeros(1, 1, dtype=torch.int64))
    (256.0 * loss.sum()).backward()
    exact = weight.detach().float().requires_grad_()
    (
        256.0
        * F.cross_entropy(
            F.linear(hidden.detach().float(), exact), torch.zeros(1, dtype=torch.int64)
        )
    ).backward()
    assert weight.grad is not None
    assert exact.grad is not None
    assert 0 < float(exact.grad[1, 0]) / 256 < 1.1e-7
    # Without the label itself: its probability minus 1 has lost digits already in fp32.
    torch.testing.assert_close(weight.grad[1:].float(), exact.grad[1:], rtol=5e-3, atol=1e-7)


def test_large_weights_of_a_badly_predicted_label_keep_gradients_finite_in_fp16() -> None:
    hidden = torch.eye(1, 4).half().requires_grad_()
    weight = torch.zeros(VOCAB, 4)
    weight[0] = torch.tensor([-20.0, 30.0, 200.0, -1e-3])
    labels = torch.zeros(1, 1, dtype=torch.int64)
    loss = linear_cross_entropy(hidden.unsqueeze(0), weight.half().requires_grad_(), labels)
    (2.0 * loss.sum()).backward()
    exact = hidden.detach().float().requires_grad_()
    (2.0 * F.cross_entropy(F.linear(exact, weight), labels[0])).backward()
    assert hidden.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(hidden.grad.float(), exact.grad, rtol=2e-3, atol=0)


def test_a_label_outside_the_vocabulary_gives_a_nan_loss() -> None:
    leaves, labels = _leaves(), ids(2, 4)
    labels[0, 1], labels[1, 2] = VOCAB, -1
    with torch.no_grad():
        losses = linear_cross_entropy(leaves["hidden"], leaves["weight"], labels)
    assert losses.isnan().nonzero().tolist() == [[0, 1], [1, 2]]


def test_the_weight_gradient_goes_into_the_main_gradient() -> None:
    leaves = _leaves()
    sink = leaves["weight"].grad_sink = Sink(leaves["weight"])  # type: ignore[attr-defined]
    sink.main_grad = torch.zeros_like(leaves["weight"])
    linear_cross_entropy(
        leaves["hidden"], leaves["weight"], ids(2, 4), bias=leaves["bias"]
    ).backward(random("g", 2, 4))
    assert sink.contributions == 1
    assert leaves["weight"].grad is None
    torch.testing.assert_close(sink.main_grad, _reference(*LOSSES["plain"])["weight"])


def test_a_second_backward_pass_adds_the_same_gradient() -> None:
    leaves = _leaves()
    loss = linear_cross_entropy(
        leaves["hidden"], leaves["weight"], ids(2, 4), bias=leaves["bias"]
    ).sum()
    loss.backward(retain_graph=True)
    first = leaves["weight"].grad
    assert first is not None
    first = first.clone()
    loss.backward()
    torch.testing.assert_close(leaves["weight"].grad, 2 * first)
