"""Reader of DeepSpeed's JSON, which checks every key and every value's type."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megacore.foreign.deepspeed_keys import (
    AUTO,
    REFUSED,
    SCHEDULER_TYPES,
    Definitions,
    Key,
    Refused,
    definitions,
)
from megacore.foreign.files import read_number, shown


@dataclass(frozen=True)
class AcceptedKeys:
    """Keys that a kind of run accepts in DeepSpeed's JSON."""

    definitions: Definitions
    """Definitions of the installed DeepSpeed."""
    keys: Mapping[str, Key]
    """All accepted keys."""
    name: str = "deepspeed.config"
    """Name of the file in messages."""
    refused: Mapping[str, Refused] = field(default_factory=lambda: REFUSED)
    """Refused keys by name."""
    optimizers: tuple[str, ...] = ("Adam", "AdamW")
    """Accepted types of optimizer; DeepSpeed ignores their case."""
    no_optimizer: str = "but megacore trains only with AdamW: use AdamW, or remove optimizer"
    """Message for other optimizers."""
    no_scheduler: str = "and no optim.lr_decay_style is like it"
    """Message for a scheduler without an equivalent."""


def pretraining_keys() -> AcceptedKeys:
    """Return the keys of a pretraining. Raises ValueError if DeepSpeed is not installed."""
    known = definitions()
    return AcceptedKeys(known, known.keys)


def read_keys(
    content: Mapping[str, Any], accepted: AcceptedKeys | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield a JSON's values, checked for their type or "auto", by their current dotted names.

    Args:
        content: content of the JSON.
        accepted: accepted keys; None means `pretraining_keys()`.

    Raises:
        ValueError: a key is unknown, refused or given in two spellings, a value has the wrong type,
            or DeepSpeed refuses a block.
    """
    accepted = accepted or pretraining_keys()
    spellings: dict[str, str] = {}
    values: dict[str, Any] = {}
    for name, (key, value) in _leaves("", content, accepted):
        if key in spellings:
            raise ValueError(
                f"{accepted.name} says both {spellings[key]} and {name}, which are the same: "
                "remove one"
            )
        spellings[key], values[key] = name, value
    accepted.definitions.check(values, accepted.name)
    yield from values.items()


def _leaves(
    prefix: str, block: Mapping[str, Any], accepted: AcceptedKeys
) -> Iterator[tuple[str, tuple[str, Any]]]:
    """Yield each value's name in the file, its current name, and the parsed value."""
    flags = accepted.definitions.offload_flags
    # Read the type first: it determines the valid parameters.
    for name in sorted(block, key=lambda name: name != "type"):
        spelled, value = f"{prefix}{name}", block[name]
        key = accepted.definitions.renamed.get(spelled, spelled)
        if key == "zero_optimization" and isinstance(value, bool):
            yield spelled, ("zero_optimization.stage", int(value))
        elif spelled in flags:
            if _read(spelled, Key("flag"), value, accepted) is True:
                yield spelled, (flags[spelled], "cpu")
        elif key in accepted.refused:
            _refuse(key, value, accepted)
        elif key in accepted.keys:
            if value is not None:
                yield spelled, (key, _typed(key, value, accepted))
        elif any(known.startswith(f"{key}.") for known in accepted.keys):
            if not isinstance(value, dict | None):
                raise ValueError(
                    f"{spelled} of {accepted.name} is {shown(value)}: give an object of its keys"
                )
            _check_parameters(key, value or {}, block, accepted)
            yield from _leaves(f"{key}.", value or {}, accepted)
        else:
            raise ValueError(
                f"unknown key {spelled} in {accepted.name}{_nearest(prefix, str(name), accepted)}"
            )


def _typed(name: str, value: Any, accepted: AcceptedKeys) -> Any:
    """Return the parsed value of a key.

    Raises ValueError for a value of the wrong type, and for an unsupported optimizer or scheduler.
    """
    value = _read(name, accepted.keys[name], value, accepted)
    if name == "optimizer.type":
        spelled = {kind.lower(): kind for kind in accepted.optimizers}.get(value.lower())
        if spelled is None:
            raise ValueError(
                f"optimizer.type of {accepted.name} is {value} {accepted.no_optimizer}"
            )
        return spelled
    if name == "scheduler.type" and value not in SCHEDULER_TYPES:
        raise ValueError(
            f"scheduler.type of {accepted.name} is {value}, {accepted.no_scheduler}: use "
            f"{', '.join(SCHEDULER_TYPES)}, or remove scheduler, and optim describes the schedule"
        )
    return value


def _check_parameters(
    key: str, params: Mapping[str, Any], block: Mapping[str, Any], accepted: AcceptedKeys
) -> None:
    """Raise ValueError for parameters without a type, or of another type of scheduler."""
    if key in ("optimizer.params", "scheduler.params") and block.get("type") is None:
        raise ValueError(
            f"{accepted.name} has {key} without {key.replace('params', 'type')}: say the type"
        )
    for name in params if key == "scheduler.params" else ():
        known = accepted.definitions.schedulers[block["type"]]
        if name not in known:
            raise ValueError(
                f"unknown key scheduler.params.{name} in {accepted.name}: {block['type']} has "
                f"{', '.join(known)}"
            )


def _read(name: str, key: Key, value: Any, accepted: AcceptedKeys) -> Any:
    """Return the parsed value of a key. Raises ValueError if it has the wrong type."""
    if value == AUTO:
        if name.endswith(".type"):
            raise ValueError(f'{name} of {accepted.name} is "auto": say which, or remove it')
        return AUTO
    reader, expected = _READERS[key.kind]
    read = reader(value)
    if read is None or (key.choices and read not in key.choices):
        expected = f"one of {', '.join(map(str, key.choices))}" if key.choices else expected
        raise ValueError(f"{name} of {accepted.name} is {shown(value)}: give {expected}")
    return read


def _flag(value: Any) -> bool | None:
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.strip().lower())
    return value if isinstance(value, bool) else None


def _integer(value: Any) -> int | None:
    number = read_number(value)
    return int(number) if number is not None and number == int(number) and number >= 0 else None


def _pair(value: Any) -> tuple[float, float] | None:
    numbers = [read_number(part) for part in value] if isinstance(value, list) else []
    return (numbers[0], numbers[1]) if len(numbers) == 2 and None not in numbers else None  # type: ignore[return-value]


def _only(kind: type, value: Any) -> Any:
    return value if isinstance(value, kind) else None


_READERS = {
    "flag": (_flag, "true or false"),
    "size": (lambda value: _integer(value) or None, "an integer above 0"),
    "integer": (_integer, "an integer that is not negative"),
    "number": (read_number, "a finite number"),
    "text": (lambda value: _only(str, value), "text"),
    "list": (lambda value: _only(list, value), "a list"),
    "pair": (_pair, "a list of two numbers"),
}
"""Reader of each kind of value, which may be given as text, and the description of valid values."""


def _refuse(name: str, value: Any, accepted: AcceptedKeys) -> None:
    """Raise ValueError unless the value of a refused key requests nothing."""
    refused = accepted.refused[name]
    if value is None or value == AUTO:
        return
    plain = _plain(value)
    if plain in refused.off if refused.off else _is_off(plain):
        return
    raise ValueError(
        f"{name} of {accepted.name} is {shown(value)}, which is refused: {refused.reason}"
    )


def _plain(value: Any) -> Any:
    """Return the value of a flag or number given as text, and any other value unchanged."""
    if isinstance(value, str):
        for reader in (_flag, read_number):
            if (read := reader(value)) is not None:
                return read
    return value


def _is_off(value: Any) -> bool:
    """Return True if a switch is off, or a block is disabled or has only switches that are off."""
    if isinstance(value, dict):
        switches = value.values()
        return _plain(value.get("enabled")) is False or all(
            _plain(part) in (None, False) for part in switches
        )
    return value is False


def _nearest(prefix: str, name: str, accepted: AcceptedKeys) -> str:
    every = (*accepted.keys, *accepted.refused, *accepted.definitions.renamed)
    here = {key.removeprefix(prefix).split(".")[0] for key in every if key.startswith(prefix)}
    close = difflib.get_close_matches(name, sorted(here), n=1, cutoff=0.7)
    elsewhere = sorted(key for key in accepted.keys if key.rsplit(".", 1)[-1] == name)
    right = [f"{prefix}{close[0]}"] if close else elsewhere
    return f" (did you mean {right[0]}?)" if right else f" (known: {', '.join(sorted(here))})"
