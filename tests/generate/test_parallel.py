"""The layout changes neither what is generated nor what is scored."""

from pathlib import Path
from typing import Any

import pytest

from tests._dist import run_distributed
from tests.generate import _ranks, _tiny
from tests.zeroshot import _texts


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of every kind, and the texts."""
    directory = tmp_path_factory.mktemp("parallel")
    _tiny.write_tokenizer(directory / "tokenizer", _ranks.VOCAB)
    for kind, values in _tiny.KINDS.items():
        own = _tiny.spec(_ranks.VOCAB, **values)
        _tiny.write_checkpoint(directory / kind, own, _tiny.random_model(own))
    _texts.write_wikitext(directory / "wiki")
    _texts.write_lambada(directory / "lambada.jsonl")
    return directory


@pytest.fixture(scope="module")
def alone(root: Path) -> dict[str, Any]:
    return _ranks.run(root)


@pytest.fixture(scope="module")
def ranks(root: Path) -> list[dict[str, Any]]:
    return run_distributed(2, _ranks.run, root)


@pytest.mark.parametrize("layout", ["tensor", "data"])
@pytest.mark.parametrize("kind", _tiny.KINDS)
def test_tokens_are_the_same(
    layout: str, kind: str, alone: dict[str, Any], ranks: list[dict[str, Any]]
) -> None:
    for rank in ranks:
        assert rank[layout][kind] == alone[kind]
    assert alone[kind][0] != alone[kind][1]


@pytest.mark.parametrize("layout", ["tensor", "data"])
def test_scores_are_the_same(
    layout: str, alone: dict[str, Any], ranks: list[dict[str, Any]]
) -> None:
    for rank in ranks:
        assert rank[layout]["wikitext"].loss == pytest.approx(alone["wikitext"].loss, rel=1e-6)
        assert rank[layout]["wikitext"].tokens == alone["wikitext"].tokens
        assert rank[layout]["lambada"].correct == alone["lambada"].correct
        assert rank[layout]["lambada"].target_ppl == pytest.approx(
            alone["lambada"].target_ppl, rel=1e-5
        )
