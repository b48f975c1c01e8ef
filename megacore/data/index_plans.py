"""Plans of the index maps: samples and epochs of each data set, and samples of whole documents."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.config.data import IndexStyle, Packing
from megacore.data import _compiled
from megacore.data.blend import Division, check_epochs, divide
from megacore.data.index_directory import IndexMaps
from megacore.data.index_options import SPLIT_NAMES, IndexOptions, Mixture, split_ranges
from megacore.errors import ConfigError, DataFormatError
from megacore.token_files.indexed_dataset import IndexedDataset

_FINAL_EPOCH_USE = 0.8
"""Used fraction of the final epoch below which it is shuffled separately."""
INT32_MAX = 2**31 - 1
UINT32_MAX = 2**32 - 1
_OTHER_SPLITS = ("90,5,5", "80,10,10", "60,20,20")
"""Weights to propose when a split is too small for one sample."""


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
    further_epochs: int = 0
    """Number of epochs after `epochs`. They are for later weights of a blend, or for a run that
    continues the order of an earlier plan. Each is shuffled separately, so that it leaves the
    samples before unchanged."""

    @property
    def all_epochs(self) -> int:
        """Number of all epochs."""
        return self.epochs + self.further_epochs


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
    *,
    planned_before: int | None = None,
) -> dict[str, SplitPlan]:
    """Plan each split that has members.

    `planned_before` is the number of samples of the train split for which this run or an earlier
    one planned its maps before. Their order stays, and further epochs follow if more are requested.

    Raises ConfigError, DataFormatError.
    """
    check_agreement(mixture, options)
    plans = {}
    for name, requested in zip(SPLIT_NAMES, samples, strict=True):
        if check_requested(mixture, name, requested):
            before = planned_before if name == "train" else None
            plans[name] = _plan_split(datasets, mixture, options, name, requested, before)
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
    planned_before: int | None,
) -> SplitPlan:
    if options.packing == "best_fit" and None not in (requested, planned_before):
        # One random state draws epoch after epoch, so a plan of more begins like one of fewer.
        planned_before = max(requested or 0, planned_before or 0)
    division = divide(mixture, options.style, name, requested, planned_before)
    members, plans = mixture.of(name), []
    for place, (member, count) in enumerate(zip(members, division.asked, strict=True)):
        number = mixture.prefixes.index(member.prefix)
        least = 0 if division.least is None else division.least[place]
        plans.append(
            _plan_member(
                datasets[member.prefix],
                number,
                options,
                name,
                count,
                least=least,
                none_needed=requested == 0,
            )
        )
    if name == "train":
        check_epochs(
            members, division, requested, (_epoch_samples(plan, options) for plan in plans)
        )
    return SplitPlan(name, tuple(plans), division)


def _epoch_samples(plan: MemberPlan, options: IndexOptions) -> float:
    """Return the number of samples of one epoch; of tokens, not rounded to whole samples."""
    if options.packing == "packed":
        return plan.tokens / options.seq_length
    return plan.epochs.samples / plan.epochs.epochs


def _plan_member(
    dataset: IndexedDataset,
    number: int,
    options: IndexOptions,
    name: str,
    requested: int | None,
    *,
    least: int,
    none_needed: bool,
) -> MemberPlan:
    if len(dataset) > INT32_MAX:
        raise DataFormatError(
            f"{dataset.prefix} has {len(dataset)} sequences; the maps number up to {INT32_MAX}"
        )
    first, last = options.range_of(name, len(dataset))
    tokens = dataset.count_tokens(first, last)
    if tokens >= (1 if none_needed else _least_tokens(options, name)):
        epochs = _plan_epochs(dataset, first, last, options, name, requested)
        if least > epochs.samples:
            further = _further_epochs(dataset, first, last, options, epochs, least)
            epochs = replace(epochs, further_epochs=further)
    elif none_needed:
        epochs = EpochPlan(
            epochs=0, separate_final_epoch=False, samples=0, samples_before_final_epoch=0
        )
    else:
        raise DataFormatError(_too_small(dataset, options, name, last - first, tokens, requested))
    return MemberPlan(number, first, last, tokens, epochs)


def _further_epochs(
    dataset: IndexedDataset,
    first: int,
    last: int,
    options: IndexOptions,
    plan: EpochPlan,
    samples: int,
) -> int:
    """Return the least number of epochs after those of `plan` that yields `samples` in total."""
    if options.packing == "packed":
        tokens = dataset.count_tokens(first, last)
        return -(-(samples * options.seq_length + options.extra) // tokens) - plan.epochs
    one = _plan_epochs(dataset, first, last, options, SPLIT_NAMES[0], None).samples
    return -(-(samples - plan.samples) // one)


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
        "(data.source.document_characters cuts text files), lower data.seq_length, or use more text"
    )


def plan_epochs(
    tokens_per_epoch: int,
    seq_length: int,
    samples: int | None,
    *,
    extra: int = 1,
    keep_partial: bool = False,
    style: IndexStyle = "megatron",
) -> EpochPlan:
    """Plan the least number of epochs that yields `samples` samples (None: one epoch).

    A sample reads `extra` tokens beyond seq_length. The final epoch is separate if less than 80 %
    of it would be used; with GPT-NeoX's style ("neox") it never is. With `keep_partial`, the tokens
    after the last full sample form a shorter one. Counts are exact integers; Megatron core uses
    32-bit floats when it keeps a partial sample, which is wrong beyond 2^24 tokens.
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


def shuffle_type(samples: int) -> type[np.integer[Any]]:
    """Return the type of the shuffle index: u32, or i64 from 2^32 - 2 samples on."""
    return np.int64 if samples >= UINT32_MAX - 1 else np.uint32


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
