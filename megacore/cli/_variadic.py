"""Options that take several values, as Megatron-LM's tools have them: --data-prefix 0.3 A 0.7 B."""

from collections.abc import Collection
from typing import Any, ClassVar

from typer.core import TyperCommand

from megacore.cli._names import options_named


class VariadicCommand(TyperCommand):
    """A command on files of which some options take several values, besides being given several times."""

    variadic: ClassVar[tuple[str, ...]] = ()
    """Their names, with both dashes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments after `--name A B` was made `--name A --name B`."""
        return super().parse_args(ctx, repeat_options(args, self.variadic))

    def invoke(self, ctx: Any) -> Any:
        """Run the command; its errors speak of options."""
        with options_named():
            return super().invoke(ctx)


def repeat_options(arguments: list[str], names: Collection[str]) -> list[str]:
    """Put the name of the option before each of the values that follow it; a negative number is a value."""
    repeated: list[str] = []
    current: str | None = None
    for position, argument in enumerate(arguments):
        if argument.startswith("-") and not _is_number(argument):
            current = argument if argument in names else None
        elif current is not None and arguments[position - 1] != current:
            repeated.append(current)
        repeated.append(argument)
    return repeated


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
