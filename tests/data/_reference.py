"""Slow reference implementation of the packing of documents into samples."""

from collections.abc import Sequence


def samples_of(
    documents: Sequence[Sequence[int]],
    seq_length: int,
    packing: str,
    extra: int,
    *,
    keep_partial: bool = False,
) -> list[list[int]]:
    """Return the unshuffled samples of the documents, padded with -1 to `seq_length` + 1."""
    capacity = seq_length + extra
    cut = {"packed": _packed, "pack_until_overflow": _until_overflow, "unpacked": _unpacked}[
        packing
    ]
    samples = cut(documents, seq_length, capacity)
    if packing == "packed" and not keep_partial:
        samples = [sample for sample in samples if len(sample) == capacity]
    return [[*sample, *[-1] * (seq_length + 1 - len(sample))] for sample in samples]


def _packed(documents: Sequence[Sequence[int]], seq_length: int, capacity: int) -> list[list[int]]:
    stream = [token for document in documents for token in document]
    extra = capacity - seq_length
    return [stream[start : start + capacity] for start in range(0, len(stream) - extra, seq_length)]


def _until_overflow(
    documents: Sequence[Sequence[int]], seq_length: int, capacity: int
) -> list[list[int]]:
    samples: list[list[int]] = []
    for document in documents:
        left = list(document)
        if samples and len(samples[-1]) + len(left) <= capacity:
            samples[-1] += left
            continue
        while len(left) > capacity:
            samples.append(left[:capacity])
            left = left[seq_length:]
        if left:
            samples.append(left)
    return samples


def _unpacked(
    documents: Sequence[Sequence[int]], seq_length: int, capacity: int
) -> list[list[int]]:
    return [list(document[:capacity]) for document in documents if document]
