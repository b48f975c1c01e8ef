"""Checks of files on disk: token files, index maps, and the manifests next to them.

Index maps are compared with their tokens, in blocks.
"""

from bisect import bisect_left
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.artifact.files import read_json
from megacore.artifact.manifest import MANIFEST_NAME, FileEntry, Manifest, file_digest
from megacore.data.index_directory import (
    BLEND_MAP_NAMES,
    MAP_NAMES,
    SENTENCE_MAP_NAME,
    IndexDescription,
    load_map,
    map_path,
    member_directory,
)
from megacore.data.index_options import SPLIT_NAMES, IndexOptions
from megacore.data.sentence_maps import document_range, load_sentence_map, sentences_of
from megacore.errors import ArtifactError, DataFormatError
from megacore.inspect.index import describe_index, is_index_directory, open_map
from megacore.inspect.provenance import find_origins
from megacore.inspect.tokens import count_empty, counted, find_prefixes
from megacore.token_files.indexed_dataset import (
    MEMBERS_NAME,
    TOKENS_NAMES,
    IndexedDataset,
    bin_path,
    idx_path,
)

_HASH_THREADS = 4
"""Number of files of an artifact hashed at a time; each keeps a core busy."""
_BLOCK = 1 << 20
Map = npt.NDArray[Any]


@dataclass(frozen=True)
class Check:
    """A passed check; a failed check raises an error instead."""

    name: str
    result: str
    """Result of the check in one clause."""


def verify(path: str | Path) -> Iterator[Check]:
    """Check the files at `path` and yield each check that passes.

    `path` is a pair of token files (with or without .bin/.idx), a directory of them, a directory of
    index maps, or any other artifact, of which only the manifest is checked. Raises DataFormatError
    or ArtifactError at the first check that fails.
    """
    place = Path(path)
    if not place.is_dir():
        for prefix in find_prefixes(path):
            yield from verify_tokens(prefix)
            yield from _verify_adjacent_manifest(prefix)
    elif is_index_directory(place):
        yield from verify_index(place)
        yield from verify_manifest(place)
    elif (place / MEMBERS_NAME).exists() or any(
        idx_path(place / name).exists() for name in TOKENS_NAMES
    ):
        prefixes = find_prefixes(place)
        for prefix in prefixes:
            yield from verify_tokens(prefix)
        for directory in dict.fromkeys([place, *(Path(prefix).parent for prefix in prefixes)]):
            yield from verify_manifest(directory)
    elif (place / MANIFEST_NAME).exists():
        yield from verify_manifest(place)
    else:
        raise DataFormatError(
            f"{place} holds neither token files of the tokenize stage, nor index maps, nor a "
            f"{MANIFEST_NAME}: for other token files give their path without .bin/.idx"
        )


def verify_tokens(prefix: str) -> Iterator[Check]:
    """Check the structure of a pair of token files, and `documents.json` if it exists.

    Raises DataFormatError.
    """
    dataset = IndexedDataset(prefix)
    name, sequences, tokens = Path(prefix).name, len(dataset), len(dataset.tokens)
    itemsize = dataset.dtype.itemsize
    size = idx_path(prefix).stat().st_size
    modes = (
        " and modes"
        if size == 34 + 13 * sequences + 8 * len(dataset.document_indices) and sequences
        else ""
    )
    yield Check(
        f"{name}.idx",
        f"version 1, {dataset.dtype.name}, {counted(sequences, 'sequence')}{modes}, {size:,} bytes "
        "as these take",
    )
    yield Check("pointers", f"{sequences:,}, each where the sequence before it ends")
    yield Check(
        f"{name}.bin",
        f"sum of lengths {tokens:,} x {itemsize} bytes = {bin_path(prefix).stat().st_size:,}, its "
        "size",
    )
    yield Check(
        "document index",
        f"{counted(dataset.documents, 'document')}, {count_empty(dataset):,} empty, from 0 to "
        f"{sequences:,}",
    )
    origins = find_origins(prefix, dataset.documents)
    if origins is not None:
        yield Check(
            origins.path.name,
            f"{counted(origins.documents, 'document')} from {counted(len(origins.files), 'file')}",
        )


def verify_index(directory: Path) -> Iterator[Check]:
    """Check index maps against the token files they were built for. Raises DataFormatError."""
    index = describe_index(directory)
    options = index.options
    yield Check(
        "index.json",
        f"seq_length {options.seq_length}, seed {options.seed}, "
        f"{counted(len(index.members), 'data set')}",
    )
    for number, member in enumerate(index.members):
        dataset = IndexedDataset(member.prefix)
        yield Check(
            f"tokens {number}",
            f"{member.prefix}: {counted(len(dataset), 'sequence')}, "
            f"{counted(len(dataset.tokens), 'token')}",
        )
        place = directory if index.single else member_directory(directory, number)
        for split in filter(member.weights.__contains__, SPLIT_NAMES):
            if (
                map_path(place, split, index.counting_map).exists()
                or index.single
                or index.samples.get(split)
            ):
                check = check_maps if options.sentences is None else check_sentence_map
                yield Check(f"{split} maps {number}", check(dataset, place, split, options))
    if not index.single:
        yield from _verify_blends(directory, index)
    for split, count in index.samples.items():
        path = map_path(
            directory, split, index.counting_map if index.single else BLEND_MAP_NAMES[0]
        )
        samples = len(load_map(path)) if count or path.exists() else 0
        if samples != count:
            raise DataFormatError(
                f"{directory}/index.json counts {count} {split} samples, but its maps have "
                f"{samples}: build them again"
            )


def _verify_blends(directory: Path, index: IndexDescription) -> Iterator[Check]:
    """Check that each blend contains only existing samples of its members."""
    for split, members in index.blends.items():
        if not index.samples.get(split):
            continue
        datasets, numbers = (open_map(map_path(directory, split, name)) for name in BLEND_MAP_NAMES)
        path = map_path(directory, split, BLEND_MAP_NAMES[0])
        if len(datasets) != len(numbers):
            raise DataFormatError(
                f"{path} has {len(datasets)} samples, the other map {len(numbers)}: build them "
                "again"
            )
        if len(datasets) and (wrong := _outside(datasets, len(members))) is not None:
            raise DataFormatError(
                f"{path} names data set {wrong} of {len(members)}: build the maps again"
            )
        shares = []
        for place, member in enumerate(members):
            taken = np.asarray(numbers)[np.asarray(datasets) == place]
            available = len(
                load_map(map_path(member_directory(directory, member), split, index.counting_map))
            )
            if len(taken) and (wrong := _outside(taken, available)) is not None:
                raise DataFormatError(
                    f"{path}: the blend takes sample {wrong} of member {member}, which has "
                    f"{available}: build it again"
                )
            shares.append(f"{len(taken) / max(1, len(datasets)):.1%} of member {member}")
        yield Check(f"{split} blend", f"{counted(len(datasets), 'sample')}: {', '.join(shares)}")


def verify_manifest(directory: Path) -> Iterator[Check]:
    """Check size and hash of every file in a directory's manifest. Raises ArtifactError."""
    if (directory / MANIFEST_NAME).exists():
        yield _check_files(directory, Manifest.read(directory).files, MANIFEST_NAME)
    else:
        yield Check("manifest", f"{directory} has none: hashes were not checked")


def _verify_adjacent_manifest(prefix: str) -> Iterator[Check]:
    """Check the manifest that the command line writes next to token files."""
    path = Path(f"{prefix}.{MANIFEST_NAME}")
    if path.exists():
        yield _check_files(path.parent, _read_files(path), path.name)
    elif Path(prefix).name in TOKENS_NAMES:
        yield from verify_manifest(path.parent)
    else:
        yield Check("manifest", f"{path.name} is not there: hashes were not checked")


def _read_files(path: Path) -> dict[str, FileEntry]:
    try:
        values: Any = read_json(path)
        return {name: FileEntry(**entry) for name, entry in values["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{path} is damaged ({error}): tokenize again, or delete it to do without"
        ) from error


def _check_files(directory: Path, files: dict[str, FileEntry], name: str) -> Check:
    with ThreadPoolExecutor(_HASH_THREADS, "megacore-hash") as pool:
        problems = pool.map(lambda item: _file_problem(directory, *item), files.items())
        problem = next((text for text in problems if text), None)
    if problem:
        raise ArtifactError(
            f"{directory}: {problem}: build it again, or copy it again from where it is whole"
        )
    size = sum(entry.size for entry in files.values())
    return Check(name, f"{counted(len(files), 'file')}, {size:,} bytes, sha256 as it was written")


def _file_problem(directory: Path, name: str, entry: FileEntry) -> str | None:
    path = directory / name
    try:
        size = path.stat().st_size
        if size != entry.size:
            return f"{name} has {size} bytes instead of {entry.size}"
        return (
            None
            if file_digest(path) == entry.sha256
            else f"{name} has other content than when it was written"
        )
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"


def check_maps(dataset: IndexedDataset, directory: Path, split: str, options: IndexOptions) -> str:
    """Check the maps of a split and return a summary in one clause. Raises DataFormatError.

    The document index must contain every sequence of the split equally often; with packed documents
    the rows of the sample index must be seq_length tokens apart; the shuffle index must contain
    each sample once. Memory: 8 bytes per sequence and one per sample.
    """
    paths = [map_path(directory, split, name) for name in MAP_NAMES]
    document, rows, shuffle = (open_map(path) for path in paths)
    if len(rows) != len(shuffle) + 1:
        raise DataFormatError(
            f"{paths[1]} has {len(rows)} rows, {paths[2].name} {len(shuffle)} samples; it should "
            "have one row more: build the index maps again"
        )
    epochs = _check_document_index(paths[0], document, dataset)
    _check_rows(paths[1], rows, document, dataset)
    if options.packing == "packed":
        _check_distances(paths[1], rows, document, dataset, options)
    _check_permutation(paths[2], shuffle)
    if not len(shuffle) and not len(document):
        return "no samples"
    parts = (
        counted(len(shuffle), "sample"),
        counted(len(document), "sequence"),
        counted(epochs, "epoch"),
    )
    return "{}, {} in {}, each sample once".format(*parts)


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
    first, last = (int(starts[place]) for place in document_range(dataset, options, split))
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


def _check_document_index(path: Path, document: Map, dataset: IndexedDataset) -> int:
    """Return the number of epochs: how often the document index contains each sequence."""
    counts = np.zeros(len(dataset), np.int64)
    for block in _blocks(document):
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
    first, last, epochs = int(used[0]), int(used[-1]), int(counts[used[0]])
    uneven = np.flatnonzero(counts[first : last + 1] != epochs)
    if len(uneven):
        sequence = first + int(uneven[0])
        raise DataFormatError(
            f"{path} has sequence {sequence} {counts[sequence]} times, but sequence {first} "
            f"{epochs} times: each epoch has every sequence of the split once; build the index "
            "maps again"
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


def _check_permutation(path: Path, shuffle: Map) -> None:
    seen = np.zeros(len(shuffle), np.bool_)
    for block in _blocks(shuffle):
        if (wrong := _outside(block, len(seen))) is not None:
            raise DataFormatError(
                f"{path} names sample {wrong} of {len(seen)}: build the index maps again"
            )
        seen[block] = True
    if not seen.all():
        raise DataFormatError(
            f"{path} lacks {np.count_nonzero(~seen)} of {len(seen)} samples, such as "
            f"{int(seen.argmin())}, and has others more than once: build the index maps again"
        )


def _outside(numbers: Map, count: int) -> int | None:
    """Return a number below 0, else one from `count` on; None if there is neither."""
    lowest, highest = int(numbers.min()), int(numbers.max())
    if lowest < 0:
        return lowest
    return highest if highest >= count else None


def _blocks(values: Map) -> Iterator[Map]:
    for start in range(0, len(values), _BLOCK):
        yield values[start : start + _BLOCK]
