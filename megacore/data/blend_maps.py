"""The two maps of a blend: which data set each sample of a split comes from, and which of its samples it is."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megacore.data.blends import build_blend, build_exhaustive_blend
from megacore.data.index_directory import BLEND_MAP_NAMES, map_path, save_array
from megacore.data.index_options import Mixture
from megacore.data.index_plans import Division
from megacore.errors import DataFormatError

_SUMMED = ("documents", "sequences", "tokens")


def write_blend(
    directory: str | Path, mixture: Mixture, split_name: str, division: Division, members: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Write how a split's members are blended; returns its counts.

    `members` are the counts of each, in the order that the blend numbers them. Raises DataFormatError when one has too
    few samples, WorkspaceError.
    """
    sizes = [member["samples"] for member in members]
    if division.size is None:
        dataset_index, sample_index = build_exhaustive_blend(sizes)
    elif division.weights is None and division.size > sum(sizes):
        raise DataFormatError(
            f"{division.size} samples are wanted of the {split_name} split, but one pass over its data sets has "
            f"{sum(sizes)}: give them weights, so that they are gone through as often as needed, or ask for fewer"
        )
    else:
        dataset_index, sample_index = build_blend(division.weights or sizes, division.size)
    drawn = np.bincount(dataset_index, minlength=len(members)).tolist()
    for member, count, size in zip(mixture.of(split_name), drawn, sizes, strict=True):
        if count > size:
            raise DataFormatError(
                f"the {split_name} blend draws {count} samples from {member.prefix}, which has {size}: ask for fewer"
            )
    dataset_name, sample_name = BLEND_MAP_NAMES
    save_array(map_path(directory, split_name, dataset_name), dataset_index)
    save_array(map_path(directory, split_name, sample_name), sample_index)
    entries = [
        {"prefix": os.path.basename(member.prefix), **entry, "drawn": count}
        for member, entry, count in zip(mixture.of(split_name), members, drawn, strict=True)
    ]
    sums = {name: sum(entry[name] for entry in entries) for name in _SUMMED if name in entries[0]}
    return {**sums, "samples": len(dataset_index), "members": entries}
