"""Reference page and JSON schemas of the configuration, generated from megacore/config.

`make reference` writes docs/reference.md, conf/schema.json and conf/finetune/schema.json. They are
committed, so that readers and editors need no installation; a test fails if they are not up to
date. This is a script and no command of `megacore`, because it writes files of the repository.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from _config_schema import (  # noqa: E402
    KINDS,
    WORDS,
    SchemaOf,
    field_default,
    is_list,
    kind_of,
    one_line,
    sections_of,
    yaml_value,
)

from megacore.config import FinetuneConfig, RunConfig  # noqa: E402
from megacore.config.base import FinetuneStage, PretrainStage  # noqa: E402
from megacore.config.keys import CONTAINED, Declaration, declaration  # noqa: E402

PAGE = "docs/reference.md"
COMMAND = "make reference"
_COMPARISONS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
_TYPES = {
    "boolean": "true or false",
    "integer": "int",
    "number": "float",
    "string": "text",
    "null": "null",
    "object": "mapping",
}
_HEADER = "| key | type | default | description | stages |\n| --- | --- | --- | --- | --- |"
_INTRODUCTION = f"""# Reference

<!-- Written by `{COMMAND}` from megacore/config: change the docstrings there. -->

Every key of the configuration files. [Configuration](configuration.md) has examples, and explains
how an editor completes and checks these keys.

- **key**: the dotted name, as in `-o optim.lr=1e-4`. `[]` stands for each element of a list.
- **default**: the value of a key that the file omits.
- **stages**: the stages whose [key](configuration.md#values-that-determine-a-cached-output) the
  value enters. A change makes them and the stages after them run again; with "none", it does not.
  \\*: the key contains a value derived from it, such as the content of a named file.
{{contained}}
"""


class Flow(NamedTuple):
    """Flow with its own class of configurations."""

    name: str
    config: type[BaseModel]
    stages: tuple[str, ...]
    directory: str
    prefix: str
    """Beginning of the headings of its sections."""
    intro: str


FLOWS = (
    Flow(
        "Pretraining",
        RunConfig,
        get_args(PretrainStage),
        "conf",
        "",
        "Files in `conf/`, for the flows `pretrain`, `prepare-data`, `evaluate` and `export`.",
    ),
    Flow(
        "Fine-tuning",
        FinetuneConfig,
        get_args(FinetuneStage),
        "conf/finetune",
        "Fine-tuning: ",
        "Files in `conf/finetune/`, for the flow `finetune`.",
    ),
)


class Table(NamedTuple):
    """Section or one kind of a section at its place in a configuration."""

    section: type[BaseModel]
    name: str
    """Dotted name; empty for the configuration."""
    heading: str
    declared: Declaration | None
    default: BaseModel | None
    """Section that the configuration has if it omits this one; None if there is none."""

    @property
    def link(self) -> str:
        """Link to the heading, as mkdocs and GitHub build it."""
        words = re.sub(r"[^\w\s-]", "", self.heading.replace("`", "")).lower()
        return f"#{words.replace(' ', '-')}"


def outputs() -> dict[str, str]:
    """Return the content of each generated file by its path in the repository."""
    schemas = {
        f"{flow.directory}/schema.json": SchemaOf(flow.config).build(
            f"megacore: {flow.name.lower()}"
        )
        for flow in FLOWS
    }
    texts = {
        path: json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
        for path, schema in schemas.items()
    }
    return {PAGE: page(), **texts}


def page() -> str:
    """Return the page in Markdown."""
    contained = (
        f"  The key of `{outer}` contains that of `{inner}`." for inner, outer in CONTAINED.items()
    )
    parts = [_INTRODUCTION.format(contained="\n".join(contained))]
    earlier: dict[str, Table] = {}  # table of each row of the flows before
    complete: dict[tuple[str, ...], Table] = {}  # the same of all rows of a table
    for flow in FLOWS:
        tables = list(_tables(flow))
        kinds: dict[type[BaseModel], Table] = {}
        for table in tables:
            kinds.setdefault(table.section, table)
        schema = flow.config.model_json_schema()
        contents = {**schema["$defs"], flow.config.__name__: schema}
        texts: list[str] = []
        rows_of: dict[tuple[str, ...], Table] = {}
        for table in reversed(tables):  # a section before those that link it
            properties = contents[table.section.__name__]["properties"]
            rows = list(_rows(flow, table, properties, kinds))
            rows_of[tuple(rows)] = table
            if tuple(rows) in complete:
                kinds[table.section] = complete[tuple(rows)]
            else:
                texts.append(_chapter(flow, table, rows, earlier))
        complete.update(rows_of)
        earlier.update({row: table for rows, table in rows_of.items() for row in rows})
        parts += reversed(texts)
    return "\n".join(parts)


def _chapter(flow: Flow, table: Table, rows: list[str], earlier: dict[str, Table]) -> str:
    """Return a table with its heading; rows that an earlier flow has too are only named."""
    level, intro = ("##", flow.intro) if not table.name else ("###", _text(table.section))
    same = [row for row in rows if row in earlier] if table.name else []
    lines = [f"{level} {table.heading}", "", intro, ""]
    if len(same) > 1:
        names = ", ".join(row.split()[1] for row in same)
        other = earlier[same[0]]
        lines += [f"As in the section [{other.heading}]({other.link}): {names}.", ""]
        rows = [row for row in rows if row not in same]
    return "\n".join([*lines, _HEADER, *rows, ""] if rows else lines)


def _tables(flow: Flow) -> Iterator[Table]:
    """Yield the configuration and every section, each class once."""
    seen = set()

    def visit(table: Table) -> Iterator[Table]:
        if table.section in seen:
            return
        seen.add(table.section)
        yield table
        for field_name, field in table.section.model_fields.items():
            inner = sections_of(field.annotation)
            key = ".".join(filter(None, (table.name, field.alias or field_name)))
            key += "[]" * is_list(field.annotation)
            declared = declaration(table.section, field_name, table.declared)
            value = field.default if table.default is None else getattr(table.default, field_name)
            for section in inner:
                kind = f": {kind_of(section)}" if len(inner) > 1 else ""
                default = value if type(value) is section else None
                heading = f"{flow.prefix}{key}{kind}"
                yield from visit(Table(section, key, heading, declared, default))

    return visit(Table(flow.config, "", flow.name, None, None))


def _rows(
    flow: Flow, table: Table, properties: dict[str, Any], tables: dict[type[BaseModel], Table]
) -> Iterator[str]:
    """Yield the rows of a table, `kind` or `step` first."""
    fields = sorted(table.section.model_fields.items(), key=lambda item: item[0] not in KINDS)
    for name, field in fields:
        key = field.alias or name
        inner = [tables[section] for section in sections_of(field.annotation)]
        stages = "" if inner else _stages(flow, table, name)
        if inner:
            nullable = type(None) in get_args(field.annotation)
            words = [f"`{word}`, " for word in WORDS.get((table.section.__name__, name), ())]
            kind = _section_type(inner, listed=is_list(field.annotation), nullable=nullable)
            kind = "".join(words) + kind
        else:
            kind = _type(properties[key])
        cells = (
            f"`{'.'.join(filter(None, (table.name, key)))}`",
            kind,
            _default(table, name),
            _escaped(one_line(field.description)),
            stages,
        )
        yield f"| {' | '.join(cells)} |"


def _section_type(inner: list[Table], *, listed: bool, nullable: bool) -> str:
    """Return the type of a field with sections, with links to their tables."""
    null = " or null" * nullable
    if len(inner) == 1:
        return f"{'list of ' * listed}[section{'s' * listed}]({inner[0].link}){null}"
    kinds = ", ".join(f"[{kind_of(table.section)}]({table.link})" for table in inner)
    return f"{'list of sections' if listed else 'section'}{null}; kinds: {kinds}"


def _type(content: dict[str, Any]) -> str:
    """Return the type of a field in words, from its JSON schema."""
    if "anyOf" in content:
        return " or ".join(map(_type, content["anyOf"]))
    if "enum" in content or "const" in content:
        values = content.get("enum", [content.get("const")])
        return ", ".join(f"`{yaml_value(value)}`" for value in values)
    if "prefixItems" in content:
        return f"[{', '.join(map(_type, content['prefixItems']))}]"
    if content["type"] == "array":
        number = f", at least {content['minItems']}" if "minItems" in content else ""
        return f"list of {_type(content['items'])}{number}"
    limits = [
        f"{sign} {content[name]:.15g}" for name, sign in _COMPARISONS.items() if name in content
    ]
    return " ".join([_TYPES[content["type"]], ", ".join(limits)]).strip()


def _default(table: Table, name: str) -> str:
    """Return the default of a field as a cell."""
    field = table.section.model_fields[name]
    if field.is_required():
        given = {"name": "the file's name"} if table.section in (RunConfig, FinetuneConfig) else {}
        return given.get(name, "**required**")
    if sections_of(field.annotation):
        value = field.default if table.default is None else getattr(table.default, name)
        if not isinstance(value, BaseModel):
            return _code(yaml_value(value))
        kind = kind_of(value.__class__)
        return "" if kind is None else f"`{{kind: {kind}}}`"
    if table.default is not None:
        return _code(yaml_value(field_default(table.default, name)))
    return _code(yaml_value(field.get_default(call_default_factory=True, validated_data={})))


def _stages(flow: Flow, table: Table, name: str) -> str:
    """Return the flow's stages whose key a field enters."""
    declared = declaration(table.section, name, table.declared)
    assert declared is not None
    stages = (
        f"{stage}{'' if stage in declared.key else chr(92) + '*'}"
        for stage in flow.stages
        if stage in declared.key | declared.resolved
    )
    return ", ".join(stages) or "none"


def _text(section: type[BaseModel]) -> str:
    """Return a section's docstring as paragraphs of lines of Markdown."""
    paragraphs = (section.__doc__ or "").split("\n\n")
    return "\n\n".join(_escaped(one_line(paragraph)) for paragraph in paragraphs)


def _escaped(text: str) -> str:
    """Return text as Markdown for a cell of a table: code in backticks stays code."""
    parts = text.split("`")
    for number, part in enumerate(parts):
        if number % 2:
            parts[number] = _code(part)
        else:
            part = re.sub(r"([*\\\[\]])", r"\\\1", part)
            parts[number] = part.replace("<", "&lt;").replace("|", "&#124;")
    return "".join(parts)


def _code(text: str) -> str:
    """Return code for a cell of a table, in which backticks cannot protect a vertical line."""
    if "|" not in text:
        return f"`{text}`"
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return f"<code>{text.replace('|', '&#124;')}</code>"


def main() -> None:
    """Write the files."""
    for path, text in outputs().items():
        (ROOT / path).write_text(text, encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
