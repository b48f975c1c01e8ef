"""Division of many texts into parts of bounded size."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

_TEXTS = 256


def text_batches(texts: Sequence[str], characters: int) -> list[Sequence[str]]:
    """The texts in runs of about `characters` together, at least one text each."""
    batches, start, size = [], 0, 0
    for number, text in enumerate(texts):
        size += len(text) + 1
        if size >= characters:
            batches.append(texts[start : number + 1])
            start, size = number + 1, 0
    return [*batches, texts[start:]] if start < len(texts) else batches


def grouped(texts: Iterable[str]) -> Iterator[list[str]]:
    """The texts some at a time, as trainers of tokenizers take them."""
    remaining = iter(texts)
    while batch := list(itertools.islice(remaining, _TEXTS)):
        yield batch
