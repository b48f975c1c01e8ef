"""Fine-tuning of encoder-decoders on pairs of texts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.errors import ConfigError, DataFormatError, DownloadError
from megacore.finetune.export import Exported, _usage, sample_text
from megacore.finetune.metrics import ANSWERS_NAME, read_answers, write_answers
from megacore.finetune.seq2seq import Seq2SeqTask
from megacore.finetune.task import SHOWN_ANSWERS, SplitScorer, build_task
from tests.finetune._tiny_models import (
    copy_rows,
    learn,
    prepare,
    scores,
    tiny_config,
    write_data,
    write_export,
    write_mbart,
    write_model,
    write_rows,
)
from tests.finetune._tiny_task import run

ALL = {"metrics": ["bleu", "rouge1", "rouge2", "rougeL", "rougeLsum"]}


@pytest.fixture(scope="module")
def blenderbot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("blenderbot")
    write_model(root / "model", "blenderbot")
    write_data(root / "data", "seq2seq")
    prepare(tiny_config(root / "model", root / "data", "seq2seq"), root)
    return root


def task_of(root: Path, **sections: dict[str, Any]) -> Seq2SeqTask:
    config = tiny_config(root / "model", root / "data", "seq2seq", **sections)
    task = build_task(config, root / "examples", root / "pretrained")
    assert isinstance(task, Seq2SeqTask)
    return task


def test_padding_of_labels_is_ignored(blenderbot: Path) -> None:
    rows = [{"input_ids": [9, 8, 2], "labels": [9, 2]}, {"input_ids": [7, 2], "labels": [7, 6, 2]}]
    batch = task_of(blenderbot).collate(rows)
    assert batch["input_ids"].tolist() == [[9, 8, 2], [7, 2, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["labels"].tolist() == [[9, 2, -100], [7, 6, 2]]
    whole = task_of(blenderbot, task={"pad_to_max_length": True}).collate(rows)
    assert (tuple(whole["input_ids"].shape), tuple(whole["labels"].shape)) == ((2, 8), (2, 6))


def test_loss_is_over_all_target_tokens(blenderbot: Path, accelerator: Any) -> None:
    task = task_of(blenderbot, task=ALL)
    model = task.build_model().eval()
    total, tokens = 0.0, 0
    with torch.no_grad():
        for row in task.split("valid") or []:
            total += float(model(**task.collate([row])).loss) * len(row["labels"])
            tokens += len(row["labels"])
    metrics = scores(task, model, accelerator)
    assert metrics["loss"] == pytest.approx(total / tokens, rel=1e-4)
    assert set(metrics) == {"loss", *ALL["metrics"]}


@pytest.mark.parametrize(("beams", "shortest"), [(1, 0), (2, 5)])
def test_generated_texts_have_the_configured_lengths(
    blenderbot: Path, beams: int, shortest: int
) -> None:
    task = task_of(blenderbot, task={"num_beams": beams, "min_target_length": shortest})
    model: Any = task.build_model().eval()
    model.generation_config.min_length = 3
    model.generation_config.num_return_sequences = 2
    model.generation_config.return_dict_in_generate = True
    generation = task.generation(model)
    batch = task.collate(list(task.split("valid") or []))
    with torch.no_grad():
        # A model that would end immediately, or never.
        for bias in (50.0, -50.0):
            model.final_logits_bias[0, 2] = bias
            inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
            written = model.generate(**inputs, generation_config=generation)[:, 1:]
            lengths = [(row != 0).sum().item() for row in written]
            assert max(lengths) <= 6
            if bias > 0:
                assert {int(row[shortest]) for row in written} == {2}
                assert not (written[:, :shortest] == 2).any()


def test_sample_text_uses_the_settings_of_the_scores(blenderbot: Path) -> None:
    task = task_of(blenderbot, task={"num_beams": 1, "min_target_length": 5})
    model: Any = task.build_model().eval()
    model.final_logits_bias[0, 2] = 50.0  # it would end immediately
    lines = sample_text(task.config, task, Exported(model, task.tokenizer)).splitlines()
    assert all(line != "prediction: " for line in lines)
    assert sum(line.startswith("prediction: ") for line in lines) == 5


def test_copies_are_learned_and_scored(blenderbot: Path, accelerator: Any) -> None:
    task = task_of(blenderbot, task=ALL | {"num_beams": 1})
    model: Any = task.build_model()
    start = scores(task, model, accelerator, "train")
    learn(task, model, 60, lr=1e-2)
    end = scores(task, model, accelerator, "train")
    assert end["loss"] < 0.3 * start["loss"]
    assert end["rouge1"] > start["rouge1"] + 40
    assert end["rougeLsum"] == pytest.approx(end["rougeL"])  # the texts have one sentence each


def test_sources_and_targets_of_an_exported_t5_end_with_the_end_token(
    tmp_path: Path, accelerator: Any
) -> None:
    export = write_export(tmp_path / "export", "t5")
    for split in ("train", "valid"):
        write_rows(tmp_path / f"data/{split}.jsonl", copy_rows(6))
    lengths = {"max_source_length": 48, "max_target_length": 24}
    config = tiny_config(export, tmp_path / "data", "seq2seq", task=lengths)
    examples, pretrained = prepare(config, tmp_path)
    task = build_task(config, examples, pretrained)
    model: Any = task.build_model()
    end = model.config.eos_token_id
    rows = list(task.split("train") or [])
    assert rows
    assert all((row["input_ids"][-1], row["labels"][-1]) == (end, end) for row in rows)
    assert all(row["input_ids"].count(end) == 1 for row in rows)
    token = task.tokenizer.convert_ids_to_tokens(end)
    usage = _usage(config, Exported(model, task.tokenizer))
    assert f"tokenizer('A text to read.{token}', return_tensors" in usage
    start = scores(task, model, accelerator)
    learn(task, model, 3)
    assert scores(task, model, accelerator)["loss"] < start["loss"]
    assert model(**task.collate(task.largest_rows(2))).loss.isfinite()


def test_targets_with_a_language_after_the_end_token_stay_as_mbart_reads_them(
    tmp_path: Path,
) -> None:
    tokenizer = write_mbart(tmp_path / "model")
    start = tokenizer.convert_tokens_to_ids("ro_RO")
    for split in ("train", "valid"):
        rows = [*copy_rows(2), {"source": "the", "target": "the " * 20}]
        write_rows(tmp_path / f"data/{split}.jsonl", rows)
    config = tiny_config(tmp_path / "model", tmp_path / "data", "seq2seq")
    samples = build_task(config, *prepare(config, tmp_path / "work")).split("train")
    assert samples is not None
    assert [row["labels"][-2:] for row in samples] == [[tokenizer.eos_token_id, start]] * 3
    assert [row["labels"].count(tokenizer.eos_token_id) for row in samples] == [1] * 3


def test_model_without_a_decoder_start_token_is_refused(blenderbot: Path, tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", "t5")
    values = json.loads((source / "config.json").read_text())
    del values["decoder_start_token_id"]
    (source / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"\(t5\) has no decoder_start_token_id"):
        prepare(tiny_config(source, blenderbot / "data", "seq2seq"), tmp_path / "work")


def test_empty_source_is_refused(blenderbot: Path, tmp_path: Path) -> None:
    export = write_export(tmp_path / "export", "t5")
    for split in ("train", "valid"):
        write_rows(
            tmp_path / f"data/{split}.jsonl", [*copy_rows(2), {"source": "", "target": "the"}]
        )
    with pytest.raises(DataFormatError, match="row 2 of the train split has an empty source"):
        prepare(tiny_config(export, tmp_path / "data", "seq2seq"), tmp_path / "work")


def _punkt_config(blenderbot: Path) -> Any:
    task = {"sentence_splitter": "punkt", "metrics": ["rougeLsum"]}
    return tiny_config(blenderbot / "model", blenderbot / "data", "seq2seq", task=task)


def test_nltk_models_are_stored_with_the_examples(
    blenderbot: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    accelerator: Any,
) -> None:
    from nltk import data

    model = tmp_path / "nltk/tokenizers/punkt_tab/english"
    model.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (model / name).write_text("")
    monkeypatch.setattr(data, "path", [str(tmp_path / "nltk")])
    config = _punkt_config(blenderbot)
    examples, pretrained = prepare(config, tmp_path / "work")
    monkeypatch.setattr(data, "path", [])
    task = build_task(config, examples, pretrained)
    assert set(scores(task, task.build_model(), accelerator)) == {"loss", "rougeLsum"}
    (examples / "punkt/tokenizers/punkt_tab/english/collocations.tab").unlink()
    with pytest.raises(DataFormatError, match="is damaged"):
        scores(task, task.build_model(), accelerator)


def test_failed_download_of_nltk_models_is_retryable(
    blenderbot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nltk import data, downloader

    def refuse(*_: Any, **__: Any) -> bool:
        raise ValueError("no route to host")

    monkeypatch.setattr(data, "path", [])
    monkeypatch.setattr(downloader.Downloader, "download", refuse)
    with pytest.raises(
        DownloadError, match=r"no route to host\).*set task\.sentence_splitter to rules"
    ):
        prepare(_punkt_config(blenderbot), tmp_path / "work")


def test_answers_of_the_first_samples_are_those_that_were_scored(
    blenderbot: Path, accelerator: Any
) -> None:
    task = task_of(blenderbot, task={"num_beams": 2})
    model: Any = accelerator.prepare(task.build_model())
    rows = task.split("train") or []
    score = SplitScorer(task, "train", accelerator, 3).score(model)
    assert score is not None
    assert len(score.answers) == min(SHOWN_ANSWERS, len(rows)) > 3
    for row, answer in zip(rows, score.answers, strict=False):
        assert answer.question == text(task, row["input_ids"])
        assert answer.reference == text(task, row["labels"])
        batch = task.collate([row])
        written = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            generation_config=task.generation(model),
        )
        assert answer.answer == text(task, written[0])


def text(task: Seq2SeqTask, ids: Any) -> str:
    return str(task.tokenizer.decode(ids, skip_special_tokens=True)).strip()


def test_evaluations_add_their_answers_to_one_table(blenderbot: Path, tmp_path: Path) -> None:
    task = task_of(blenderbot)
    settings = {"max_steps": 2, "num_epochs": 1, "micro_batch_size": 2, "precision": "fp32"}
    config = tiny_config(blenderbot / "model", blenderbot / "data", "seq2seq", train=settings)
    result = run(config, task, tmp_path)
    table = json.loads((tmp_path / ANSWERS_NAME).read_text())
    assert table["columns"] == ["step", "epoch", "question", "reference", "answer"]
    samples = min(SHOWN_ANSWERS, len(task.split("valid") or []))
    assert [row[0] for row in table["data"]] == [0] * samples + [2] * samples
    questions = [row[2] for row in table["data"]]
    assert questions[:samples] == questions[samples:]
    assert [event["iteration"] for event in result.of("answers")] == [0, 2]
    answers = read_answers(tmp_path / ANSWERS_NAME, 2)
    write_answers(tmp_path / ANSWERS_NAME, 2, 1, answers)
    write_answers(tmp_path / ANSWERS_NAME, 1, 0, answers[:1])
    again = json.loads((tmp_path / ANSWERS_NAME).read_text())["data"]
    assert [row[0] for row in again] == [0] * samples + [1] + [2] * samples
