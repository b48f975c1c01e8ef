"""JSON schema of a configuration, with which editors complete, explain and check YAML files.

It differs from pydantic's schema where a YAML file may have other values than a section:

- `extends` names other files, which may give any value, even the `kind` of a section. Keys are
  required only in files without it.
- Editors read YAML 1.2 and the loader YAML 1.1, so that `on` is text for the former and true for
  the latter. Both are valid where one is.
- Validators translate some values, and other files give some required ones.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from megacore.config.base import OMIT_DEFAULT, RESOLVED, STAGES

Content = dict[str, Any]
KINDS = ("kind", "step")
"""Fields that select the section of a union."""
GIVEN_ELSEWHERE = {
    "RunConfig": {"name"},
    "FinetuneConfig": {"name", "optim"},
    "FinetuneOptimConfig": {"lr"},
}
"""Required fields, by section, that a file may leave out: the default name is the file's, and a
DeepSpeed JSON may give the learning rate."""
ONE_OF = {"DataConfig": ("source", "blend", "split_blends")}
"""Optional fields, by section, of which one is required."""
NEEDED = {"RunConfig": ("data",)}
"""Optional fields, by section, without which a file is incomplete."""
TRANSLATED = {("TrainConfig", "skip_samples"): {"items": {"type": ["string", "integer"]}}}
"""Parts of the schemas of fields whose validators accept further types."""
WORDS = {("TrainConfig", "kernels"): ["auto", "plain"]}
"""Words that may replace a section, by the field that holds it."""
_EXTENDS = {
    "title": "extends",
    "description": "Configurations that this file extends: a name or path, or a list of them. "
    "Sections merge; other values of this file replace theirs.",
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
    ],
}
_YAML_1_1_BOOLEANS = "^(yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF)$"
_INTERNAL = (STAGES, RESOLVED, OMIT_DEFAULT)


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections that a type mentions, without nested ones."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections_of(part)]


def kind_of(section: type[BaseModel]) -> str | None:
    """Return the value of `kind` that selects a section of a union; None for other sections."""
    name = kind_field(section)
    values = () if name is None else get_args(section.model_fields[name].annotation)
    return str(values[0]) if len(values) == 1 else None


def kind_field(section: type[BaseModel]) -> str | None:
    """Return the name of the field that selects a section, or None."""
    return next((name for name in KINDS if name in section.model_fields), None)


def is_list(annotation: Any) -> bool:
    """Return True if a type is a tuple, or a tuple or None."""
    return any(get_origin(each) is tuple for each in (annotation, *get_args(annotation)))


def one_line(text: str | None) -> str:
    """Return a docstring on one line."""
    return " ".join((text or "").split())


class SchemaOf:
    """Builder of the schema of one class of configuration files."""

    def __init__(self, config: type[BaseModel]) -> None:
        """Collect the places of all sections of a class such as RunConfig."""
        self._config = config
        self._places: dict[type[BaseModel], list[tuple[str, BaseModel | None]]] = {}
        self._definitions: dict[str, Content] = {}
        for section, name, default in _walk(config):
            self._places.setdefault(section, []).append((name, default))
        self._named = {section.__name__: section for section in self._places}

    def build(self, title: str) -> Content:
        """Return the schema."""
        content = self._config.model_json_schema()
        for name, definition in content["$defs"].items():
            self._definitions[name] = self._section(self._named[name], definition)
        root = self._section(self._config, content)
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            **root,
            "title": title,
            "properties": {"extends": _EXTENDS, **root["properties"]},
            "if": {"not": {"required": ["extends"]}},
            "then": self._required(self._config),
            "$defs": dict(sorted(self._definitions.items())),
        }

    def _section(self, section: type[BaseModel], content: Content) -> Content:
        """Return pydantic's schema of a section in the form for files."""
        fields = section.model_fields.items()
        keys = {name: field.alias or name for name, field in fields}
        return {
            "title": kind_of(section) or self._title(section, ""),
            "description": one_line(section.__doc__),
            "type": "object",
            "properties": {
                key: self._field(section, name, content["properties"][key])
                for name, key in keys.items()
            },
            "additionalProperties": False,
        }

    def _title(self, section: type[BaseModel], key: str) -> str:
        """Return a dotted name, or the last part of it for a section with several places."""
        places = self._places[section]
        return ".".join(filter(None, (places[0][0] if len(places) == 1 else "", key)))

    def _field(self, section: type[BaseModel], name: str, content: Content) -> Content:
        """Return pydantic's schema of a field in the form for files."""
        field, places = section.model_fields[name], self._places[section]
        inner = sections_of(field.annotation)
        result = {key: value for key, value in content.items() if key not in _INTERNAL}
        if len(places) == 1 and places[0][1] is not None and not inner:
            result["default"] = field_default(places[0][1], name)
        description = one_line(field.description)
        if inner:
            result.pop("default", None)
        elif "default" in result:
            description += f" Default: {yaml_value(result['default'])}."
        result |= {
            "title": self._title(section, field.alias or name),
            "description": description,
        }
        if words := WORDS.get((section.__name__, name)):
            result["anyOf"] = [{"enum": words}, {"$ref": result.pop("$ref")}]
        result = _with_yaml_1_1_booleans(result)
        return {**self._choices(result, name), **TRANSLATED.get((section.__name__, name), {})}

    def _choices(self, content: Any, name: str) -> Any:
        """Return the schema of the field `name` with unions that allow a missing `kind`.

        Lists are not merged with those of an extended file: keys are required in their sections.
        """
        if isinstance(content, list):
            return [self._choices(item, name) for item in content]
        if not isinstance(content, dict):
            return content
        if "discriminator" in content:
            choice = self._choice(**content["discriminator"])
            if self._definitions.setdefault(name, choice) != choice:
                raise ValueError(f"two different unions are named {name}: rename one of the fields")
            rest = {key: content[key] for key in content if key not in ("discriminator", "oneOf")}
            return {**rest, "$ref": f"#/$defs/{name}"}
        result = {key: self._choices(value, name) for key, value in content.items()}
        union = content.get("items", {}).get("discriminator", {}).get("mapping", {})
        if union:
            rules = self._required_in(name, [self._at(each) for each in union.values()])
            result["items"] = {"allOf": [result["items"], rules]}
        reference = content.get("items", {}).get("$ref")
        if reference is not None:
            rules = self._required(self._at(reference))
            result["items"] = {"allOf": [{"$ref": reference}, rules]}
        return result

    def _at(self, reference: str) -> type[BaseModel]:
        return self._named[reference.rpartition("/")[2]]

    def _choice(self, propertyName: str, mapping: Mapping[str, str]) -> Content:  # noqa: N803
        """Return the schema of a union: the section of a kind, or part of any without `kind`."""
        sections = [self._at(reference) for reference in mapping.values()]
        keys = {field.alias or key for part in sections for key, field in part.model_fields.items()}
        part = {
            "type": "object",
            "properties": {key: key != propertyName for key in sorted(keys)},
            "additionalProperties": False,
        }
        whole = [
            {"allOf": [{"$ref": reference}, {"required": [propertyName]}]}
            for reference in mapping.values()
        ]
        return {"oneOf": [*whole, part]}

    def _required(self, section: type[BaseModel]) -> Content:
        """Return a schema of what is required in a section and inside it; {} for nothing."""
        rules: Content = {}
        omissible = GIVEN_ELSEWHERE.get(section.__name__, set())
        names = [
            field.alias or name
            for name, field in section.model_fields.items()
            if field.is_required() and name not in omissible
        ]
        if section.__name__ in ONE_OF:
            rules["anyOf"] = [{"required": [name]} for name in ONE_OF[section.__name__]]
        inner = {
            field.alias or name: below
            for name, field in section.model_fields.items()
            if not is_list(field.annotation)
            and (below := self._required_in(name, sections_of(field.annotation)))
        }
        names += NEEDED.get(section.__name__, ())
        if names:
            rules["required"] = names
        return {**rules, "properties": inner} if inner else rules

    def _required_in(self, name: str, sections: list[type[BaseModel]]) -> Content:
        """Return a schema of what is required in the section or the union of a field."""
        if len(sections) < 2:
            return self._required(sections[0]) if sections else {}
        complete, kind = f"complete_{name}", kind_field(sections[0])
        self._definitions[complete] = {
            "required": [kind],
            "allOf": [
                {
                    "if": {"properties": {kind: {"const": kind_of(each)}}, "required": [kind]},
                    "then": self._required(each),
                }
                for each in sections
            ],
        }
        return {"$ref": f"#/$defs/{complete}"}


def _walk(
    section: type[BaseModel], name: str = "", default: BaseModel | None = None
) -> Iterator[tuple[type[BaseModel], str, BaseModel | None]]:
    """Yield every section with its dotted name and its default, if it has one."""
    yield section, name, default
    for key, field in section.model_fields.items():
        value = field.default if default is None else getattr(default, key)
        for inner in sections_of(field.annotation):
            inside = ".".join(filter(None, (name, field.alias or key)))
            yield from _walk(inner, inside, value if type(value) is inner else None)


def field_default(section: BaseModel, name: str) -> Any:
    """Return the value of a field of a default section as JSON."""
    return to_jsonable_python(getattr(section, name))


def yaml_value(value: Any) -> str:
    """Return a value on one line of YAML, as a user writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {yaml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(yaml_value, value)) + "]"
    if isinstance(value, str):
        return value if value and value == value.strip() else f'"{value}"'
    return json.dumps(value)


def _with_yaml_1_1_booleans(content: Content) -> Content:
    """Return the schema of a field in which on and true, or off and false, are the same.

    A boolean also takes yes, no, on and off; the words on and off also true and false.
    """
    booleans = [
        value for word, value in (("on", True), ("off", False)) if word in content.get("enum", ())
    ]
    if booleans:
        rest = {key: value for key, value in content.items() if key != "type"}
        return {**rest, "enum": content["enum"] + booleans}
    if content.get("type") == "boolean":
        return {**content, "type": ["boolean", "string"], "pattern": _YAML_1_1_BOOLEANS}
    if {"type": "boolean"} in content.get("anyOf", ()):
        rest = {key: value for key, value in content.items() if key != "anyOf"}
        types = ["boolean", "string", "null"]
        return {**rest, "type": types, "pattern": _YAML_1_1_BOOLEANS}
    return content
