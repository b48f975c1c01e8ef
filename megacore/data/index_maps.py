"""Index maps of GPT data sets: the tokens of each sample, the order of samples, and blends.

The three maps equal Megatron core's (https://github.com/NVIDIA/Megatron-LM, core/datasets) bit for
bit. Document index (i32): the split's sequences, repeated once per epoch and shuffled. Sample index
(i32 or i64, shape (samples + 1, 2)): the start of each sample in the document index. Shuffle index
(u32): the order of the samples.

With the style "neox" they equal `doc_idx`, `sample_idx` and `shuffle_idx` of GPT-NeoX
(https://github.com/EleutherAI/gpt-neox, megatron/data/gpt2_dataset.py) for the same data, split,
seq_length, seed and number of samples, in values and types, so that a GPT-NeoX run can be resumed.

Both styles use the same seed and order of shuffles for each data set and split, the least number of
epochs, and samples that overlap by one token. GPT-NeoX differs as follows: all epochs are always
shuffled together; splits have other boundaries (see `split_ranges`); the sample index is i64 from
2^30 samples on; a blend rounds differently (see `member_sizes`) and numbers its data sets with u8,
where this module uses i16. GPT-NeoX never uses the last entry of a shuffle index before it starts
over; here that entry counts as a sample.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.artifact.files import workspace_errors
from megacore.data import _compiled as helpers
from megacore.data.index_directory import (
    BLEND_MAP_NAMES,
    INDEX_NAME,
    MAP_NAMES,
    IndexDescription,
    IndexMaps,
    map_path,
    member_directory,
    read_description,
    save_maps,
    write_description,
)
from megacore.data.index_options import (
    IndexOptions,
    IndexStyle,
    Member,
    Mixture,
    Packing,
    SentenceOptions,
)
from megacore.data.index_plans import (
    EXTRA_TOKENS,
    INT32_MAX,
    EpochPlan,
    MemberPlan,
    SplitPlan,
    plan_epochs,
    plan_splits,
    write_blend,
)
from megacore.token_files.indexed_dataset import IndexedDataset

__all__ = [
    "BLEND_MAP_NAMES",
    "EXTRA_TOKENS",
    "INDEX_NAME",
    "MAP_NAMES",
    "VERSION",
    "EpochPlan",
    "IndexDescription",
    "IndexMaps",
    "IndexOptions",
    "Member",
    "Mixture",
    "SentenceOptions",
    "build_index_maps",
    "build_split",
    "index_plan",
    "map_path",
    "member_directory",
    "plan_epochs",
    "read_description",
    "save_maps",
]

VERSION = 2
"""Version of the index stage, increased whenever its output changes."""
_UINT32_MAX = 2**32 - 1


def index_plan(
    mixture: Mixture, options: IndexOptions, samples: Sequence[int | None]
) -> dict[str, Any]:
    """Return the values that determine the maps together with data, weights and options.

    For each split, these are the epochs and the shuffling of the final epoch.

    The plan replaces the requested numbers of samples (train, valid, test; None: one epoch) in the
    index stage's key, so that requesting more samples within the same epochs keeps the key. A blend
    has its size in the plan. Raises ConfigError, DataFormatError.
    """
    plans = plan_splits(_open(mixture), mixture, options, samples)
    return {name: _plan_values(plan, mixture) for name, plan in plans.items()}


def build_index_maps(
    mixture: Mixture, directory: str | Path, options: IndexOptions, samples: Sequence[int | None]
) -> dict[str, Any]:
    """Write the maps of each split and `index.json` into `directory`; return counts per split.

    `samples` are the requested numbers for train, valid and test. The maps of a data set cover
    whole epochs, so a split has at least that many samples; a blend with weights has as many, or a
    few more. None means one epoch, and in a blend each sample of each member once, regardless of
    its weight. Raises ConfigError, DataFormatError, WorkspaceError.
    """
    datasets = _open(mixture)
    plans = plan_splits(datasets, mixture, options, samples)
    folders = {
        prefix: Path(directory) if mixture.is_single else member_directory(directory, number)
        for number, prefix in enumerate(mixture.prefixes)
    }
    built: dict[str, list[dict[str, Any]]] = {name: [] for name in plans}
    # Loop over data sets first, so that only the lengths of one are in memory at a time.
    for number, (prefix, folder) in enumerate(folders.items()):
        with workspace_errors(folder):
            folder.mkdir(exist_ok=True)
        # The array in the file is not aligned.
        lengths = np.require(datasets[prefix].lengths, np.int32, ["C", "A"])
        for name, plan in plans.items():
            for member in plan.members:
                if member.number == number:
                    built[name].append(_build_member(lengths, member, options, folder, name))
    counts = {}
    for name, plan in plans.items():
        by_number = {entry.pop("number"): entry for entry in built[name]}
        members = [by_number[member.number] for member in plan.members]
        counts[name] = (
            members[0]
            if mixture.is_single
            else write_blend(directory, mixture, name, plan.division, members)
        )
    write_description(
        directory, mixture, options, {name: entry["samples"] for name, entry in counts.items()}
    )
    return counts


def build_split(
    lengths: npt.NDArray[np.int32],
    first: int,
    last: int,
    plan: EpochPlan,
    seq_length: int,
    seed: int,
    *,
    extra: int = EXTRA_TOKENS,
    packing: Packing = "packed",
    style: IndexStyle = "megatron",
) -> IndexMaps:
    """Build the maps of the split with the sequences first … last-1.

    One random state is used for all of them, in order.
    """
    random_state = helpers.RandomState(seed)
    document_index = build_document_index(
        first, last, plan.epochs, plan.separate_final_epoch, random_state
    )
    if packing == "packed":
        sample_index = build_sample_index(
            lengths, document_index, seq_length, plan, extra=extra, style=style
        )
        before_final = plan.samples_before_final_epoch
    else:
        from megacore.data.index_plans import pack_sample_index

        sample_index = pack_sample_index(lengths, document_index, seq_length, packing, extra)
        before_final = len(sample_index) - 1
    shuffle_index = build_shuffle_index(len(sample_index) - 1, before_final, random_state)
    return IndexMaps(document_index, sample_index, shuffle_index)


def build_document_index(
    first: int,
    last: int,
    epochs: int,
    separate_final_epoch: bool,
    random_state: helpers.RandomState,
) -> npt.NDArray[np.int32]:
    """Return the sequences first … last-1, once per epoch, shuffled.

    With `separate_final_epoch` the final epoch is shuffled separately.
    """
    index: npt.NDArray[np.int32] = np.empty((epochs, last - first), np.int32)
    index[:] = np.arange(first, last, dtype=np.int32)
    index = index.reshape(-1)
    before_final = len(index) - (last - first if separate_final_epoch else 0)
    random_state.shuffle(index[:before_final])
    if separate_final_epoch:
        random_state.shuffle(index[before_final:])
    return index


def build_sample_index(
    lengths: npt.NDArray[np.int32],
    document_index: npt.NDArray[np.int32],
    seq_length: int,
    plan: EpochPlan,
    *,
    extra: int = EXTRA_TOKENS,
    style: IndexStyle = "megatron",
) -> npt.NDArray[Any]:
    """Return the start of each sample, shape (samples + 1, 2); i64 if a position exceeds i32.

    In GPT-NeoX's style it is also i64 if the number of entries exceeds i32.
    """
    wide = len(document_index) > INT32_MAX or (
        style == "neox" and 2 * (plan.samples + 1) >= INT32_MAX
    )
    build = helpers.build_sample_index_int64 if wide else helpers.build_sample_index_int32
    return build(lengths, document_index, seq_length, plan.samples, extra, plan.partial_sample)


def build_shuffle_index(
    samples: int, samples_before_final_epoch: int, random_state: helpers.RandomState
) -> npt.NDArray[Any]:
    """Return the order of the samples: first those before the final epoch, then the rest.

    Both groups are shuffled separately.
    """
    index: npt.NDArray[Any] = np.arange(
        samples, dtype=np.int64 if samples >= _UINT32_MAX - 1 else np.uint32
    )
    random_state.shuffle(index[:samples_before_final_epoch])
    if samples > samples_before_final_epoch:
        random_state.shuffle(index[samples_before_final_epoch:])
    return index


def _open(mixture: Mixture) -> dict[str, IndexedDataset]:
    return {prefix: IndexedDataset(prefix) for prefix in mixture.prefixes}


def _plan_values(plan: SplitPlan, mixture: Mixture) -> dict[str, Any]:
    members = [
        {"epochs": member.epochs.epochs, "separate_final_epoch": member.epochs.separate_final_epoch}
        for member in plan.members
    ]
    return members[0] if mixture.is_single else {"size": plan.division.size, "members": members}


def _build_member(
    lengths: npt.NDArray[np.int32],
    member: MemberPlan,
    options: IndexOptions,
    folder: Path,
    split_name: str,
) -> dict[str, Any]:
    plan = member.epochs
    maps = build_split(
        lengths,
        member.first,
        member.last,
        plan,
        options.seq_length,
        options.seed,
        extra=options.extra,
        packing=options.packing,
        style=options.style,
    )
    save_maps(maps, folder, split_name)
    return {
        "number": member.number,
        "sequences": member.last - member.first,
        "tokens": member.tokens,
        "samples": len(maps.shuffle_index),
        "epochs": plan.epochs,
        "separate_final_epoch": plan.separate_final_epoch,
    }
