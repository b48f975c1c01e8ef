"""The export stage of a BERT and a T5, from sentences to a directory that passed the gate."""

import json
from pathlib import Path

import pytest
import torch

from megacore.convert.export import export
from megacore.convert.parity import load_exported, load_exported_tokenizer
from megacore.errors import ConversionError
from megacore.jobs.run import ConvertJob
from tests.convert._family_jobs import family_config, family_job


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> ConvertJob:
    job = family_job(tmp_path_factory.mktemp("bert"), family_config("bert"))
    export(job)
    return job


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> ConvertJob:
    job = family_job(
        tmp_path_factory.mktemp("t5"), family_config("t5", dtype="bfloat16", max_test_samples=5)
    )
    export(job)
    return job


def read(job: ConvertJob, name: str) -> str:
    return (Path(job.output_directory) / name).read_text(encoding="utf-8")


def test_a_bert_passes_the_gate_with_its_binary_head(bert: ConvertJob) -> None:
    report = json.loads(read(bert, "parity.json"))
    assert report["passed"] is True
    assert report["max_abs_logit_difference"] <= 1e-4
    assert 0 <= report["max_abs_answer_difference"] <= 1e-4
    assert report["perplexity_split"] == "test"
    assert report["perplexity_samples"] >= 9
    assert 0 < report["perplexity_tokens"] < 48 * report["perplexity_samples"]
    assert report["greedy_tokens"] > 3
    assert report["tokenizer_tokens"] > 30
    config = json.loads(read(bert, "model/config.json"))
    assert config["architectures"] == ["BertForPreTraining"]
    assert not (Path(bert.output_directory) / "model" / "generation_config.json").exists()


def test_an_exported_bert_fills_masks(bert: ConvertJob) -> None:
    from transformers import pipeline

    lines = read(bert, "sample.txt").splitlines()
    assert lines[0] == "step three [MASK]"
    assert lines[1].startswith("[MASK]: '")
    assert lines[1].count("%") == 5
    filler = pipeline("fill-mask", str(Path(bert.output_directory) / "model"))
    assert len(filler("step [MASK] value")) == 5
    card = read(bert, "model/README.md")
    assert "pipeline_tag: fill-mask" in card
    assert 'pipeline("fill-mask"' in card
    assert "A BertForPreTraining encoder" in card
    assert "AutoModelForPreTraining" in card


def test_the_tokenizer_of_an_exported_bert_returns_segments(bert: ConvertJob) -> None:
    from transformers import AutoTokenizer

    pair = AutoTokenizer.from_pretrained(Path(bert.output_directory) / "model")("step", "three")
    second = pair["input_ids"].index(bert.special_tokens.sep) + 1
    segments = [int(place >= second) for place in range(len(pair["input_ids"]))]
    assert pair["token_type_ids"] == segments


def test_a_t5_passes_the_gate_in_bfloat16(t5: ConvertJob) -> None:
    report = json.loads(read(t5, "parity.json"))
    assert report["passed"] is True
    assert report["dtype"] == "bfloat16"
    assert report["perplexity_samples"] == 5
    assert report["perplexity_native"] == pytest.approx(report["perplexity_trained"], rel=0.005)
    assert report["perplexity_native"] != report["perplexity_trained"]
    assert report["greedy_tokens"] > 3
    directory = Path(t5.output_directory) / "model"
    assert next(load_exported(directory, torch.bfloat16).parameters()).dtype == torch.bfloat16
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    special = t5.special_tokens
    assert (config["decoder_start_token_id"], config["eos_token_id"]) == (special.pad, special.eod)


def test_an_exported_t5_fills_spans(t5: ConvertJob) -> None:
    lines = read(t5, "sample.txt").splitlines()
    assert lines[0] == "step three <extra_id_0>"
    assert len(lines[1]) > 10
    tokenizer = load_exported_tokenizer(Path(t5.output_directory) / "model")
    assert tokenizer.convert_tokens_to_ids("<extra_id_1>") == t5.special_tokens.sentinels[1]
    card = read(t5, "model/README.md")
    assert "AutoModelForSeq2SeqLM" in card
    assert "(2 + 1 layers" in card
    assert "rounded to bfloat16" in card


def test_the_code_of_a_t5s_card_runs(t5: ConvertJob, capsys: pytest.CaptureFixture[str]) -> None:
    code = read(t5, "model/README.md").split("```python\n")[1].split("```")[0]
    exec(code.replace("path/to/this/directory", str(Path(t5.output_directory) / "model")), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_a_tokenizer_with_other_special_tokens_is_refused(family: str, tmp_path: Path) -> None:
    job = family_job(tmp_path / "own", family_config(family))
    settings = Path(job.tokenizer_directory) / "tokenizer_config.json"
    values = json.loads(settings.read_text(encoding="utf-8"))
    export(job)
    other = tmp_path / "other"
    changed = (
        {**values, "pad_token": "three"} if family == "t5" else {**values, "mask_token": "[UNK]"}
    )
    settings.write_text(json.dumps(changed), encoding="utf-8")
    with pytest.raises(ConversionError, match=r"its tokenizer has id \d+ for (pad|mask), ours \d+"):
        export(job.model_copy(update={"output_directory": str(other)}))
