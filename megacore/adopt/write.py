"""Writer of the commented YAML: each line names the setting that it comes from."""

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from megacore.adopt.rules import Draft, Entry
from megacore.adopt.settings import Settings

SECTIONS = (
    *("name", "family", "seed", "engine", "data", "model", "optim", "train", "checkpoint"),
    *("resume", "parallel", "deepspeed", "launch"),
)
"""Order of the sections in the file."""
_WIDTH = 100


def to_yaml(draft: Draft, settings: Settings, title: str, *, partial: bool = False) -> str:
    """Return the text of a configuration file.

    Args:
        draft: values with their origins, and what was refused or is without effect.
        settings: settings that it was made from.
        title: first line, without the sign of a comment.
        partial: True to list the refused settings at the top.
    """
    lines = [f"# {title}"]
    if partial and draft.refused:
        lines += ["#", "# Refused, and not in this file: the run differs in these points."]
        lines += _comments(refused.text for refused in draft.refused)
    if draft.questions:
        lines += ["#", "# Questions: values that were not written, marked with ? below."]
        lines += _comments(f"{name}: {question}" for name, question in draft.questions)
    remarks = [*settings.remarks, *draft.remarks]
    if remarks:
        lines += ["#", "# Remarks."]
        lines += _comments(remarks)
    if draft.without_effect:
        lines += ["#", "# Without effect here."]
        lines += _comments(f"{setting}: {reason}" for setting, reason in draft.without_effect)
    asked = {name for name, _ in draft.questions}
    lines += ["", *_block(_nested(draft.values), asked)]
    return "\n".join(lines) + "\n"


def values_of(draft: Draft) -> dict[str, Any]:
    """Return the values of a draft as nested mappings, as the YAML has them."""

    def plain(node: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: node_or_entry.value if isinstance(node_or_entry, Entry) else plain(node_or_entry)
            for key, node_or_entry in node.items()
        }

    return plain(_nested(draft.values))


def _nested(values: Mapping[str, Entry]) -> dict[str, Any]:
    def place(name: str) -> int:
        section = name.split(".")[0]
        return SECTIONS.index(section) if section in SECTIONS else len(SECTIONS)

    tree: dict[str, Any] = {}
    for name in sorted(values, key=place):
        *blocks, leaf = name.split(".")
        node = tree
        for block in blocks:
            node = node.setdefault(block, {})
        node[leaf] = values[name]
    return tree


def _block(
    node: Mapping[str, Any], asked: set[str], prefix: str = "", depth: int = 0
) -> Iterator[str]:
    for key, value in node.items():
        name, indent = f"{prefix}{key}", "  " * depth
        if isinstance(value, Entry):
            mark = "? " if name in asked else ""
            yield f"{indent}{key}: {_scalar(value.value)}  # {mark}{_line(value.origin)}"
            continue
        if depth == 0:
            yield ""
        yield f"{indent}{key}:"
        yield from _block(value, asked, f"{name}.", depth + 1)


def _scalar(value: Any) -> str:
    """Return a value in YAML's flow style on one line."""
    if isinstance(value, float) and value != 0 and not 1e-3 <= abs(value) < 1e7:
        mantissa, _, exponent = repr(value).partition("e")
        if exponent:
            whole = mantissa if "." in mantissa else f"{mantissa}.0"
            return f"{whole}e{exponent}"
    text = yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True)
    return text.strip().removesuffix("\n...").strip()


def _line(text: str) -> str:
    return " ".join(text.split())


def _comments(items: Any) -> Iterator[str]:
    """Yield the lines of a list in comments, wrapped."""
    import textwrap

    for item in dict.fromkeys(items):
        yield from textwrap.wrap(
            _line(item),
            _WIDTH,
            initial_indent="#   ",
            subsequent_indent="#     ",
            break_long_words=False,
            break_on_hyphens=False,
        )
