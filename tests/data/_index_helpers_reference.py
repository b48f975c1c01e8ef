"""Reference implementation of the compiled index helpers in NumPy and plain Python."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_WORD = 2**64 - 1
LONG_SENTENCE = 512
"""Tokens of a sentence beyond which its document is left out of a sentence map."""


def build_sample_index(
    lengths: npt.NDArray[np.int32],
    document_index: npt.NDArray[np.int32],
    seq_length: int,
    num_samples: int,
    extra: int,
    partial: bool = False,
    dtype: npt.DTypeLike = np.int32,
) -> npt.NDArray[Any]:
    """Return the start of each sample, shape (num_samples + 1, 2).

    Columns: position in `document_index`, token offset in that document.

    Consecutive samples of `seq_length` + `extra` tokens overlap by `extra`. The last row is the
    start of the sample after the last. With `partial` the last sample is shorter, and the last row
    is `extra` before the end of the last document.

    Raises:
        ValueError: The documents have too few tokens.
    """
    complete = num_samples - partial
    ends = np.cumsum(lengths[document_index], dtype=np.int64)
    if complete and (not len(ends) or ends[-1] < complete * seq_length + extra):
        raise ValueError("the documents end before the samples do")
    rows = np.zeros((num_samples + 1, 2), dtype)
    # A sample's boundary is in the document of the last token read so far, including the overlap.
    last_read = np.arange(1, complete + 1, dtype=np.int64) * seq_length + extra
    position = np.searchsorted(ends, last_read, side="left")
    start = ends[position] - lengths[document_index[position]]
    rows[1 : complete + 1, 0] = position
    rows[1 : complete + 1, 1] = last_read - extra - start
    if partial:
        rows[-1] = len(document_index) - 1, lengths[document_index[-1]] - extra
    return rows


def shuffle(values: npt.NDArray[Any], seed: int) -> None:
    """Shuffle in place with `numpy.random.RandomState(seed)` (Fisher-Yates from the end)."""
    np.random.RandomState(seed).shuffle(values)


def build_blend(
    weights: Sequence[float] | npt.NDArray[np.float64], size: int
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """Return (dataset index, dataset sample index) of a blend by weights.

    Sample i is from the data set with the largest weight x max(i, 1) - samples taken, the first
    one of a tie.
    """
    return _blend(np.asarray(weights, np.float64), np.full(len(weights), size), size)


def build_exhaustive_blend(
    sizes: Sequence[int] | npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """Return (dataset index, dataset sample index) of a blend that uses every sample once.

    The weights are size / total.
    """
    limits = np.asarray(sizes, np.int64)
    total = int(limits.sum())
    return _blend(limits / max(total, 1), limits, total)


def _blend(
    weights: npt.NDArray[np.float64], limits: npt.NDArray[np.int64], size: int
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    dataset_index, sample_index = np.empty(size, np.int16), np.empty(size, np.int64)
    counts = np.zeros(len(weights), np.int64)
    for i in range(size):
        errors = weights * float(max(i, 1)) - counts
        best = int(np.argmax(np.where(counts < limits, errors, -np.inf)))
        dataset_index[i], sample_index[i] = best, counts[best]
        counts[best] += 1
    return dataset_index, sample_index


def build_sentence_map(
    document_starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int32],
    max_samples: int,
    max_epochs: int,
    max_length: int,
    short_probability: float,
    min_sentences: int,
    seed: int,
    dtype: npt.DTypeLike = np.uint32,
) -> npt.NDArray[Any]:
    """Return samples of complete sentences, shape (samples, 3).

    Columns: first sentence, end sentence, target length in tokens.

    `document_starts` has the first sentence of each document and the end of the last. A sample ends
    when it reaches its target, has `min_sentences` and leaves at least two, or with its document.
    Documents of several sentences are left out if one of them is longer than 512 tokens. No epoch
    begins after `max_samples` samples.
    """
    targets = np.random.RandomState(seed)
    ratio = int(np.floor(1.0 / short_probability + 0.5)) if short_probability > 0 else 0

    def draw() -> int:
        if not ratio:
            return max_length
        value = int(targets.randint(0, 2**32, dtype=np.uint32))
        return 2 + value % (max_length - 1) if value % ratio == 0 else max_length

    rows: list[tuple[int, int, int]] = []
    for _ in range(max_epochs):
        before = len(rows)
        if before >= max_samples:
            break
        for first, end in zip(
            document_starts[:-1].tolist(), document_starts[1:].tolist(), strict=True
        ):
            long = end - first > 1 and bool((lengths[first:end] > LONG_SENTENCE).any())
            if end - first < min_sentences or long:
                continue
            target, tokens = draw(), 0
            for sentence in range(first, end):
                tokens += int(lengths[sentence])
                left = end - sentence - 1
                if left == 0 or (
                    tokens >= target and left > 1 and sentence + 1 - first >= min_sentences
                ):
                    rows.append((first, sentence + 1, target))
                    first, target, tokens = sentence + 1, draw(), 0
        if len(rows) == before:
            break
    order = _shuffled_rows(len(rows), seed + 1)
    return np.array(rows, dtype).reshape(-1, 3)[order]


def _shuffled_rows(count: int, seed: int) -> list[int]:
    """Return the rows 0 … count-1, shuffled from the last to the second.

    Row i is swapped with row (next 64-bit draw) % (i + 1).
    """
    order, generator = list(range(count)), _Mt19937x64(seed)
    for i in range(count - 1, 0, -1):
        j = generator.next() % (i + 1)
        order[i], order[j] = order[j], order[i]
    return order


class _Mt19937x64:
    """The generator MT19937-64 (Matsumoto and Nishimura 2004) of the C++ standard library."""

    def __init__(self, seed: int) -> None:
        self._state = [seed & _WORD]
        for k in range(1, 312):
            previous = self._state[-1]
            self._state.append((6364136223846793005 * (previous ^ (previous >> 62)) + k) & _WORD)
        self._position = 312

    def next(self) -> int:
        if self._position == 312:
            self._refill()
        value = self._state[self._position]
        self._position += 1
        value ^= (value >> 29) & 0x5555555555555555
        value ^= (value << 17) & 0x71D67FFFEDA60000
        value ^= (value << 37) & 0xFFF7EEE000000000
        return value ^ (value >> 43)

    def _refill(self) -> None:
        state, low = self._state, 0x7FFFFFFF
        for k in range(312):
            mixed = (state[k] & ~low & _WORD) | (state[(k + 1) % 312] & low)
            state[k] = (
                state[(k + 156) % 312] ^ (mixed >> 1) ^ (0xB5026F5AA96619E9 if mixed & 1 else 0)
            )
        self._position = 0
