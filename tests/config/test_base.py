"""Values that every section of the configuration refuses."""

import pytest

from megacore.config.base import Section, unkeyed


class Switches(Section):
    """Fields that take booleans, and fields that do not."""

    maybe: bool | None = unkeyed(None)
    """True, false or null."""
    count: int | None = unkeyed(None)
    """A number or null."""


def test_a_boolean_is_refused_where_a_number_is_expected() -> None:
    assert (Switches(maybe=True).maybe, Switches(maybe=None).maybe) == (True, None)
    with pytest.raises(
        ValueError, match="count is true: give a value of its type, not true or false"
    ):
        Switches(count=True)


def test_a_section_knows_which_fields_have_their_default() -> None:
    switches = Switches(maybe=None, count=2)
    assert switches.has_default("maybe")
    assert not switches.has_default("count")
