"""Token files and index maps of a run: are they there, are they whole, and has the vocabulary every token."""

import os
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megacore.data.index_directory import (
    BLEND_MAP_NAMES,
    MAP_NAMES,
    SENTENCE_MAP_NAME,
    IndexDescription,
    map_path,
    member_directory,
    read_description,
)
from megacore.data.indexed_dataset import IndexedDataset
from megacore.data.map_files import load_map
from megacore.errors import MegacoreError

_BLOCK = 1 << 22
"""Tokens that are read at a time."""
_THREADS = 4


def look_at_tokens(
    prefixes: Sequence[str], vocab_size: int | None, share: tuple[int, int], seconds: float
) -> dict[str, Any]:
    """Largest token of this host's share of the files, against the vocabulary.

    Args:
        prefixes: token files without .bin/.idx.
        vocab_size: entries of the vocabulary; None only opens the files.
        share: (k, n): every n-th block from the k-th on.
        seconds: after which no further block is begun. Blocks are taken in a random order, so that what was read until
            then is spread over the files.
    """
    deadline = time.monotonic() + seconds
    files: list[dict[str, Any]] = []
    for prefix in prefixes:
        try:
            dataset = IndexedDataset(prefix)
        except MegacoreError as error:
            files.append({"prefix": prefix, "problem": str(error)})
            continue
        found = {"prefix": prefix, "tokens": len(dataset.tokens), "documents": dataset.documents, "read": 0}
        if vocab_size is not None:
            found |= _scan(dataset, vocab_size, share, deadline)
        files.append(found)
    return {"files": files, "vocab_size": vocab_size}


def _scan(dataset: IndexedDataset, vocab_size: int, share: tuple[int, int], deadline: float) -> dict[str, Any]:
    """How many tokens were read, the smallest and the largest, and where the first one outside stands."""
    first, step = share
    starts = list(range(first * _BLOCK, len(dataset.tokens), step * _BLOCK))
    planned = sum(min(_BLOCK, len(dataset.tokens) - start) for start in starts)
    random.Random(0).shuffle(starts)
    read, smallest, largest = 0, 0, 0
    outside: list[int] = []

    def look(start: int) -> tuple[int, int, int, int] | None:
        if time.monotonic() > deadline:
            return None
        block = dataset.tokens[start : start + _BLOCK]
        low, high = int(block.min()), int(block.max())
        bad = -1
        if low < 0 or high >= vocab_size:
            bad = start + int(((block < 0) | (block >= vocab_size)).argmax())
        return len(block), low, high, bad

    with ThreadPoolExecutor(min(_THREADS, len(os.sched_getaffinity(0)))) as pool:
        for result in pool.map(look, starts):
            if result is None:
                continue
            length, low, high, bad = result
            read, smallest, largest = read + length, min(smallest, low), max(largest, high)
            outside += [bad] if bad >= 0 else []
    return {
        "read": read,
        "planned": planned,
        "smallest": smallest,
        "largest": largest,
        "outside": min(outside, default=None),
    }


def look_at_index(directory: Path, prefixes: Sequence[str]) -> dict[str, Any]:
    """How many index maps there are, all readable, and of which other token files. Raises DataFormatError."""
    index = read_description(directory)
    paths = list(_maps(directory, index))
    for path in paths:
        load_map(path)
    known = {os.path.realpath(prefix) for prefix in prefixes}
    others = [member.prefix for member in index.members if os.path.realpath(member.prefix) not in known]
    return {"directory": str(directory), "maps": len(paths), "samples": dict(index.samples), "others": others}


def _maps(directory: Path, index: IndexDescription) -> Iterator[Path]:
    """The maps of each split that has samples: those of its data sets, and how these are blended."""
    names = MAP_NAMES if index.options.sentences is None else (SENTENCE_MAP_NAME,)
    for split in (split for split, count in index.samples.items() if count):
        if index.single:
            yield from (map_path(directory, split, name) for name in names)
            continue
        yield from (map_path(directory, split, name) for name in BLEND_MAP_NAMES)
        for number, member in enumerate(index.members):
            if split in member.weights:
                yield from (map_path(member_directory(directory, number), split, name) for name in names)
