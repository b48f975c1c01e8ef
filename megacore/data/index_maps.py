"""The three index maps of a GPT data set.

Which tokens, in which order, make up each sample; and blends of data sets.

They are Megatron core's (https://github.com/NVIDIA/Megatron-LM, core/datasets), bit for bit:
document index (i32), the split's sequences repeated once per epoch and shuffled; sample index (i32
or i64, shape (samples + 1, 2)), where each sample begins in the document index; shuffle index
(u32), the order of the samples.

With the style "neox" they are GPT-NeoX's (https://github.com/EleutherAI/gpt-neox,
megatron/data/gpt2_dataset.py), so that a run of it can be continued: `doc_idx`, `sample_idx` and
`shuffle_idx` of the same data, split, seq_length, seed and number of samples, value by value and
type by type. What is the same in both: the seed of each data set's and each split's shuffles and
their order, the least number of epochs, samples that overlap by one token. What differs in
GPT-NeoX: all epochs are always shuffled as one; the boundaries of splits (see `split_ranges`); the
sample index becomes i64 from 2^30 samples on; a blend rounds otherwise (see `member_sizes`) and
numbers its data sets in u8, which are i16 here. GPT-NeoX never uses the last entry of a shuffle
index and starts over where it ends; here it counts as a sample.
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
"""Of the index stage; raised when it produces something else."""
_UINT32_MAX = 2**32 - 1


def index_plan(
    mixture: Mixture, options: IndexOptions, samples: Sequence[int | None]
) -> dict[str, Any]:
    """What decides the maps beside data, weights and options.

    Of each split: epochs, and the final one's shuffle.

    It stands in the index stage's key for the wanted numbers of samples (train, valid, test; None:
    one epoch), so that asking for more samples of the same epochs changes nothing; a blend is as
    long as it was asked to be. Raises ConfigError, DataFormatError.
    """
    plans = plan_splits(_open(mixture), mixture, options, samples)
    return {name: _plan_values(plan, mixture) for name, plan in plans.items()}


def build_index_maps(
    mixture: Mixture, directory: str | Path, options: IndexOptions, samples: Sequence[int | None]
) -> dict[str, Any]:
    """Write the maps of each split and `index.json` into `directory`; returns counts per split.

    `samples` are the wanted numbers for train, valid and test. The maps of a data set cover whole
    epochs, so a split has at least that many; a blend with weights has as many, or a few more. None
    means one epoch, and in a blend each sample of each member once, whatever its weight. Raises
    ConfigError, DataFormatError, WorkspaceError.
    """
    datasets = _open(mixture)
    plans = plan_splits(datasets, mixture, options, samples)
    folders = {
        prefix: Path(directory) if mixture.is_single else member_directory(directory, number)
        for number, prefix in enumerate(mixture.prefixes)
    }
    built: dict[str, list[dict[str, Any]]] = {name: [] for name in plans}
    # Data set by data set, so that the lengths of one are in memory at a time.
    for number, (prefix, folder) in enumerate(folders.items()):
        with workspace_errors(folder):
            folder.mkdir(exist_ok=True)
        # the file's own array is not aligned
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
    """The maps of the split that holds the sequences first … last-1.

    One random state draws them in order.
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
    """The sequences first … last-1, once per epoch, shuffled.

    The final epoch is shuffled by itself if separate.
    """
    index: npt.NDArray[np.int32] = np.empty((epochs, last - first), np.int32)
    index[:] = np.arange(first, last, dtype=np.int32)
    index = index.reshape(-1)
    whole = len(index) - (last - first if separate_final_epoch else 0)
    random_state.shuffle(index[:whole])
    if separate_final_epoch:
        random_state.shuffle(index[whole:])
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
    """Where each sample begins, shape (samples + 1, 2); i64 once a position no longer fits i32.

    GPT-NeoX's is i64, too, once its number of entries does not fit.
    """
    wide = len(document_index) > INT32_MAX or (
        style == "neox" and 2 * (plan.samples + 1) >= INT32_MAX
    )
    build = helpers.build_sample_index_int64 if wide else helpers.build_sample_index_int32
    return build(lengths, document_index, seq_length, plan.samples, extra, plan.partial_sample)


def build_shuffle_index(
    samples: int, samples_before_final_epoch: int, random_state: helpers.RandomState
) -> npt.NDArray[Any]:
    """The order of the samples: those before the final epoch shuffled, then the rest."""
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
