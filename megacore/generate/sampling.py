"""From logits to tokens; what is drawn depends on the seed, the prompt's number and how many tokens it has alone."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megacore.generate.options import GenerateOptions
from megacore.parallel.rng import stable_seed


class Chooser:
    """Takes the next token of each prompt of a batch."""

    def __init__(self, options: GenerateOptions, numbers: Sequence[int]) -> None:
        """`numbers` are those of the prompts among all, by which they draw."""
        self._options = options
        self._generators = [
            torch.Generator().manual_seed(stable_seed("generate", options.seed, number)) for number in numbers
        ]

    def choose(self, logits: Tensor) -> Tensor:
        """[b, v] -> [b] ids: the most probable ones, or drawn ones."""
        if not self._options.samples:
            return logits.argmax(-1)
        draws = torch.cat([torch.rand(1, dtype=torch.float64, generator=own) for own in self._generators])
        return sample(logits, draws.to(logits.device), self._options)

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these prompts of the batch alone."""
        self._generators = [self._generators[row] for row in rows]


def sample(logits: Tensor, draws: Tensor, options: GenerateOptions) -> Tensor:
    """Invert the distribution function that temperature, top_k and top_p leave, in this order.

    Args:
        logits: [b, v].
        draws: [b] fp64, uniform in [0, 1).
        options: what is left of the distribution.

    Returns:
        [b] ids.
    """
    scaled = logits.double() / options.resolved_temperature
    ids = None
    if options.top_k is not None:
        scaled, ids = scaled.topk(min(options.top_k, logits.shape[-1]), dim=-1)
    elif options.top_p is not None:
        scaled, ids = scaled.sort(dim=-1, descending=True, stable=True)
    probabilities = scaled.softmax(-1)
    if options.top_p is not None:
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= options.top_p, 0.0)  # the first one always stays
    reached = probabilities.cumsum(-1)
    places = torch.searchsorted(reached, (draws[:, None] * reached[:, -1:]), right=True)
    # A product that rounds up to the whole would name a token behind the last one with a probability.
    places = places.minimum((probabilities > 0).cumsum(-1).argmax(-1, keepdim=True))
    return (places if ids is None else ids.gather(-1, places))[:, 0]
