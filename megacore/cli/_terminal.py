"""Lines and tables on standard output, in which brackets and `:x:` in a path are no markup."""

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH = 200
"""Width of a table where standard output is no terminal."""
_ANY_WIDTH = 10_000


def write_line(text: str, style: str = "", *, stderr: bool = False) -> None:
    """Print a text; only the terminal breaks its lines, so that paths can be copied."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=stderr).print(Text(text, style), soft_wrap=True)


def write_table(table: "Table") -> None:
    """Print a table, of which nothing is cut off.

    On a terminal that is narrower than its words it has its natural width: the terminal breaks it.
    """
    from rich.console import Console
    from rich.measure import Measurement

    for column in table.columns:
        column.overflow = "fold"
    width = None if sys.stdout.isatty() else _WIDTH
    console = Console(width=width, markup=False, emoji=False)
    needed = Measurement.get(console, console.options.update(width=_ANY_WIDTH), table)
    if console.width < needed.minimum:
        console.width = needed.maximum
    console.print(table)


def write_json_text(value: Any) -> None:
    """Print a value as JSON, for programs."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, indent=2) + "\n")
