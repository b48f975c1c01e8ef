"""What every section of the configuration shares: frozen, strict, and explicit about cache keys."""

from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

PretrainStage = Literal[
    "collect",
    "tokenizer",
    "punkt",
    "tokenize",
    "tokenize-shard",
    "blend",
    "index",
    "run",
    "train",
    "evaluate",
    "zeroshot",
    "convert",
    "publish",
]
"""The stages of the flow pretrain, and `run`: the directory of a training, which resumes there."""
FinetuneStage = Literal[
    "pretrained",
    "dataset",
    "examples",
    "finetune",
    "finetune-export",
    "finetune-publish",
    "find-batch-size",
]
"""The stages of the flow finetune."""
Stage = PretrainStage | FinetuneStage
Stages = Stage | tuple[Stage, ...]

STAGES = "stages"
RESOLVED = "resolved"
OMIT_DEFAULT = "omit_default"
"""Names in a field's `json_schema_extra`; `megacore.config.keys` reads them."""


class Section(BaseModel):
    """A frozen group of values; unknown names are refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _bools_are_no_numbers(cls, values: Any) -> Any:
        """Refuse what Python would take for 1 or 0.

        Where on and off are meant, YAML has read them as booleans.
        """
        if not isinstance(values, dict):
            return values
        found = dict(values)
        for name, value in values.items():
            field = cls.model_fields.get(name)
            kinds = () if field is None else (field.annotation, *get_args(field.annotation))
            if not isinstance(value, bool) or not kinds or bool in kinds:
                continue
            if not {"on", "off"} <= set(map(str, kinds)):
                raise ValueError(
                    f"{name} is {str(value).lower()}: give a value of its type, not true or false"
                )
            found[name] = "on" if value else "off"
        return found


def keyed(
    default: Any = ...,
    *,
    key: Stages = (),
    resolved: Stages = (),
    omit_default: bool = False,
    **constraints: Any,
) -> Any:
    """Declare a field that changes what a stage produces, so that it enters that stage's key.

    A field that names no stage enters the keys that its section enters. One that holds a section
    declares this for the section's fields.

    Args:
        default: value of a field that is not given.
        key: stages whose key holds the value as it is.
        resolved: stages whose key holds what the stage makes of the value: the content of the file
            that it names, the default that null stands for, one value of several fields.
        omit_default: whether the default stays out of the key. A field that is added to a stage
            with this, and whose default changes nothing, leaves the artifacts that are there valid.
        constraints: of pydantic's `Field`.
    """
    extra: dict[str, Any] = {
        STAGES: _names(key),
        RESOLVED: _names(resolved),
        OMIT_DEFAULT: omit_default,
    }
    return Field(default, json_schema_extra=extra, **constraints)


def unkeyed(default: Any = ..., **constraints: Any) -> Any:
    """Declare a field that enters no key: it changes only how a stage runs (workers, intervals)."""
    return Field(default, json_schema_extra={STAGES: None}, **constraints)


def _names(stages: Stages) -> list[Any]:
    return [stages] if isinstance(stages, str) else list(stages)
