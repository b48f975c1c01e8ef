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

import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from megacore.config.data import IndexStyle
from megacore.data import _compiled as helpers
from megacore.data.best_fit import build_best_fit
from megacore.data.blend import write_blend
from megacore.data.index_directory import (
    IndexMaps,
    make_map_directory,
    save_maps,
    write_description,
)
from megacore.data.index_options import IndexOptions, Mixture
from megacore.data.index_plans import (
    INT32_MAX,
    EpochPlan,
    MemberPlan,
    SplitPlan,
    pack_sample_index,
    padding_share,
    plan_splits,
    shuffle_type,
)
from megacore.token_files.indexed_dataset import IndexedDataset

_T = TypeVar("_T")

VERSION = 2
"""Version of the index stage, increased whenever its output changes."""
_PIECE = 1 << 18
"""Number of entries that are numbered at a time."""
_BUILDERS: dict[type[np.generic], Any] = {
    np.int32: helpers.build_sample_index_int32,
    np.int64: helpers.build_sample_index_int64,
}


def index_plan(
    mixture: Mixture,
    options: IndexOptions,
    samples: Sequence[int | None],
    *,
    planned_before: int | None = None,
) -> dict[str, Any]:
    """Return the values that determine the maps together with data, weights and options.

    For each split, these are the epochs and the shuffling of the final epoch.

    The plan replaces the requested numbers of samples (train, valid, test; None: one epoch) in the
    index stage's key, so that requesting more samples within the same epochs keeps the key. A blend
    has its size in the plan. See `plan_splits` for `planned_before`. Raises ConfigError,
    DataFormatError.
    """
    plans = plan_splits(_open(mixture), mixture, options, samples, planned_before=planned_before)
    return {name: _plan_values(plan, mixture) for name, plan in plans.items()}


def build_index_maps(
    mixture: Mixture,
    directory: str | Path,
    options: IndexOptions,
    samples: Sequence[int | None],
    *,
    planned_before: int | None = None,
) -> dict[str, Any]:
    """Write the maps of each split and `index.json` into `directory`; return counts per split.

    `samples` are the requested numbers for train, valid and test. The maps of a data set cover
    whole epochs, so a split has at least that many samples; a blend with weights has as many, or a
    few more. None means one epoch, and in a blend each sample of each member once, regardless of
    its weight. See `plan_splits` for `planned_before`. Raises ConfigError, DataFormatError,
    WorkspaceError.
    """
    datasets = _open(mixture)
    plans = plan_splits(datasets, mixture, options, samples, planned_before=planned_before)
    built: dict[str, list[dict[str, Any]]] = {name: [] for name in plans}
    # Loop over data sets first, so that only the lengths of one are in memory at a time.
    for number, dataset in enumerate(datasets.values()):
        folder = make_map_directory(directory, mixture, number)
        # The array in the file is not aligned.
        lengths = np.require(dataset.lengths, np.int32, ["C", "A"])
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
        directory,
        mixture,
        options,
        {name: entry["samples"] for name, entry in counts.items()},
        {name: entry["padding"] for name, entry in counts.items() if "padding" in entry},
    )
    return counts


def build_split(
    lengths: npt.NDArray[np.int32],
    first: int,
    last: int,
    plan: EpochPlan,
    options: IndexOptions,
) -> IndexMaps:
    """Build the maps of the split with the sequences first … last-1 of a data set.

    `lengths` are those of all its sequences. One random state is used for all maps, in order. The
    first access to new memory takes longer than the computation of the entries, so a second thread
    makes half of these accesses.
    """
    seq_length, packing, extra = options.seq_length, options.packing, options.extra
    if packing == "best_fit":
        return build_best_fit(
            lengths, first, last, plan.all_epochs, seq_length, options.seed, extra
        )
    random_state = helpers.RandomState(options.seed)
    sequences, middle = last - first, (first + last) // 2
    epochs = np.empty((plan.epochs, sequences), np.int32)
    with ThreadPoolExecutor(1, "index-memory") as second:
        filled = _begun(second, _number, epochs[:, middle - first :], middle)
        if packing == "packed":
            dtype = _sample_type(epochs.size, plan.samples, options.style)
            rows = np.empty((plan.samples + 1, 2), dtype)
            touched = _begun(second, _touch, rows)
            numbered = _begun(second, _in_order, plan.samples)
        _number(epochs[:, : middle - first], first)
        filled()
        document_index = epochs.reshape(-1)
        final = sequences if plan.separate_final_epoch else 0
        _shuffle_apart(document_index, len(document_index) - final, random_state)
        if packing == "packed":
            touched()
            build = _BUILDERS[rows.dtype.type]
            partial = plan.partial_sample
            build(lengths, document_index, seq_length, plan.samples, extra, partial, out=rows)
            order, before_final = numbered(), plan.samples_before_final_epoch
        else:
            rows = pack_sample_index(lengths, document_index, seq_length, packing, extra)
            order, before_final = _in_order(len(rows) - 1), len(rows) - 1
    _shuffle_apart(order, before_final, random_state)
    maps = IndexMaps(document_index, rows, order)
    if not plan.further_epochs:
        return maps
    return _extend(maps, lengths, first, last, plan, options)


def _extend(
    maps: IndexMaps,
    lengths: npt.NDArray[np.int32],
    first: int,
    last: int,
    plan: EpochPlan,
    options: IndexOptions,
) -> IndexMaps:
    """Return `maps` with the plan's further epochs after them.

    The random state of each further epoch has a seed of its own. It shuffles first the sequences of
    the epoch and then its samples, so that more epochs only append.
    """
    seq_length, packing, extra = options.seq_length, options.packing, options.extra
    states = [
        helpers.RandomState((options.seed + plan.epochs + number) % 2**32)
        for number in range(plan.further_epochs)
    ]
    epochs = np.empty((len(states), last - first), np.int32)
    _number(epochs, first)
    for state, sequences in zip(states, epochs, strict=True):
        state.shuffle(sequences)
    document_index = np.concatenate([maps.document_index, epochs.reshape(-1)])
    if packing == "packed":
        tokens = int(lengths[first:last].sum(dtype=np.int64))
        ends = [
            (tokens * (plan.epochs + number) - extra) // seq_length
            for number in range(1, len(states) + 1)
        ]
        build = _BUILDERS[_sample_type(document_index.size, ends[-1], options.style)]
        rows = build(lengths, document_index, seq_length, ends[-1], extra, False)
    else:
        parts, position = [maps.sample_index], len(maps.document_index)
        for sequences in epochs:
            part = pack_sample_index(lengths, sequences, seq_length, packing, extra)
            # The first row of a part is where the part before it ends.
            parts[-1] = parts[-1][:-1]
            parts.append(part + np.array([position, 0], np.int64))
            position += len(sequences)
        wide = len(document_index) > INT32_MAX
        rows = np.concatenate(parts).astype(np.int64 if wide else np.int32)
        ends = (np.cumsum([len(part) for part in parts[1:-1]] + [len(parts[-1]) - 1])).tolist()
        ends = [len(parts[0]) + end for end in ends]
    order = _in_order(len(rows) - 1)
    order[: len(maps.shuffle_index)] = maps.shuffle_index
    start = len(maps.shuffle_index)
    for state, end in zip(states, ends, strict=True):
        state.shuffle(order[start:end])
        start = end
    return IndexMaps(document_index, rows, order)


def _begun(
    executor: ThreadPoolExecutor, function: Callable[..., _T], *arguments: Any
) -> Callable[[], _T]:
    """Start a call in the executor's thread and return a function that waits for its result.

    Where no thread can be created, the call is made at once.
    """
    try:
        return executor.submit(function, *arguments).result
    except RuntimeError:
        result = function(*arguments)
        return lambda: result


def _sample_type(positions: int, samples: int, style: IndexStyle) -> type[np.integer[Any]]:
    """Return the type of the sample index: i64 if a position exceeds i32.

    In GPT-NeoX's style it is also i64 if the number of entries of the sample index exceeds i32.
    """
    wide = positions > INT32_MAX or (style == "neox" and 2 * (samples + 1) >= INT32_MAX)
    return np.int64 if wide else np.int32


def _shuffle_apart(
    index: npt.NDArray[Any], before_final: int, random_state: helpers.RandomState
) -> None:
    """Shuffle the entries before the final epoch, then those of the final epoch."""
    random_state.shuffle(index[:before_final])
    if len(index) > before_final:
        random_state.shuffle(index[before_final:])


def _in_order(samples: int) -> npt.NDArray[Any]:
    """Return the numbers of the samples."""
    index = np.empty(samples, shuffle_type(samples))
    _number(index, 0)
    return index


def _number(rows: npt.NDArray[Any], first: int) -> None:
    """Fill each row with the numbers from `first` on, in pieces that stay in the cache."""
    count = rows.shape[-1]
    for start in range(0, count, _PIECE):
        stop = min(start + _PIECE, count)
        rows[..., start:stop] = np.arange(first + start, first + stop, dtype=rows.dtype)


def _touch(array: npt.NDArray[Any]) -> None:
    """Write to each page of a new array."""
    array.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE] = 0


def _open(mixture: Mixture) -> dict[str, IndexedDataset]:
    return {prefix: IndexedDataset(prefix) for prefix in mixture.prefixes}


def _plan_values(plan: SplitPlan, mixture: Mixture) -> dict[str, Any]:
    members = []
    for member in plan.members:
        epochs = member.epochs
        values = {
            "epochs": epochs.epochs,
            "separate_final_epoch": epochs.separate_final_epoch,
        }
        further = {"further_epochs": epochs.further_epochs} if epochs.further_epochs else {}
        members.append(values | further)
    return members[0] if mixture.is_single else {"size": plan.division.size, "members": members}


def _build_member(
    lengths: npt.NDArray[np.int32],
    member: MemberPlan,
    options: IndexOptions,
    folder: Path,
    split_name: str,
) -> dict[str, Any]:
    plan = member.epochs
    maps = build_split(lengths, member.first, member.last, plan, options)
    save_maps(maps, folder, split_name)
    counts: dict[str, Any] = {
        "number": member.number,
        "sequences": member.last - member.first,
        "tokens": member.tokens,
        "samples": len(maps.shuffle_index),
        "epochs": plan.all_epochs,
        "separate_final_epoch": plan.separate_final_epoch,
    }
    if options.packing != "packed":
        part = lengths[member.first : member.last]
        counts["padding"] = padding_share(part, maps, plan.all_epochs, options)
    return counts
