"""Independence of generation and scores from the layout."""

from pathlib import Path
from typing import Any

import pytest

from tests._dist import run_distributed
from tests.generate import _ranks, _tiny
from tests.zeroshot import _texts


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a checkpoint of every kind, and the texts."""
    directory = tmp_path_factory.mktemp("parallel")
    _tiny.write_tokenizer(directory / "tokenizer", _ranks.VOCAB)
    for kind, values in _tiny.KINDS.items():
        spec = _tiny.spec(_ranks.VOCAB, **values)
        _tiny.write_checkpoint(directory / kind, spec, _tiny.random_model(spec))
    _texts.write_wikitext(directory / "wiki")
    _texts.write_lambada(directory / "lambada.jsonl")
    return directory


@pytest.fixture(scope="module")
def one_process(root: Path) -> dict[str, Any]:
    return _ranks.run(root)


@pytest.fixture(scope="module")
def ranks(root: Path) -> list[dict[str, Any]]:
    return run_distributed(2, _ranks.run, root)


@pytest.mark.parametrize("layout", ["tensor", "data"])
@pytest.mark.parametrize("kind", _tiny.KINDS)
def test_tokens_do_not_depend_on_the_layout(
    layout: str, kind: str, one_process: dict[str, Any], ranks: list[dict[str, Any]]
) -> None:
    for rank in ranks:
        assert rank[layout][kind] == one_process[kind]
    assert one_process[kind][0] != one_process[kind][1]


@pytest.mark.parametrize("layout", ["tensor", "data"])
def test_scores_do_not_depend_on_the_layout(
    layout: str, one_process: dict[str, Any], ranks: list[dict[str, Any]]
) -> None:
    for rank in ranks:
        assert rank[layout]["wikitext"].loss == pytest.approx(
            one_process["wikitext"].loss, rel=1e-6
        )
        assert rank[layout]["wikitext"].tokens == one_process["wikitext"].tokens
        assert rank[layout]["lambada"].correct == one_process["lambada"].correct
        assert rank[layout]["lambada"].target_ppl == pytest.approx(
            one_process["lambada"].target_ppl, rel=1e-5
        )
