"""Rectangles of a tensor that several files hold."""

from collections.abc import Sequence

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]
"""First element and lengths of a rectangle in a tensor."""


def overlap(parts: Sequence[Rectangle]) -> bool:
    """Return True if two rectangles have a common element."""
    return any(
        all(max(a, b) < min(a + m, b + n) for a, m, b, n in zip(*first, *second, strict=True))
        for index, first in enumerate(parts)
        for second in parts[:index]
    )
