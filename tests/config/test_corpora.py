"""The corpora in conf/data/, which other configurations extend."""

import re
from pathlib import Path

import pytest
import yaml

from megacore.config import RunConfig, load_config
from megacore.config.data import HubSource
from megacore.corpus.hub import fingerprint
from tests.config.test_load import CONF_DIR

CORPORA = sorted((CONF_DIR / "data").glob("*.yaml"))
NAMES = [path.stem for path in CORPORA]
UNPINNED = {"bookcorpus": "refs/convert/parquet"}
"""Revisions of which no public source names a commit."""


def extend(directory: Path, *bases: str) -> RunConfig:
    """Load a configuration that extends files of conf/."""
    path = directory / "own.yaml"
    paths = [str(CONF_DIR / f"{base}.yaml") for base in bases]
    path.write_text(yaml.safe_dump({"name": "own", "extends": paths}), encoding="utf-8")
    return load_config(str(path))


def test_all_corpora_are_there() -> None:
    assert set(NAMES) == {
        "bookcorpus",
        "codeparrot",
        "fineweb-edu",
        "openwebtext",
        "wikipedia-en",
        "wikipedia-ja",
        "wikitext-103",
    }


@pytest.mark.parametrize("base", ["gpt2-345m", "codeparrot-small", "gpt2-tiny", "bert-345m"])
@pytest.mark.parametrize("path", CORPORA, ids=NAMES)
def test_a_corpus_replaces_the_source_completely(path: Path, base: str, tmp_path: Path) -> None:
    """Sources of one kind are merged by field, so a corpus must set each field that differs."""
    values = yaml.safe_load(path.read_text(encoding="utf-8"))["data"]["source"]
    config = extend(tmp_path, base, f"data/{path.stem}")
    assert config.data.source == HubSource.model_validate(values)
    assert config.train == load_config(base).train


@pytest.mark.parametrize("path", CORPORA, ids=NAMES)
def test_a_corpus_is_pinned_to_a_commit(path: Path) -> None:
    source = yaml.safe_load(path.read_text(encoding="utf-8"))["data"]["source"]
    if path.stem in UNPINNED:
        assert source["revision"] == UNPINNED[path.stem]
    else:
        assert re.fullmatch("[0-9a-f]{40}", source["revision"])


@pytest.mark.parametrize(
    ("row", "begins"),
    [
        (" = Valkyria Chronicles III = \n", True),
        (" = E = mc² = \n", True),
        (" = = Gameplay = = \n", False),
        (" = = = Plot = = = \n", False),
        (" As with previous games , a = b = c . \n", False),
        ("", False),
    ],
)
def test_articles_of_wikitext_begin_with_a_title(row: str, begins: bool) -> None:
    source = load_config("gpt2-345m").data.source
    assert isinstance(source, HubSource)
    assert source.document_start is not None
    assert bool(re.search(source.document_start, row)) is begins
    assert "document_start" in fingerprint(source)


def test_sentences_of_bookcorpus_stay_in_order_without_ends_of_documents(tmp_path: Path) -> None:
    data = extend(tmp_path, "gpt2-tiny", "data/bookcorpus").data
    assert (data.shuffle_documents, data.append_eod) == (False, False)
