"""Dropout's mask in C++, with what torch draws: from the same state of its generator the same elements are dropped.

torch draws one number at a time in one thread, 5 ns for each; vectors of the same generator take a tenth of it.
"""

from functools import cache

import torch
from torch import Tensor

from megacore.kernels.cpu import _draw
from megacore.kernels.cpu.common import is_half

_SAMPLE = 4001
"""Numbers by which the two are compared: of several blocks of the generator, and not of a whole number of them."""


def kept_like(x: Tensor, p: float) -> Tensor:
    """Ones, and zeros with probability p, in a tensor that is dense like x; drawn from torch's default generator."""
    kept = torch.empty_like(x)
    if torch.compiler.is_compiling() or not draws_as_torch():
        return kept.bernoulli_(1.0 - p)
    state = torch.get_rng_state()
    _draw.bernoulli(state.data_ptr(), 1.0 - p, kept.data_ptr(), kept.numel(), is_half(kept))
    torch.set_rng_state(state)
    return kept


@cache
def draws_as_torch() -> bool:
    """Whether torch draws with this generator here; on Intel's CPUs it has MKL's instead."""
    before = torch.get_rng_state()
    torch.rand(3)
    state = torch.get_rng_state()
    expected, found = torch.empty(_SAMPLE).bernoulli_(0.7), torch.empty(_SAMPLE)
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    _draw.bernoulli(state.data_ptr(), 0.7, found.data_ptr(), _SAMPLE, False)
    return torch.equal(expected, found) and torch.equal(state, after)
