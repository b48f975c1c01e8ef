"""Index maps: lookup of the documents and tokens of a sample, and checks of the maps.

Maps are compared with their tokens, in blocks.
"""

from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.data.best_fit import piece_counts, rest_starts
from megacore.data.index_directory import (
    BLEND_MAP_NAMES,
    INDEX_NAME,
    MAP_NAMES,
    SENTENCE_MAP_NAME,
    IndexDescription,
    check_form,
    load_map,
    map_path,
    member_directory,
    read_description,
)
from megacore.data.index_options import IndexOptions
from megacore.data.sentence_maps import load_sentence_map, sentences_of, sequence_range
from megacore.errors import DataFormatError
from megacore.inspect.tokens import blocks, document_of
from megacore.observe.logging import counted
from megacore.paths import exists, glob
from megacore.token_files.indexed_dataset import IndexedDataset

_BLOCK = 1 << 20
"""Rows of a map that are checked at a time."""
Map = npt.NDArray[Any]


@dataclass(frozen=True)
class Part:
    """Consecutive tokens of a sample that come from one sequence."""

    document: int
    """Number of the document in the token files, from 0."""
    sequence: int
    """Number of the sequence in the token files, from 0."""
    start: int
    """First token within the sequence."""
    stop: int
    """One past the last token."""
    length: int
    """Number of tokens of the complete sequence."""


@dataclass(frozen=True)
class Sample:
    """Location of the tokens of a sample."""

    split: str
    number: int
    """Number in the order of training."""
    member: int
    """Index of the data set among the members of the index directory."""
    prefix: str
    """Path of the data set's token files, without .bin/.idx."""
    member_sample: int
    """Number in the shuffled order of the data set; without a blend the same as `number`."""
    row: int
    """Row of the data set's sample index or sentence map."""
    parts: tuple[Part, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens without padding."""
        return sum(part.stop - part.start for part in self.parts)


def is_index_directory(path: Path) -> bool:
    """Return True for a directory of index maps, also of an older version without `index.json`."""
    maps = (glob(path, f"*_{name}_index.npy") for name in ("shuffle", SENTENCE_MAP_NAME))
    return exists(path / INDEX_NAME) or any(map(any, maps))


def describe_index(directory: Path) -> IndexDescription:
    """Read a directory's `index.json`. Raises DataFormatError."""
    if not exists(directory / INDEX_NAME):
        raise DataFormatError(
            f"{directory} has no {INDEX_NAME}: its index maps are of an older version, or of "
            "another tool; build them again with `megacore index`"
        )
    return read_description(directory)


def find_sample(directory: Path, split: str, number: int) -> Sample:
    """Return the location of sample `number` of a split, counted in the order of training.

    Raises DataFormatError.
    """
    index = describe_index(directory)
    if not index.samples.get(split):
        known = (
            ", ".join(f"{count} {name}" for name, count in index.samples.items() if count) or "none"
        )
        raise DataFormatError(
            f"{directory} has no {split} samples (it has {known}): choose another split"
        )
    member, sample, place = 0, number, directory
    if not index.single:
        member, sample = _blended_sample(directory, index, split, number)
        place = member_directory(directory, member)
    prefix = index.members[member].prefix
    dataset = IndexedDataset(prefix)
    if index.options.sentences is not None:
        parts, row = _sentence_parts(dataset, place, split, sample), sample
    else:
        parts, row = _token_parts(index, dataset, place, split, sample)
    return Sample(split, number, member, prefix, sample, row, parts)


def _sentence_parts(
    dataset: IndexedDataset, place: Path, split: str, sample: int
) -> tuple[Part, ...]:
    """Return the sentences of a sample. Raises DataFormatError."""
    rows = load_sentence_map(place, split, dataset)
    _check_number(map_path(place, split, SENTENCE_MAP_NAME), sample, len(rows))
    lengths = {
        number: int(dataset.lengths[number])
        for number in range(int(rows[sample, 0]), int(rows[sample, 1]))
    }
    return tuple(
        Part(document_of(dataset, number), number, 0, size, size)
        for number, size in lengths.items()
    )


def _token_parts(
    index: IndexDescription, dataset: IndexedDataset, place: Path, split: str, sample: int
) -> tuple[tuple[Part, ...], int]:
    """Return the ranges of tokens of a sample, and its row of the sample index.

    Raises DataFormatError.
    """
    document, rows, shuffle = (open_map(map_path(place, split, name)) for name in MAP_NAMES)
    _check_number(map_path(place, split, "shuffle"), sample, len(shuffle))
    row = int(shuffle[sample])
    parts = None
    if 0 <= row < len(rows) - 1:
        parts = _parts(index, dataset, document, rows[row : row + 2].tolist())
    if parts is None:
        raise DataFormatError(
            f"{map_path(place, split, 'sample')}: row {row} of {len(rows) - 1} does not fit "
            f"{dataset.prefix}: the maps were built for other tokens or are damaged; build them "
            "again"
        )
    return parts, row


def _blended_sample(
    directory: Path, index: IndexDescription, split: str, number: int
) -> tuple[int, int]:
    """Return (index of the member, number of its sample) of a blend's sample `number`."""
    path = map_path(directory, split, BLEND_MAP_NAMES[0])
    datasets, samples = (open_map(map_path(directory, split, name)) for name in BLEND_MAP_NAMES)
    _check_number(path, number, min(len(datasets), len(samples)))
    members, place = index.blends.get(split, ()), int(datasets[number])
    if not 0 <= place < len(members):
        raise DataFormatError(
            f"{path} names data set {place} of {len(members)}: build the index maps again"
        )
    return members[place], int(samples[number])


def _parts(
    index: IndexDescription,
    dataset: IndexedDataset,
    document: npt.NDArray[Any],
    rows: list[list[int]],
) -> tuple[Part, ...] | None:
    """Return the ranges between two rows of the sample index, or None if the rows are invalid."""
    (first, offset), (last, end) = rows
    options = index.options
    packed, best_fit = options.packing == "packed", options.packing == "best_fit"
    room = options.seq_length + options.extra
    # A sample of whole documents ends before the next row's document.
    stop = last + 1 if packed or (last == first and not best_fit) else last
    if not 0 <= first <= last or stop > len(document) or offset < 0 or end < 0:
        return None
    if best_fit and first == last:
        return None
    parts = []
    for position in range(first, stop):
        sequence = int(document[position])
        if not 0 <= sequence < len(dataset):
            return None
        length = int(dataset.lengths[sequence])
        if best_fit and position > first:
            offset = int(rest_starts(np.asarray(length), options.seq_length, options.extra))
            if length - offset > room:
                return None
        until = end + options.extra if position == last else length
        until = min(until, offset + room) if not packed else until
        if not offset <= until <= length:
            return None
        if until > offset:
            parts.append(Part(document_of(dataset, sequence), sequence, offset, until, length))
            room -= until - offset
        offset = 0
    return tuple(parts)


def open_map(path: Path) -> Map:
    """Open a map of tokens as a memory map: a sample index has two columns, others one dimension.

    Raises DataFormatError.
    """
    values = load_map(path)
    rows = path.name.endswith("_sample_index.npy") and not path.name.endswith(
        "_dataset_sample_index.npy"
    )
    check_form(path, values, 2 if rows else 1, ("<i2", "<i4", "<u4", "<i8"))
    if rows and (values.shape[1] != 2 or not len(values)):
        raise DataFormatError(
            f"{path} has shape {values.shape} instead of (samples + 1, 2): build it again"
        )
    return values


def _check_number(path: Path, number: int, count: int) -> None:
    if not 0 <= number < count:
        raise DataFormatError(f"{path} has no sample {number}: it has {count}, numbered from 0")


def check_maps(dataset: IndexedDataset, directory: Path, split: str, options: IndexOptions) -> str:
    """Check the maps of a split and return a summary in one clause. Raises DataFormatError.

    The document index must contain every sequence of the split equally often, with best fit every
    piece; with packed documents the rows of the sample index must be seq_length tokens apart; the
    shuffle index must contain each sample once. Memory: 1 byte per sample, 8 to 32 per sequence.
    """
    paths = [map_path(directory, split, name) for name in MAP_NAMES]
    document, rows, shuffle = (open_map(path) for path in paths)
    if len(rows) != len(shuffle) + 1:
        raise DataFormatError(
            f"{paths[1]} has {len(rows)} rows, {paths[2].name} {len(shuffle)} samples; it should "
            "have one row more: build the index maps again"
        )
    epochs = _check_document_index(paths[0], document, dataset, _pieces_of(dataset, options))
    _check_rows(paths[1], rows, document, dataset)
    if options.packing == "packed":
        _check_distances(paths[1], rows, document, dataset, options)
    elif options.packing == "best_fit":
        _check_best_fit(paths[1], rows, document, dataset, options, epochs)
    _check_permutation(paths[2], shuffle)
    if not len(shuffle) and not len(document):
        return "no samples"
    parts = (
        counted(len(shuffle), "sample"),
        counted(len(document), "piece" if options.packing == "best_fit" else "sequence"),
        counted(epochs, "epoch"),
    )
    return "{}, {} in {}, each sample once".format(*parts)


def _check_document_index(path: Path, document: Map, dataset: IndexedDataset, pieces: Map) -> int:
    """Return the number of epochs: how often the document index contains each sequence."""
    counts = np.zeros(len(dataset), np.int64)
    for block in blocks(document, _BLOCK):
        if block.min() < 0 or block.max() >= len(dataset):
            wrong = block.min() if block.min() < 0 else block.max()
            raise DataFormatError(
                f"{path} names sequence {wrong} of {len(dataset)} in {dataset.prefix}: it was "
                "built for other tokens"
            )
        counts += np.bincount(block, minlength=len(counts))
    used = np.flatnonzero(counts)
    if not len(used):
        return 0
    first, last = int(used[0]), int(used[-1])
    epochs = int(counts[first]) // max(1, int(pieces[first]))
    uneven = np.flatnonzero(counts[first : last + 1] != epochs * pieces[first : last + 1])
    if len(uneven):
        sequence = first + int(uneven[0])
        raise DataFormatError(
            f"{path} has sequence {sequence} {counts[sequence]} times, but sequence {first} "
            f"{counts[first]} times: each epoch has every sequence of the split once, with "
            "best_fit every piece of it; build the index maps again"
        )
    return epochs


def _check_rows(path: Path, rows: Map, document: Map, dataset: IndexedDataset) -> None:
    """Check that each row is inside a document of the document index and rows are ascending."""
    previous = (0, 0)
    for start in range(0, len(rows), _BLOCK):
        block = rows[start : start + _BLOCK].astype(np.int64)
        position, offset = block[:, 0], block[:, 1]
        inside = (position >= 0) & (position < len(document)) & (offset >= 0)
        inside[inside] = offset[inside] <= dataset.lengths[document[position[inside]]]
        inside |= (position == len(document)) & (offset == 0)  # the end of the last sample
        earlier = np.concatenate([[previous], block[:-1]])
        falling = (position < earlier[:, 0]) | (
            (position == earlier[:, 0]) & (offset < earlier[:, 1])
        )
        wrong = np.flatnonzero(~inside | falling)
        if len(wrong):
            row = int(wrong[0])
            raise DataFormatError(
                f"{path}: row {start + row} is {block[row].tolist()}, which does not follow "
                f"{earlier[row].tolist()} within the documents of {dataset.prefix}: build the "
                "index maps again"
            )
        previous = (int(position[-1]), int(offset[-1]))


def _check_distances(
    path: Path, rows: Map, document: Map, dataset: IndexedDataset, options: IndexOptions
) -> None:
    """Check that row i is i x seq_length tokens into the documents.

    Only the last row may be earlier, because the last sample may be partial.
    """
    row, before = 0, 0
    for start in range(0, len(document), _BLOCK):
        lengths = dataset.lengths[document[start : start + _BLOCK]].astype(np.int64)
        starts = before + np.cumsum(lengths) - lengths
        stop = bisect_left(rows[:, 0], start + len(lengths), lo=row)
        block = rows[row:stop].astype(np.int64)
        reached = starts[block[:, 0] - start] + block[:, 1]
        wrong = np.flatnonzero(reached != np.arange(row, stop) * options.seq_length)
        wrong = wrong[
            (row + wrong != len(rows) - 1) | (reached[wrong] > (len(rows) - 1) * options.seq_length)
        ]
        if len(wrong):
            raise DataFormatError(
                f"{path}: sample {row + int(wrong[0])} begins {reached[wrong[0]]} tokens into the "
                f"documents instead of {(row + int(wrong[0])) * options.seq_length}: the maps were "
                "built for other tokens; build them again"
            )
        row, before = stop, int(starts[-1] + lengths[-1])


def _pieces_of(dataset: IndexedDataset, options: IndexOptions) -> npt.NDArray[np.int64]:
    """Return how often an epoch's document index contains each sequence."""
    if options.packing == "best_fit":
        return piece_counts(dataset.lengths, options.seq_length, options.extra)
    return np.ones(len(dataset), np.int64)


def _check_best_fit(
    path: Path,
    rows: Map,
    document: Map,
    dataset: IndexedDataset,
    options: IndexOptions,
    epochs: int,
) -> None:
    """Check that the samples fit seq_length and contain each piece of each document once per epoch.

    `rows` is the sample index at `path`, `document` the document index. Raises DataFormatError.
    """
    length, room = options.seq_length, options.seq_length + options.extra
    rests = rest_starts(dataset.lengths, length, options.extra)
    starts_sum = np.zeros(len(dataset), np.int64)
    for start in range(0, len(rows) - 1, _BLOCK):
        block = rows[start : start + _BLOCK + 1].astype(np.int64)
        firsts = block[:-1, 0] - block[0, 0]
        empty = np.flatnonzero(np.diff(block[:, 0]) < 1)
        if len(empty):
            raise DataFormatError(
                f"{path}: sample {start + int(empty[0])} has no documents: build the index maps "
                "again"
            )
        sequences = document[block[0, 0] : block[-1, 0]]
        begins = rests[sequences]
        begins[firsts] = block[:-1, 1]
        left = dataset.lengths[sequences] - begins
        # A piece at the start may be full, before the rest of its document.
        single = firsts[begins[firsts] < rests[sequences[firsts]]]
        left[single] = np.minimum(left[single], room)
        tokens = np.add.reduceat(left, firsts)
        wrong = np.flatnonzero(tokens > room)
        if len(wrong):
            raise DataFormatError(
                f"{path}: sample {start + int(wrong[0])} has {tokens[wrong[0]]} tokens of "
                f"{room}: the maps were built for other tokens; build them again"
            )
        np.add.at(starts_sum, sequences, begins)
    full = rests // length
    used = np.zeros(len(dataset), np.bool_)
    used[document] = True
    uneven = np.flatnonzero(used & (starts_sum != epochs * length * full * (full + 1) // 2))
    if len(uneven):
        raise DataFormatError(
            f"{path} does not have each piece of sequence {int(uneven[0])} of {dataset.prefix} "
            "once in each epoch: build the index maps again"
        )


def check_sentence_map(
    dataset: IndexedDataset, directory: Path, split: str, options: IndexOptions
) -> str:
    """Check the sentence map of a split and return a summary in one clause.

    Every sample must be inside one document of the split, have the minimum number of sentences, and
    a target length that fits the model. Raises DataFormatError.
    """
    sentences = sentences_of(options)
    path = map_path(directory, split, SENTENCE_MAP_NAME)
    rows = load_sentence_map(
        directory, split, dataset, options.seq_length - sentences.special_tokens
    )
    starts = dataset.document_indices
    first, last = sequence_range(dataset, options, split)
    used = np.zeros(dataset.documents, np.bool_)
    for start in range(0, len(rows), _BLOCK):
        block = rows[start : start + _BLOCK].astype(np.int64)
        documents = np.searchsorted(starts, block[:, 0], side="right") - 1
        inside = (
            (first <= block[:, 0]) & (block[:, 1] <= last) & (block[:, 1] <= starts[documents + 1])
        )
        wrong = np.flatnonzero(~inside | (block[:, 1] - block[:, 0] < sentences.minimum_sentences))
        if len(wrong):
            row = block[wrong[0]].tolist()
            raise DataFormatError(
                f"{path}: sample {start + int(wrong[0])} has the sentences {row[0]} to "
                f"{row[1] - 1}, which are not {sentences.minimum_sentences} or more of one "
                f"document of the {split} split, {first} to {last - 1}: build the index maps again"
            )
        used[documents] = True
    return (
        f"{counted(len(rows), 'sample')} of {counted(int(used.sum()), 'document')}"
        if len(rows)
        else "no samples"
    )


def _check_permutation(path: Path, shuffle: Map) -> None:
    seen = np.zeros(len(shuffle), np.bool_)
    for block in blocks(shuffle, _BLOCK):
        if (wrong := outside(block, len(seen))) is not None:
            raise DataFormatError(
                f"{path} names sample {wrong} of {len(seen)}: build the index maps again"
            )
        seen[block] = True
    if not seen.all():
        raise DataFormatError(
            f"{path} lacks {np.count_nonzero(~seen)} of {len(seen)} samples, such as "
            f"{int(seen.argmin())}, and has others more than once: build the index maps again"
        )


def outside(numbers: Map, count: int) -> int | None:
    """Return a number below 0, else one from `count` on; None if there is neither."""
    lowest, highest = int(numbers.min()), int(numbers.max())
    if lowest < 0:
        return lowest
    return highest if highest >= count else None
