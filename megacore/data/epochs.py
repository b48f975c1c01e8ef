"""How often a split is gone through for the samples that are wanted of it."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

EXTRA_TOKENS = 1
"""Tokens that a sample has beyond seq_length: the last label."""
_FINAL_EPOCH_USE = 0.8
"""Share of the final epoch below which it is shuffled by itself."""


@dataclass(frozen=True)
class EpochPlan:
    """How often a split is gone through, which with its sequences decides its maps."""

    epochs: int
    """Passes over the split; 0 when it has no sample and none is wanted."""
    separate_final_epoch: bool
    """Whether the last pass is shuffled by itself, because only a small part of it is needed."""
    samples: int
    """Samples in all passes; for whole documents (packing) their least number."""
    samples_before_final_epoch: int
    """Samples shuffled among themselves: those before a separate last pass, else all."""
    partial_sample: bool = False
    """Whether the last sample is shorter than the others."""


NO_EPOCH = EpochPlan(0, False, 0, 0)
"""Of a split without a sample of which none is wanted."""


def plan_epochs(
    tokens_per_epoch: int,
    seq_length: int,
    samples: int | None,
    *,
    extra: int = EXTRA_TOKENS,
    keep_partial: bool = False,
    style: Literal["megatron", "neox"] = "megatron",
) -> EpochPlan:
    """The least number of epochs that yields `samples` samples (None: one epoch).

    The final epoch is separate when less than 80 % of it would be used; GPT-NeoX's ("neox") never is.
    With `keep_partial`, what remains after the last whole sample is one more. All counts are in 64-bit integers;
    Megatron core counts with 32-bit floats when it keeps a partial sample, which goes wrong past 2^24 tokens.
    """
    epochs = 1
    if samples is not None:
        epochs = max(1, -(-(samples * seq_length + extra) // tokens_per_epoch))
    total, rest = divmod(epochs * tokens_per_epoch - extra, seq_length)
    partial = keep_partial and rest > 0
    total += partial
    if samples is None or epochs == 1 or style == "neox":
        return EpochPlan(epochs, False, total, total, partial)
    before_final = ((epochs - 1) * tokens_per_epoch - extra) // seq_length
    per_epoch = (tokens_per_epoch - extra) // seq_length
    separate = samples - before_final < int(_FINAL_EPOCH_USE * per_epoch)
    return EpochPlan(epochs, separate, total, before_final if separate else total, partial)


def plan_whole_documents(least_samples: Callable[[int], int], samples: int | None, capacity: int) -> EpochPlan:
    """The least number of epochs that yields `samples` samples of whole documents in any order; None: one epoch.

    `least_samples` gives the samples that a number of epochs makes at least, `capacity` the tokens of one.
    """
    # An epoch has at least one token, so that many epochs are enough.
    enough = range(1, (samples or 0) * capacity + 1)
    epochs = 1 + bisect_left(enough, samples or 0, key=least_samples)
    total = least_samples(epochs)
    return EpochPlan(epochs, False, total, total)
