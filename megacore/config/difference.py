"""Comparison of a checkpoint's configuration with the configuration that resumes from it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel

from megacore.config.base import PretrainStage, Stage, as_yaml
from megacore.config.batch_schedule import BatchSchedule
from megacore.config.finetune import FinetuneConfig
from megacore.config.keys import Declaration, declaration
from megacore.config.run import RunConfig, with_current_names
from megacore.errors import CheckpointError, ConfigError
from megacore.redact import redact_values

_TOKENS: frozenset[Stage] = frozenset(
    [
        "collect",
        "curate",
        "decontaminate",
        "tokenizer",
        "punkt",
        "tokenize",
        "tokenize-shard",
        "blend",
    ]
)
"""Stages that produce the tokens. Within a run they are equal, because the run's key includes their
keys."""
_TRAINING = _TOKENS | {"run"}
"""Stages whose output a training computes with, and the training itself."""
_LATER: frozenset[Stage] = frozenset(
    ["search", "contamination", "evaluate", "zeroshot", "convert", "lm-eval", "publish", "push"]
)
"""Stages whose values do not affect the training. What a search finds may, by `decontaminate`."""
_PRETRAINING: frozenset[Stage] = frozenset(get_args(PretrainStage))
_FINETUNING: frozenset[Stage] = frozenset(["pretrained", "dataset", "examples", "finetune"])
"""Stages of a fine-tuning and of its inputs."""
OPTIMIZER = "optim.name"
"""Value that no override allows to change, because each optimizer has other state."""
_OWN_CHECKS = ("train.pretrained_checkpoint", "resume")
"""Values that give the origin of the weights; separate checks compare them."""
_ABSENT = "absent"


@dataclass(frozen=True)
class Change:
    """Value that differs between two configurations."""

    field: str
    """Dotted name of the value."""
    before: Any
    """Value in the checkpoint; `absent` if the checkpoint lacks the field."""
    now: Any
    keyed: bool
    """True if the value changes the computation of a training, so that the change must be
    allowed."""

    @property
    def to_allow(self) -> str:
        """Name that allows the change in `resume.override`: the value's or its section's.

        If the new configuration lacks the field, this is the section's name, because only existing
        names are accepted.
        """
        section = self.field.rpartition(".")[0]
        return section if self.now == _ABSENT and section else self.field

    def __str__(self) -> str:
        """Return the change as readable text."""
        return f"{self.field}: {as_yaml(self.before)} -> {as_yaml(self.now)}"


def compare_configurations(
    before: Mapping[str, Any], now: RunConfig, *, another_run: bool = False
) -> list[Change]:
    """Return the changes since `before`, a configuration as JSON, that affect a training, by name.

    Values that only later stages read are left out. Within a run, the values that determine the
    tokens are left out too; with `another_run`, `before` belongs to another one.
    """
    # A checkpoint contains no credentials, so both configurations are compared without them.
    old, new = (
        dict(_leaves(redact_values(values)))
        for values in (with_current_names(before), now.model_dump(mode="json"))
    )
    ignored = _LATER if another_run else _LATER | _TOKENS
    changes = []
    for field in sorted(old.keys() | new.keys()):
        if any(field == name or field.startswith(f"{name}.") for name in _OWN_CHECKS):
            continue
        if field not in old and new[field] == _default(now, field):
            continue  # a newer field at its default changes nothing
        old_value, new_value = (_without_nulls(values.get(field, _ABSENT)) for values in (old, new))
        stages, section_stages = _stages(now, field)
        read_by = stages or section_stages
        if old_value != new_value and not (read_by and read_by <= ignored):
            changes.append(Change(field, old_value, new_value, bool(stages & _TRAINING)))
    return changes


def _without_nulls(value: Any) -> Any:
    """Return a value without the null fields of its sections: newer fields at their default."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list | tuple) else value


def differing_values(
    before: Mapping[str, Any], now: RunConfig
) -> list[tuple[Change, frozenset[Stage]]]:
    """Return every value that differs, with the stages whose keys it enters, sorted by name."""
    old = dict(_leaves(with_current_names(before)))
    new = dict(_leaves(now.model_dump(mode="json")))
    result = []
    for field in sorted(old.keys() | new.keys()):
        if field not in old and new[field] == _default(now, field):
            continue
        old_value, new_value = old.get(field, _ABSENT), new.get(field, _ABSENT)
        if old_value != new_value:
            stages, _ = _stages(now, field)
            change = Change(field, old_value, new_value, bool(stages & _TRAINING))
            result.append((change, stages))
    return result


def compare_finetunings(before: Mapping[str, Any], now: FinetuneConfig) -> list[Change]:
    """Return the changes since `before`, a configuration as JSON, that make another run, by name.

    Credentials are left out.
    """
    old, new = (
        dict(_leaves(redact_values(values))) for values in (before, now.model_dump(mode="json"))
    )
    changes = [
        Change(field, old.get(field, _ABSENT), new.get(field, _ABSENT), keyed=True)
        for field in sorted(old.keys() | new.keys())
        if _stages(now, field, _FINETUNING)[0]
    ]
    return [
        change
        for change in changes
        if change.before != change.now
        and not (change.before == _ABSENT and change.now == _default(now, change.field))
    ]


def check_resume(changes: Sequence[Change], allowed: Sequence[str], checkpoint: str) -> None:
    """Refuse to resume from `checkpoint` if a keyed value differs and is not allowed.

    Another optimizer is always refused. `allowed` are the dotted names in `resume.override`; the
    name of a section allows all of its values. Raises ConfigError with all of the refused values.
    """
    for change in changes:
        if change.field == OPTIMIZER:
            before = "adam" if change.before == _ABSENT else change.before
            raise ConfigError(
                f"{checkpoint} was written with {OPTIMIZER} {before}, whose state {change.now} "
                "cannot continue: set it back, or begin with the weights through "
                "train.pretrained_checkpoint, as a new training"
            )
    refused = [
        change
        for change in changes
        if change.keyed
        and not any(change.field == name or change.field.startswith(f"{name}.") for name in allowed)
    ]
    if refused:
        names = ", ".join(dict.fromkeys(change.to_allow for change in refused))
        raise ConfigError(
            f"{checkpoint} was written with another configuration "
            f"({'; '.join(map(str, refused))}): set them back, or allow the change with "
            f"resume.override: [{names}]"
        )


def changed_warmup(
    before: Mapping[str, Any],
    now: RunConfig,
    checkpoint: str,
    *,
    consumed_samples: int,
    applied_iterations: int,
) -> str | None:
    """Return how many iterations a warm-up in samples changes to with another batch size, or None.

    `optim.lr_warmup_samples` are converted to iterations as if the batch size held from the start,
    so that another one changes the learning rates also of a warm-up that has begun, and a smaller
    one returns to a warm-up that was over. None too if the warm-up is over with both batch sizes
    and its length does not affect the decay. The learning rates depend on `applied_iterations`, the
    optimizer steps of the checkpoint.

    Raises:
        CheckpointError: the configuration of the checkpoint is damaged.
        ConfigError: the checkpoint is within the warm-up that one of the batch sizes gives.
    """
    samples = now.optim.lr_warmup_samples
    if samples is None or before.get("optim", {}).get("lr_warmup_samples") != samples:
        return None
    try:
        old_schedule = BatchSchedule.of_json(before["train"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the configuration in {checkpoint} does not show its batches ({error}): use another "
            "checkpoint"
        ) from error
    new_schedule = BatchSchedule.of(now.train)
    old, new = old_schedule.iterations_for(samples), new_schedule.iterations_for(samples)
    if old == new:
        return None
    difference = (
        f"optim.lr_warmup_samples {samples} took {old} iterations with the batches of {checkpoint} "
        f"(train.global_batch_size {old_schedule.global_batch_size}), and takes {new} with "
        f"train.global_batch_size {new_schedule.global_batch_size}"
    )
    keep = (
        f"set optim.lr_warmup_samples to null and optim.lr_warmup_iters to {old}, and name both in "
        "resume.override"
    )
    if consumed_samples < samples or applied_iterations < max(old, new):
        # a longer warm-up would begin again after the shorter one
        later = "" if new > old else ", or resume after the warm-up"
        raise ConfigError(
            f"{difference}, but {checkpoint} is within that warm-up, at sample {consumed_samples} "
            f"after {applied_iterations} optimizer steps, where the learning rate would jump: "
            f"{keep}{later}"
        )
    if now.optim.lr_decay_style in ("constant", "WSD"):
        return None
    return f"{difference}, which changes the learning rates of the decay: to keep them, {keep}"


def described(changes: Sequence[Change]) -> str:
    """Return all changes on one line, or "none"."""
    return "; ".join(map(str, changes)) or "none"


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and value of all leaves; only mappings are descended into.

    `train.kernels` is a leaf: one word or a mapping, which are compared as a whole.
    """
    for name, value in values.items():
        if isinstance(value, Mapping) and f"{prefix}{name}" != "train.kernels":
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _stages(
    config: BaseModel, field: str, flow: frozenset[Stage] = _PRETRAINING
) -> tuple[frozenset[Stage], frozenset[Stage]]:
    """Return the stages whose keys a value enters, and those of the nearest section around it.

    Only stages of `flow` count.

    A value below a null and a field that no longer exists are treated like their section. If the
    section names no stage, they count as part of every key.
    """
    section: Any = config
    declared: Declaration | None = None
    section_stages: frozenset[Stage] = frozenset()
    for name in field.split("."):
        if not isinstance(section, BaseModel) or name not in type(section).model_fields:
            break
        section_stages = _stages_of(declared) & flow or section_stages
        declared = declaration(type(section), name, declared)
        section = getattr(section, name)
    return (flow if declared is None else _stages_of(declared) & flow), section_stages


def _stages_of(declared: Declaration | None) -> frozenset[Stage]:
    return frozenset() if declared is None else declared.stages


def _default(config: BaseModel, field: str) -> Any:
    """Return the default of a dotted name, or an object that equals nothing if there is none."""
    section: Any = config
    *sections, last = field.split(".")
    for name in sections:
        # Values that are not sections have no defaults for what is below them.
        section = getattr(section, name, None)
    if not isinstance(section, BaseModel) or last not in type(section).model_fields:
        return object()
    default = type(section).model_fields[last].default
    return list(default) if isinstance(default, tuple) else default
