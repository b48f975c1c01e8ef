"""A user's own DeepSpeed JSON: read, every key known by name, and every value of its kind."""

import difflib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.errors import ConfigError
from megacore.foreign.deepspeed_keys import (
    AUTO,
    FIELD_DEFAULTS,
    FIELD_OF,
    FIELDS,
    KEYS,
    OFFLOAD_FLAGS,
    REFUSED,
    RENAMED,
    Key,
    Refused,
)

if TYPE_CHECKING:
    from megacore.config.run import RunConfig

OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW"}
"""Types that are AdamW, as DeepSpeed spells them in any case."""
SCHEDULERS = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"),
    "WarmupDecayLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "total_num_steps"),
    "WarmupCosineLR": ("warmup_min_ratio", "cos_min_ratio", "warmup_num_steps", "warmup_type", "total_num_steps"),
}
"""Types that have a counterpart, and their parameters."""


@dataclass(frozen=True)
class Form:
    """What one kind of run takes of DeepSpeed's JSON."""

    name: str = "deepspeed.config"
    """The file in sentences."""
    keys: Mapping[str, Key] = field(default_factory=lambda: KEYS)
    """Every key that is honoured."""
    refused: Mapping[str, Refused] = field(default_factory=lambda: REFUSED)
    """Keys that are refused by name."""
    optimizers: Mapping[str, str] = field(default_factory=lambda: OPTIMIZERS)
    """Types of optimizer, in lower case, and how they are spelled."""
    no_optimizer: str = "but megacore trains with AdamW alone: use AdamW, or remove optimizer"
    """What is said of another one."""
    no_scheduler: str = "and no optim.lr_decay_style is like it"
    """What is said of a scheduler without a counterpart."""


PRETRAINING = Form()


@dataclass(frozen=True)
class Asked:
    """What DeepSpeed is asked for beside the rest of the configuration."""

    values: Mapping[str, Any]
    """By dotted names of DeepSpeed's JSON; what is null or left to others is absent."""
    autos: frozenset[str]
    """Names that the JSON leaves to the configuration by "auto"."""
    in_file: bool
    """Whether a JSON says it, not the section's fields."""

    @property
    def stage(self) -> int:
        """ZeRO's."""
        return int(self.values["zero_optimization.stage"])

    def named(self, key: str) -> str:
        """Where a user finds a value."""
        return f"{key} of deepspeed.config" if self.in_file else f"deepspeed.{FIELD_OF[key]}"

    def device(self, what: str) -> str:
        """Where `offload_optimizer` or `offload_param` puts things."""
        return str(self.values.get(f"zero_optimization.{what}.device", "none"))


def read_json(path: Path, name: str = "deepspeed.config") -> dict[str, Any]:
    """The content of a DeepSpeed JSON, which the value `name` leads to.

    Raises ConfigError when it is no JSON object, or one with a key given twice.
    """
    try:
        content = json.loads(
            path.read_text(encoding="utf-8"), object_pairs_hook=_without_repetition, parse_constant=_refuse_constant
        )
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{name} {path} is not JSON ({error}): mend it; JSON has no comments and no comma after the last value"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{name} {path} holds {_shown(content)}: give an object, as in conf/ds/zero2.json")
    return content


def asked_of(config: "RunConfig") -> Asked:
    """What a configuration asks of DeepSpeed, by its section or by the user's JSON, with "auto" filled.

    Raises ValueError for a key or a value that is refused, and for a field of the section that the JSON contradicts.
    """
    section = config.deepspeed
    given = {name: getattr(section, name) for name in FIELDS if getattr(section, name) != FIELD_DEFAULTS[name]}
    values: dict[str, Any] = {}
    if section.config is None:
        values = {key: value for name, value in given.items() for key in FIELDS[name]}
    elif isinstance(section.config, str):
        raise ValueError(
            f"deepspeed.config is the path {section.config!r}, which was not read: give the content of the file, or "
            "load the configuration from its YAML"
        )
    else:
        values = dict(read_keys(section.config))
        for name, value in given.items():
            _fill(values, name, value)
    autos = frozenset(key for key, value in values.items() if value == AUTO)
    values |= _by_width(autos, values, config)
    values = {key: value for key, value in values.items() if value != AUTO}
    values.setdefault("zero_optimization.stage", int(config.parallel.use_distributed_optimizer))
    return Asked(values, autos, section.config is not None)


def _fill(values: dict[str, Any], name: str, value: Any) -> None:
    """Put a field of the section where the JSON says "auto". Raises ValueError where it says otherwise."""
    keys = FIELDS[name]
    said = [key for key in keys if key in values]
    if not said:
        raise ValueError(
            f"deepspeed.{name} is {_shown(value)} but deepspeed.config takes its place and does not say "
            f"{' or '.join(keys)}: write it there, or remove deepspeed.{name}"
        )
    for key in said:
        if values[key] not in (AUTO, value):
            raise ValueError(
                f"deepspeed.{name} is {_shown(value)} but {key} of deepspeed.config is {_shown(values[key])}: remove "
                "one of them"
            )
        values[key] = value


def _by_width(autos: frozenset[str], values: Mapping[str, Any], config: "RunConfig") -> dict[str, int]:
    """Sizes that Hugging Face's integrations fill from the model's width."""
    width = config.model.hidden_size
    sizes = {"zero_optimization.reduce_bucket_size": width * width}
    if values.get("zero_optimization.stage") == 3:
        sizes["zero_optimization.stage3_prefetch_bucket_size"] = width * width * 9 // 10
        sizes["zero_optimization.stage3_param_persistence_threshold"] = 10 * width
    return {key: size for key, size in sizes.items() if key in autos}


def read_keys(content: Mapping[str, Any], form: Form = PRETRAINING) -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a JSON, each of its kind or "auto", in DeepSpeed's present spelling.

    Raises ValueError for a key that is unknown, refused or given in two spellings, and for a value of another kind.
    """
    found: dict[str, str] = {}
    for name, (key, value) in _leaves("", content, form):
        if key in found:
            raise ValueError(f"{form.name} says both {found[key]} and {name}, which are the same: remove one")
        found[key] = name
        yield key, value


def _leaves(prefix: str, block: Mapping[str, Any], form: Form) -> Iterator[tuple[str, tuple[str, Any]]]:
    """For each value the name that the file has for it, its present name, and what it means."""
    # The type first: it decides which parameters there are.
    for name in sorted(block, key=lambda name: name != "type"):
        spelled, value = f"{prefix}{name}", block[name]
        key = RENAMED.get(spelled, spelled)
        if key == "zero_optimization" and isinstance(value, bool):
            yield spelled, ("zero_optimization.stage", int(value))
        elif spelled in OFFLOAD_FLAGS:
            if _read(spelled, Key("flag"), value, form) is True:
                yield spelled, (OFFLOAD_FLAGS[spelled], "cpu")
        elif key in form.refused:
            _refuse(key, value, form)
        elif key in form.keys:
            if value is not None:
                yield spelled, (key, _typed(key, value, form))
        elif any(known.startswith(f"{key}.") for known in form.keys):
            if not isinstance(value, dict | None):
                raise ValueError(f"{spelled} of {form.name} is {_shown(value)}: give an object of its keys")
            _check_parameters(key, value or {}, block, form)
            yield from _leaves(f"{key}.", value or {}, form)
        else:
            raise ValueError(f"unknown key {spelled} in {form.name}{_nearest(prefix, name, form)}")


def _typed(name: str, value: Any, form: Form) -> Any:
    """What a value means, of a type its canonical name. Raises ValueError when it is not of its kind."""
    value = _read(name, form.keys[name], value, form)
    if name == "optimizer.type":
        if str(value).lower() not in form.optimizers:
            raise ValueError(f"optimizer.type of {form.name} is {value} {form.no_optimizer}")
        return form.optimizers[str(value).lower()]
    if name == "scheduler.type" and value not in SCHEDULERS:
        raise ValueError(
            f"scheduler.type of {form.name} is {value}, {form.no_scheduler}: use "
            f"{', '.join(SCHEDULERS)}, or remove scheduler, and optim describes the schedule"
        )
    return value


def _check_parameters(key: str, params: Mapping[str, Any], block: Mapping[str, Any], form: Form) -> None:
    """Raise ValueError for parameters without a type, or of another type of scheduler."""
    if key in ("optimizer.params", "scheduler.params") and "type" not in block:
        raise ValueError(f"{form.name} has {key} without {key.replace('params', 'type')}: say the type")
    for name in params if key == "scheduler.params" else ():
        known = SCHEDULERS[block["type"]]
        if name not in known:
            raise ValueError(
                f"unknown key scheduler.params.{name} in {form.name}: {block['type']} has {', '.join(known)}"
            )


def _read(name: str, key: Key, value: Any, form: Form) -> Any:
    """What a value means. Raises ValueError when it is not of its kind."""
    if value == AUTO:
        if name.endswith(".type"):
            raise ValueError(f'{name} of {form.name} is "auto": say which, or remove it')
        return AUTO
    read = _READERS[key.kind](value)
    if read is None or (key.choices and read not in key.choices):
        wanted = f"one of {', '.join(map(str, key.choices))}" if key.choices else _WANTED[key.kind]
        raise ValueError(f"{name} of {form.name} is {_shown(value)}: give {wanted}")
    return read


def _flag(value: Any) -> bool | None:
    spelled = value.strip().lower() if isinstance(value, str) else value
    return {"true": True, "false": False}.get(spelled) if isinstance(spelled, str) else _only(bool, value)


def _number(value: Any) -> float | int | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    if not math.isfinite(number):
        return None
    return number if isinstance(value, str) else value


def _integer(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None and number == int(number) and number >= 0 else None


def _pair(value: Any) -> tuple[float, float] | None:
    numbers = [_number(part) for part in value] if isinstance(value, list) else []
    return (numbers[0], numbers[1]) if len(numbers) == 2 and None not in numbers else None  # type: ignore[return-value]


def _only(kind: type, value: Any) -> Any:
    return value if isinstance(value, kind) else None


_READERS = {
    "flag": _flag,
    "size": lambda value: _integer(value) or None,
    "integer": _integer,
    "number": _number,
    "text": lambda value: _only(str, value),
    "list": lambda value: _only(list, value),
    "pair": _pair,
}
_WANTED = {
    "flag": "true or false",
    "size": "an integer above 0",
    "integer": "an integer that is not negative",
    "number": "a finite number",
    "text": "text",
    "list": "a list",
    "pair": "a list of two numbers",
}


def _refuse(name: str, value: Any, form: Form) -> None:
    """Raise ValueError unless the value asks for nothing."""
    refused = form.refused[name]
    if value is None or value == AUTO:
        return
    plain = _plain(value)
    if plain in refused.off if refused.off else _is_off(plain):
        return
    raise ValueError(f"{name} of {form.name} is {_shown(value)}, which is refused: {refused.reason}")


def _plain(value: Any) -> Any:
    """A flag or number that is spelled as a string, as what it means."""
    if isinstance(value, str):
        for reader in (_flag, _number):
            if (read := reader(value)) is not None:
                return read
    return value


def _is_off(value: Any) -> bool:
    """Whether a switch, or every switch of a block, is off."""
    if isinstance(value, dict):
        return _plain(value.get("enabled")) is False or all(_plain(part) in (None, False) for part in value.values())
    return value is False


def _nearest(prefix: str, name: str, form: Form) -> str:
    every = (*form.keys, *form.refused, *RENAMED)
    here = {key.removeprefix(prefix).split(".")[0] for key in every if key.startswith(prefix)}
    close = difflib.get_close_matches(name, sorted(here), n=1, cutoff=0.7)
    elsewhere = sorted(key for key in form.keys if key.rsplit(".", 1)[-1] == name)
    right = [f"{prefix}{close[0]}"] if close else elsewhere
    return f" (did you mean {right[0]}?)" if right else f" (known: {', '.join(sorted(here))})"


def _shown(value: Any) -> str:
    """A value as JSON has it, cut short."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)} is given twice")
    return content


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")
