"""Plans of the index maps: samples and epochs of each data set, whole documents, and blends.

Blends follow Megatron core (https://github.com/NVIDIA/Megatron-LM, core/datasets), bit for bit:
sample i comes from the data set d with the largest weight_d x max(i, 1) - taken_d, in double
precision, the first of equals.
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
from megacore.data.index_directory import BLEND_MAP_NAMES, map_path, save_array
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
"""Tokens that a sample has beyond seq_length: the last label."""
_FINAL_EPOCH_USE = 0.8
"""Share of the final epoch below which it is shuffled by itself."""
SURPLUS = 0.005
"""Share of samples by which a member has more than its weight asks for: its order is no multiple of
the weights."""
INT32_MAX = 2**31 - 1
_SUMMED = ("documents", "sequences", "tokens")


@dataclass(frozen=True)
class EpochPlan:
    """How often a split is gone through, which with its sequences decides its maps."""

    epochs: int
    """Passes over the split; 0 when it has no sample and none is wanted."""
    separate_final_epoch: bool
    """Whether the last pass is shuffled by itself, because only a small part of it is needed."""
    samples: int
    """Samples in all passes; for whole documents (packing) their least number."""
    samples_before_final_epoch: int
    """Samples shuffled among themselves: those before a separate last pass, else all."""
    partial_sample: bool = False
    """Whether the last sample is shorter than the others."""


NO_EPOCH = EpochPlan(0, False, 0, 0)
"""Of a split without a sample of which none is wanted."""


@dataclass(frozen=True)
class MemberPlan:
    """The part of one data set in one split."""

    number: int
    """Among all data sets of the mixture."""
    first: int
    """First sequence of the part."""
    last: int
    """Sequence after the part's last."""
    tokens: int
    """In one epoch."""
    epochs: EpochPlan


@dataclass(frozen=True)
class Division:
    """How the wanted samples of a split are divided over its members."""

    asked: tuple[int | None, ...]
    """Of each member; None: one epoch."""
    weights: tuple[float, ...] | None
    """Shares of the members, which add up to 1; None: in proportion to their sizes."""
    size: int | None
    """Samples of the blend; None: every sample of every member once."""


@dataclass(frozen=True)
class SplitPlan:
    """One split of a mixture."""

    name: str
    members: tuple[MemberPlan, ...]
    """In the order that the blend numbers them."""
    division: Division
    """How they are blended."""


def plan_splits(
    datasets: Mapping[str, IndexedDataset],
    mixture: Mixture,
    options: IndexOptions,
    samples: Sequence[int | None],
) -> dict[str, SplitPlan]:
    """The plan of each split that draws from something. Raises ConfigError, DataFormatError."""
    check_agreement(mixture, options)
    plans = {}
    for name, wanted in zip(SPLIT_NAMES, samples, strict=True):
        if check_wanted(mixture, name, wanted):
            plans[name] = _plan_split(datasets, mixture, options, name, wanted)
    return plans


def check_agreement(mixture: Mixture, options: IndexOptions) -> None:
    """Raises ConfigError for a split that cannot be, and for the lack of one."""
    if mixture.whole and options.split is not None:
        raise ConfigError(
            f"data.split is {options.split}, but each data set belongs to one split whole: leave "
            "data.split out"
        )
    if not mixture.whole and options.split is None:
        raise ConfigError("data.split is missing: say how the data is divided, as in 949,50,1")


def divide(mixture: Mixture, style: IndexStyle, name: str, wanted: int | None) -> Division:
    """What is asked of each member of a split, and how these are blended."""
    members = mixture.of(name)
    given = [member.weight for member in members if member.weight is not None]
    # Megatron core does not blend the only data set of a split; GPT-NeoX does as soon as it has a
    # weight.
    alone = mixture.whole and len(members) == 1 and not (style == "neox" and given)
    if mixture.is_single or alone:  # as many samples as whole epochs have
        return Division((wanted,) * len(members), None, None)
    if wanted is None or not given:
        return Division((None,) * len(members), None, wanted)
    weights = tuple(shares(given, style))
    sizes, size = member_sizes(weights, wanted, style)
    return Division(tuple(sizes), weights, size)


def check_wanted(mixture: Mixture, name: str, wanted: int | None) -> bool:
    """Whether a split draws from something.

    Raises ConfigError for numbers of samples that it cannot have.
    """
    if wanted is not None and wanted < 0:
        raise ConfigError(f"{wanted} samples are wanted of the {name} split: give 0 or more")
    if wanted and not mixture.of(name):
        raise ConfigError(
            f"{wanted} samples are wanted of the {name} split, which has no data set: name one"
        )
    return bool(mixture.of(name))


def _plan_split(
    datasets: Mapping[str, IndexedDataset],
    mixture: Mixture,
    options: IndexOptions,
    name: str,
    wanted: int | None,
) -> SplitPlan:
    division = divide(mixture, options.style, name, wanted)
    plans = []
    for member, count in zip(mixture.of(name), division.asked, strict=True):
        number = mixture.prefixes.index(member.prefix)
        none_needed = wanted == 0
        plans.append(
            _plan_member(datasets[member.prefix], number, options, name, count, none_needed)
        )
    return SplitPlan(name, tuple(plans), division)


def _plan_member(
    dataset: IndexedDataset,
    number: int,
    options: IndexOptions,
    name: str,
    wanted: int | None,
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
        epochs = _plan_epochs(dataset, first, last, options, name, wanted)
    elif none_needed:
        epochs = NO_EPOCH
    else:
        raise DataFormatError(_too_small(dataset, options, name, last - first, tokens, wanted))
    return MemberPlan(number, first, last, tokens, epochs)


def _least_tokens(options: IndexOptions, name: str) -> int:
    """Tokens of the smallest data set that has a sample."""
    if options.packing != "packed":
        return 1
    return options.extra + (1 if options.keeps_partial(name) else options.seq_length)


def _plan_epochs(
    dataset: IndexedDataset,
    first: int,
    last: int,
    options: IndexOptions,
    name: str,
    wanted: int | None,
) -> EpochPlan:
    tokens = dataset.count_tokens(first, last)
    if options.packing == "packed":
        return plan_epochs(
            tokens,
            options.seq_length,
            wanted,
            extra=options.extra,
            keep_partial=options.keeps_partial(name),
            style=options.style,
        )

    sequences = int(np.count_nonzero(dataset.lengths[first:last]))

    def least(epochs: int) -> int:
        return least_samples(
            epochs * tokens, epochs * sequences, options.seq_length, options.packing, options.extra
        )

    return plan_whole_documents(least, wanted, options.seq_length + options.extra)


def _too_small(
    dataset: IndexedDataset,
    options: IndexOptions,
    name: str,
    sequences: int,
    tokens: int,
    wanted: int | None,
) -> str:
    samples = "as many as there are" if wanted is None else str(wanted)
    more = (
        f"give it more of data.split (now {options.split})"
        if options.split
        else "name a larger one"
    )
    least = (
        f"{options.seq_length} + {options.extra}"
        if _least_tokens(options, name) > options.extra + 1
        else "a token"
    )
    return (
        f"the {name} split of {dataset.prefix} has {sequences} of {len(dataset)} sequences with "
        f"{tokens} tokens, but one sample takes {least} (samples wanted: {samples}): {more}, lower "
        "data.seq_length, or use more text"
    )


def write_blend(
    directory: str | Path,
    mixture: Mixture,
    split_name: str,
    division: Division,
    members: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Write how a split's members are blended; returns its counts.

    `members` are the counts of each, in the order that the blend numbers them. Raises
    DataFormatError when one has too few samples, WorkspaceError.
    """
    sizes = [member["samples"] for member in members]
    if division.size is None:
        dataset_index, sample_index = build_exhaustive_blend(sizes)
    elif division.weights is None and division.size > sum(sizes):
        raise DataFormatError(
            f"{division.size} samples are wanted of the {split_name} split, but one pass over its "
            f"data sets has {sum(sizes)}: give them weights, so that they are gone through as "
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
    """The least number of epochs that yields `samples` samples (None: one epoch).

    The final epoch is separate when less than 80 % of it would be used; GPT-NeoX's ("neox") never
    is. With `keep_partial`, what remains after the last whole sample is one more. All counts are in
    64-bit integers; Megatron core counts with 32-bit floats when it keeps a partial sample, which
    goes wrong past 2^24 tokens.
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
    """The least number of epochs that yields `samples` samples of whole documents.

    The documents may be in any order. None means one epoch.

    `least_samples` gives the samples that a number of epochs makes at least, `capacity` the tokens
    of one.
    """
    # An epoch has at least one token, so that many epochs are enough.
    enough = range(1, (samples or 0) * capacity + 1)
    epochs = 1 + bisect_left(enough, samples or 0, key=least_samples)
    total = least_samples(epochs)
    return EpochPlan(epochs, False, total, total)


def pack_sample_index(
    lengths: npt.NDArray[np.int32],
    document_index: npt.NDArray[np.int32],
    seq_length: int,
    packing: Packing,
    extra: int,
) -> npt.NDArray[Any]:
    """Where each sample of whole documents begins, and the last ends: (samples + 1, 2).

    Integers are i32 or i64. A row is (position in the document index, token offset there) of a
    sample's first token. The sample ends before the next row's document, or, where the next row is
    within the same document, `extra` tokens after its offset; what exceeds seq_length + extra is
    cut, and a short sample is padded at its end.

    The names are GPT-NeoX's (https://github.com/EleutherAI/gpt-neox, `pack_impl`): as there,
    "pack_until_overflow" puts whole documents into a sample as long as they fit, and "unpacked"
    puts one into each. Otherwise than there:

    * with "pack_until_overflow" a document longer than a sample is divided into consecutive ones,
      which share their ends as those of "packed" do, so that each of its tokens is learnt; NeoX
      keeps its first tokens alone. The rest of such a document is filled up like any other. With
      "unpacked" both keep the first tokens;
    * padding is -1, which counts in no loss; NeoX pads with token 0, which it learns;
    * the documents are those of the document index, in its order, to the end of its last epoch.

    Args:
        lengths: tokens of each sequence; empty ones are passed over.
        document_index: the sequences in the order in which they are read, once per epoch.
        seq_length: tokens of a sample, s.
        packing: "pack_until_overflow" or "unpacked".
        extra: 1 when a sample reads one token beyond seq_length as its last label, else 0.
    """
    assert packing != "packed"
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
    """How many samples `pack_sample_index` makes at least, whatever the order of the documents.

    Of `tokens` tokens in `sequences` sequences that are not empty; for all epochs together. With
    "unpacked" it is their number.
    """
    return sequences if packing == "unpacked" else -(-tokens // (seq_length + extra))


def shares(weights: Sequence[float], style: IndexStyle = "megatron") -> list[float]:
    """Weights that add up to 1.

    As NumPy sums them, or, as GPT-NeoX does, Python (the last bits differ).
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
    """Samples to ask of each member for a blend of `samples`, and the size of the blend.

    The weights add up to 1.

    Megatron core rounds each member's share up and blends the sum. GPT-NeoX rounds once, and blends
    more than it uses, of which the first `samples` are taken here.
    """
    if style == "neox":
        return [math.ceil(samples * weight * (1 + SURPLUS)) for weight in weights], samples
    wanted = [math.ceil(samples * weight) for weight in weights]
    return [math.ceil(count * (1 + SURPLUS)) for count in wanted], sum(wanted)


def build_blend(
    weights: Sequence[float], size: int
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """(dataset index, dataset sample index) of `size` samples.

    The weights are normalised (once more, if they already were), as Megatron core does at this
    place.
    """
    if size == 0:
        return np.empty(0, np.int16), np.empty(0, np.int64)
    return _compiled.build_blend(np.asarray(shares(weights)), size)


def build_exhaustive_blend(
    sizes: Sequence[int],
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """(dataset index, dataset sample index) of every sample of every data set once.

    They come in proportion to the data sets' sizes.
    """
    return _compiled.build_exhaustive_blend(np.asarray(sizes, np.int64))
