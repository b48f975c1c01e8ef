"""What every section of the configuration shares: frozen, strict, and explicit about cache keys."""

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

_IN_KEY = "in_key"


class Section(BaseModel):
    """A frozen group of values; unknown names are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _bools_are_no_numbers(cls, values: Any) -> Any:
        """Refuse what Python would take for 1 or 0; where on and off are meant, YAML has read them as booleans."""
        if not isinstance(values, dict):
            return values
        found = dict(values)
        for name, value in values.items():
            field = cls.model_fields.get(name)
            kinds = () if field is None else (field.annotation, *get_args(field.annotation))
            if not isinstance(value, bool) or not kinds or bool in kinds:
                continue
            if not {"on", "off"} <= set(map(str, kinds)):
                raise ValueError(f"{name} is {str(value).lower()}: give a value of its type, not true or false")
            found[name] = "on" if value else "off"
        return found


def keyed(default: Any = ..., **constraints: Any) -> Any:
    """A field that changes what a stage produces: it is part of that stage's key."""
    return Field(default, json_schema_extra={_IN_KEY: True}, **constraints)


def unkeyed(default: Any = ..., **constraints: Any) -> Any:
    """A field that changes only how a stage runs (workers, intervals, paths of output)."""
    return Field(default, json_schema_extra={_IN_KEY: False}, **constraints)


def is_keyed(section: type[BaseModel], name: str) -> bool:
    """Whether field `name` is part of a key. Raises KeyError when the field does not say."""
    extra = section.model_fields[name].json_schema_extra
    if not isinstance(extra, dict) or _IN_KEY not in extra:
        raise KeyError(f"{section.__name__}.{name} says neither keyed() nor unkeyed()")
    return bool(extra[_IN_KEY])


def key_parameters(section: BaseModel) -> dict[str, Any]:
    """The keyed fields of a section as plain JSON values, nested sections included."""
    parameters: dict[str, Any] = {}
    for name in type(section).model_fields:
        if not is_keyed(type(section), name):
            continue
        parameters[name] = _plain(getattr(section, name))
    return parameters


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return key_parameters(value)
    return [_plain(element) for element in value] if isinstance(value, tuple) else value
