"""YAML and dotted overrides in, one frozen RunConfig out."""

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from megacore.config.deepspeed_json import read_json
from megacore.config.run import RunConfig
from megacore.errors import ConfigError

CONF_DIR = Path("conf")


def _without_colons(form: re.Pattern[str]) -> re.Pattern[str]:
    return re.compile(rf"(?!.*:)(?:{form.pattern})", form.flags)


class _Loader(yaml.SafeLoader):
    """Reads `1:2` and `12:00:00` as text, as YAML 1.2 does, and not as numbers to the base of 60."""

    yaml_implicit_resolvers = {  # noqa: RUF012  PyYAML's own name
        first: [(tag, _without_colons(form) if tag.endswith((":int", ":float")) else form) for tag, form in known]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def conf_path(conf: str, conf_dir: Path = CONF_DIR) -> Path:
    """The file that `conf` names: a path, or the stem of a file in `conf_dir`.

    Raises ConfigError with the nearest name when there is none.
    """
    for candidate in (Path(conf), conf_dir / f"{conf}.yaml"):
        if candidate.is_file():
            return candidate
    known = sorted(path.stem for path in conf_dir.glob("*.yaml"))
    raise ConfigError(
        f"no configuration named {conf!r}: neither that file nor {conf_dir / conf}.yaml exists{_nearest(conf, known)}"
    )


def load_config(conf: str, overrides: Mapping[str, Any] | None = None, *, conf_dir: Path = CONF_DIR) -> RunConfig:
    """Read a YAML file, apply overrides with dotted keys (`{"train.train_iters": 50}`), validate.

    Raises ConfigError with one line per wrong value: its key, what it is, and what to do.
    """
    if not isinstance(conf, str) or not isinstance(overrides or {}, Mapping):
        raise ConfigError(
            f"conf is {conf!r} and overrides are {overrides!r}: give a name or path, and a mapping of dotted keys"
        )
    path = conf_path(conf, conf_dir)
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {type(values).__name__}, not a mapping of sections: see conf/gpt2-tiny.yaml")
    for key, value in (overrides or {}).items():
        _set_dotted(values, key, value)
    _read_deepspeed_json(values, path, conf_dir)
    return parse_config(values, origin=str(path))


def parse_config(values: Mapping[str, Any], *, origin: str) -> RunConfig:
    """Validate plain values; `origin` names them in messages. Raises ConfigError."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        # Each alternative of a union complains by itself: of one key the first complaint is shown.
        problems = {_key(item): _describe(item) for item in reversed(error.errors())}
        raise ConfigError(f"{origin}: " + "; ".join(reversed(problems.values()))) from error


def read_config(path: Path) -> RunConfig:
    """Read a validated configuration back from JSON. Raises ConfigError."""
    try:
        return parse_config(json.loads(path.read_text(encoding="utf-8")), origin=str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a configuration: {error}") from error


def parse_overrides(pairs: list[str]) -> dict[str, Any]:
    """`["train.train_iters=50"]` as a mapping; values are YAML. Raises ConfigError."""
    overrides: dict[str, Any] = {}
    for pair in pairs:
        key, sign, text = pair.partition("=")
        if not sign or not key:
            raise ConfigError(f"override {pair!r} is not key=value, as in train.train_iters=50")
        try:
            overrides[key] = yaml.load(text, Loader=_Loader)
        except yaml.YAMLError as error:
            raise ConfigError(f"override {pair!r}: its value is not YAML") from error
    return overrides


def _read_deepspeed_json(values: dict[str, Any], conf: Path, conf_dir: Path) -> None:
    """Put the content of `deepspeed.config` in the place of its path, so that no process reads it again.

    The path is relative to the working directory, to the directory of the configuration, or to that of `conf_dir`.
    """
    section = values.get("deepspeed")
    if (
        values.get("engine") != "deepspeed"
        or not isinstance(section, dict)
        or not isinstance(section.get("config"), str)
    ):
        return
    given = section["config"]
    candidates = list(dict.fromkeys(Path(root, given) for root in ("", conf.parent, conf_dir.absolute().parent)))
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        raise ConfigError(f"deepspeed.config is {given!r}: there is no file {' or '.join(map(str, candidates))}")
    values["deepspeed"] = {**section, "config": read_json(found)}


def _set_dotted(values: dict[str, Any], key: str, value: Any) -> None:
    """Set `values[a][b][c] = value` for key `a.b.c`, making mappings on the way."""
    *parents, leaf = key.split(".")
    target = values
    for depth, parent in enumerate(parents):
        child = target.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {key!r}: {'.'.join(parents[: depth + 1])} holds {child!r}, not a section")
        target = child
    target[leaf] = value


def _describe(item: Any) -> str:
    """One pydantic error as one clause."""
    location = _location(item)
    key = _key(item)
    if item["type"] == "extra_forbidden":
        name = str(location[-1])
        return f"unknown key {key}{_elsewhere(name) or _nearest(name, _fields_at(location[:-1]))}"
    if item["type"] == "missing":
        return f"{key} is missing: give it a value"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return str(message)
    if location in _WHOLE:
        return f"{key} is {item['input']!r}: give {_WHOLE[location]}"
    advice = _ADVICE.get(item["type"]) or f"{message[:1].lower()}{message[1:]}"
    return f"{key} is {item['input']!r}: {advice}"


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
_UNIONS = {"source", "tokenizer"}
"""Behind these keys of `data` pydantic names the alternative that it tried."""
_WHOLE: dict[tuple[str | int, ...], str] = {
    ("deepspeed", "config"): "a path, or the content of DeepSpeed's JSON",
    ("launch", "nproc_per_node"): "an integer above 0 or auto",
    ("parallel", "pipeline_partition"): "balanced, uniform or a list of integers, as in [3, 3]",
}
"""Values of several kinds: what they may be, whichever of them was tried."""


def _location(item: Any) -> tuple[str | int, ...]:
    location: tuple[str | int, ...] = item["loc"]
    if location[:2] in _WHOLE:
        return location[:2]
    if location[:1] != ("data",):
        return location
    return tuple(part for before, part in zip((None, *location), location, strict=False) if before not in _UNIONS)


def _key(item: Any) -> str:
    return ".".join(str(part) for part in _location(item)) or "the configuration"


def _fields_at(location: tuple[str | int, ...]) -> list[str]:
    """The names a section takes; of every alternative where the section is a union."""
    candidates: list[type[BaseModel]] = [RunConfig]
    for part in location:
        if isinstance(part, int):  # an element of a list has the names of its type
            continue
        candidates = [
            model
            for section in candidates
            if part in section.model_fields
            for model in _models_in(section.model_fields[str(part)].annotation)
        ]
    return sorted({field.alias or name for section in candidates for name, field in section.model_fields.items()})


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models_in(part)]


def _elsewhere(name: str) -> str:
    """The same name in another section, for a key that is right but in the wrong place."""
    for section, field in RunConfig.model_fields.items():
        if any(name in model.model_fields for model in _models_in(field.annotation)):
            return f" (did you mean {section}.{name}?)"
    return ""


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f" (did you mean {close[0]}?)"
    return f" (known: {', '.join(known)})" if known else ""
