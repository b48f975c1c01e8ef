"""What will be built of each split: how many samples are asked of each data set, and how often it is gone through."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megacore.data.blends import member_sizes, shares
from megacore.data.epochs import NO_EPOCH, EpochPlan, plan_epochs, plan_whole_documents
from megacore.data.index_options import IndexOptions, IndexStyle, Mixture
from megacore.data.indexed_dataset import IndexedDataset
from megacore.data.splits import SPLIT_NAMES, split_ranges
from megacore.errors import ConfigError, DataFormatError

INT32_MAX = 2**31 - 1


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
    datasets: Mapping[str, IndexedDataset], mixture: Mixture, options: IndexOptions, samples: Sequence[int | None]
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
            f"data.split is {options.split}, but each data set belongs to one split whole: leave data.split out"
        )
    if not mixture.whole and options.split is None:
        raise ConfigError("data.split is missing: say how the data is divided, as in 949,50,1")


def divide(mixture: Mixture, style: IndexStyle, name: str, wanted: int | None) -> Division:
    """What is asked of each member of a split, and how these are blended."""
    members = mixture.of(name)
    given = [member.weight for member in members if member.weight is not None]
    # Megatron core does not blend the only data set of a split; GPT-NeoX does as soon as it has a weight.
    alone = mixture.whole and len(members) == 1 and not (style == "neox" and given)
    if mixture.is_single or alone:  # as many samples as whole epochs have
        return Division((wanted,) * len(members), None, None)
    if wanted is None or not given:
        return Division((None,) * len(members), None, wanted)
    weights = tuple(shares(given, style))
    sizes, size = member_sizes(weights, wanted, style)
    return Division(tuple(sizes), weights, size)


def check_wanted(mixture: Mixture, name: str, wanted: int | None) -> bool:
    """Whether a split draws from something. Raises ConfigError for numbers of samples that it cannot have."""
    if wanted is not None and wanted < 0:
        raise ConfigError(f"{wanted} samples are wanted of the {name} split: give 0 or more")
    if wanted and not mixture.of(name):
        raise ConfigError(f"{wanted} samples are wanted of the {name} split, which has no data set: name one")
    return bool(mixture.of(name))


def _plan_split(
    datasets: Mapping[str, IndexedDataset], mixture: Mixture, options: IndexOptions, name: str, wanted: int | None
) -> SplitPlan:
    division = divide(mixture, options.style, name, wanted)
    plans = []
    for member, count in zip(mixture.of(name), division.asked, strict=True):
        number = mixture.prefixes.index(member.prefix)
        none_needed = wanted == 0
        plans.append(_plan_member(datasets[member.prefix], number, options, name, count, none_needed))
    return SplitPlan(name, tuple(plans), division)


def _plan_member(
    dataset: IndexedDataset, number: int, options: IndexOptions, name: str, wanted: int | None, none_needed: bool
) -> MemberPlan:
    if len(dataset) > INT32_MAX:
        raise DataFormatError(f"{dataset.prefix} has {len(dataset)} sequences; the maps number up to {INT32_MAX}")
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
    dataset: IndexedDataset, first: int, last: int, options: IndexOptions, name: str, wanted: int | None
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
    from megacore.data.packing import least_samples

    sequences = int(np.count_nonzero(dataset.lengths[first:last]))

    def least(epochs: int) -> int:
        return least_samples(epochs * tokens, epochs * sequences, options.seq_length, options.packing, options.extra)

    return plan_whole_documents(least, wanted, options.seq_length + options.extra)


def _too_small(
    dataset: IndexedDataset, options: IndexOptions, name: str, sequences: int, tokens: int, wanted: int | None
) -> str:
    samples = "as many as there are" if wanted is None else str(wanted)
    more = f"give it more of data.split (now {options.split})" if options.split else "name a larger one"
    least = f"{options.seq_length} + {options.extra}" if _least_tokens(options, name) > options.extra + 1 else "a token"
    return (
        f"the {name} split of {dataset.prefix} has {sequences} of {len(dataset)} sequences with {tokens} tokens, but "
        f"one sample takes {least} (samples wanted: {samples}): {more}, lower "
        "data.seq_length, or use more text"
    )
