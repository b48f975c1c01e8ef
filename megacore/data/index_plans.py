"""Plans of the index maps: samples and epochs of each data set, whole documents, and blends.

Blends equal those of Megatron core (https://github.com/NVIDIA/Megatron-LM, core/datasets) bit for
bit: sample i comes from the data set d with the largest weight_d x max(i, 1) - taken_d in double
precision; if several are equal, from the first.
"""

import math
import os
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megacore.data import _compiled
from megacore.data.index_directory import BLEND_MAP_NAMES, IndexMaps, map_path, save_array
from megacore.data.index_options import (
    SPLIT_NAMES,
    IndexOptions,
    IndexStyle,
    Mixture,
    Packing,
    split_ranges,
)
from megacore.errors import ConfigError, DataFormatError
from megacore.token_files.indexed_dataset import IndexedDataset

EXTRA_TOKENS = 1
"""Number of tokens of a sample beyond seq_length: the last label."""
_FINAL_EPOCH_USE = 0.8
"""Used fraction of the final epoch below which it is shuffled separately."""
SURPLUS = 0.005
"""Fraction of extra samples of a member, because a blend does not draw exactly by the weights."""
INT32_MAX = 2**31 - 1
_OTHER_SPLITS = ("90,5,5", "80,10,10", "60,20,20")
"""Weights to propose when a split is too small for one sample."""
_SUMMED = ("documents", "sequences", "tokens")


@dataclass(frozen=True)
class EpochPlan:
    """Number of epochs and samples of a split, which with its sequences determine its maps."""

    epochs: int
    """Number of epochs; 0 if the split has no samples and none are requested."""
    separate_final_epoch: bool
    """True if the final epoch is shuffled separately, because only a small part of it is used."""
    samples: int
    """Number of samples in all epochs; the minimum number if whole documents are packed."""
    samples_before_final_epoch: int
    """Number of samples shuffled together: those before a separate final epoch, else all."""
    partial_sample: bool = False
    """True if the last sample is shorter than the others."""


NO_EPOCH = EpochPlan(0, False, 0, 0)
"""Plan of a split that has no samples and from which none are requested."""


@dataclass(frozen=True)
class MemberPlan:
    """Part of one data set in one split."""

    number: int
    """Number of the data set in the mixture."""
    first: int
    """First sequence of the part."""
    last: int
    """Sequence after the last of the part."""
    tokens: int
    """Number of tokens in one epoch."""
    epochs: EpochPlan


@dataclass(frozen=True)
class Division:
    """Division of the requested samples of a split among its members."""

    asked: tuple[int | None, ...]
    """Requested number of samples of each member; None for one epoch."""
    weights: tuple[float, ...] | None
    """Shares of the members, which add up to 1; None for shares proportional to their sizes."""
    size: int | None
    """Number of samples of the blend; None to use every sample of every member once."""


@dataclass(frozen=True)
class SplitPlan:
    """Plan of one split of a mixture."""

    name: str
    members: tuple[MemberPlan, ...]
    """Members in the order in which the blend numbers them."""
    division: Division
    """Numbers of samples and weights of the blend."""


def plan_splits(
    datasets: Mapping[str, IndexedDataset],
    mixture: Mixture,
    options: IndexOptions,
    samples: Sequence[int | None],
) -> dict[str, SplitPlan]:
    """Plan each split that has members. Raises ConfigError, DataFormatError."""
    check_agreement(mixture, options)
    plans = {}
    for name, requested in zip(SPLIT_NAMES, samples, strict=True):
        if check_requested(mixture, name, requested):
            plans[name] = _plan_split(datasets, mixture, options, name, requested)
    return plans


def check_agreement(mixture: Mixture, options: IndexOptions) -> None:
    """Raise ConfigError if split weights are given for whole data sets, or are missing."""
    if mixture.whole and options.split is not None:
        raise ConfigError(
            f"data.split is {options.split}, but each data set belongs to one split whole: leave "
            "data.split out"
        )
    if not mixture.whole and options.split is None:
        raise ConfigError("data.split is missing: say how the data is divided, as in 949,50,1")


def divide(mixture: Mixture, style: IndexStyle, name: str, requested: int | None) -> Division:
    """Divide the requested samples of a split among its members."""
    members = mixture.of(name)
    member_weights = [member.weight for member in members if member.weight is not None]
    # Megatron core does not blend the only data set of a split; GPT-NeoX does if it has a weight.
    unblended = mixture.whole and len(members) == 1 and not (style == "neox" and member_weights)
    if mixture.is_single or unblended:  # whole epochs, without a blend
        return Division((requested,) * len(members), None, None)
    if requested is None or not member_weights:
        return Division((None,) * len(members), None, requested)
    weights = tuple(shares(member_weights, style))
    sizes, size = member_sizes(weights, requested, style)
    return Division(tuple(sizes), weights, size)


def check_requested(mixture: Mixture, name: str, requested: int | None) -> bool:
    """Return True if a split has members.

    Raises ConfigError if the number of samples is negative, or positive without members.
    """
    if requested is not None and requested < 0:
        raise ConfigError(
            f"{requested} samples are requested from the {name} split: give 0 or more"
        )
    if requested and not mixture.of(name):
        raise ConfigError(
            f"{requested} samples are requested from the {name} split, which has no data set: name "
            "one"
        )
    return bool(mixture.of(name))


def _plan_split(
    datasets: Mapping[str, IndexedDataset],
    mixture: Mixture,
    options: IndexOptions,
    name: str,
    requested: int | None,
) -> SplitPlan:
    division = divide(mixture, options.style, name, requested)
    plans = []
    for member, count in zip(mixture.of(name), division.asked, strict=True):
        number = mixture.prefixes.index(member.prefix)
        none_needed = requested == 0
        plans.append(
            _plan_member(datasets[member.prefix], number, options, name, count, none_needed)
        )
    return SplitPlan(name, tuple(plans), division)


def _plan_member(
    dataset: IndexedDataset,
    number: int,
    options: IndexOptions,
    name: str,
    requested: int | None,
    none_needed: bool,
) -> MemberPlan:
    if len(dataset) > INT32_MAX:
        raise DataFormatError(
            f"{dataset.prefix} has {len(dataset)} sequences; the maps number up to {INT32_MAX}"
        )
    first, last = 0, len(dataset)
    if options.split is not None:
        first, last = split_ranges(options.split, len(dataset), options.style)[name]
    tokens = dataset.count_tokens(first, last)
    if tokens >= (1 if none_needed else _least_tokens(options, name)):
        epochs = _plan_epochs(dataset, first, last, options, name, requested)
    elif none_needed:
        epochs = NO_EPOCH
    else:
        raise DataFormatError(_too_small(dataset, options, name, last - first, tokens, requested))
    return MemberPlan(number, first, last, tokens, epochs)


def _least_tokens(options: IndexOptions, name: str) -> int:
    """Return the minimum number of tokens for one sample."""
    if options.packing != "packed":
        return 1
    return options.extra + (1 if options.keeps_partial(name) else options.seq_length)


def _plan_epochs(
    dataset: IndexedDataset,
    first: int,
    last: int,
    options: IndexOptions,
    name: str,
    requested: int | None,
) -> EpochPlan:
    if options.packing == "best_fit":
        lengths = np.require(dataset.lengths[first:last], np.int32, ["C", "A"])
        return plan_best_fit(lengths, options.seq_length, options.extra, requested)
    tokens = dataset.count_tokens(first, last)
    if options.packing == "packed":
        return plan_epochs(
            tokens,
            options.seq_length,
            requested,
            extra=options.extra,
            keep_partial=options.keeps_partial(name),
            style=options.style,
        )

    sequences = int(np.count_nonzero(dataset.lengths[first:last]))

    def least(epochs: int) -> int:
        return least_samples(
            epochs * tokens, epochs * sequences, options.seq_length, options.packing, options.extra
        )

    return plan_whole_documents(least, requested, options.seq_length + options.extra)


def _too_small(
    dataset: IndexedDataset,
    options: IndexOptions,
    name: str,
    sequences: int,
    tokens: int,
    requested: int | None,
) -> str:
    samples = "as many as there are" if requested is None else str(requested)
    divided = ""
    more = "name a larger one, lower data.seq_length, or use more text"
    if options.split:
        ranges = split_ranges(options.split, len(dataset), options.style)
        parts = ", ".join(f"{split} {last - first}" for split, (first, last) in ranges.items())
        divided = f" (data.split {options.split} gives {parts})"
        more = _better_split(dataset, options)
    least = (
        f"{options.seq_length} + {options.extra}"
        if _least_tokens(options, name) > options.extra + 1
        else "a token"
    )
    return (
        f"the {name} split of {dataset.prefix} has {sequences} of {len(dataset)} sequences"
        f"{divided} with {tokens} tokens, but one sample takes {least} (samples requested: "
        f"{samples}): {more}"
    )


def _better_split(dataset: IndexedDataset, options: IndexOptions) -> str:
    """Return advice: weights with which each split has a sample, or what else may help."""
    for split in _OTHER_SPLITS:
        ranges = split_ranges(split, len(dataset), options.style)
        if all(
            dataset.count_tokens(first, last) >= _least_tokens(options, name)
            for name, (first, last) in ranges.items()
        ):
            return f"set data.split to {split}, or use more text"
    return (
        "no data.split gives each split a sample: cut the text into more documents "
        "(document_characters of a source of kind text), lower data.seq_length, or use more text"
    )


def write_blend(
    directory: str | Path,
    mixture: Mixture,
    split_name: str,
    division: Division,
    members: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Write the blend of a split's members and return its counts.

    `members` are the counts of each member, in the order in which the blend numbers them. Raises
    DataFormatError if a member has too few samples, WorkspaceError.
    """
    sizes = [member["samples"] for member in members]
    if division.size is None:
        dataset_index, sample_index = build_exhaustive_blend(sizes)
    elif division.weights is None and division.size > sum(sizes):
        raise DataFormatError(
            f"{division.size} samples are requested from the {split_name} split, but one pass over "
            f"its data sets has {sum(sizes)}: give them weights, so that they are repeated as "
            "often as needed, or ask for fewer"
        )
    else:
        dataset_index, sample_index = build_blend(division.weights or sizes, division.size)
    drawn = np.bincount(dataset_index, minlength=len(members)).tolist()
    for member, count, size in zip(mixture.of(split_name), drawn, sizes, strict=True):
        if count > size:
            raise DataFormatError(
                f"the {split_name} blend draws {count} samples from {member.prefix}, which has "
                f"{size}: ask for fewer"
            )
    dataset_name, sample_name = BLEND_MAP_NAMES
    save_array(map_path(directory, split_name, dataset_name), dataset_index)
    save_array(map_path(directory, split_name, sample_name), sample_index)
    entries = [
        {"prefix": os.path.basename(member.prefix), **entry, "drawn": count}
        for member, entry, count in zip(mixture.of(split_name), members, drawn, strict=True)
    ]
    sums = {name: sum(entry[name] for entry in entries) for name in _SUMMED if name in entries[0]}
    if members and "padding" in members[0]:
        padding = sum(entry["padding"] * entry["drawn"] for entry in entries)
        sums["padding"] = round(padding / max(1, len(dataset_index)), 6)
    return {**sums, "samples": len(dataset_index), "members": entries}


def plan_epochs(
    tokens_per_epoch: int,
    seq_length: int,
    samples: int | None,
    *,
    extra: int = EXTRA_TOKENS,
    keep_partial: bool = False,
    style: Literal["megatron", "neox"] = "megatron",
) -> EpochPlan:
    """Plan the least number of epochs that yields `samples` samples (None: one epoch).

    The final epoch is separate if less than 80 % of it would be used; with GPT-NeoX's style
    ("neox") it never is. With `keep_partial`, the tokens after the last full sample form a shorter
    one. Counts are exact integers; Megatron core uses 32-bit floats when it keeps a partial sample,
    which is wrong beyond 2^24 tokens.
    """
    epochs = 1
    if samples is not None:
        epochs = max(1, -(-(samples * seq_length + extra) // tokens_per_epoch))
    total, rest = divmod(epochs * tokens_per_epoch - extra, seq_length)
    partial = keep_partial and rest > 0
    total += partial
    if samples is None or epochs == 1 or style == "neox":
        return EpochPlan(epochs, False, total, total, partial)
    before_final = ((epochs - 1) * tokens_per_epoch - extra) // seq_length
    per_epoch = (tokens_per_epoch - extra) // seq_length
    separate = samples - before_final < int(_FINAL_EPOCH_USE * per_epoch)
    return EpochPlan(epochs, separate, total, before_final if separate else total, partial)


def plan_whole_documents(
    least_samples: Callable[[int], int], samples: int | None, capacity: int
) -> EpochPlan:
    """Plan the least number of epochs that yields `samples` samples of whole documents.

    The result is valid for any order of the documents. If `samples` is None, plan one epoch.

    `least_samples` returns the minimum number of samples in a number of epochs; `capacity` is the
    number of tokens of a sample.
    """
    # An epoch has at least one token, so samples x capacity epochs are always enough.
    enough = range(1, (samples or 0) * capacity + 1)
    epochs = 1 + bisect_left(enough, samples or 0, key=least_samples)
    total = least_samples(epochs)
    return EpochPlan(epochs, False, total, total)


def plan_best_fit(
    lengths: npt.NDArray[np.int32], seq_length: int, extra: int, samples: int | None
) -> EpochPlan:
    """Plan the least number of epochs that yields `samples` samples packed by best fit.

    Each epoch has the same number of samples, because it depends only on the lengths, of which at
    least one is positive. If `samples` is None, plan one epoch.
    """
    per_epoch, _ = _compiled.count_best_fit(lengths, seq_length, extra)
    epochs = 1 if samples is None else max(1, -(-samples // per_epoch))
    return EpochPlan(epochs, False, epochs * per_epoch, epochs * per_epoch)


def pack_sample_index(
    lengths: npt.NDArray[np.int32],
    document_index: npt.NDArray[np.int32],
    seq_length: int,
    packing: Packing,
    extra: int,
) -> npt.NDArray[Any]:
    """Return the start of each sample of whole documents, and the end: (samples + 1, 2).

    Integers are i32 or i64. A row is (position in the document index, token offset there) of a
    sample's first token. The sample ends before the next row's document, or, if the next row is in
    the same document, `extra` tokens after its offset; it is cut to seq_length + extra tokens, and
    a short sample is padded at its end.

    The names are GPT-NeoX's (https://github.com/EleutherAI/gpt-neox, `pack_impl`): as in GPT-NeoX,
    "pack_until_overflow" puts whole documents into a sample as long as they fit, and "unpacked"
    puts one into each. Differences from GPT-NeoX:

    * with "pack_until_overflow" a document longer than a sample is divided into consecutive
      samples, which overlap as with "packed", so that all of its tokens are learnt; NeoX keeps only
      its first tokens. The last of these samples is filled up with further documents. With
      "unpacked" both keep the first tokens;
    * padding is -1, which counts in no loss; NeoX pads with token 0, which it learns;
    * the documents are those of the document index, in its order, to the end of its last epoch.

    Args:
        lengths: number of tokens of each sequence; empty sequences are skipped.
        document_index: sequences in reading order, once per epoch.
        seq_length: number of tokens of a sample, s.
        packing: "pack_until_overflow" or "unpacked".
        extra: 1 if a sample reads one token beyond seq_length as its last label, else 0.
    """
    assert packing in ("pack_until_overflow", "unpacked")
    wide = len(document_index) > INT32_MAX
    if packing == "pack_until_overflow":
        pack = _compiled.pack_until_overflow_int64 if wide else _compiled.pack_until_overflow_int32
        return pack(lengths, document_index, seq_length, extra)
    positions = np.flatnonzero(lengths[document_index])
    rows = np.zeros((len(positions) + 1, 2), np.int64 if wide else np.int32)
    rows[:-1, 0] = positions
    rows[-1, 0] = len(document_index)
    return rows


def least_samples(
    tokens: int, sequences: int, seq_length: int, packing: Packing, extra: int
) -> int:
    """Return the minimum number of samples of `pack_sample_index`, for any order of documents.

    `tokens` and `sequences` are the numbers of tokens and of non-empty sequences in all epochs.
    With "unpacked" the number of samples is exactly `sequences`.
    """
    return sequences if packing == "unpacked" else -(-tokens // (seq_length + extra))


def padding_share(
    lengths: npt.NDArray[np.int32], maps: IndexMaps, epochs: int, options: IndexOptions
) -> float:
    """Return the share of padding in the seq_length + extra tokens of all samples, 0 … 1.

    `lengths` are the lengths of the split's sequences; the samples are of whole documents.
    """
    room = options.seq_length + options.extra
    samples = len(maps.shuffle_index)
    if not samples:
        return 0.0
    read = epochs * int(lengths.sum(dtype=np.int64))
    match options.packing:
        case "best_fit":  # each further piece of a document repeats its first `extra` tokens
            documents = epochs * int(np.count_nonzero(lengths))
            read += options.extra * (len(maps.document_index) - documents)
        case "pack_until_overflow":
            read += options.extra * int(np.count_nonzero(maps.sample_index[:, 1]))
        case _:
            read = epochs * int(np.minimum(lengths, room).sum(dtype=np.int64))
    return round(1 - read / (samples * room), 6)


def shares(weights: Sequence[float], style: IndexStyle = "megatron") -> list[float]:
    """Normalize weights so that they add up to 1.

    The sum is NumPy's, or with "neox" Python's as in GPT-NeoX (the last bits differ).
    """
    if style == "neox":
        total = sum(weights)
        return [weight / total for weight in weights]
    values = np.asarray(weights, np.float64)
    normalised: list[float] = (values / values.sum()).tolist()
    return normalised


def member_sizes(
    weights: Sequence[float], samples: int, style: IndexStyle
) -> tuple[list[int], int]:
    """Return the number of samples to request of each member, and the size of the blend.

    The weights add up to 1; `samples` is the requested size of the blend.

    Megatron core rounds each member's share up and blends the sum. GPT-NeoX rounds once, and blends
    more than it uses; here the first `samples` of these are used.
    """
    if style == "neox":
        return [math.ceil(samples * weight * (1 + SURPLUS)) for weight in weights], samples
    drawn = [math.ceil(samples * weight) for weight in weights]
    return [math.ceil(count * (1 + SURPLUS)) for count in drawn], sum(drawn)


def build_blend(
    weights: Sequence[float], size: int
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """Return (dataset index, dataset sample index) of `size` samples.

    The weights are normalized even if they already add up to 1, because Megatron core does so.
    """
    if size == 0:
        return np.empty(0, np.int16), np.empty(0, np.int64)
    return _compiled.build_blend(np.asarray(shares(weights)), size)


def build_exhaustive_blend(
    sizes: Sequence[int],
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """Return (dataset index, dataset sample index) of every sample of every data set once.

    Samples are drawn in proportion to the sizes of the data sets.
    """
    return _compiled.build_exhaustive_blend(np.asarray(sizes, np.int64))
