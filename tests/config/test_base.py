"""What every section of the configuration refuses."""

import pytest

from megacore.config.base import Section, unkeyed


class Switches(Section):
    """Fields that take true and false, or do not."""

    maybe: bool | None = unkeyed(None)
    """Takes them, or null."""
    count: int | None = unkeyed(None)
    """Takes a number, or null."""


def test_true_and_false_are_no_numbers() -> None:
    assert (Switches(maybe=True).maybe, Switches(maybe=None).maybe) == (True, None)
    with pytest.raises(
        ValueError, match="count is true: give a value of its type, not true or false"
    ):
        Switches(count=True)
