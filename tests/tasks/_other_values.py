"""Other valid values for each field of a configuration, by its type."""

import types
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from megacore.config.keys import Declaration, declaration


@dataclass(frozen=True)
class Place:
    """A field of a configuration and its declaration."""

    path: tuple[str | int, ...]
    """Names and numbers on the way to the field."""
    owner: str
    """Class of the field's section."""
    name: str
    annotation: Any
    declared: Declaration | None

    @property
    def field(self) -> str:
        """Class and name of the field."""
        return f"{self.owner}.{self.name}"


def places(
    section: BaseModel, inherited: Declaration | None = None, path: tuple[str | int, ...] = ()
) -> list[Place]:
    """Return all fields that contain no section, including those of nested sections."""
    result: list[Place] = []
    for name, field in type(section).model_fields.items():
        declared = declaration(type(section), name, inherited)
        value = getattr(section, name)
        here = (*path, field.alias or name)
        if isinstance(value, BaseModel):
            result += places(value, declared, here)
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            for number, element in enumerate(value):
                result += places(element, declared, (*here, number))
        else:
            result.append(Place(here, type(section).__name__, name, field.annotation, declared))
    return result


def section_classes(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield each section class that a type mentions, nested ones included."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from section_classes(field.annotation)
    for part in get_args(annotation):
        yield from section_classes(part)


def other_values(annotation: Any, value: Any) -> list[Any]:
    """Return values of the type other than the present one.

    The values that are most likely to be valid come first.
    """
    return [
        other
        for other in _values(annotation, value)
        if other != value or type(other) is not type(value)
    ]


def _values(annotation: Any, value: Any) -> list[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _values(get_args(annotation)[0], value)
    if origin is Literal:
        return list(get_args(annotation))
    if origin in (Union, types.UnionType):
        return [other for part in get_args(annotation) for other in _values(part, value)]
    if annotation is types.NoneType:
        return [None]
    if annotation is bool:
        return [not value]
    if annotation is int:
        number = value if isinstance(value, int) else 2
        return [number + 1, number * 2, number // 2, number - 1, 4, 1]
    if annotation is float:
        number = float(value) if isinstance(value, int | float) else 1.0
        return [number / 2, number * 2, number + 1e-3, 2.0, 0.5]
    if annotation is str:
        return [f"{value}x" if isinstance(value, str) else "x"]
    if origin is tuple:
        items = list(value) if isinstance(value, list | tuple) else []
        element = get_args(annotation)[0]
        return [[*items, other] for other in other_values(element, None)] + [items[:-1], items[:1]]
    return [{"a": "b"}] if origin is dict else []


def changed(values: dict[str, Any], path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """Return a copy of plain values with another value at a path."""
    copy = deepcopy(values)
    target: Any = copy
    for part in path[:-1]:
        if isinstance(target[part], str):  # one word for all fields of a section
            target[part] = {}
        target = target[part]
    target[path[-1]] = value
    return copy
