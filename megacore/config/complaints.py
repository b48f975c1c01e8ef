"""What pydantic found wrong with plain values, as clauses that name the key, the value and what to do."""

from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from megacore.foreign.files import nearest

Location = tuple[str | int, ...]

_ADVICE = {
    "model_type": "give a mapping of its fields",
    "model_attributes_type": "give a mapping of its fields",
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
"""What to do about a wrong type; other kinds of error say it themselves."""
_WHOLE: dict[Location, str] = {
    ("data", "workers"): "an integer above 0 or auto",
    ("deepspeed", "config"): "a path, or the content of DeepSpeed's JSON",
    ("launch", "accelerate_config"): "a path, or the content of Accelerate's YAML",
    ("launch", "deepspeed_config"): "a path, or the content of DeepSpeed's JSON",
    ("launch", "nnodes"): "a number of machines, as 2, or a range, as 2:4",
    ("launch", "nproc_per_node"): "an integer above 0 or auto",
    ("launch", "slurm", "gpus_per_node"): "an integer that is not negative, or auto",
    ("parallel", "pipeline_partition"): "balanced, uniform or a list of integers, as in [3, 3]",
}
"""Values of several kinds: what they may be, whichever of them was tried."""
_KIND = "kind"
"""The field that says which alternative of a section is meant; pydantic puts its value into locations."""


def complaints(error: ValidationError, schema: type[BaseModel]) -> str:
    """Every wrong value of a configuration, once each, with semicolons between.

    Args:
        error: what validation raised.
        schema: the class that the values were to be.
    """
    # Each alternative of a union complains by itself: of one key the first complaint is shown.
    items = [item for item in error.errors() if not _follows(item, error.errors())]
    problems = {_key(item, schema): _describe(item, schema) for item in reversed(items)}
    return "; ".join(reversed(problems.values()))


def _follows(item: Any, items: Sequence[Any]) -> bool:
    """Whether a list is too short only because pydantic left the wrong ones of its elements out."""
    place = item["loc"]
    return item["type"] == "too_short" and any(
        len(other["loc"]) > len(place) and other["loc"][: len(place)] == place for other in items
    )


def _describe(item: Any, schema: type[BaseModel]) -> str:
    """One pydantic error as one clause."""
    key, location = _key(item, schema), _location(item, schema)
    if item["type"] == "extra_forbidden":
        return f"unknown key {key}{_hint(item['loc'], schema)}"
    if item["type"] == "missing":
        return f"{key} is missing: give it a value"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return str(message)
    if location in _WHOLE and len(item["loc"]) > len(location):
        return f"{key} is {item['input']!r}: give {_WHOLE[location]}"
    advice = _ADVICE.get(item["type"]) or f"{message[:1].lower()}{message[1:]}"
    return f"{key} is {item['input']!r}: {advice}"


def _hint(location: Location, schema: type[BaseModel]) -> str:
    """What may have been meant by an unknown key."""
    name, above = str(location[-1]), _without_kinds(location[:-1], schema)
    here = _sections_at(location[:-1], schema)
    others = [section for section in _sections_at(above, schema) if name in section.model_fields]
    if others and here != others:
        kind = f"{'.'.join(map(str, above))}.{_KIND}"
        return f" (it belongs to {kind} {_kinds_of(others[0])[0]}, and {kind} is {_kinds_of(here[0])[0]})"
    known = sorted({field.alias or own for section in here for own, field in section.model_fields.items()})
    return _elsewhere(name, schema) or nearest(name, known)


def _location(item: Any, schema: type[BaseModel]) -> Location:
    location = _without_kinds(item["loc"], schema)
    wholes = (location[:length] for length in range(1, len(location) + 1))
    return next((whole for whole in wholes if whole in _WHOLE), location)


def _key(item: Any, schema: type[BaseModel]) -> str:
    return ".".join(str(part) for part in _location(item, schema)) or "the configuration"


def _without_kinds(location: Location, schema: type[BaseModel]) -> Location:
    """A location as the user wrote it, without the alternatives that pydantic tried."""
    kept: list[str | int] = []
    sections: list[type[BaseModel]] = [schema]
    for part in location:
        fields = [section for section in sections if part in _names_of(section)]
        if not fields and any(part in _kinds_of(section) for section in sections):
            sections = [section for section in sections if part in _kinds_of(section)]
            continue
        kept.append(part)
        sections = _below(fields, part) if not isinstance(part, int) else sections
    return tuple(kept)


def _sections_at(location: Location, schema: type[BaseModel]) -> list[type[BaseModel]]:
    """The sections that a location may be in: several where it stops at a union whose kind it does not tell."""
    sections: list[type[BaseModel]] = [schema]
    for part in location:
        if isinstance(part, int):  # an element of a list has the names of its type
            continue
        fields = [section for section in sections if part in _names_of(section)]
        kinds = [section for section in sections if part in _kinds_of(section)]
        sections = kinds if kinds and not fields else _below(fields, part)
    return sections


def _below(sections: list[type[BaseModel]], name: str | int) -> list[type[BaseModel]]:
    """The sections that a field of these may hold."""
    return [
        model
        for section in sections
        for own, field in section.model_fields.items()
        if name in (own, field.alias)
        for model in _models_in(field.annotation)
    ]


def _names_of(section: type[BaseModel]) -> set[str]:
    return {name for own, field in section.model_fields.items() for name in (own, field.alias) if name is not None}


def _kinds_of(section: type[BaseModel]) -> tuple[str, ...]:
    """The values of `kind` that choose a section."""
    field = section.model_fields.get(_KIND)
    return () if field is None else tuple(map(str, get_args(field.annotation)))


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models_in(part)]


def _elsewhere(name: str, schema: type[BaseModel]) -> str:
    """The same name in another section, for a key that is right but in the wrong place."""
    for section, field in schema.model_fields.items():
        if any(name in model.model_fields for model in _models_in(field.annotation)):
            return f" (did you mean {section}.{name}?)"
    return ""
