"""Check before a training with document masks: no document sees another one.

It runs the attention of this rank's layers as they are built, forward and backward, on random
queries, keys and values. Then it changes one document: what belongs to the others must keep its
bits, and none of their gradients may reach it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megacore.errors import LeakError
from megacore.models.base import Model
from megacore.models.gpt import GPTModel
from megacore.models.layers.attention import SelfAttention, WindowedSelfAttention
from megacore.models.layers.shared import Shared

LENGTH = 1024
"""Maximum number of tokens that are checked."""
_BOUNDARIES = 0.29, 0.71
"""Ends of the first two documents, as fractions of the tokens; not on a kernel's block."""


def check_documents(chunks: Sequence[Model], length: int, device: torch.device) -> str:
    """Check each kind of attention layer, and return a line for the log.

    Args:
        chunks: this rank's chunks of a GPT model.
        length: tokens of a sequence.
        device: device of the model.

    Raises:
        LeakError: a token's output or gradient depends on another document.
    """
    length = min(length, LENGTH)
    places = torch.arange(length, device=device)
    first, second = (int(length * part) for part in _BOUNDARIES)
    documents = ((places >= first).long() + (places >= second))[None]
    changed = documents[0] == 1
    kinds: dict[type[SelfAttention], str] = {}
    for chunk in chunks:
        assert isinstance(chunk, GPTModel)
        like = next(chunk.parameters()).new_empty(0)
        shared = chunk.shared(length, None, like, documents=documents)
        for name, layer in chunk.encoder.layers.items():
            attention = layer.self_attention
            assert isinstance(attention, SelfAttention)
            kind = type(attention)
            if kind not in kinds:
                kinds[kind] = name
                windowed = isinstance(attention, WindowedSelfAttention)
                masks = shared.windowed if windowed else shared
                assert masks is not None
                _check_layer(name, attention, masks, changed, like.dtype)
    return (
        f"documents do not see each other: {len(kinds)} kind(s) of attention layer checked on "
        f"{length} tokens, outputs and gradients to the bit"
    )


def _check_layer(
    name: str, attention: SelfAttention, shared: Shared, changed: Tensor, dtype: torch.dtype
) -> None:
    """Compare two runs of a layer that differ at the `changed` tokens, bool [s]."""
    generator = torch.Generator(changed.device).manual_seed(1)

    def random(heads: int) -> Tensor:
        size = (1, heads, len(changed), attention.head_dim)
        return torch.randn(size, generator=generator, device=changed.device).to(dtype)

    heads = (attention.heads, attention.local_groups, attention.local_groups)
    inputs, others = ([random(count) for count in heads] for _ in range(2))
    others = [
        torch.where(changed[:, None], other, value)
        for other, value in zip(others, inputs, strict=True)
    ]
    upstream = random(attention.heads).masked_fill_(changed[:, None], 0)
    with torch.enable_grad():
        results = [_run(attention, parts, shared, upstream) for parts in (inputs, others)]
    kept = ~changed
    for what, before, after in zip(
        ("output", "query gradient", "key gradient", "value gradient"), *results, strict=True
    ):
        leaks = not torch.equal(before[:, :, kept], after[:, :, kept])
        leaks |= what != "output" and bool(after[:, :, changed].any())
        if leaks:
            raise LeakError(
                f"layer {name}'s {what} depends on another document although "
                "data.reset_attention_mask is true: the attention kernel is wrong on this machine; "
                "set train.kernels.attention to plain, and report it"
            )


def _run(
    attention: SelfAttention, inputs: list[Tensor], shared: Shared, upstream: Tensor
) -> list[Tensor]:
    """Return the output [b, n, s, d] and the gradients of queries, keys and values."""
    leaves = [part.detach().requires_grad_() for part in inputs]
    output = attention.attend(leaves[0], leaves[1], leaves[2], 0, shared)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]
