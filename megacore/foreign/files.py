"""Strict readers of YAML and JSON, conversion of dotted names, and hints for wrong names.

A `Claim` is a setting of such a file, expressed as a value of the configuration.
"""

import difflib
import errno
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megacore.artifact.files import MAX_DEPTH, MAX_DIGITS, parse_json, read_bytes
from megacore.errors import ConfigError, one_line
from megacore.paths import is_file


@dataclass(frozen=True)
class Claim:
    """Value that a file requires, with the text for messages."""

    field: str
    """Dotted name of the value in the configuration, or in the file's own terms if `ours` is
    False."""
    value: Any
    """Required value."""
    clause: str
    """Key, file and value as written in the file, such as `mixed_precision of default_config.yaml
    is fp16`."""
    ours: bool = True
    """True if the configuration has this value; if False, it is only compared between files."""
    by_default: bool = False
    """True if the file omits the value and its program's default applies, which any other value
    overrides."""

    @property
    def meaning(self) -> str:
        """Text of the equivalent configuration value; empty if the file spells it alike."""
        value = ", ".join(self.value) if isinstance(self.value, list) else self.value
        return (
            ""
            if self.clause.endswith(f" {self.shown(value)}")
            else f", which is {self.field} {self.shown(value)},"
        )

    @staticmethod
    def shown(value: Any) -> str:
        """Return a value as YAML spells it."""
        return str(value).lower() if isinstance(value, bool) else str(value)


YAML_BYTES = 1 << 20
"""Largest settings file in bytes: a recipe has 5 KB, a blend of 10,000 data sets up to 1 MB."""
YAML_VALUES = 50_000
"""Most values in a YAML file, keys included: those of a blend of 10,000 data sets."""


def _implicit(tag: str, form: re.Pattern[str]) -> tuple[str, re.Pattern[str]]:
    numeric = tag.endswith((":int", ":float"))
    return tag, re.compile(rf"(?!.*:)(?:{form.pattern})", form.flags) if numeric else form


class Loader(yaml.SafeLoader):
    """YAML loader with limits, which refuses repeated keys and reads plain values like YAML 1.2.

    `1:2` and `12:00:00` are text, not base-60 numbers, `2024-01-31` is text, not a date, and `0100`
    is 100, not octal. The limits hold for the content with every alias replaced by what it stands
    for.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012  PyYAML's own name
        first: [_implicit(tag, form) for tag, form in known if not tag.endswith(":timestamp")]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        """Start to load `text`."""
        super().__init__(text)
        self._depth = 0
        self._sizes: dict[yaml.Node, tuple[int, int]] = {}
        """Number of values in each complete node, with itself, and its number of levels."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node and check the limits. Raises ComposerError."""
        alias = self.check_event(yaml.AliasEvent)
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _problem(f"it nests more than {MAX_DEPTH} levels deep", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is None:
            return None
        if alias and node not in self._sizes:
            raise _problem("an alias stands for a value that contains it", mark)
        if not alias:
            _refuse_repetition(node)
            self._sizes[node] = self._size(node)
        count, levels = self._sizes[node]
        if count + len(self._sizes) > YAML_VALUES:
            raise _problem(
                f"it has more than {YAML_VALUES:,} values, with those that aliases repeat", mark
            )
        if self._depth + levels > MAX_DEPTH:
            raise _problem(f"it nests more than {MAX_DEPTH} levels deep", mark)
        return node

    def _size(self, node: yaml.Node) -> tuple[int, int]:
        """Return the number of values in a node whose children are complete, and its levels."""
        if isinstance(node, yaml.ScalarNode):
            return 1, 1
        children = [
            child for item in node.value for child in (item if isinstance(item, tuple) else (item,))
        ]
        sizes = [self._sizes[child] for child in children]
        return 1 + sum(count for count, _ in sizes), 1 + max(
            (levels for _, levels in sizes), default=0
        )

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Build the value of a node. Raises ConstructorError for text that its tag cannot hold."""
        tag = node.tag.rpartition(":")[2]
        if tag == "int" and len(node.value) > MAX_DIGITS:
            raise _problem(
                f"the number {node.value[:20]}… has {len(node.value)} digits, more than "
                f"{MAX_DIGITS}",
                node.start_mark,
            )
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, IndexError, AttributeError, OverflowError) as error:
            raise _problem(f"{shown(node.value)} is no {tag}", node.start_mark) from error


def _construct_integer(loader: Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node)).replace("_", "")
    if re.fullmatch(r"[-+]?0\d+", text):
        return int(text)
    return int(loader.construct_yaml_int(node))


Loader.add_constructor("tag:yaml.org,2002:int", _construct_integer)


def _refuse_repetition(node: yaml.Node) -> None:
    if isinstance(node, yaml.MappingNode):
        keys = set[tuple[str, str]]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in keys:
                    raise _problem(f"the key {key.value[:100]} is given twice", key.start_mark)
                keys.add((key.tag, key.value))


def _problem(text: str, mark: yaml.Mark | None) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, text, mark)


def first_file(candidates: Iterable[Path]) -> Path | None:
    """Return the first path that is a regular file; None if none is.

    Raises ConfigError for a path that the system does not let this user look up.
    """
    for path in candidates:
        try:
            if is_file(path):
                return path
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:  # no file has such a name
                raise ConfigError(
                    f"{path} cannot be read: {error.strerror}: give another file, or make it "
                    "readable"
                ) from error
    return None


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file. Raises ConfigError or FileAccessError."""
    try:
        text = read_bytes(path, YAML_BYTES).decode("utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read as YAML: {error.strerror}: give another file, or make it "
            "readable"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}: correct the file") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> Any:
    """Return the value of a YAML document; `name` is its name in messages.

    Raises:
        ConfigError: the text is not YAML, repeats a key, or exceeds a limit: `YAML_VALUES` values,
            `MAX_DEPTH` levels, or `MAX_DIGITS` digits of an integer.
    """
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        problem = ", ".join(part for part in (error.context, error.problem) if part)[:200]
        raise ConfigError(f"{name} cannot be read as YAML{where}: {problem}: correct it") from error
    except yaml.YAMLError as error:
        problem = one_line(error)
        raise ConfigError(f"{name} cannot be read as YAML: {problem}: correct it") from error


def read_settings_json(path: Path, name: str = "deepspeed.config") -> dict[str, Any]:
    """Return the content of a JSON file with settings, of at most `YAML_BYTES`.

    Args:
        path: path of the file.
        name: name of the setting that refers to the file, for messages.

    Raises:
        ConfigError: the file is not a JSON object, a key appears twice, or it exceeds a limit.
        FileAccessError: the disk fails, the mount is lost, or too many files are open.
    """
    try:
        content = parse_json(read_bytes(path, YAML_BYTES), parse_constant=_refuse_constant)
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(
            f"{name} {path} is not JSON ({error}): fix it; JSON has no comments and no comma "
            "after the last value"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{name} {path} holds {shown(content)}: give an object, as in conf/ds/zero2.json"
        )
    return content


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def read_number(value: Any) -> float | int | None:
    """Return a number, which may be given as text; None if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    if not math.isfinite(number):
        return None
    return number if isinstance(value, str) else value


def shown(value: Any) -> str:
    """Return a value as JSON, shortened to 60 characters."""
    return shortened(json.dumps(value, default=str), 60)


def shortened(text: str, limit: int = 200) -> str:
    """Return a value's text for a message, cut after `limit` characters."""
    return text if len(text) <= limit else f"{text[:limit]}…"


def nearest(name: str, known: Sequence[str]) -> str:
    """Return a hint in parentheses: the most similar known name, else all known names."""
    return similar(name, known) or (f" (known: {', '.join(known)})" if known else "")


def similar(name: str, known: Sequence[str]) -> str:
    """Return a hint in parentheses, the most similar known name; empty if none is similar."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted name as nested JSON objects."""
    content: dict[str, Any] = {}
    for key, value in flat.items():
        *blocks, leaf = key.split(".")
        block = content
        for part in blocks:
            block = block.setdefault(part, {})
        block[leaf] = list(value) if isinstance(value, tuple) else value
    return content


def leaves(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted names and values of nested JSON objects."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
