"""Validation of values against the schema of a section or configuration.

The errors of pydantic become clauses with the key, the value and what to do.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from megacore.config.base import BOOLEAN, INTEGER_TOO_LARGE
from megacore.errors import ConfigError, dotted
from megacore.foreign.files import nearest, shortened

Location = tuple[str | int, ...]
Model = TypeVar("Model", bound=BaseModel)
DISCRIMINATORS = ("kind", "step")
"""Field that selects the alternative of a section. Pydantic includes its value in error
locations."""
_ADVICE = {
    "model_type": "give a mapping of its fields",
    "model_attributes_type": "give a mapping of its fields",
    "dict_type": "give a mapping, as in {first: 1, second: 2}",
    "tuple_type": "give a list, as in [first, second]",
    "int_type": "give an integer",
    "int_parsing": "give an integer",
    "int_from_float": "give an integer",
    "float_type": "give a number",
    "float_parsing": "give a number",
    "finite_number": "give a finite number",
    "bool_type": "give true or false",
    "bool_parsing": "give true or false",
    "string_type": "give text",
}
"""Advice for wrong types; other kinds of errors contain their own."""
_PATTERNS = {
    r"^[a-z0-9][a-z0-9.-]*$": (
        "give lower-case letters, digits, dots and dashes, the first a letter or digit"
    ),
    r"^[A-Za-z0-9][A-Za-z0-9_.-]*$": (
        "give letters, digits, dots, dashes and underscores, the first a letter or digit"
    ),
    r"^[a-z_]+$": "give lower-case letters and underscores",
    r"^[0-9a-f]{64}$": "give 64 hexadecimal digits in lower case",
    r"^[^/:%'\x22]*$": "give a name without /, :, % and quotes, which MLflow does not take",
    r"^https?://": "give an address that begins with https:// or http://",
}
"""Advice for text by the pattern that it does not match."""
_WHOLE: dict[Location, str] = {
    ("data", "workers"): "an integer above 0 or auto",
    ("deepspeed", "config"): "a path, or the content of DeepSpeed's JSON",
    ("launch", "accelerate_config"): "a path, or the content of Accelerate's YAML",
    ("launch", "deepspeed_config"): "a path, or the content of DeepSpeed's JSON",
    ("launch", "nnodes"): "a number of machines, such as 2, or a range, such as 2:4",
    ("launch", "nproc_per_node"): "an integer above 0 or auto",
    ("launch", "slurm", "gpus_per_node"): "an integer that is not negative, or auto",
    ("parallel", "pipeline_partition"): "balanced, uniform or a list of integers, as in [3, 3]",
}
"""Advice for values of union types, whichever alternative pydantic tried."""


def validated(
    schema: type[Model],
    values: Mapping[str, Any],
    origin: str,
    *,
    context: dict[str, Any] | None = None,
    place_of: Callable[[str], str] = lambda key: "",
) -> Model:
    """Return `values` as a section or configuration.

    `origin` names the values in messages. `place_of` returns what a clause adds on the origin of
    its key, such as ` (in base.yaml)`. Raises ConfigError with one clause per wrong value: its key,
    the value and what to do.
    """
    try:
        return schema.model_validate(values, context=context)
    except ValidationError as error:
        raise ConfigError(f"{origin}: {_format_errors(error, schema, place_of)}") from error


def _format_errors(
    error: ValidationError, schema: type[BaseModel], place_of: Callable[[str], str]
) -> str:
    """Return all validation errors, one clause per key with its place, joined by semicolons."""
    # Each alternative of a union reports its own errors: only the first error of each key is shown.
    items = [item for item in error.errors() if not _follows(item, error.errors())]
    problems = {key_of(item, schema): _describe(item, schema) for item in reversed(items)}
    return "; ".join(f"{problem}{place_of(key)}" for key, problem in reversed(problems.items()))


def _follows(item: Any, items: Sequence[Any]) -> bool:
    """Return True if a list is too short only because pydantic dropped its invalid elements."""
    place = item["loc"]
    return item["type"] == "too_short" and any(
        len(other["loc"]) > len(place) and other["loc"][: len(place)] == place for other in items
    )


def _describe(item: Any, schema: type[BaseModel]) -> str:
    """Return a pydantic error as one clause."""
    key, location = key_of(item, schema), _location(item, schema)
    if item["type"] == "extra_forbidden":
        return f"unknown key {dotted(location) or repr('')}{_hint(item['loc'], schema)}"
    if item["type"] == "invalid_key" or item["loc"][-1:] == ("[key]",):
        place = dotted(location[: -1 if item["type"] == "invalid_key" else -2])
        place = place or "the configuration"
        return f"key {shortened(repr(item['input']))} of {place} is not text: put it in quotes"
    if item["type"] == "missing":
        return f"{key} is missing: give it a value"
    if item["type"] == "union_tag_not_found":
        return f"{key}.{_discriminator(item)} is missing: give it a value"
    if item["type"] == "union_tag_invalid":
        *most, last = item["ctx"]["expected_tags"].replace("'", "").split(", ")
        name = f"{key}.{_discriminator(item)}"
        return f"{name} is {item['ctx']['tag']!r}: give {', '.join(most)} or {last}"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return str(message)
    if item["type"] in (INTEGER_TOO_LARGE, BOOLEAN):
        return dotted([*location, message])
    if location in _WHOLE and len(item["loc"]) > len(location):
        return f"{key} is {shortened(repr(item['input']))}: give {_WHOLE[location]}"
    advice = _ADVICE.get(item["type"]) or f"{message[:1].lower()}{message[1:]}"
    if item["type"] == "string_pattern_mismatch":
        advice = _PATTERNS[item["ctx"]["pattern"]]
    elif item["type"] == "string_too_short":
        advice = "give text that is not empty"
    elif item["type"] == "string_too_long":
        advice = f"give at most {item['ctx']['max_length']} characters"
    elif item["type"] == "less_than_equal":
        advice = f"give at most {item['ctx']['le']:,}"
    elif item["type"] == "too_short" and isinstance(item["input"], list | tuple):
        least = item["ctx"]["min_length"]
        advice = f"give at least {least} element{'s' if least > 1 else ''}"
    return f"{key} is {shortened(repr(item['input']))}: {advice}"


def _hint(location: Location, schema: type[BaseModel]) -> str:
    """Return a hint at the intended key for an unknown key."""
    name, above = str(location[-1]), _without_kinds(location[:-1], schema)
    here = sections_at(location[:-1], schema)
    others = [section for section in sections_at(above, schema) if name in section.model_fields]
    if others and here != others:
        kind = dotted([*above, *_discriminators_of(here[0])])
        return (
            f" (it belongs to {kind} {_kinds_of(others[0])[0]}, and {kind} is "
            f"{_kinds_of(here[0])[0]})"
        )
    known = sorted(
        {
            field.alias or field_name
            for section in here
            for field_name, field in section.model_fields.items()
        }
    )
    return _hint_of_sections(name, schema) or nearest(name, known)


def _location(item: Any, schema: type[BaseModel]) -> Location:
    location = _without_kinds(item["loc"], schema)
    wholes = (location[:length] for length in range(1, len(location) + 1))
    return next((whole for whole in wholes if whole in _WHOLE), location)


def key_of(item: Any, schema: type[BaseModel]) -> str:
    """Return the dotted key of one of pydantic's errors, as the user wrote it."""
    return dotted(_location(item, schema)) or "the configuration"


def _without_kinds(location: Location, schema: type[BaseModel]) -> Location:
    """Return a location as the user wrote it, without the alternatives that pydantic tried."""
    parts: list[str | int] = []
    sections: list[type[BaseModel]] = [schema]
    for part in location:
        fields = [section for section in sections if part in _names_of(section)]
        kinds = [section for section in sections if part in _kinds_of(section)]
        if kinds and (not fields or len(sections) > 1):  # a field may have the name of its kind
            sections = kinds
            continue
        parts.append(part)
        sections = _below(fields, part) if not isinstance(part, int) else sections
    return tuple(parts)


def sections_at(location: Location, schema: type[BaseModel]) -> list[type[BaseModel]]:
    """Return the sections that a location may refer to.

    There are several if the location ends at a union without naming the alternative.
    """
    sections: list[type[BaseModel]] = [schema]
    for part in location:
        if isinstance(part, int):  # elements of a list have no names
            continue
        fields = [section for section in sections if part in _names_of(section)]
        kinds = [section for section in sections if part in _kinds_of(section)]
        sections = kinds if kinds and not fields else _below(fields, part)
    return sections


def _below(sections: list[type[BaseModel]], name: str | int) -> list[type[BaseModel]]:
    """Return the sections that the field `name` of the given sections may contain."""
    return [
        model
        for section in sections
        for field_name, field in section.model_fields.items()
        if name in (field_name, field.alias)
        for model in _models_in(field.annotation)
    ]


def _names_of(section: type[BaseModel]) -> set[str]:
    return {
        name
        for field_name, field in section.model_fields.items()
        for name in (field_name, field.alias)
        if name is not None
    }


def _kinds_of(section: type[BaseModel]) -> tuple[str, ...]:
    """Return the values of `kind` or `step` that select a section."""
    return tuple(
        str(value)
        for name in _discriminators_of(section)
        for value in get_args(section.model_fields[name].annotation)
    )


def _discriminators_of(section: type[BaseModel]) -> tuple[str, ...]:
    return tuple(name for name in DISCRIMINATORS if name in section.model_fields)


def _discriminator(item: Any) -> str:
    """Return the name of the field that selects an alternative of the union in an error."""
    return str(item["ctx"]["discriminator"]).strip("'")


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models_in(part)]


def _hint_of_sections(name: str, schema: type[BaseModel]) -> str:
    """Return a hint if a section has a field `name`, or one of the same words in another order."""
    fields = [
        (section, key)
        for section, field in schema.model_fields.items()
        for model in _models_in(field.annotation)
        for key in model.model_fields
    ]
    words = sorted(name.split("_"))
    same = [(section, key) for section, key in fields if sorted(key.split("_")) == words]
    if not same:
        return ""
    section, key = min(same, key=lambda field: field[1] != name)
    return f" (did you mean {section}.{key}?)"
