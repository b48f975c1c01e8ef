"""Settings of other programs, the rules of translation tables, and the draft that they fill.

Each setting has the place it comes from. A table maps the name of a setting to a rule. After its
program's module has applied the table, each setting is in exactly one place of the draft: a value,
without effect, refused, or a question.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from megacore.config.base import MAX_INTEGER
from megacore.foreign.files import read_number

_Number = TypeVar("_Number", int, float)
_NAMES = {
    "megatron": "Megatron-LM",
    "megatron-deepspeed": "Megatron-DeepSpeed",
    "neox": "GPT-NeoX",
    "nanotron": "nanotron",
}


@dataclass(frozen=True)
class Place:
    """Line of a file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}" if self.line else Path(self.file).name


@dataclass(frozen=True)
class Setting:
    """Flag of a command line, or key of a settings file, with its value."""

    name: str
    """Name as the program spells it, such as `--num-layers` or `zero_optimization.stage`."""
    value: Any
    """Value: a list of words for a flag, else the value of the key."""
    place: Place
    unknown: bool = False
    """True if the value contains a variable or a placeholder without a value."""

    @property
    def words(self) -> list[str]:
        """Values as text, one word each."""
        values = self.value if isinstance(self.value, list) else [self.value]
        return [str(value) for value in values]

    @property
    def text(self) -> str:
        """Setting as written, shortened to one line."""
        shown = _shortened(" ".join(self.words))
        separator = " " if self.name.startswith("--") else ": "
        return f"{self.name}{separator}{shown}".rstrip(" :") if shown else self.name

    def __str__(self) -> str:
        return f"{self.text} ({self.place})"


def _shortened(text: str) -> str:
    return text if len(text) <= 70 else f"{text[:67]}..."


@dataclass
class Settings:
    """All settings of a run, in the order in which they were written; the last of a name counts."""

    program: str
    """Program that they are for, one of `megacore.adopt.read.PROGRAMS`."""
    entry: str
    """Training program or files that they come from, such as pretrain_gpt.py."""
    items: list[Setting]
    remarks: list[str] = field(default_factory=list)
    """Sentences about the reading: conditions taken as false, variables taken as empty."""
    ranks_per_host: int | None = None
    hosts: int | None = None
    launcher: list[Setting] = field(default_factory=list)
    """Options of the launcher, such as --nproc_per_node."""
    json: Mapping[str, Any] | None = None
    """DeepSpeed's JSON of the run; None if there is none."""
    accelerate: Mapping[str, Any] = field(default_factory=dict)
    """Content of Accelerate's YAML; empty for other programs."""

    def __post_init__(self) -> None:
        self._last = {item.name: item for item in self.items}

    def __contains__(self, name: str) -> bool:
        return name in self._last

    def __iter__(self) -> Iterator[Setting]:
        return iter(self._last.values())

    def get(self, name: str) -> Setting | None:
        """Return the setting that counts for a name, or None."""
        return self._last.get(name)

    @property
    def default(self) -> str:
        """Origin of a value that no setting gives: the default of the program."""
        return f"{_NAMES[self.program]}'s default"

    @property
    def ranks(self) -> int | None:
        """Number of ranks of the launch; None if it is not written."""
        if self.ranks_per_host is None:
            return None
        return self.ranks_per_host * (self.hosts or 1)


class Entry(NamedTuple):
    """Value of the configuration, and where it comes from."""

    value: Any
    origin: str
    """Settings it comes from, or the default of the other program."""


class Refused(NamedTuple):
    """Setting that has no equivalent here."""

    setting: str
    feature: str
    """Feature that is absent here, or what is wrong with the value."""
    nearest: str
    """Nearest thing that exists."""

    @property
    def text(self) -> str:
        """Sentence about the setting."""
        return f"{self.setting}: {self.feature}; nearest: {self.nearest}"


@dataclass
class Draft:
    """Configuration in the making."""

    values: dict[str, Entry] = field(default_factory=dict)
    """Values by dotted name."""
    without_effect: list[tuple[Setting, str]] = field(default_factory=list)
    """Settings that change nothing here, with the reason."""
    refused: list[Refused] = field(default_factory=list)
    questions: list[tuple[str, str]] = field(default_factory=list)
    """Dotted name and question about a value that was not written, such as a path."""
    missing: list[tuple[Setting, str]] = field(default_factory=list)
    """Settings without a value that the configuration cannot do without, with the dotted name."""
    wrong: list[str] = field(default_factory=list)
    """Clauses on values that their setting cannot have."""
    remarks: list[str] = field(default_factory=list)
    """Differences in behaviour that no setting states."""
    done: set[str] = field(default_factory=set)
    """Names of settings that have their place."""

    def put(self, name: str, value: Any, *origins: Setting | str) -> None:
        """Set a value that comes from these settings, or from a stated default."""
        self.values[name] = Entry(value, ", ".join(map(str, origins)))
        self.done |= {each.name for each in origins if isinstance(each, Setting)}

    def ignore(self, setting: Setting, reason: str) -> None:
        """Note a setting that changes nothing here."""
        self.without_effect.append((setting, reason))
        self.done.add(setting.name)

    def refuse(self, setting: Setting | str, feature: str, near: str) -> None:
        """Note a setting that has no equivalent here."""
        self.refused.append(Refused(str(setting), feature, near))
        if isinstance(setting, Setting):
            self.done.add(setting.name)

    def reject(self, setting: Setting, advice: object) -> None:
        """Note a value that its setting cannot have, with what to give instead."""
        value = " ".join(setting.words)
        self.wrong.append(f"{setting.name} is {_shortened(value)!r} ({setting.place}): {advice}")
        self.done.add(setting.name)

    def lack(self, setting: Setting, name: str) -> None:
        """Note a setting whose value is not written, and the dotted name that needs it."""
        self.missing.append((setting, name))
        self.done.add(setting.name)

    def ignore_rest(self, reason: str, *settings: Setting | None) -> None:
        """Note those of the settings that have no place yet: they change nothing here."""
        for setting in settings:
            if setting is not None and setting.name not in self.done:
                self.ignore(setting, reason)

    def ask(self, name: str, question: str) -> None:
        """Note a question about a value of the configuration."""
        self.questions.append((name, question))

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value that was set, else a default."""
        return self.values[name].value if name in self.values else default


class BadValueError(ValueError):
    """Value that a setting cannot have; the message says what to give."""


def integer(text: Any) -> int:
    """Return a whole number. Raises BadValueError."""
    number = read_number(text)
    if number is None or number != int(number):
        raise BadValueError("give an integer")
    if abs(number) > MAX_INTEGER:
        raise BadValueError(f"give at most {MAX_INTEGER:,}")
    return int(number)


def positive(text: Any) -> int:
    """Return a whole number above 0. Raises BadValueError."""
    number = integer(text)
    if number < 1:
        raise BadValueError("give an integer above 0")
    return number


def number(text: Any) -> float:
    """Return a number. Raises BadValueError."""
    value = read_number(text)
    if value is None:
        raise BadValueError("give a number")
    return float(value)


def word(text: Any) -> str:
    """Return text without quotes that a script put into it."""
    return str(text).strip("'\"")


def switch(text: Any) -> bool:
    """Return true or false. Raises BadValueError."""
    value = {"true": True, "false": False}.get(str(text).lower())
    if value is None:
        raise BadValueError("give true or false")
    return value


class To(NamedTuple):
    """A value of the configuration with the same meaning."""

    field: str
    convert: Callable[[Any], Any] = word
    off: tuple[str, ...] = ()
    """Values with which the setting requests nothing."""


class On(NamedTuple):
    """A flag without a value that sets a value of the configuration."""

    field: str
    value: Any = True


class Choice(NamedTuple):
    """A value of the configuration whose choices have other names; others are refused."""

    field: str
    choices: Mapping[str, Any]
    feature: str
    near: str


class NoEffect(NamedTuple):
    """A setting that changes nothing here."""

    reason: str


class Absent(NamedTuple):
    """A feature that does not exist here."""

    feature: str
    near: str = "leave it out"
    off: tuple[str, ...] = ()
    """Values with which the setting requests nothing."""


class Joint(NamedTuple):
    """A setting that is translated together with others, by the program's module."""

    purpose: str


Rule = To | On | Choice | NoEffect | Absent | Joint
Table = Mapping[str, Rule]

DECIDES_DATA = Joint("it decides the data")
DECIDES_START = Joint("it decides what the run starts from")
ONLY_SPEED = NoEffect("it changes speed or memory only; kernels are chosen by train.kernels")
ONLY_LOGGING = NoEffect("metrics go to events.jsonl, MLflow and, with tracking.tensorboard, there")
ONLY_LOADING = NoEffect("samples are read from memory maps in the order of the index maps")
ONLY_PROCESSES = NoEffect("the section launch starts and supervises the processes")
_OFF = ("false", "none", "null", "0", "", "[]", "{}")


@dataclass(frozen=True)
class Rules:
    """Table of a program: rules by name, and by pattern for families of settings."""

    exact: Table
    families: tuple[tuple[str, Rule], ...] = ()
    """Regular expressions of names, tried in order after `exact`."""

    def rule(self, name: str) -> Rule | None:
        """Return the rule of a setting; None if the program does not know it."""
        if name in self.exact:
            return self.exact[name]
        for pattern, rule in self.families:
            if re.fullmatch(pattern, name):
                return rule
        return None

    def apply(self, setting: Setting, draft: Draft) -> None:
        """Give a setting its place in the draft, except for a joint one."""
        rule = self.rule(setting.name)
        match rule:
            case None:
                close = difflib.get_close_matches(setting.name, self.exact, n=1, cutoff=0.5)
                near = f"did you mean {close[0]}" if close else "leave it out"
                draft.refuse(setting, "unknown here", near)
            case On(name, value):
                if isinstance(setting.value, bool) and not setting.value:
                    draft.ignore(setting, "it requests nothing")
                else:
                    draft.put(name, value, setting)
            case NoEffect(reason):
                draft.ignore(setting, reason)
            case Absent(feature, near, off):
                if setting.unknown and off:
                    draft.lack(setting, f"{feature}, which is absent here")
                elif _requests_nothing(setting, off):
                    draft.ignore(setting, "its value requests nothing")
                else:
                    draft.refuse(setting, feature, near)
            case To() | Choice() if setting.value is None:
                draft.ignore(setting, "it requests nothing")
            case To() | Choice() if setting.name.startswith("-") and len(setting.words) > 1:
                draft.reject(setting, "give one value")
            case To(off=off) if off and _requests_nothing(setting, off):
                draft.ignore(setting, "its value requests nothing")
            case To(name, convert):
                self._convert(setting, name, convert, draft)
            case Choice(name, choices, feature, near):
                key = word(first(setting)).lower()
                if setting.unknown:
                    draft.lack(setting, name)
                elif key in choices:
                    draft.put(name, choices[key], setting)
                else:
                    draft.refuse(setting, feature, near)
            case Joint():
                pass

    @staticmethod
    def _convert(setting: Setting, name: str, convert: Callable[[Any], Any], draft: Draft) -> None:
        if setting.unknown and convert is not word:
            draft.lack(setting, name)
            return
        try:
            value = convert(first(setting))
        except BadValueError as error:
            draft.reject(setting, error)
            return
        draft.put(name, value, setting)
        if setting.unknown:
            draft.ask(name, f"{setting} has no value: which?")

    def finish(self, settings: Settings, draft: Draft) -> None:
        """Refuse the joint settings for which the program's module found no place.

        A setting that is done and named nowhere is listed as without effect.
        """
        named = [entry.origin for entry in draft.values.values()]
        named += [str(setting) for setting, _ in (*draft.without_effect, *draft.missing)]
        named += [refused.setting for refused in draft.refused] + draft.remarks
        text = "\n".join(named)
        for setting in settings:
            if setting.name not in draft.done:
                rule = self.rule(setting.name)
                purpose = rule.purpose if isinstance(rule, Joint) else "it was not translated"
                if draft.missing:
                    draft.remarks.append(f"{setting}: {purpose}, once the missing values are given")
                    continue
                draft.refuse(setting, f"{purpose}, which it does not decide here", "leave it out")
            elif not names(text, setting.name):
                draft.ignore(setting, "another setting decides the same")


def first(setting: Setting) -> Any:
    """Return a flag's first word, or a key's value."""
    if isinstance(setting.value, list) and setting.name.startswith("-"):
        return setting.value[0] if setting.value else ""
    return setting.value


def _requests_nothing(setting: Setting, off: tuple[str, ...]) -> bool:
    text = " ".join(setting.words).lower()
    if setting.name.startswith("-"):  # a flag without a value is a request
        return bool(setting.words) and text in off
    return text in (*_OFF, *off)


def require(settings: Settings, draft: Draft, sizes: Mapping[str, str]) -> None:
    """Note the sizes of the model that no setting says.

    Args:
        settings: settings of the run.
        draft: draft with the values that the settings say.
        sizes: names of the settings by the dotted names of the values that they set.
    """
    missing = {name for _, name in draft.missing}
    for name, setting in sizes.items():
        if name not in draft.values and name not in missing:
            unwritten = Setting(setting, ["(not written)"], Place(settings.entry, 0))
            draft.missing.append((unwritten, name))


def names(text: str, name: str) -> bool:
    """Return True if a text contains the whole name of a setting."""
    return re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", text) is not None


def ranks_per_host(ranks: int) -> int:
    """Return the ranks of each host where only their total is known: at most 8."""
    return ranks if ranks <= 8 else next(n for n in (8, 4, 2, 1) if ranks % n == 0)


def put_ranks(draft: Draft, ranks: int, origin: str, per_host: int | None = None) -> None:
    """Set the launch of a number of ranks; without `per_host` each host has at most 8 of them."""
    per_host = per_host or ranks_per_host(ranks)
    draft.put("launch.nproc_per_node", per_host, origin)
    if ranks > per_host:
        draft.put("launch.nnodes", ranks // per_host, origin)
        put_hostfile(draft)


def put_hostfile(draft: Draft, hosts: int | None = None) -> None:
    """Set a placeholder for the file with the hosts, and ask for it; `hosts` is their number."""
    draft.put("launch.hostfile", "hostfile", "several hosts")
    count = "" if hosts is None else f"{hosts} "
    draft.ask("launch.hostfile", f"name a file with the {count}hosts, or use launch.kind slurm")


def sources(*settings: Setting | str | None, default: str = "") -> list[Setting | str]:
    """Return the settings that are given; the stated default if there is none."""
    present: list[Setting | str] = [setting for setting in settings if setting is not None]
    return present or ([default] if default else [])


def value_of(settings: Settings, name: str, default: Any = None) -> Any:
    """Return the value of a setting; the default if it is absent or null."""
    setting = settings.get(name)
    return default if setting is None or setting.value is None else setting.value


def number_of(setting: Setting | None, draft: Draft, name: str) -> float | None:
    """Return the number of a joint setting; None if it is absent, unknown or rejected."""
    return _converted(setting, draft, name, number)


def integer_of(
    setting: Setting | None, draft: Draft, name: str, *, least: int = 0, most: int = MAX_INTEGER
) -> int | None:
    """Return the whole number of a joint setting; None if it is absent, unknown or rejected.

    Args:
        setting: the setting; None if it is absent.
        draft: draft that notes an unknown or a wrong value.
        name: dotted name that lacks a value if the setting has none.
        least: smallest value that the setting can have.
        most: largest value that the setting can have.
    """

    def convert(text: Any) -> int:
        value = positive(text) if least == 1 else integer(text)
        if not least <= value <= most:
            raise BadValueError(f"give at least {least:,} and at most {most:,}")
        return value

    return _converted(setting, draft, name, convert)


def _converted(
    setting: Setting | None, draft: Draft, name: str, convert: Callable[[Any], _Number]
) -> _Number | None:
    if setting is None:
        return None
    if setting.unknown:
        draft.lack(setting, name)
        return None
    try:
        return convert(first(setting))
    except BadValueError as error:
        draft.reject(setting, error)
        return None
