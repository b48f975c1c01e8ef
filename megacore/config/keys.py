"""Selection of the configuration values in each stage's key, from the fields' declarations."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel

from megacore.config.base import OMIT_DEFAULT, RESOLVED, STAGES, Stage

CONTAINED: Mapping[Stage, Stage] = {"run": "train", "tokenize": "tokenize-shard"}
"""Stages whose key includes all values of another stage's key: what enters the first key enters the
second."""
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
    "lm-eval": {"evaluate.lm_eval": ""},
    "push": {"export": ""},
    "examples": {"data": "limits", "model": ""},
    "finetune": {"launch": "", "launch.deepspeed_config": "deepspeed"},
    "find-batch-size": {"launch": "", "find_batch_size": "search"},
}
"""Names in a stage's key for the values of a section or a field, where they differ from their
dotted names. The longest matching name applies. Moving a value changes every key of the stage."""


@dataclass(frozen=True)
class Declaration:
    """Declaration of the keys that a field enters."""

    key: frozenset[Stage]
    """Stages whose key contains the value unchanged."""
    resolved: frozenset[Stage] = frozenset()
    """Stages whose key contains a value derived from the field by the stage."""
    omit_default: bool = False
    """True if the field's default is left out of the keys."""

    @property
    def stages(self) -> frozenset[Stage]:
        """All stages whose key may depend on the value."""
        named = self.key | self.resolved
        return named | {CONTAINED[stage] for stage in named if stage in CONTAINED}


@cache
def declaration(
    section: type[BaseModel], name: str, inherited: Declaration | None
) -> Declaration | None:
    """Return the declaration of a field, or `inherited` of the field that contains the section.

    None means that neither names a stage. Raises TypeError if the field is neither keyed() nor
    unkeyed().
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

    They consist of the values of the fields that name the stage, and of `resolved` values by dotted
    name, which the stage derives from the configuration. If `section` is one that the stage reads
    separately, such as one of several sources, its fields that name no stage belong to the stage.
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
    """Yield the dotted name and the value of each field that enters the key unchanged."""
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
            if declared.omit_default and value == field.default:
                continue
            yield f"{prefix}{name}", list(value) if isinstance(value, tuple) else value


def _place(stage: Stage, path: str) -> str:
    """Return the name in a stage's key for the value with the dotted name `path`."""
    places = PLACES.get(stage, {})
    for name in sorted(places, key=len, reverse=True):
        if f"{path}.".startswith(f"{name}."):
            return f"{places[name]}.{path.removeprefix(name).lstrip('.')}".strip(".")
    return path
