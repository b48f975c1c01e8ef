"""What differs between a checkpoint's configuration and the one that goes on from it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel

from megacore.config.base import PretrainStage, Stage
from megacore.config.keys import Declaration, declaration
from megacore.config.run import RunConfig
from megacore.errors import ConfigError
from megacore.redact import redact_values

_TOKENS: frozenset[Stage] = frozenset(
    ["collect", "tokenizer", "punkt", "tokenize", "tokenize-shard", "blend"]
)
"""What tokens come from: within a run they are the same, since its key holds their identity."""
_TRAINING = _TOKENS | {"run"}
"""Whose output a training computes with, and its own."""
_LATER: frozenset[Stage] = frozenset(["evaluate", "zeroshot", "convert", "publish"])
"""Stages after the training; their values mean nothing to it."""
_OWN_CHECKS = ("train.pretrained_checkpoint", "resume")
"""What says where weights came from."""
_ABSENT = "absent"


@dataclass(frozen=True)
class Change:
    """One value that is not what it was."""

    field: str
    """Dotted name."""
    before: Any
    """In the checkpoint; `absent` where it did not have the field."""
    now: Any
    keyed: bool
    """Whether it changes what a training computes, so that it has to be allowed."""

    @property
    def to_allow(self) -> str:
        """The name for `resume.override`: the value's, or its section's.

        Only names that the configuration has are taken.
        """
        section = self.field.rpartition(".")[0]
        return section if self.now == _ABSENT and section else self.field

    def __str__(self) -> str:
        """The change for people."""
        return f"{self.field}: {_shown(self.before)} -> {_shown(self.now)}"


def changes_of(
    before: Mapping[str, Any], now: RunConfig, *, another_run: bool = False
) -> list[Change]:
    """What a training would notice of the changes since `before`, by name.

    What only later stages read is left out, and within a run where text and tokenizer come from.

    Args:
        before: a configuration as JSON.
        now: what is to go on.
        another_run: whether `before` is that of another run.
    """
    # A checkpoint holds no credentials: without them the two can be compared.
    old, new = (
        dict(_leaves(redact_values(values))) for values in (before, now.model_dump(mode="json"))
    )
    ignored = _LATER if another_run else _LATER | _TOKENS
    changes = []
    for field in sorted(old.keys() | new.keys()):
        if any(field == name or field.startswith(f"{name}.") for name in _OWN_CHECKS):
            continue
        if field not in old and new[field] == _default(now, field):
            continue  # a field that came later, as if it had not
        one, other = old.get(field, _ABSENT), new.get(field, _ABSENT)
        stages, section_stages = _stages(now, field)
        read_by = stages or section_stages
        if one != other and not (read_by and read_by <= ignored):
            changes.append(Change(field, one, other, bool(stages & _TRAINING)))
    return changes


def check_resume(changes: Sequence[Change], allowed: Sequence[str], checkpoint: str) -> None:
    """Refuse to go on from `checkpoint` when a keyed value differs.

    Values that `resume.override` names may differ.

    A name of a section allows everything in it. Raises ConfigError that shows every such change.
    """
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


def described(changes: Sequence[Change]) -> str:
    """All changes on one line, or that there is none."""
    return "; ".join(map(str, changes)) or "none"


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of whatever is no mapping; lists are values."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _stages(config: RunConfig, field: str) -> tuple[frozenset[Stage], frozenset[Stage]]:
    """Return the stages whose keys a value enters, and those of the nearest section around it.

    What is below a null, and a field that is gone, count as their section does; where that names
    no stage, as part of every key.
    """
    section: Any = config
    declared: Declaration | None = None
    section_stages: frozenset[Stage] = frozenset()
    for name in field.split("."):
        if not isinstance(section, BaseModel) or name not in type(section).model_fields:
            break
        section_stages = _pretraining(declared) or section_stages
        declared = declaration(type(section), name, declared)
        section = getattr(section, name)
    stages = frozenset(get_args(PretrainStage)) if declared is None else _pretraining(declared)
    return stages, section_stages


def _pretraining(declared: Declaration | None) -> frozenset[Stage]:
    return (
        frozenset() if declared is None else declared.stages.intersection(get_args(PretrainStage))
    )


def _default(config: RunConfig, field: str) -> Any:
    """The default of a dotted name; a value that equals nothing where there is none."""
    section: Any = config
    *sections, last = field.split(".")
    for name in sections:
        # below a value that is no section there are no defaults
        section = getattr(section, name, None)
    if not isinstance(section, BaseModel) or last not in type(section).model_fields:
        return object()
    default = (
        type(section).model_fields[last].get_default(call_default_factory=True, validated_data={})
    )
    return list(default) if isinstance(default, tuple) else default


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)
