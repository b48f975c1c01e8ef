"""How a long text is read in windows: plain arithmetic."""

from dataclasses import dataclass

from megacore.errors import ConfigError


@dataclass(frozen=True)
class Window:
    """A stretch of tokens that is read at once; the last of the tokens after them are scored."""

    start: int
    """Of its first token."""
    stop: int
    """Behind its last token; the token at `stop` is the last one that it predicts."""
    scored: int
    """How many of its predictions count, the last ones."""


def check_windows(length: int, stride: int | None, positions: int | None = None) -> None:
    """Refuse windows that leave tokens out or are longer than the model's `positions`. Raises ConfigError."""
    if positions is not None and length > positions:
        raise ConfigError(
            f"seq_length is {length} and the model has {positions} positions: lower it to at most {positions}"
        )
    if stride is not None and not 1 <= stride <= length:
        raise ConfigError(
            f"overlapping_eval is {stride}, but windows of {length} tokens begin 1 to {length} tokens apart: give one "
            "of these, or leave it out"
        )


def windows(tokens: int, length: int, stride: int | None = None) -> list[Window]:
    """Windows in which every token but the first is predicted once, with as many tokens before it as there can be.

    All but the first window count their last `stride` predictions alone: each then has at least `length` - `stride`
    tokens before it, or all there are. They begin where those of NVIDIA/Megatron-LM's `--overlapping-eval` do.

    Args:
        tokens: of the text.
        length: of a window.
        stride: tokens between the starts of windows; None means `length`: they do not overlap.

    Raises:
        ConfigError: `stride` does not lie between 1 and `length`.
    """
    check_windows(length, stride)
    step = length if stride is None else stride
    found: list[Window] = []
    predicted = 0  # the token at this place is the last that a window so far predicts
    while predicted < tokens - 1:
        start = len(found) * step
        stop = min(start + length, tokens - 1)
        found.append(Window(start, stop, stop - predicted))
        predicted = stop
    return found
