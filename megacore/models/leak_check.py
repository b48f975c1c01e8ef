"""Check before a training with document masks: no document sees another one.

It runs the attention of this rank's layers as they are built, forward and backward, on random
queries, keys and values. Then it changes one document: what belongs to the others must keep its
bits, and none of their gradients may reach it. If ranks divide the sequences, each checks its part
of the queries with the keys of whole sequences.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megacore.errors import LeakError
from megacore.models.base import Model
from megacore.models.gpt import GPTModel
from megacore.models.layers.attention import SelfAttention, WindowedSelfAttention
from megacore.models.layers.shared import Shared
from megacore.parallel.context import part_of_rank

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
    chunks_of_sequence = 2 * chunks[0].cp.size
    length = min(length, LENGTH) // chunks_of_sequence * chunks_of_sequence
    places = torch.arange(length, device=device)
    first, second = (int(length * part) for part in _BOUNDARIES)
    documents = ((places >= first).long() + (places >= second))[None]
    changed = documents[0] == 1
    kinds: dict[type[SelfAttention], str] = {}
    for chunk in chunks:
        assert isinstance(chunk, GPTModel)
        like = next(chunk.parameters()).new_empty(0)
        shared = chunk.shared_in_training(length, None, like, documents)
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
    layers = (
        "one kind of attention layer"
        if len(kinds) == 1
        else f"{len(kinds)} kinds of attention layers"
    )
    return (
        f"documents do not see each other: {layers} checked on {length} tokens, outputs and "
        "gradients to the bit"
    )


def _check_layer(
    name: str, attention: SelfAttention, shared: Shared, changed: Tensor, dtype: torch.dtype
) -> None:
    """Compare two runs of a layer that differ at the `changed` tokens, bool [s]."""
    generator = torch.Generator(changed.device).manual_seed(1)
    changed_queries = part_of_rank(changed[None], shared.cp)[0]

    def random(heads: int, tokens: int) -> Tensor:
        size = (1, heads, tokens, attention.head_dim)
        return torch.randn(size, generator=generator, device=changed.device).to(dtype)

    parts = (changed_queries, changed, changed)  # of queries, keys and values
    heads = (attention.heads, attention.local_groups, attention.local_groups)
    inputs, others = (
        [random(count, len(part)) for count, part in zip(heads, parts, strict=True)]
        for _ in range(2)
    )
    others = [
        torch.where(part[:, None], other, value)
        for part, other, value in zip(parts, others, inputs, strict=True)
    ]
    upstream = random(attention.heads, len(changed_queries))
    upstream.masked_fill_(changed_queries[:, None], 0)
    with torch.enable_grad():
        results = [_run(attention, each, shared, upstream) for each in (inputs, others)]
    for what, part, before, after in zip(
        ("output", "query gradient", "key gradient", "value gradient"),
        (changed_queries, *parts),
        *results,
        strict=True,
    ):
        leaks = not torch.equal(before[:, :, ~part], after[:, :, ~part])
        leaks |= what != "output" and bool(after[:, :, part].any())
        if leaks:
            raise LeakError(
                f"layer {name}'s {what} depends on another document although "
                "data.reset_attention_mask is true: the attention kernel is wrong on this machine; "
                "set train.kernels.attention to plain, and report it"
            )


def _run(
    attention: SelfAttention, inputs: list[Tensor], shared: Shared, upstream: Tensor
) -> list[Tensor]:
    """Return the output [b, n, s/cp, d] and the gradients of queries, keys and values."""
    if attention.training and attention.attention_dropout:
        # As the layer does: a compiled graph does not seed the dropout that it draws.
        attention.seed(0)
    leaves = [part.detach().requires_grad_() for part in inputs]
    output = attention.attend(leaves[0], leaves[1], leaves[2], 0, shared)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]
