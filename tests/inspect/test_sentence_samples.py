"""`inspect` on samples of BERT and T5, and `verify` on sentence maps."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from megacore.cli import app
from megacore.data.index_directory import map_path
from megacore.data.index_options import IndexOptions, Member, Mixture, SentenceOptions
from megacore.data.sentence_maps import build_sentence_maps
from megacore.errors import DataFormatError
from megacore.inspect.index import find_sample
from megacore.inspect.report import report_index, report_sample, spelled
from megacore.inspect.verify import verify
from megacore.tokenizer import load_tokenizer
from tests.data._sentences import write_lengths
from tests.data.test_build import write_tokenizer

DOCUMENTS = [[4, 5, 3, 6, 2], [7, 8], [], [3, 3, 3]] * 6


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path)


def build(tmp_path: Path, kind: Any, *, blend: bool = False) -> Path:
    prefixes = [
        write_lengths(tmp_path / name, DOCUMENTS[first_document:]).prefix
        for first_document, name in enumerate("ab")
    ]
    weighted = [Member(prefix, weight) for prefix, weight in zip(prefixes, (1.0, 2.0), strict=True)]
    mixture = Mixture.blend(weighted) if blend else Mixture.single(prefixes[0])
    sentences = SentenceOptions(kind, minimum_sentences=2 if kind == "bert" else 1)
    options = IndexOptions(split="2,1,1", seq_length=32, seed=5, sentences=sentences)
    directory = tmp_path / "maps"
    directory.mkdir()
    build_sentence_maps(mixture, directory, options, (20, 4, None))
    return directory


@pytest.mark.parametrize("blend", [False, True])
def test_a_sample_of_bert_has_the_sentences_of_its_map(
    tmp_path: Path, tokenizer: Path, blend: bool
) -> None:
    directory = build(tmp_path, "bert", blend=blend)
    sample = find_sample(directory, "train", 7)
    rows = np.load(
        map_path(
            directory / f"member-0{sample.member}" if blend else directory, "train", "sentence"
        )
    )
    first, end, _ = rows[sample.row].tolist()
    assert [part.sequence for part in sample.parts] == list(range(first, end))
    assert all(part.start == 0 and part.stop == part.length for part in sample.parts)
    assert len({part.document for part in sample.parts}) == 1
    report = report_sample(directory, "train", 7, tokenizer)
    assert report["map"] == "sentence map"
    training_input = report["made"]
    assert training_input["reads"].startswith("[CLS] ")
    assert training_input["reads"].count("[SEP]") == 2
    assert training_input["sentence_label"] in (0, 1)
    assert training_input["predicts"]
    assert report_sample(directory, "train", 7, None)["made"] is None
    with pytest.raises(DataFormatError, match="has no sample 9999"):
        find_sample(directory, "train", 9999)


def test_a_sample_of_t5_has_sentinels_and_spans(tmp_path: Path, tokenizer: Path) -> None:
    directory = build(tmp_path, "t5")
    training_input = report_sample(directory, "valid", 1, tokenizer)["made"]
    assert "<extra_id_0>" in training_input["reads"]
    assert training_input["writes"].startswith("<extra_id_0> ")
    assert training_input["writes"].endswith(" [SEP]")
    assert training_input["options"]["mean_span_length"] == 3.0


def test_masking_options_come_from_the_manifest(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = build(tmp_path, "bert")
    before = report_sample(directory, "train", 0, tokenizer)["made"]
    parameters = {"masked_lm": {"masked_lm_prob": 0.5, "pairs": True}}
    monkeypatch.setattr("megacore.inspect.report._parameters", lambda place: parameters)
    after = report_sample(directory, "train", 0, tokenizer)["made"]
    assert after["options"]["masked_lm_prob"] == 0.5
    assert len(after["predicts"]) > len(before["predicts"])


def test_inspect_prints_the_input_and_labels_of_a_sample(tmp_path: Path, tokenizer: Path) -> None:
    directory = build(tmp_path, "bert")
    arguments = ["inspect", str(directory), "--sample", "2", "--tokenizer", str(tokenizer)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "of its sentence map)" in result.output
    assert "the model reads\n  | [CLS]" in result.output
    assert "and predicts " in result.output
    assert json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)["made"]["predicts"]
    result = CliRunner().invoke(app, ["inspect", str(directory)])
    assert "kind bert, minimum_sentences 2, short_seq_prob 0.1" in result.output
    assert report_index(directory)["options"]["kind"] == "bert"


def test_special_tokens_are_spelled_between_spaces(tokenizer: Path) -> None:
    loaded = load_tokenizer(tokenizer)
    assert spelled(np.array([2, 7, 9, 400, 4, 3]), loaded) == "[CLS] t7t9 <extra_id_0> [MASK] [SEP]"
    assert spelled(np.array([], np.int64), loaded) == ""


@pytest.mark.parametrize("blend", [False, True])
def test_undamaged_maps_pass_verification(tmp_path: Path, blend: bool) -> None:
    directory = build(tmp_path, "bert", blend=blend)
    results = {check.name: check.result for check in verify(directory)}
    assert results["train maps 0"].endswith("samples of 9 documents")
    assert ("train blend" in results) == blend


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            [0, 1, 20],
            (
                "sample 1 has the sentences 0 to 0, which are not 2 or more of one document of the "
                "train split"
            ),
        ),
        ([3, 7, 20], "sample 1 has the sentences 3 to 6"),
        ([30, 33, 20], "of one document of the train split, 0 to 29"),
        ([0, 3, 31], "samples of .* to 31 tokens where 2 to 29 have room"),
        ([0, 9999, 20], "points beyond the 60 sentences"),
    ],
)
def test_damaged_maps_are_refused(tmp_path: Path, row: list[int], message: str) -> None:
    directory = build(tmp_path, "bert")
    path = map_path(directory, "train", "sentence")
    rows = np.load(path)
    rows[1] = row
    np.save(path, rows)
    with pytest.raises(DataFormatError, match=message):
        list(verify(directory))


def test_a_map_of_another_length_is_refused(tmp_path: Path) -> None:
    directory = build(tmp_path, "t5")
    path = map_path(directory, "valid", "sentence")
    np.save(path, np.load(path)[:-1])
    with pytest.raises(DataFormatError, match=r"counts .* valid samples, but its maps have"):
        list(verify(directory))
