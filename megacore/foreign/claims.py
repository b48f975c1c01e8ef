"""Setting in another tool's file, expressed as a value of the configuration."""

from dataclasses import dataclass
from typing import Any


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
