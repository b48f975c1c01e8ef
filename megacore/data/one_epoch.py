"""One pass over a split, whatever the maps of the run are: what perplexities are measured on."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.config.data import DataConfig
from megacore.data.blended import ConcatDataset
from megacore.data.build import describe, open_member
from megacore.data.gpt_dataset import GPTDataset
from megacore.data.index_directory import IndexDescription, save_maps
from megacore.data.index_maps import build_split
from megacore.data.index_options import Member, Mixture
from megacore.data.index_plans import MemberPlan, plan_splits
from megacore.data.indexed_dataset import IndexedDataset
from megacore.data.samples import Dataset
from megacore.data.splits import SPLIT_NAMES, split_ranges


def one_epoch(
    token_prefixes: Sequence[str], index_directory: str | Path, split_name: str, config: DataConfig, scratch: Path
) -> Dataset:
    """Each sample of each member of a split once; of several members one after the other, without weights.

    Args:
        token_prefixes: token files without .bin/.idx, in the order of the index directory's members.
        index_directory: where the run's maps are.
        split_name: "train", "valid" or "test".
        config: how samples are made.
        scratch: existing directory for maps, which have no names left when this returns.

    Raises:
        DataFormatError: tokens or maps are missing or damaged, or a member is too small for one sample.
    """
    description = describe(token_prefixes, index_directory, config)
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        members = []
        for number in description.blends.get(split_name, ()):
            folder = Path(directory, str(number))
            folder.mkdir()
            members.append(_build(token_prefixes[number], folder, split_name, description))
        return members[0] if len(members) == 1 else ConcatDataset(members, config.seq_length)


def train_tokens(
    token_prefixes: Sequence[str], index_directory: str | Path, config: DataConfig
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """The tokens of the train split: of each of its members the prefix, and the tokens as one view.

    Raises DataFormatError.
    """
    description = describe(token_prefixes, index_directory, config)
    for number in description.blends.get("train", ()):
        tokens = IndexedDataset(token_prefixes[number])
        first, last = 0, len(tokens)
        if description.options.split is not None:
            first, last = split_ranges(description.options.split, len(tokens), description.options.style)["train"]
        yield tokens.prefix, tokens.token_range(first, last)


def _build(prefix: str, folder: Path, split_name: str, description: IndexDescription) -> GPTDataset:
    """One pass over a member; its maps are in `folder`, and outlive it once they are opened."""
    options = description.options
    tokens = IndexedDataset(prefix)
    plan = _plan(tokens, split_name, description)
    maps = build_split(
        np.require(tokens.lengths, np.int32, ["C", "A"]),  # the file's own array is not aligned
        plan.first,
        plan.last,
        plan.epochs,
        options.seq_length,
        options.seed,
        extra=options.extra,
        packing=options.packing,
        style=options.style,
    )
    save_maps(maps, folder, split_name)
    return open_member(prefix, folder, split_name, description)


def _plan(tokens: IndexedDataset, split_name: str, description: IndexDescription) -> MemberPlan:
    members = (Member(tokens.prefix),)
    mixture = Mixture.blend(members)
    if description.options.split is None:
        mixture = Mixture.per_split(**{name: members if name == split_name else () for name in SPLIT_NAMES})
    samples = [None if name == split_name else 0 for name in SPLIT_NAMES]
    return plan_splits({tokens.prefix: tokens}, mixture, description.options, samples)[split_name].members[0]
