"""The search for the largest micro batch that fits: doubling, then bisection."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Fits:
    """A micro batch with which training goes on."""

    peak_memory: int
    """Bytes that the rank with most of them had at the most."""


@dataclass(frozen=True)
class TooLarge:
    """A micro batch for which memory does not suffice."""

    reason: str
    """What the rank that ran out of memory said, as one sentence."""


Answer = Fits | TooLarge
Probe = Callable[[int], Answer]
"""Tries a micro batch; whatever fails for another reason than memory is raised."""


@dataclass(frozen=True)
class Found:
    """The outcome of a search."""

    batch: int
    """The largest micro batch that fits; 0 where not even 1 does."""
    tried: dict[int, Answer]
    """Each probe's answer, in the order of the probes."""
    limit: int
    """The largest micro batch that might have been tried."""

    @property
    def at_limit(self) -> bool:
        """Whether the limit ended the search, not memory."""
        return self.batch == self.limit

    @property
    def peak_memory(self) -> int | None:
        """Bytes of the rank with most of them at `batch`; None where nothing fits."""
        answer = self.tried.get(self.batch)
        return answer.peak_memory if isinstance(answer, Fits) else None

    @property
    def reason(self) -> str | None:
        """Why the next larger micro batch does not fit; None where the limit ended the search."""
        answer = self.tried.get(self.batch + 1)
        return answer.reason if isinstance(answer, TooLarge) else None


def largest_batch(probe: Probe, *, limit: int, start: int = 1) -> Found:
    """The largest micro batch from 1 to `limit` that fits.

    It is assumed that whatever is smaller than one that fits does too, as memory grows with the batch. From `start` the
    batch is doubled until one is too large; between the two, or 0, bisection finds the end. That takes at most
    2 + 2 log2(limit) probes, and fewer the nearer `start` is.

    Args:
        probe: tries one; it is called once for each micro batch.
        limit: the largest that is tried, 1 or more.
        start: the first that is tried; one above `limit` counts as `limit`.

    Raises whatever `probe` does.
    """
    assert limit >= 1, limit
    assert start >= 1, start
    tried: dict[int, Answer] = {}
    fitting, too_large, batch = 0, limit + 1, min(start, limit)
    while too_large - fitting > 1:
        tried[batch] = probe(batch)
        if isinstance(tried[batch], Fits):
            fitting = batch
        else:
            too_large = batch
        doubling = too_large > limit
        batch = min(2 * fitting, limit) if doubling else (fitting + too_large) // 2
    return Found(fitting, tried, limit)
