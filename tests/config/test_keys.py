"""Parameters of a stage's key, derived from the declarations of fields."""

import json

import pytest
from pydantic import BaseModel

from megacore.config.base import Section, Stage, keyed, unkeyed
from megacore.config.keys import PLACES, Declaration, declaration, key_parameters


class Inner(Section):
    """Fields with the stages of their section, and fields with their own."""

    width: int = keyed(3)
    """Value with the stages of its section."""
    depth: int = keyed(2, key="index")
    """Value with its own stage."""
    path: str | None = keyed(None, resolved="run")
    """Path whose content enters a key."""
    later: int = keyed(0, omit_default=True)
    """Value with the stages of its section, omitted if it is 0."""
    workers: int = unkeyed(1)
    """Value in no key."""


class Outer(Section):
    """An outer section."""

    inner: Inner = keyed(Inner(), key=("run", "evaluate"))
    """Section that names the stages of its fields."""
    quiet: Inner = unkeyed(Inner())
    """Section that names no stages."""
    several: tuple[Inner, ...] = keyed((Inner(), Inner(width=4)), key="evaluate")
    """Several sections."""
    files: tuple[str, ...] = keyed(("a", "b"), key="publish")
    """Plain values."""


class Silent(Section):
    """A section whose field declares nothing."""

    value: int = 1
    """Value without a declaration."""


def test_key_parameters_are_the_fields_of_the_stage_as_json() -> None:
    parameters = key_parameters(Outer(), "run")
    assert parameters == {"inner": {"width": 3}}
    assert key_parameters(Outer(), "publish") == {"files": ["a", "b"]}
    assert key_parameters(Outer(), "collect") == {}
    assert json.loads(json.dumps(parameters)) == parameters


def test_omit_default_keeps_other_values_in_the_key() -> None:
    assert key_parameters(Outer(inner=Inner(later=1)), "run") == {"inner": {"width": 3, "later": 1}}


def test_a_list_of_sections_stays_a_list() -> None:
    single = Outer(inner=Inner(width=9), several=(Inner(), Inner(width=4)))
    assert key_parameters(single, "publish") == {"files": ["a", "b"]}
    values = key_parameters(Outer(), "index")
    assert values["several"] == [{"depth": 2}, {"depth": 2}]


def test_fields_of_a_root_section_enter_the_key_of_any_stage() -> None:
    assert key_parameters(Inner(), "run", {"path": "digest"}) == {"width": 3, "path": "digest"}


def test_values_move_to_the_place_of_their_section(monkeypatch: pytest.MonkeyPatch) -> None:
    places: dict[Stage, dict[str, str]] = {"run": {"inner": "", "inner.width": "deep.wide"}}
    monkeypatch.setattr("megacore.config.keys.PLACES", {**PLACES, **places})
    values = Outer(inner=Inner(later=2))
    assert key_parameters(values, "run", {"deep.path": 1}) == {
        "deep": {"wide": 3, "path": 1},
        "later": 2,
    }


def test_duplicate_names_in_a_key_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the key of run has two values named inner\.width"):
        key_parameters(Outer(), "run", {"inner.width": 1})


def test_a_stage_includes_the_stages_whose_keys_contain_its_key() -> None:
    assert Declaration(frozenset(["run"])).stages == {"run", "train"}
    assert Declaration(frozenset(), frozenset(["tokenize"])).stages == {
        "tokenize",
        "tokenize-shard",
    }


@pytest.mark.parametrize(
    ("section", "name", "stages"),
    [
        (Inner, "width", {"evaluate"}),
        (Inner, "depth", {"index"}),
        (Inner, "path", {"run", "train"}),
        (Inner, "workers", set()),
    ],
)
def test_a_field_declares_its_stages_or_inherits_its_sections(
    section: type[BaseModel], name: str, stages: set[str]
) -> None:
    inherited = Declaration(frozenset(["evaluate"]))
    declared = declaration(section, name, inherited)
    assert declared is not None
    assert declared.stages == stages


def test_an_undeclared_field_is_refused() -> None:
    message = (
        r"Silent\.value is neither keyed\(\) nor unkeyed\(\): declare it as keyed\(key=\.\.\.\)"
    )
    with pytest.raises(TypeError, match=message):
        key_parameters(Silent(), "run")
    assert declaration(Inner, "width", None) is None  # neither it nor its section names a stage
