"""Blends of the data sets of a split: numbers of samples, order, schedules of weights and limits.

Blends equal those of Megatron core (https://github.com/NVIDIA/Megatron-LM, core/datasets) bit for
bit: sample i comes from the data set d with the largest weight_d x max(i, 1) - taken_d in double
precision; if several are equal, from the first.

With a schedule of weights, each step is such a blend that begins at its own sample 0. What a data
set has given beyond its share before the step counts in taken_d, so that no share is lost or given
twice at a step. A data set of weight 0 gives nothing in that step.
"""

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.config.data import IndexStyle
from megacore.data import _compiled
from megacore.data.index_directory import save_blend
from megacore.data.index_options import Member, Mixture, WeightStep
from megacore.errors import ConfigError, DataFormatError

SURPLUS = 0.005
"""Fraction of extra samples of a member, because a blend does not draw exactly by the weights."""
_SUMMED = ("documents", "sequences", "tokens")
_FRACTION = 2.0**20
"""Parts of a sample in which what a data set has given beyond its share is counted."""
_PIECE = 1 << 20
"""Number of samples that are numbered at a time."""


@dataclass(frozen=True)
class Phase:
    """Part of a blend with constant weights."""

    start: int
    """First sample."""
    stop: int
    """Sample after the last."""
    shares: tuple[float, ...]
    """Share of each member; they add up to 1."""


@dataclass(frozen=True)
class Division:
    """Division of the requested samples of a split among its members."""

    asked: tuple[int | None, ...]
    """Requested number of samples of each member; None for one epoch."""
    weights: tuple[float, ...] | None
    """Shares of the members, which add up to 1; None for shares proportional to their sizes."""
    size: int | None
    """Number of samples of the blend; None to use every sample of every member once."""
    steps: tuple[WeightStep, ...] = ()
    """Later weights, all within the size."""
    least: tuple[int, ...] | None = None
    """Number of samples of each member that suffices for these steps, or for more samples than an
    earlier plan has; None if the number in `asked` suffices."""


def divide(
    mixture: Mixture,
    style: IndexStyle,
    name: str,
    requested: int | None,
    planned_before: int | None = None,
) -> Division:
    """Divide the requested samples of a split among its members.

    `planned_before` is the number of samples of an earlier plan, whose order stays the same: what
    is requested beyond it is in `least`.
    """
    if requested is not None and planned_before is not None and planned_before != requested:
        before = divide(mixture, style, name, planned_before)
        if planned_before > requested:
            return before
        division = divide(mixture, style, name, requested)
        enough = [count for count in division.asked if count is not None]
        if not enough:  # every sample once: more of them begin like fewer
            return division
        return replace(division, asked=before.asked, least=division.least or tuple(enough))
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
    steps = mixture.steps_before(size) if name == "train" else ()
    if not steps:
        # The shares are rounded up, so the blend is larger than requested, and may draw more of a
        # member than it is asked for.
        most = [math.floor(size * share) + 1 for share in weights]
        if all(count <= asked for count, asked in zip(most, sizes, strict=True)):
            return Division(tuple(sizes), weights, size)
        drawn_of = np.bincount(build_blend(weights, size)[0], minlength=len(weights))
        return Division(tuple(sizes), weights, size, least=tuple(drawn_of.tolist()))
    drawn = targets(phases(weights, steps, size))
    # A member gives at most one sample more than its share in each phase.
    least = tuple(math.ceil(share) + len(steps) + 2 for share in drawn)
    return Division(tuple(sizes), weights, size, steps, least)


def phases(weights: Sequence[float], steps: Sequence[WeightStep], size: int) -> tuple[Phase, ...]:
    """Return the parts of the first `size` samples of a blend with constant weights.

    The weights of `steps` replace `weights` from their sample on.
    """
    starts = [0, *(step.samples for step in steps)]
    values = [weights, *(step.weights for step in steps)]
    stops = [*starts[1:], size]
    return tuple(
        Phase(start, min(stop, size), tuple(shares(each)))
        for start, stop, each in zip(starts, stops, values, strict=True)
        if start < size
    )


def targets(parts: Sequence[Phase]) -> list[float]:
    """Return the share of each member of the samples in `parts`, in samples."""
    totals = [0.0] * len(parts[0].shares) if parts else []
    for phase in parts:
        length = phase.stop - phase.start
        totals = [total + length * share for total, share in zip(totals, phase.shares, strict=True)]
    return totals


def check_epochs(
    members: Sequence[Member],
    division: Division,
    samples: int | None,
    epoch_samples: Iterable[float],
) -> None:
    """Refuse a training that repeats a member more often than its `max_epochs`.

    Args:
        members: members of the train split.
        division: division of the samples among them.
        samples: number of samples that the training reads; None for one epoch.
        epoch_samples: number of samples of one epoch of each member; read only if one has a limit.

    Raises:
        ConfigError: a member exceeds its limit.
    """
    if not samples or all(member.max_epochs is None for member in members):
        return
    # Members with limits have weights, except a single one, which is not blended.
    weights = division.weights or (1.0,) * len(members)
    parts = phases(weights, division.steps, samples)
    drawn = targets(parts)
    for number, (member, count, size) in enumerate(zip(members, drawn, epoch_samples, strict=True)):
        limit = member.max_epochs
        # The choice of samples deviates from the shares by up to one sample.
        if limit is None or count <= limit * size + 1:
            continue
        at = _reached(parts, number, limit * size)
        raise ConfigError(
            f"the training draws {count:,.0f} samples from {member.prefix}, which are "
            f"{count / size:.3g} epochs of {size:,.0f} samples, but its max_epochs is {limit:g}: "
            f"it is reached at sample {at:,}; give it weight 0 from there on in "
            "data.blend_schedule, lower its weight or train.train_iters, add data, or raise "
            "max_epochs"
        )


def _reached(parts: Sequence[Phase], number: int, limit: float) -> int:
    """Return the sample of the blend at which a member has given `limit` samples."""
    reached = 0.0
    for phase in parts:
        share = phase.shares[number]
        if reached + share * (phase.stop - phase.start) > limit:
            return phase.start + int((limit - reached) / share)
        reached += share * (phase.stop - phase.start)
    return parts[-1].stop


def temperature_weights(tokens: Sequence[int], temperature: float) -> tuple[float, ...]:
    """Return weights proportional to size^(1/T) (Conneau et al. 2019, arXiv:1911.02116).

    1 gives weights proportional to the sizes; a higher temperature gives small data sets a larger
    share.
    """
    largest = max(tokens)
    return tuple((size / largest) ** (1.0 / temperature) for size in tokens)


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
        dataset_index, sample_index = build_blend(
            division.weights or sizes, division.size, division.steps
        )
    drawn = np.bincount(dataset_index, minlength=len(members)).tolist()
    for member, count, size in zip(mixture.of(split_name), drawn, sizes, strict=True):
        if count > size:
            raise DataFormatError(
                f"the {split_name} blend draws {count} samples from {member.prefix}, which has "
                f"{size}: ask for fewer"
            )
    save_blend(directory, split_name, (dataset_index, sample_index))
    entries = [
        {"prefix": os.path.basename(member.prefix), **entry, "drawn": count}
        for member, entry, count in zip(mixture.of(split_name), members, drawn, strict=True)
    ]
    sums = {name: sum(entry[name] for entry in entries) for name in _SUMMED if name in entries[0]}
    if members and "padding" in members[0]:
        padding = sum(entry["padding"] * entry["drawn"] for entry in entries)
        sums["padding"] = round(padding / max(1, len(dataset_index)), 6)
    return {**sums, "samples": len(dataset_index), "members": entries}


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
    weights: Sequence[float], size: int, steps: Sequence[WeightStep] = ()
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """Return (dataset index, dataset sample index) of `size` samples.

    The weights are normalized even if they already add up to 1, because Megatron core does so.
    Those of `steps` apply from their sample on; all samples before are the same without the step.
    """
    parts = phases(weights, steps, size)
    if len(parts) == 1 and all(parts[0].shares):
        return _compiled.build_blend(np.asarray(parts[0].shares), size)
    dataset_index = np.empty(size, np.int16)
    sample_index = np.empty(size, np.int64)
    given, due = np.zeros(len(weights), np.int64), [0.0] * len(weights)
    for phase in parts:
        surplus = [
            round(_FRACTION * (int(taken) - target)) / _FRACTION if share else math.inf
            for taken, target, share in zip(given, due, phase.shares, strict=True)
        ]
        members, samples = _compiled.build_blend(
            np.asarray(phase.shares), phase.stop - phase.start, surplus=surplus
        )
        dataset_index[phase.start : phase.stop] = members
        for start in range(0, len(samples), _PIECE):
            piece = slice(start, start + _PIECE)
            samples[piece] += given[members[piece]]
        sample_index[phase.start : phase.stop] = samples
        given += np.bincount(members, minlength=len(weights))
        due = [before + part for before, part in zip(due, targets([phase]), strict=True)]
    return dataset_index, sample_index


def build_exhaustive_blend(
    sizes: Sequence[int],
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """Return (dataset index, dataset sample index) of every sample of every data set once.

    Samples are drawn in proportion to the sizes of the data sets.
    """
    return _compiled.build_exhaustive_blend(np.asarray(sizes, np.int64))
