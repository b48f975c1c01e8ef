"""docs/coverage.md: every test that it names exists, with its case."""

import re

import pytest

from tests.architecture._source import ROOT

PAGE = (ROOT / "docs/coverage.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+)(?:\[([^\]]+)\])?)?`", PAGE)))


@pytest.mark.parametrize(("path", "test", "case"), NAMED)
def test_a_named_test_exists_with_its_case(path: str, test: str, case: str) -> None:
    source = (ROOT / path).read_text()
    assert not test or f"def {test}(" in source
    assert not case or f'"{case}":' in source
