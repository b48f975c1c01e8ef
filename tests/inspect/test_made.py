"""`inspect` shows what BERT and T5 read of a sample.

`verify` holds sentence maps against their sentences.
"""

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
        write_lengths(tmp_path / name, DOCUMENTS[place:]).prefix for place, name in enumerate("ab")
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
def test_the_sentences_of_a_sample(tmp_path: Path, tokenizer: Path, blend: bool) -> None:
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
    found = report_sample(directory, "train", 7, tokenizer)
    assert found["map"] == "sentence map"
    made = found["made"]
    assert made["reads"].startswith("[CLS] ")
    assert made["reads"].count("[SEP]") == 2
    assert made["sentence_label"] in (0, 1)
    assert made["predicts"]
    assert report_sample(directory, "train", 7, None)["made"] is None
    with pytest.raises(DataFormatError, match="has no sample 9999"):
        find_sample(directory, "train", 9999)


def test_what_t5_writes(tmp_path: Path, tokenizer: Path) -> None:
    directory = build(tmp_path, "t5")
    made = report_sample(directory, "valid", 1, tokenizer)["made"]
    assert "<extra_id_0>" in made["reads"]
    assert made["writes"].startswith("<extra_id_0> ")
    assert made["writes"].endswith(" [SEP]")
    assert made["options"]["mean_span_length"] == 3.0


def test_options_are_those_of_the_manifest(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = build(tmp_path, "bert")
    before = report_sample(directory, "train", 0, tokenizer)["made"]
    given = {"masked_lm": {"masked_lm_prob": 0.5, "pairs": True}}
    monkeypatch.setattr("megacore.inspect.report._parameters", lambda place: given)
    made = report_sample(directory, "train", 0, tokenizer)["made"]
    assert made["options"]["masked_lm_prob"] == 0.5
    assert len(made["predicts"]) > len(before["predicts"])


def test_in_a_terminal(tmp_path: Path, tokenizer: Path) -> None:
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


def test_special_tokens_stand_between_spaces(tokenizer: Path) -> None:
    given = load_tokenizer(tokenizer)
    assert spelled(np.array([2, 7, 9, 400, 4, 3]), given) == "[CLS] t7t9 <extra_id_0> [MASK] [SEP]"
    assert spelled(np.array([], np.int64), given) == ""


@pytest.mark.parametrize("blend", [False, True])
def test_whole_maps_are_verified(tmp_path: Path, blend: bool) -> None:
    directory = build(tmp_path, "bert", blend=blend)
    found = {check.name: check.result for check in verify(directory)}
    assert found["train maps 0"].endswith("samples of 9 documents")
    assert ("train blend" in found) == blend


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
def test_damaged_maps_are_found(tmp_path: Path, row: list[int], message: str) -> None:
    directory = build(tmp_path, "bert")
    path = map_path(directory, "train", "sentence")
    rows = np.load(path)
    rows[1] = row
    np.save(path, rows)
    with pytest.raises(DataFormatError, match=message):
        list(verify(directory))


def test_a_map_of_another_length_is_found(tmp_path: Path) -> None:
    directory = build(tmp_path, "t5")
    path = map_path(directory, "valid", "sentence")
    np.save(path, np.load(path)[:-1])
    with pytest.raises(DataFormatError, match=r"counts .* valid samples, but its maps have"):
        list(verify(directory))
