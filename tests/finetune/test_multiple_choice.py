"""Fine-tuning of a choice of one of several answers."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.errors import ConfigError, DataFormatError
from megacore.finetune.export import load_exported, sample_text
from megacore.finetune.multiple_choice import (
    MultipleChoiceTask,
    encode_choices,
    read_choice_labels,
)
from megacore.finetune.task import build_task
from tests.finetune import _tiny_task
from tests.finetune._tiny_models import (
    choice_rows,
    learn,
    prepare,
    scores,
    tiny_config,
    write_data,
    write_export,
    write_model,
    write_rows,
)

KIND = "multiple_choice"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide model, data and the stages' artifacts."""
    root = tmp_path_factory.mktemp("choice")
    write_model(root / "model", "bert")
    write_data(root / "data", KIND, 96, 30)
    prepare(tiny_config(root / "model", root / "data", KIND), root)
    return root


def task_of(root: Path, **sections: dict[str, Any]) -> MultipleChoiceTask:
    """Return the task on the artifacts below `root`."""
    config = tiny_config(root / "model", root / "data", KIND, **sections)
    task = build_task(config, root / "examples", root / "pretrained")
    assert isinstance(task, MultipleChoiceTask)
    return task


def by_hand(root: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tokenize the training rows as transformers' multiple-choice example does."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(root / "model")
    lines = (root / "data/train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    contexts, answers = [], []
    for row in rows:
        for choice in row["choices"]:
            question = row["question"]
            blank = "_" in question
            contexts.append(row["context"])
            answers.append(question.replace("_", choice) if blank else f"{question} {choice}")
    encoded = tokenizer(
        contexts, answers, padding=True, return_tensors="pt", return_token_type_ids=True
    )
    labels = torch.tensor(["ABC".index(row["label"]) for row in rows])
    return {name: tensor.view(len(rows), 3, -1) for name, tensor in encoded.items()}, labels


def test_batches_and_one_step_equal_a_loop_with_transformers(bert: Path) -> None:
    inputs, labels = by_hand(bert)
    task = task_of(bert)
    train = task.split("train")
    assert train is not None
    batch = task.collate([train[number] for number in range(len(train))])
    for name, tensor in inputs.items():
        assert torch.equal(batch[name], tensor)
    ours = task.build_model().eval()
    theirs = copy.deepcopy(ours)
    losses = []
    for model, values in ((ours, batch), (theirs, {**inputs, "labels": labels})):
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        for _ in range(2):
            loss = model(**values).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:2] == losses[2:]
    # Cross entropy over one score for each choice, from the pooled first token.
    with torch.no_grad():
        flat = {name: tensor.flatten(0, 1) for name, tensor in inputs.items()}
        logits = theirs.classifier(theirs.bert(**flat).pooler_output).view(-1, 3)
        expected = torch.nn.functional.cross_entropy(logits, labels)
        assert float(ours(**batch).loss) == pytest.approx(float(expected), rel=1e-5)


def test_scores_do_not_depend_on_padding_or_batches(bert: Path, accelerator: Any) -> None:
    model = task_of(bert).build_model()
    short = scores(task_of(bert), model, accelerator)
    whole = scores(task_of(bert, task={"pad_to_max_length": True}), model, accelerator)
    assert short == pytest.approx(whole, rel=1e-4)
    largest = task_of(bert).collate(task_of(bert).largest_rows(2))
    assert largest["input_ids"].shape == (2, 3, 16)
    assert torch.isfinite(model(**largest).loss)


def test_learns_the_right_choice(bert: Path, accelerator: Any) -> None:
    task = task_of(bert)
    model = task.build_model()
    before = scores(task, model, accelerator)
    learn(task, model, 12)
    after = scores(task, model, accelerator)
    assert after["accuracy"] >= 0.9 > before["accuracy"]
    assert after["loss"] < before["loss"]


def test_run_keeps_a_best_model_that_the_export_loads(bert: Path, tmp_path: Path) -> None:
    config = tiny_config(bert / "model", bert / "data", KIND)
    task = task_of(bert)
    run = _tiny_task.run(config, task, tmp_path)
    assert run.of("best")[-1]["metric"] == "accuracy"
    (best,) = (tmp_path / "best").glob("iter_*")
    exported = load_exported(best / "model", KIND)
    text = sample_text(config, task, exported)
    assert "choice 2: " in text
    assert "prediction: " in text


def test_starts_from_an_export_of_this_project(bert: Path, tmp_path: Path) -> None:
    config = tiny_config(
        write_export(tmp_path / "export", "bert"), bert / "data", KIND, task={"max_length": 8}
    )
    task = build_task(config, *prepare(config, tmp_path / "stages"))
    train = task.split("train")
    assert train is not None
    assert torch.isfinite(task.build_model()(**task.collate([train[0], train[1]])).loss)


def test_a_column_for_each_choice(bert: Path, tmp_path: Path) -> None:
    rows = [
        {"context": row["context"], "label": "ABC".index(row["label"])}
        | {f"ending{number}": choice for number, choice in enumerate(row["choices"])}
        for row in choice_rows(8)
    ]
    for name in ("train", "valid"):
        write_rows(tmp_path / f"data/{name}.jsonl", rows)
    task = {"question_column": None, "choices_columns": ["ending0", "ending1", "ending2"]}
    config = tiny_config(bert / "model", tmp_path / "data", KIND, task=task)
    built = build_task(config, *prepare(config, tmp_path))
    train = built.split("train")
    assert train is not None
    ids = built.collate([train[0]])["input_ids"][0]
    texts = [built.tokenizer.decode(choice, skip_special_tokens=True) for choice in ids]
    assert texts == [f"{rows[0]['context']} {rows[0][f'ending{number}']}" for number in range(3)]


@pytest.mark.parametrize(
    ("row", "task", "message"),
    [
        ({}, {"context_column": "article"}, r"task\.context_column is 'article', but .* columns"),
        ({"label": "D"}, {}, r"row 1 .* has 'D' in task\.label_column 'label', .* A to C"),
        ({"choices": ["good", "bad"]}, {}, r"row 1 .* has 2 choices .* training has 3"),
        ({"choices": ["good", "bad", " "]}, {}, r"row 1 of the train split has a choice without"),
        ({"choices": ["good", "bad", None]}, {}, r"row 1 of the train split has a choice without"),
        ({"choices": ["good", 7, "bad"]}, {}, r"row 1 .* the choice 7 in .* write all .* as text"),
        ({}, {"choices_columns": ["context"]}, r"has a str in column 'context' .* a list of two"),
        ({}, {"max_length": 4}, r"task\.max_length is 4, which the special tokens .* to 5 or more"),
    ],
)
def test_wrong_rows_are_refused(
    bert: Path, tmp_path: Path, row: dict[str, Any], task: dict[str, Any], message: str
) -> None:
    rows = choice_rows(6)
    rows[1] |= row
    write_rows(tmp_path / "data/train.jsonl", rows)
    write_rows(tmp_path / "data/valid.jsonl", choice_rows(4))
    config = tiny_config(bert / "model", tmp_path / "data", KIND, task=task)
    with pytest.raises((ConfigError, DataFormatError), match=message):
        prepare(config, tmp_path)


@pytest.mark.parametrize("split", ["train", "valid"])
def test_an_empty_choice_in_a_column_is_refused(bert: Path, tmp_path: Path, split: str) -> None:
    row = {"context": "it is", "label": 0, "ending0": "good", "ending1": "bad"}
    for name in ("train", "valid"):
        rows = [row, row | {"ending1": " "}] if name == split else [row, row]
        write_rows(tmp_path / f"data/{name}.jsonl", rows)
    task = {"question_column": None, "choices_columns": ["ending0", "ending1"]}
    message = rf"row 1 of the {split} split has a choice without text in column 'ending1': fill"
    with pytest.raises(DataFormatError, match=message):
        prepare(tiny_config(bert / "model", tmp_path / "data", KIND, task=task), tmp_path)


def test_one_choice_is_refused(bert: Path, tmp_path: Path) -> None:
    rows = [row | {"choices": ["good"], "label": 0} for row in choice_rows(4)]
    for name in ("train", "valid"):
        write_rows(tmp_path / f"data/{name}.jsonl", rows)
    with pytest.raises(DataFormatError, match=r"row 0 of the train split has 1 in column"):
        prepare(tiny_config(bert / "model", tmp_path / "data", KIND), tmp_path)


def test_a_decoder_is_refused(bert: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "gpt2", "gpt2")
    config = tiny_config(tmp_path / "gpt2", bert / "data", KIND)
    with pytest.raises(ConfigError, match=r"takes a model .* class …ForMultipleChoice"):
        prepare(config, tmp_path / "stages")


def test_labels_are_numbers_or_letters() -> None:
    assert read_choice_labels([0, "2", "B"], "valid", "label", 3) == [0, 2, 1]
    for value in (3, -1, None, "", "b", True, 1.0):
        with pytest.raises(DataFormatError, match=r"row 1 of the valid split has"):
            read_choice_labels([0, value], "valid", "label", 3)


def test_a_choice_replaces_each_blank_once_however_long_it_is(bert: Path) -> None:
    task = task_of(bert)

    def encoded(question: str) -> dict[str, Any]:
        row: dict[str, Any] = choice_rows(1)[0] | {"question": question}
        rows = {name: [value] for name, value in row.items()}
        return encode_choices(rows, task=task.task, tokenizer=task.tokenizer, segments=True)

    assert encoded("the ____ of __ is") == encoded("the _ of _ is")
    assert encoded("the _ of _ is") != encoded("the _ is")
