"""Checks of what lies on the disk: token files, index maps, and the manifests beside them."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megacore.artifact.manifest import MANIFEST_NAME, FileEntry, Manifest, file_digest
from megacore.data.index_directory import BLEND_MAP_NAMES, IndexDescription, map_path, member_directory
from megacore.data.indexed_dataset import IndexedDataset, bin_path, idx_path
from megacore.data.map_files import load_map
from megacore.data.members import MEMBERS_NAME, TOKENS_NAMES
from megacore.data.splits import SPLIT_NAMES
from megacore.errors import ArtifactError, DataFormatError
from megacore.inspect.index import describe_index, is_index_directory, open_map
from megacore.inspect.provenance import find_origins
from megacore.inspect.tokens import count_empty, counted, find_prefixes
from megacore.inspect.verify_maps import check_maps, check_sentence_map

_HASH_THREADS = 4
"""Files of an artifact that are hashed at a time; hashing one keeps a core busy."""


@dataclass(frozen=True)
class Check:
    """A check that passed; one that fails raises."""

    name: str
    result: str
    """What was found, in one clause."""


def verify(path: str | Path) -> Iterator[Check]:
    """Every check of what `path` stands for, as it passes.

    A pair of token files (with or without .bin/.idx), a directory of them, a directory of index maps, or any other
    artifact, of which only the manifest is checked. Raises DataFormatError and ArtifactError at the first check that
    fails.
    """
    place = Path(path)
    if not place.is_dir():
        for prefix in find_prefixes(path):
            yield from verify_tokens(prefix)
            yield from _verify_manifest_beside(prefix)
    elif is_index_directory(place):
        yield from verify_index(place)
        yield from verify_manifest(place)
    elif (place / MEMBERS_NAME).exists() or any(idx_path(place / name).exists() for name in TOKENS_NAMES):
        prefixes = find_prefixes(place)
        for prefix in prefixes:
            yield from verify_tokens(prefix)
        for directory in dict.fromkeys([place, *(Path(prefix).parent for prefix in prefixes)]):
            yield from verify_manifest(directory)
    elif (place / MANIFEST_NAME).exists():
        yield from verify_manifest(place)
    else:
        raise DataFormatError(
            f"{place} holds neither token files of the tokenize stage, nor index maps, nor a {MANIFEST_NAME}: for "
            "other token files give their path without .bin/.idx"
        )


def verify_tokens(prefix: str) -> Iterator[Check]:
    """The structure of a pair of token files, and `documents.json` if there is one. Raises DataFormatError."""
    dataset = IndexedDataset(prefix)
    name, sequences, tokens = Path(prefix).name, len(dataset), len(dataset.tokens)
    itemsize = dataset.dtype.itemsize
    size = idx_path(prefix).stat().st_size
    modes = " and modes" if size == 34 + 13 * sequences + 8 * len(dataset.document_indices) and sequences else ""
    yield Check(
        f"{name}.idx",
        f"version 1, {dataset.dtype.name}, {counted(sequences, 'sequence')}{modes}, {size:,} bytes as these take",
    )
    yield Check("pointers", f"{sequences:,}, each where the sequence before it ends")
    yield Check(
        f"{name}.bin", f"sum of lengths {tokens:,} x {itemsize} bytes = {bin_path(prefix).stat().st_size:,}, its size"
    )
    yield Check(
        "document index",
        f"{counted(dataset.documents, 'document')}, {count_empty(dataset):,} empty, from 0 to {sequences:,}",
    )
    origins = find_origins(prefix, dataset.documents)
    if origins is not None:
        yield Check(
            origins.path.name, f"{counted(origins.documents, 'document')} from {counted(len(origins.files), 'file')}"
        )


def verify_index(directory: Path) -> Iterator[Check]:
    """Index maps against the token files they were built for. Raises DataFormatError."""
    index = describe_index(directory)
    options = index.options
    yield Check(
        "index.json", f"seq_length {options.seq_length}, seed {options.seed}, {counted(len(index.members), 'data set')}"
    )
    for number, member in enumerate(index.members):
        dataset = IndexedDataset(member.prefix)
        yield Check(
            f"tokens {number}",
            f"{member.prefix}: {counted(len(dataset), 'sequence')}, {counted(len(dataset.tokens), 'token')}",
        )
        place = directory if index.single else member_directory(directory, number)
        for split in filter(member.weights.__contains__, SPLIT_NAMES):
            if map_path(place, split, index.counting_map).exists() or index.single or index.samples.get(split):
                check = check_maps if options.sentences is None else check_sentence_map
                yield Check(f"{split} maps {number}", check(dataset, place, split, options))
    if not index.single:
        yield from _verify_blends(directory, index)
    for split, count in index.samples.items():
        path = map_path(directory, split, index.counting_map if index.single else BLEND_MAP_NAMES[0])
        found = len(load_map(path)) if count or path.exists() else 0
        if found != count:
            raise DataFormatError(
                f"{directory}/index.json counts {count} {split} samples, but its maps have {found}: build them again"
            )


def _verify_blends(directory: Path, index: IndexDescription) -> Iterator[Check]:
    """Each blend takes existing samples of its members."""
    for split, members in index.blends.items():
        if not index.samples.get(split):
            continue
        datasets, numbers = (open_map(map_path(directory, split, name)) for name in BLEND_MAP_NAMES)
        path = map_path(directory, split, BLEND_MAP_NAMES[0])
        if len(datasets) != len(numbers):
            raise DataFormatError(f"{path} has {len(datasets)} samples, the other map {len(numbers)}: build them again")
        if len(datasets) and not 0 <= int(datasets.min()) <= int(datasets.max()) < len(members):
            raise DataFormatError(f"{path} names data set {datasets.max()} of {len(members)}: build the maps again")
        shares = []
        for place, member in enumerate(members):
            taken = np.asarray(numbers)[np.asarray(datasets) == place]
            most = len(load_map(map_path(member_directory(directory, member), split, index.counting_map)))
            if len(taken) and not 0 <= int(taken.min()) <= int(taken.max()) < most:
                raise DataFormatError(
                    f"{path}: the blend takes sample {taken.max()} of member {member}, which has {most}: build it again"
                )
            shares.append(f"{len(taken) / max(1, len(datasets)):.1%} of member {member}")
        yield Check(f"{split} blend", f"{counted(len(datasets), 'sample')}: {', '.join(shares)}")


def verify_manifest(directory: Path) -> Iterator[Check]:
    """The size and hash of every file that a directory's manifest lists. Raises ArtifactError."""
    if (directory / MANIFEST_NAME).exists():
        yield _check_files(directory, Manifest.read(directory).files, MANIFEST_NAME)
    else:
        yield Check("manifest", f"{directory} has none: hashes were not checked")


def _verify_manifest_beside(prefix: str) -> Iterator[Check]:
    """The same for the manifest that the command line writes beside token files."""
    path = Path(f"{prefix}.{MANIFEST_NAME}")
    if path.exists():
        yield _check_files(path.parent, _read_files(path), path.name)
    elif Path(prefix).name in TOKENS_NAMES:
        yield from verify_manifest(path.parent)
    else:
        yield Check("manifest", f"{path.name} is not there: hashes were not checked")


def _read_files(path: Path) -> dict[str, FileEntry]:
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
        return {name: FileEntry(**entry) for name, entry in values["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{path} is damaged ({error}): tokenize again, or delete it to do without") from error


def _check_files(directory: Path, files: dict[str, FileEntry], name: str) -> Check:
    with ThreadPoolExecutor(_HASH_THREADS, "megacore-hash") as pool:
        problems = pool.map(lambda item: _file_problem(directory, *item), files.items())
        problem = next((found for found in problems if found), None)
    if problem:
        raise ArtifactError(f"{directory}: {problem}: build it again, or copy it again from where it is whole")
    size = sum(entry.size for entry in files.values())
    return Check(name, f"{counted(len(files), 'file')}, {size:,} bytes, sha256 as it was written")


def _file_problem(directory: Path, name: str, entry: FileEntry) -> str | None:
    path = directory / name
    try:
        size = path.stat().st_size
        if size != entry.size:
            return f"{name} has {size} bytes instead of {entry.size}"
        return None if file_digest(path) == entry.sha256 else f"{name} has another content than when it was written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
