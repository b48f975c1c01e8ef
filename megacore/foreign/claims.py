"""What a file of another tool says, as a value of the configuration."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Claim:
    """One value, and the words in which the file says it."""

    field: str
    """Dotted name of the value in the configuration, else in the files' own terms."""
    value: Any
    """What it must be."""
    clause: str
    """Key, file and value as the file has it: `mixed_precision of default_config.yaml is fp16`."""
    ours: bool = True
    """Whether the configuration has such a value; else only files are compared."""
    by_default: bool = False
    """Whether the file leaves it out: its program's default, which gives way to any value."""

    @property
    def meaning(self) -> str:
        """What the file's value means here, where it is not written alike."""
        value = ", ".join(self.value) if isinstance(self.value, list) else self.value
        return (
            ""
            if self.clause.endswith(f" {self.shown(value)}")
            else f", which is {self.field} {self.shown(value)},"
        )

    @staticmethod
    def shown(value: Any) -> str:
        """A value as YAML has it."""
        return str(value).lower() if isinstance(value, bool) else str(value)
