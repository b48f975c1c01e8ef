"""Checks of the index maps of a split against its tokens, in blocks."""

from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.data.index_directory import MAP_NAMES, SENTENCE_MAP_NAME, map_path
from megacore.data.index_options import IndexOptions
from megacore.data.indexed_dataset import IndexedDataset
from megacore.data.sentence_maps import document_range, load_sentence_map, sentences_of
from megacore.errors import DataFormatError
from megacore.inspect.index import open_map
from megacore.inspect.tokens import counted

_BLOCK = 1 << 20

Map = npt.NDArray[Any]


def check_maps(dataset: IndexedDataset, directory: Path, split: str, options: IndexOptions) -> str:
    """What the maps of a split hold, in one clause. Raises DataFormatError.

    Every sequence of the split stands in the document index equally often; with packed documents the rows of the
    sample index are seq_length tokens apart; and the shuffle index has each sample once. Memory: 8 bytes per sequence
    and one per sample.
    """
    paths = [map_path(directory, split, name) for name in MAP_NAMES]
    document, rows, shuffle = (open_map(path) for path in paths)
    if len(rows) != len(shuffle) + 1:
        raise DataFormatError(
            f"{paths[1]} has {len(rows)} rows, {paths[2].name} {len(shuffle)} samples; it should have one row more: "
            "build the index maps again"
        )
    epochs = _check_document_index(paths[0], document, dataset)
    _check_rows(paths[1], rows, document, dataset)
    if options.packing == "packed":
        _check_distances(paths[1], rows, document, dataset, options)
    _check_permutation(paths[2], shuffle)
    if not len(shuffle) and not len(document):
        return "no samples"
    parts = (counted(len(shuffle), "sample"), counted(len(document), "sequence"), counted(epochs, "epoch"))
    return "{}, {} in {}, each sample once".format(*parts)


def check_sentence_map(dataset: IndexedDataset, directory: Path, split: str, options: IndexOptions) -> str:
    """What the sentence map of a split holds, in one clause. Raises DataFormatError.

    Every sample is of the split's documents, lies within one of them, has as many sentences as it must, and a target
    length that the model has room for.
    """
    sentences = sentences_of(options)
    path = map_path(directory, split, SENTENCE_MAP_NAME)
    rows = load_sentence_map(directory, split, dataset, options.seq_length - sentences.special_tokens)
    starts = dataset.document_indices
    first, last = (int(starts[place]) for place in document_range(dataset, options, split))
    used = np.zeros(dataset.documents, np.bool_)
    for start in range(0, len(rows), _BLOCK):
        block = rows[start : start + _BLOCK].astype(np.int64)
        documents = np.searchsorted(starts, block[:, 0], side="right") - 1
        inside = (first <= block[:, 0]) & (block[:, 1] <= last) & (block[:, 1] <= starts[documents + 1])
        wrong = np.flatnonzero(~inside | (block[:, 1] - block[:, 0] < sentences.minimum_sentences))
        if len(wrong):
            row = block[wrong[0]].tolist()
            raise DataFormatError(
                f"{path}: sample {start + int(wrong[0])} has the sentences {row[0]} to {row[1] - 1}, which are not "
                f"{sentences.minimum_sentences} or more of one document of the {split} split, {first} to {last - 1}: "
                "build the index maps again"
            )
        used[documents] = True
    return f"{counted(len(rows), 'sample')} of {counted(int(used.sum()), 'document')}" if len(rows) else "no samples"


def _check_document_index(path: Path, document: Map, dataset: IndexedDataset) -> int:
    """How often each sequence of the split stands in the document index."""
    counts = np.zeros(len(dataset), np.int64)
    for block in _blocks(document):
        if block.min() < 0 or block.max() >= len(dataset):
            wrong = block.min() if block.min() < 0 else block.max()
            raise DataFormatError(
                f"{path} names sequence {wrong} of {len(dataset)} in {dataset.prefix}: it was built for other tokens"
            )
        counts += np.bincount(block, minlength=len(counts))
    used = np.flatnonzero(counts)
    if not len(used):
        return 0
    first, last, epochs = int(used[0]), int(used[-1]), int(counts[used[0]])
    uneven = np.flatnonzero(counts[first : last + 1] != epochs)
    if len(uneven):
        sequence = first + int(uneven[0])
        raise DataFormatError(
            f"{path} has sequence {sequence} {counts[sequence]} times, but sequence {first} {epochs} times: each epoch "
            "has every sequence of the split once; build the index maps again"
        )
    return epochs


def _check_rows(path: Path, rows: Map, document: Map, dataset: IndexedDataset) -> None:
    """Every row lies within a document of the document index, and none before the one above it."""
    previous = (0, 0)
    for start in range(0, len(rows), _BLOCK):
        block = rows[start : start + _BLOCK].astype(np.int64)
        position, offset = block[:, 0], block[:, 1]
        inside = (position >= 0) & (position < len(document)) & (offset >= 0)
        inside[inside] = offset[inside] <= dataset.lengths[document[position[inside]]]
        inside |= (position == len(document)) & (offset == 0)  # the end of the last sample
        earlier = np.concatenate([[previous], block[:-1]])
        falling = (position < earlier[:, 0]) | ((position == earlier[:, 0]) & (offset < earlier[:, 1]))
        wrong = np.flatnonzero(~inside | falling)
        if len(wrong):
            row = int(wrong[0])
            raise DataFormatError(
                f"{path}: row {start + row} is {block[row].tolist()}, which does not follow {earlier[row].tolist()} "
                f"within the documents of {dataset.prefix}: build the index maps again"
            )
        previous = (int(position[-1]), int(offset[-1]))


def _check_distances(path: Path, rows: Map, document: Map, dataset: IndexedDataset, options: IndexOptions) -> None:
    """Row i lies i x seq_length tokens into the documents; only the last may be nearer, after a partial sample."""
    row, before = 0, 0
    for start in range(0, len(document), _BLOCK):
        lengths = dataset.lengths[document[start : start + _BLOCK]].astype(np.int64)
        starts = before + np.cumsum(lengths) - lengths
        stop = bisect_left(rows[:, 0], start + len(lengths), lo=row)
        block = rows[row:stop].astype(np.int64)
        reached = starts[block[:, 0] - start] + block[:, 1]
        wrong = np.flatnonzero(reached != np.arange(row, stop) * options.seq_length)
        wrong = wrong[(row + wrong != len(rows) - 1) | (reached[wrong] > (len(rows) - 1) * options.seq_length)]
        if len(wrong):
            raise DataFormatError(
                f"{path}: sample {row + int(wrong[0])} begins {reached[wrong[0]]} tokens into the documents instead of "
                f"{(row + int(wrong[0])) * options.seq_length}: the maps were built for other tokens; build them again"
            )
        row, before = stop, int(starts[-1] + lengths[-1])


def _check_permutation(path: Path, shuffle: Map) -> None:
    seen = np.zeros(len(shuffle), np.bool_)
    for block in _blocks(shuffle):
        if block.min() < 0 or block.max() >= len(seen):
            raise DataFormatError(f"{path} names sample {block.max()} of {len(seen)}: build the index maps again")
        seen[block] = True
    if not seen.all():
        raise DataFormatError(
            f"{path} lacks {np.count_nonzero(~seen)} of {len(seen)} samples, such as {int(seen.argmin())}, and has "
            "others more than once: build the index maps again"
        )


def _blocks(values: Map) -> Iterator[Map]:
    for start in range(0, len(values), _BLOCK):
        yield values[start : start + _BLOCK]
