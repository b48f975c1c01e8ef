"""Settings as other programs write them, each with the place it comes from."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


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
        shown = " ".join(self.words)
        shown = shown if len(shown) <= 70 else f"{shown[:67]}..."
        separator = " " if self.name.startswith("--") else ": "
        return f"{self.name}{separator}{shown}".rstrip(" :") if shown else self.name

    def __str__(self) -> str:
        return f"{self.text} ({self.place})"


@dataclass
class Settings:
    """All settings of a run, in the order in which they were written; the last of a name counts."""

    program: str
    """Program that they are for: megatron, megatron-deepspeed, neox, nanotron."""
    entry: str
    """Training program or files that they come from, such as pretrain_gpt.py."""
    items: list[Setting]
    remarks: list[str] = field(default_factory=list)
    """Sentences about the reading: conditions taken as false, variables taken as empty."""
    ranks_per_host: int | None = None
    hosts: int | None = None
    launcher: list[Setting] = field(default_factory=list)
    """Options of the launcher, such as --nproc_per_node."""

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
    def ranks(self) -> int | None:
        """Number of ranks of the launch; None if it is not written."""
        if self.ranks_per_host is None:
            return None
        return self.ranks_per_host * (self.hosts or 1)
