"""YAML and JSON without surprises, dotted names, and the nearest right name for a wrong one."""

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megacore.errors import ConfigError


def _without_colons(form: re.Pattern[str]) -> re.Pattern[str]:
    return re.compile(rf"(?!.*:)(?:{form.pattern})", form.flags)


class Loader(yaml.SafeLoader):
    """A loader that takes `1:2` and `12:00:00` as text, as YAML 1.2 does, not to the base of 60."""

    yaml_implicit_resolvers = {  # noqa: RUF012  PyYAML's own name
        first: [
            (tag, _without_colons(form) if tag.endswith((":int", ":float")) else form)
            for tag, form in known
        ]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file. Raises ConfigError when it is none."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"{path} cannot be read as YAML: {problem}") from error


def read_settings_json(path: Path, name: str = "deepspeed.config") -> dict[str, Any]:
    """Return the content of a JSON file, which the value `name` leads to.

    Raises ConfigError when it is no JSON object, or one with a key given twice.
    """
    try:
        content = json.loads(
            path.read_text(encoding="utf-8"),
            object_pairs_hook=_without_repetition,
            parse_constant=_refuse_constant,
        )
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{name} {path} is not JSON ({error}): mend it; JSON has no comments and no comma "
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
    """Return a number, which a string may spell; None where it is none, or not finite."""
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
    """Return a value as JSON has it, cut short."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}…"


def nearest(name: str, known: Sequence[str]) -> str:
    """Return the known name most like a wrong one, in parentheses; all of them where none is."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f" (did you mean {close[0]}?)"
    return f" (known: {', '.join(known)})" if known else ""


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted names as the objects of a JSON."""
    content: dict[str, Any] = {}
    for key, value in flat.items():
        *blocks, leaf = key.split(".")
        block = content
        for part in blocks:
            block = block.setdefault(part, {})
        block[leaf] = list(value) if isinstance(value, tuple) else value
    return content


def leaves(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values of a JSON."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
