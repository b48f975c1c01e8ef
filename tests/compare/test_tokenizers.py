"""Comparison of tokenizers: planted faults."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from megacore.compare.models import config_token_findings
from megacore.compare.side import Side
from megacore.compare.tokenizers import compare_tokenizers
from megacore.config.spec import ModelSpec, SpecialTokens
from megacore.corpus.documents import CorpusWriter
from megacore.tokenizer.build import build_tokenizer
from megacore.tokenizer.load import JsonTokenizer
from tests.convert._tiny import documents, tiny_config

Values = dict[str, Any]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokenizer")
    (root / "corpus").mkdir()
    (root / "original").mkdir()
    with CorpusWriter(root / "corpus") as corpus:
        for number, text in enumerate(documents()):
            corpus.add(text, f"document {number}")
    choice = tiny_config().data.tokenizer
    build_tokenizer(choice, root / "corpus", root / "original")
    return root / "original"


def merges_cut(values: Values) -> None:
    values["model"]["merges"] = values["model"]["merges"][:-10]


def vocabulary_exchanged(values: Values) -> None:
    vocabulary = values["model"]["vocab"]
    first, second = list(vocabulary)[10:12]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]


def token_added(values: Values) -> None:
    template = values["added_tokens"][0]
    values["added_tokens"].append({**template, "id": 300, "content": "<|new|>"})


def merges_ignored(values: Values) -> None:
    values["model"]["ignore_merges"] = True


def prefix_space(values: Values) -> None:
    values["pre_tokenizer"]["add_prefix_space"] = not values["pre_tokenizer"]["add_prefix_space"]


def lower_case(values: Values) -> None:
    values["normalizer"] = {"type": "Lowercase"}


def no_decoder(values: Values) -> None:
    values["decoder"] = None


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (merges_cut, "tokenizer_merges"),
        (vocabulary_exchanged, "tokenizer_vocabulary"),
        (token_added, "added_tokens"),
        (merges_ignored, "tokenizer_vocabulary"),
        (prefix_space, "tokenizer_pretokenizer"),
        (lower_case, "tokenizer_normalizer"),
        (no_decoder, "tokenizer_decoder"),
    ],
)
def test_a_damaged_tokenizer_is_named(
    damage: Callable[[Values], None], cause: str, original: Path, tmp_path: Path
) -> None:
    shutil.copytree(original, tmp_path / "damaged")
    path = tmp_path / "damaged" / "tokenizer.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    damage(values)
    path.write_text(json.dumps(values), encoding="utf-8")
    findings, compared = compare_tokenizers(original, tmp_path / "damaged")
    assert compared
    assert cause in {finding.cause for finding in findings if finding.differs}


def test_another_end_of_documents_is_named(original: Path, tmp_path: Path) -> None:
    shutil.copytree(original, tmp_path / "damaged")
    path = tmp_path / "damaged" / "tokenizer_config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**values, "eos_token": "!"}), encoding="utf-8")
    findings, _ = compare_tokenizers(original, tmp_path / "damaged")
    assert "special_tokens" in {finding.cause for finding in findings if finding.differs}


def test_other_scores_of_the_same_tokens_are_named(tmp_path: Path) -> None:
    for name, score in (("first", -2.5), ("same", -2.5 - 1e-9), ("other", -2.75)):
        pieces = [("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0), ("b", score)]
        backend = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
        (tmp_path / name).mkdir()
        JsonTokenizer(backend, "</s>").save(tmp_path / name)
    assert compare_tokenizers(tmp_path / "first", tmp_path / "same") == ([], True)
    [finding], _ = compare_tokenizers(tmp_path / "first", tmp_path / "other")
    assert (finding.cause, finding.where, finding.differs) == ("tokenizer_vocabulary", ("3",), True)
    assert "1 tokens have other scores, first 3 ('b'): -2.5 in A, -2.75 in B" in finding.sentence


def test_an_option_that_only_some_versions_write_is_no_difference(
    original: Path, tmp_path: Path
) -> None:
    shutil.copytree(original, tmp_path / "copy")
    path = tmp_path / "copy" / "tokenizer.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    assert values["model"].pop("ignore_merges") is False
    path.write_text(json.dumps(values), encoding="utf-8")
    assert compare_tokenizers(original, tmp_path / "copy") == ([], True)


def test_a_copy_is_equal(original: Path, tmp_path: Path) -> None:
    shutil.copytree(original, tmp_path / "copy")
    assert compare_tokenizers(original, tmp_path / "copy") == ([], True)


@pytest.mark.parametrize(
    ("ends", "differs"), [((2, 3), False), ((3, 2), False), ((2,), True), ((), True)]
)
def test_ends_of_a_text_differ_by_what_all_files_of_a_model_say(
    ends: tuple[int, ...], differs: bool
) -> None:
    def side(value: int | list[int], ends: tuple[int, ...]) -> Side:
        special = SpecialTokens(eod=1, ends=ends)
        spec = ModelSpec.of(tiny_config(), 100, special)
        values = {"eos_token_id": value}
        return Side(Path("m"), "hf", "gpt2", spec, lambda _: pytest.fail("read"), values=values)

    findings = config_token_findings(side([1, 2, 3], (2, 3)), side(1, ends))
    assert [finding.where for finding in findings] == ([("eos_token_id",)] if differs else [])
