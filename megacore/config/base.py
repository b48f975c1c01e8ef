"""Base class of all configuration sections and the declaration of cache keys."""

import math
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

PretrainStage = Literal[
    "collect",
    "curate",
    "search",
    "decontaminate",
    "tokenizer",
    "punkt",
    "tokenize",
    "tokenize-shard",
    "blend",
    "index",
    "contamination",
    "run",
    "train",
    "evaluate",
    "zeroshot",
    "convert",
    "lm-eval",
    "publish",
    "push",
]
"""Stages of the flow pretrain, and `run`: the training directory, in which a training resumes."""
FinetuneStage = Literal[
    "pretrained",
    "dataset",
    "examples",
    "finetune",
    "finetune-export",
    "finetune-publish",
    "push",
    "find-batch-size",
]
"""Stages of the flow finetune."""
Stage = PretrainStage | FinetuneStage
Stages = Stage | tuple[Stage, ...]

MAX_INTEGER = 2**63 - 1
"""Largest integer of a configuration: that of torch and NumPy."""
INTEGER_TOO_LARGE = "integer_too_large"
"""Type of pydantic's error for a larger one; its message begins with the field's name."""
BOOLEAN = "boolean"
"""Type of pydantic's error for true or false as another value; its message begins likewise."""
STAGES = "stages"
RESOLVED = "resolved"
OMIT_DEFAULT = "omit_default"
"""Names in a field's `json_schema_extra`, read by `megacore.config.keys`."""


def as_yaml(value: object) -> str:
    """Return a plain value as YAML spells it: null, true or false, or else its text."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


class Section(BaseModel):
    """Immutable group of configuration values that refuses unknown names."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    def has_default(self, name: str) -> bool:
        """Return True if the field `name` has its default."""
        return bool(getattr(self, name) == type(self).model_fields[name].default)

    @model_validator(mode="after")
    def _integers_fit(self) -> Self:
        """Refuse integers that neither torch nor NumPy can hold."""
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, int) and abs(value) > MAX_INTEGER:
                digits = math.ceil(value.bit_length() * math.log10(2))  # str has a limit
                raise PydanticCustomError(
                    INTEGER_TOO_LARGE,
                    f"{name} is an integer of about {digits} digits: give at most {MAX_INTEGER:,}",
                )
        return self

    @model_validator(mode="before")
    @classmethod
    def _refuse_booleans(cls, values: Any) -> Any:
        """Refuse booleans for numeric fields, because Python would accept them as 1 or 0.

        YAML reads on and off as booleans: for fields with the value "on" or "off" they are
        translated back.
        """
        if not isinstance(values, dict):
            return values
        result = dict(values)
        for name, value in values.items():
            field = cls.model_fields.get(name)
            kinds = () if field is None else (field.annotation, *get_args(field.annotation))
            if not isinstance(value, bool) or not kinds or bool in kinds:
                continue
            word = "on" if value else "off"
            if word not in map(str, kinds):
                raise PydanticCustomError(
                    BOOLEAN,
                    f"{name} is {str(value).lower()}: give a value of its type, not true or false",
                )
            result[name] = word
        return result


def keyed(
    default: Any = ...,
    *,
    key: Stages = (),
    resolved: Stages = (),
    omit_default: bool = False,
    **constraints: Any,
) -> Any:
    """Declare a field that changes a stage's output and therefore enters the stage's key.

    A field that names no stage enters the same keys as its section. If the field is itself a
    section, the declaration applies to the fields of that section.

    Args:
        default: value of a field that the configuration omits.
        key: stages whose key contains the value unchanged.
        resolved: stages whose key contains a value that the stage derives from the field: the
            content of the named file, the default that replaces null, or one value computed from
            several fields.
        omit_default: True to leave the default out of the key. Use it for a new field whose default
            changes nothing: existing artifacts remain valid.
        constraints: further arguments of pydantic's `Field`.
    """
    extra: dict[str, Any] = {
        STAGES: _names(key),
        RESOLVED: _names(resolved),
        OMIT_DEFAULT: omit_default,
    }
    return Field(default, json_schema_extra=extra, **constraints)


def unkeyed(default: Any = ..., **constraints: Any) -> Any:
    """Declare a field that enters no key: it only changes how a stage runs (workers, intervals)."""
    return Field(default, json_schema_extra={STAGES: None}, **constraints)


def _names(stages: Stages) -> list[Any]:
    return [stages] if isinstance(stages, str) else list(stages)
