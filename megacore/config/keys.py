"""Which values of a configuration enter the key of which stage, as their fields declare."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from megacore.config.base import OMIT_DEFAULT, RESOLVED, STAGES, Stage

CONTAINED: Mapping[Stage, Stage] = {"run": "train", "tokenize": "tokenize-shard"}
"""Stages whose keys hold all that another's does: what enters the first enters the second."""
PLACES: Mapping[Stage, Mapping[str, str]] = {
    "punkt": {"data": ""},
    "tokenize": {
        "data": "",
        "data.sentence_splitter": "sentences.splitter",
        "data.keep_newlines": "sentences.keep_newlines",
    },
    "index": {"data": ""},
    "run": {"data": "samples", "seed": "samples.seed"},
    "train": {"train": ""},
    "evaluate": {"evaluate": ""},
    "zeroshot": {"evaluate.zero_shot": "", "data": ""},
    "convert": {"export": ""},
    "examples": {"data": "limits", "model": ""},
    "finetune": {"launch": "", "launch.deepspeed_config": "deepspeed"},
    "find-batch-size": {"launch": "", "find_batch_size": "search"},
}
"""Where a key has the values of a section or a field, when not under their own dotted names. The
longest name holds. To move a value is to change every key of the stage."""


@dataclass(frozen=True)
class Declaration:
    """The keys that a field enters."""

    key: frozenset[Stage]
    """Stages whose key holds the value as it is."""
    resolved: frozenset[Stage] = frozenset()
    """Stages whose key holds what the stage makes of the value."""
    omit_default: bool = False
    """Whether the field's default stays out."""

    @property
    def stages(self) -> frozenset[Stage]:
        """Every stage whose key the value may change."""
        named = self.key | self.resolved
        return named | {CONTAINED[stage] for stage in named if stage in CONTAINED}


def declaration(
    section: type[BaseModel], name: str, inherited: Declaration | None
) -> Declaration | None:
    """Return what a field declares, or what its section declares for it.

    Args:
        section: class of the section.
        name: of the field.
        inherited: declaration of the field that holds the section; None where that names no stage.

    Raises:
        TypeError: the field is neither keyed() nor unkeyed().
    """
    extra = section.model_fields[name].json_schema_extra
    if not isinstance(extra, dict) or STAGES not in extra:
        raise TypeError(
            f"{section.__name__}.{name} is neither keyed() nor unkeyed(): declare it as "
            "keyed(key=...) with the stages whose output it changes, or as unkeyed()"
        )
    stages: Any = extra[STAGES]
    if stages is None:
        return Declaration(frozenset())
    resolved: Any = extra[RESOLVED]
    omit_default = bool(extra[OMIT_DEFAULT])
    if stages or resolved:
        return Declaration(frozenset(stages), frozenset(resolved), omit_default)
    if inherited is None:
        return None
    return Declaration(inherited.key, inherited.resolved, omit_default)


def key_parameters(
    section: BaseModel, stage: Stage, resolved: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the parameters of a stage's key as JSON.

    They are the values of the fields that name the stage, and those that the stage resolved.

    Args:
        section: the configuration; or a section of it that the stage reads by itself, such as one
            of several sources. The fields of the latter belong to the stage when they name none.
        stage: whose key it is.
        resolved: what the key has beside plain values, by dotted name.
    """
    root = Declaration(frozenset([stage]))
    placed = [(_place(stage, path), value) for path, value in _entries(section, stage, root)]
    return _tree([*placed, *(resolved or {}).items()], stage)


def _tree(entries: Iterable[tuple[str, Any]], stage: Stage) -> dict[str, Any]:
    """Return values by dotted name as nested mappings."""
    tree: dict[str, Any] = {}
    for path, value in entries:
        *parents, leaf = path.split(".")
        target = tree
        for parent in parents:
            target = target.setdefault(parent, {})
        if leaf in target:
            raise ValueError(
                f"the key of {stage} has two values named {path}: give one of them another place"
            )
        target[leaf] = value
    return tree


def _entries(
    section: BaseModel, stage: Stage, inherited: Declaration | None, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each field that enters the key as it is."""
    for name, field in type(section).model_fields.items():
        declared = declaration(type(section), name, inherited)
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _entries(value, stage, declared, f"{prefix}{name}.")
        elif isinstance(value, tuple) and any(isinstance(element, BaseModel) for element in value):
            elements = [_tree(_entries(element, stage, declared), stage) for element in value]
            if any(elements):
                yield f"{prefix}{name}", elements
        elif declared is not None and stage in declared.key:
            if declared.omit_default and value == field.get_default(
                call_default_factory=True, validated_data={}
            ):
                continue
            yield f"{prefix}{name}", list(value) if isinstance(value, tuple) else value


def _place(stage: Stage, path: str) -> str:
    """Return where the key of a stage has the value with this dotted name."""
    places = PLACES.get(stage, {})
    for name in sorted(places, key=len, reverse=True):
        if f"{path}.".startswith(f"{name}."):
            return f"{places[name]}.{path.removeprefix(name).lstrip('.')}".strip(".")
    return path
