"""Tests of the examples in docs/sources.md."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import TypeAdapter

from megacore.config.data import Source
from megacore.corpus.remote import TEXT_SUFFIXES, fingerprint

PAGE = Path(__file__).parents[2] / "docs" / "sources.md"
EXAMPLES = [
    values["source"]
    for block in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    if "source" in (values := yaml.safe_load(block))
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example["kind"])
def test_each_example_is_a_valid_source(example: dict[str, Any]) -> None:
    source = TypeAdapter(Source).validate_python(example)
    if source.kind == "http":
        assert fingerprint(source)["files"][0][0] == example["files"][0]["url"]


def test_every_kind_of_source_has_an_example() -> None:
    union = get_args(get_args(Source)[0])
    kinds = {get_args(section.model_fields["kind"].annotation)[0] for section in union}
    assert {example["kind"] for example in EXAMPLES} == kinds
    assert len(kinds) == 8


def test_every_suffix_is_documented() -> None:
    text = PAGE.read_text()
    assert all(
        f"`.{part}`" in text for suffix in TEXT_SUFFIXES for part in suffix.strip(".").split(".")
    )
