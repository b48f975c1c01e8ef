"""Weights of a blend as a function of the consumed samples, and checks of blends."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from megacore.config.data import BlendStep, DataConfig
from megacore.errors import ConfigError

BLEND_SCHEDULE = "data.blend_schedule"


def blend_steps(data: DataConfig) -> tuple[tuple[int, tuple[float, ...]], ...]:
    """Return the first sample and the weights of each step of the schedule."""
    return tuple(
        (step.first_sample(data.seq_length), step.weights) for step in data.blend_schedule or ()
    )


def source_names(data: DataConfig) -> tuple[str, ...]:
    """Return a name for each of `data.sources`, for curves and tables; no two are equal.

    It is the name in the configuration, or the number and the end of the source's path or name.
    """
    blends = reversed(data.blends.values())
    names = {each.source: each.name for blend in blends for each in blend if each.name}
    return tuple(
        names.get(source) or f"{number}-{_short(source)}"
        for number, source in enumerate(data.sources)
    )


def _short(source: Any) -> str:
    """Return the last part of a source's path, with only letters, digits and dashes."""
    files = getattr(source, "files", None)
    text = next(
        str(value)
        for value in (
            getattr(source, "prefix", None),
            getattr(source, "dataset", None),
            files and getattr(files[0], "url", files[0]),
            getattr(source, "path", None),
            source.kind,
        )
        if value
    )
    last = text.rstrip("/").rpartition("/")[2]
    kept = "".join(each if each.isascii() and each.isalnum() else "-" for each in last)
    return "-".join(part for part in kept.split("-") if part)[:40] or str(source.kind)


def check_blends(data: DataConfig) -> None:
    """Raise ValueError for sources, weights, names, limits or a schedule that do not fit."""
    for blend, each in data.blends.items():
        sources = [member.source for member in each]
        twice = next(
            (number for number, source in enumerate(sources) if source in sources[:number]), None
        )
        if twice is not None:
            raise ValueError(
                f"data.{blend}[{twice}] names the source of "
                f"data.{blend}[{sources.index(sources[twice])}] again: give it the sum of their "
                "weights once"
            )
    members = data.train_blend
    if not members:
        for name in ("blend_schedule", "blend_temperature"):
            if getattr(data, name) is not None:
                raise ValueError(
                    f"data.{name} is given without data.blend or data.split_blends: give one of "
                    "them, or remove the former"
                )
    for blend, each in data.blends.items():
        for number, member in enumerate(each):
            where = f"data.{blend}[{number}]"
            if (member.weight is None) != (data.blend_temperature is not None):
                raise ValueError(
                    f"{where} has no weight: give it one, or set data.blend_temperature for all"
                    if member.weight is None
                    else f"{where}.weight is {member.weight:g} and data.blend_temperature "
                    f"{data.blend_temperature:g} computes the weights: remove one of them"
                )
            if member.max_epochs is not None and not blend.endswith(("blend", "train")):
                raise ValueError(
                    f"{where}.max_epochs is {member.max_epochs:g}, but only the train split is "
                    "repeated: remove it"
                )
            later = each is members and any(
                any(step.weights[number : number + 1]) for step in data.blend_schedule or ()
            )
            if member.weight == 0 and not later:
                raise ValueError(
                    f"{where}.weight is 0, so that nothing is drawn from it: remove it, or give it "
                    "a weight later in data.blend_schedule"
                )
        if each and not any(member.weight is None or member.weight for member in each):
            raise ValueError(f"all weights of data.{blend} are 0: give one a positive weight")
    _check_names(data)
    if data.blend_schedule is not None:
        _check_steps(data.blend_schedule, len(members), data)


def _check_names(data: DataConfig) -> None:
    names = source_names(data)
    twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if twice is not None:
        raise ValueError(
            f"two sources of the blend have the name {twice}: give each a name of its own"
        )


def _check_steps(steps: tuple[BlendStep, ...], members: int, data: DataConfig) -> None:
    for number, step in enumerate(steps):
        where = f"{BLEND_SCHEDULE}[{number}]"
        if (step.samples is None) == (step.tokens is None):
            raise ValueError(f"{where} needs either samples or tokens: give exactly one of them")
        if len(step.weights) != members:
            raise ValueError(
                f"{where}.weights has {len(step.weights)} numbers for {members} sources: give one "
                "for each, in the order of the blend"
            )
        if not any(step.weights):
            raise ValueError(f"{where}.weights are all 0: give one source a positive weight")
    for number, ((before, _), (first, _)) in enumerate(pairwise(blend_steps(data)), 1):
        if first <= before:
            raise ValueError(
                f"{BLEND_SCHEDULE}[{number}] begins at sample {first}, which does not exceed "
                f"{before}, where the step before it begins: sort the steps"
            )


def check_past_weights(
    before: Mapping[str, Any], now: DataConfig, consumed_samples: int, checkpoint: str
) -> None:
    """Refuse a schedule that differs within the samples that a checkpoint was trained on.

    `before` is the section `data` of the checkpoint's configuration as JSON. Raises ConfigError if
    a step before `consumed_samples` was added, changed or removed.
    """
    length = before.get("seq_length", now.seq_length)
    past = [BlendStep.model_validate(step) for step in before.get("blend_schedule") or ()]
    old = [(step.first_sample(length), step.weights) for step in past]
    trained, wanted = (
        [(first, _normalised(weights)) for first, weights in steps if first < consumed_samples]
        for steps in (old, blend_steps(now))
    )
    if trained == wanted:
        return
    differing = sorted(set(trained) ^ set(wanted))[0][0]
    raise ConfigError(
        f"{checkpoint} was trained on {consumed_samples} samples, but {BLEND_SCHEDULE} differs "
        f"from its own at sample {differing}: change only steps from sample {consumed_samples} on, "
        f"or allow it with resume.override: [{BLEND_SCHEDULE}]"
    )


def _normalised(weights: tuple[float, ...]) -> tuple[float, ...]:
    total = sum(weights)
    return tuple(weight / total for weight in weights)
