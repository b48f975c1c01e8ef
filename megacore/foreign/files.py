"""Strict readers of YAML and JSON, conversion of dotted names, and hints for wrong names."""

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megacore.artifact.files import regular
from megacore.errors import ConfigError


def _without_colons(form: re.Pattern[str]) -> re.Pattern[str]:
    return re.compile(rf"(?!.*:)(?:{form.pattern})", form.flags)


class Loader(yaml.SafeLoader):
    """YAML loader that reads `1:2` and `12:00:00` as text like YAML 1.2, not as base-60 numbers."""

    yaml_implicit_resolvers = {  # noqa: RUF012  PyYAML's own name
        first: [
            (tag, _without_colons(form) if tag.endswith((":int", ":float")) else form)
            for tag, form in known
        ]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file. Raises ConfigError if it cannot be read."""
    try:
        return yaml.load(regular(path).read_text(encoding="utf-8"), Loader=Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"{path} cannot be read as YAML: {problem}") from error


def read_settings_json(path: Path, name: str = "deepspeed.config") -> dict[str, Any]:
    """Return the content of a JSON file with settings.

    Args:
        path: path of the file.
        name: name of the setting that refers to the file, for messages.

    Raises:
        ConfigError: the file is not a JSON object, or a key appears twice.
    """
    try:
        content = json.loads(
            regular(path).read_text(encoding="utf-8"),
            object_pairs_hook=_without_repetition,
            parse_constant=_refuse_constant,
        )
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{name} {path} is not JSON ({error}): fix it; JSON has no comments and no comma "
            "after the last value"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{name} {path} holds {shown(content)}: give an object, as in conf/ds/zero2.json"
        )
    return content


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice} is given twice")
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
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}…"


def nearest(name: str, known: Sequence[str]) -> str:
    """Return a hint in parentheses: the most similar known name, else all known names."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f" (did you mean {close[0]}?)"
    return f" (known: {', '.join(known)})" if known else ""


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
