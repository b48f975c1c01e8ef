"""How the parameters of a stage's key follow from what fields declare."""

import json

import pytest
from pydantic import BaseModel

from megacore.config.base import Section, Stage, keyed, unkeyed
from megacore.config.keys import PLACES, Declaration, declaration, key_parameters


class Inner(Section):
    """Fields of a section that names their stages, or name their own."""

    width: int = keyed(3)
    """Of the section's stages."""
    depth: int = keyed(2, key="index")
    """Of a stage of its own."""
    path: str | None = keyed(None, resolved="run")
    """Whose content is in a key."""
    later: int = keyed(0, omit_default=True)
    """Of the section's stages, unless it is 0."""
    workers: int = unkeyed(1)
    """Of none."""


class Outer(Section):
    """An outer section."""

    inner: Inner = keyed(Inner(), key=("run", "evaluate"))
    """Names the stages of its fields."""
    quiet: Inner = unkeyed(Inner())
    """Names none for them."""
    several: tuple[Inner, ...] = keyed((Inner(), Inner(width=4)), key="evaluate")
    """Several sections."""
    files: tuple[str, ...] = keyed(("a", "b"), key="publish")
    """Values."""


class Silent(Section):
    """A section whose field does not say."""

    value: int = 1
    """Declares nothing."""


def test_a_key_has_the_values_that_name_its_stage_as_json() -> None:
    parameters = key_parameters(Outer(), "run")
    assert parameters == {"inner": {"width": 3}}
    assert key_parameters(Outer(), "publish") == {"files": ["a", "b"]}
    assert key_parameters(Outer(), "collect") == {}
    assert json.loads(json.dumps(parameters)) == parameters


def test_a_default_that_came_later_stays_out() -> None:
    assert key_parameters(Outer(inner=Inner(later=1)), "run") == {"inner": {"width": 3, "later": 1}}


def test_sections_in_a_list_are_a_list() -> None:
    single = Outer(inner=Inner(width=9), several=(Inner(), Inner(width=4)))
    assert key_parameters(single, "publish") == {"files": ["a", "b"]}
    values = key_parameters(Outer(), "index")
    assert values["several"] == [{"depth": 2}, {"depth": 2}]


def test_a_section_by_itself_belongs_to_the_stage_that_reads_it() -> None:
    assert key_parameters(Inner(), "run", {"path": "digest"}) == {"width": 3, "path": "digest"}


def test_a_value_has_the_place_of_its_section(monkeypatch: pytest.MonkeyPatch) -> None:
    places: dict[Stage, dict[str, str]] = {"run": {"inner": "", "inner.width": "deep.wide"}}
    monkeypatch.setattr("megacore.config.keys.PLACES", {**PLACES, **places})
    values = Outer(inner=Inner(later=2))
    assert key_parameters(values, "run", {"deep.path": 1}) == {
        "deep": {"wide": 3, "path": 1},
        "later": 2,
    }


def test_two_values_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the key of run has two values named inner\.width"):
        key_parameters(Outer(), "run", {"inner.width": 1})


def test_what_enters_a_key_enters_those_that_hold_it() -> None:
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
def test_a_field_declares_its_stages_or_takes_its_sections(
    section: type[BaseModel], name: str, stages: set[str]
) -> None:
    inherited = Declaration(frozenset(["evaluate"]))
    declared = declaration(section, name, inherited)
    assert declared is not None
    assert declared.stages == stages


def test_a_field_must_declare_whether_it_enters_a_key() -> None:
    message = (
        r"Silent\.value is neither keyed\(\) nor unkeyed\(\): declare it as keyed\(key=\.\.\.\)"
    )
    with pytest.raises(TypeError, match=message):
        key_parameters(Silent(), "run")
    assert declaration(Inner, "width", None) is None  # neither it nor its section names a stage
