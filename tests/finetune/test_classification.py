"""Fine-tuning of classification and regression."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Json

from megacore.config.finetune_task import ClassificationConfig, classification_settings
from megacore.errors import ConfigError, DataFormatError
from megacore.finetune.classification import ClassificationTask, read_labels
from megacore.finetune.task import batch_loss, build_task
from tests.finetune._tiny_models import (
    learn,
    pair_rows,
    prepare,
    scores,
    tiny_config,
    word_rows,
    write_data,
    write_export,
    write_mbart,
    write_model,
    write_rows,
)

WORDS = {"sentence1_column": "sentence", "sentence2_column": None, "max_length": 16}


@pytest.fixture(scope="module")
def deberta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide model, data and the stages' artifacts."""
    root = tmp_path_factory.mktemp("deberta")
    write_model(root / "model", "deberta")
    write_data(root / "data", "classification")
    prepare(tiny_config(root / "model", root / "data", "classification"), root)
    return root


def task_of(root: Path, **sections: dict[str, Any]) -> ClassificationTask:
    """Return the task on the artifacts below `root`."""
    config = tiny_config(root / "model", root / "data", "classification", **sections)
    task = build_task(config, root / "examples", root / "pretrained")
    assert isinstance(task, ClassificationTask)
    return task


def test_head_depends_on_the_seed_and_body_is_pretrained(deberta: Path) -> None:
    from safetensors.torch import load_file

    before = torch.random.get_rng_state()
    one, same = task_of(deberta).build_model(), task_of(deberta).build_model()
    other = task_of(deberta, train={}).build_model()
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    pretrained = load_file(deberta / "model/model.safetensors")
    tensors = one.state_dict()
    name = "deberta.encoder.layer.1.output.dense.weight"
    assert torch.equal(tensors[name], pretrained[name])
    assert {weight.dtype for weight in tensors.values() if weight.is_floating_point()} == {
        torch.float32
    }
    config = tiny_config(deberta / "model", deberta / "data", "classification").model_copy(
        update={"seed": 7}
    )
    reseeded = (
        build_task(config, deberta / "examples", deberta / "pretrained").build_model().state_dict()
    )
    assert torch.equal(reseeded[name], tensors[name])
    assert not torch.equal(reseeded["classifier.weight"], tensors["classifier.weight"])


def test_random_weights_replace_the_pretrained_ones(deberta: Path) -> None:
    name = "deberta.encoder.layer.1.output.dense.weight"
    random = task_of(deberta, model={"random_weights": True}).build_model().state_dict()
    same = task_of(deberta, model={"random_weights": True}).build_model().state_dict()
    assert torch.equal(random[name], same[name])
    assert not torch.equal(random[name], task_of(deberta).build_model().state_dict()[name])


def test_model_configuration_names_the_classes(deberta: Path) -> None:
    config = task_of(deberta).build_model().config
    assert config.id2label == {0: "0", 1: "1"}
    assert config.problem_type == "single_label_classification"


def test_batch_is_padded_to_its_longest_sample_or_the_maximum(deberta: Path) -> None:
    rows = [{"input_ids": [2, 9, 3], "labels": 1}, {"input_ids": [2, 3], "labels": 0}]
    batch = task_of(deberta).collate(rows)
    assert batch["input_ids"].tolist() == [[2, 9, 3], [2, 3, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["labels"].tolist() == [1, 0]
    assert task_of(deberta, task={"pad_to_max_length": True}).collate(rows)["input_ids"].shape == (
        2,
        16,
    )


def test_padding_does_not_change_scores(deberta: Path, accelerator: Any) -> None:
    model = task_of(deberta).build_model()
    short = scores(task_of(deberta), model, accelerator)
    whole = scores(task_of(deberta, task={"pad_to_max_length": True}), model, accelerator)
    assert short == pytest.approx(whole, rel=1e-4)


def test_scores_equal_a_computation_by_hand(deberta: Path, accelerator: Any) -> None:
    task = task_of(deberta)
    model = task.build_model().eval()
    rows = list(task.split("valid") or [])
    with torch.no_grad():
        logits = [
            model(**{k: v for k, v in task.collate([row]).items() if k != "labels"}).logits[0]
            for row in rows
        ]
    losses = [
        -torch.log_softmax(row, -1)[sample["labels"]]
        for row, sample in zip(logits, rows, strict=True)
    ]
    right = [
        int(row.argmax()) == sample["labels"] for row, sample in zip(logits, rows, strict=True)
    ]
    metrics = scores(task, model, accelerator)
    assert metrics["loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)
    assert metrics["accuracy"] == pytest.approx(sum(right) / 9)
    assert set(metrics) == {"loss", "accuracy", "f1"}


def test_loss_of_a_regression_is_computed_in_fp32() -> None:
    def model(**inputs: torch.Tensor) -> Any:
        assert inputs.keys() == {"input_ids"}
        return SimpleNamespace(logits=torch.tensor([[1.0], [2.0]], dtype=torch.bfloat16))

    batch = {"input_ids": torch.ones(2, 3), "labels": torch.tensor([2010.5, 2011.25])}
    assert batch_loss(model, batch) == pytest.approx((2009.5**2 + 2009.25**2) / 2, rel=1e-6)


def test_largest_rows_have_the_maximum_length(deberta: Path) -> None:
    task = task_of(deberta)
    batch = task.collate(task.largest_rows(3))
    assert batch["input_ids"].shape == (3, 16)
    assert bool(batch["attention_mask"].all())
    assert task.build_model()(**batch).loss.isfinite()


def test_largest_rows_of_mbart_have_an_end_token(tmp_path: Path) -> None:
    write_mbart(tmp_path / "model")
    write_data(tmp_path / "data", "classification", 2, 2)
    prepare(tiny_config(tmp_path / "model", tmp_path / "data", "classification"), tmp_path)
    task = task_of(tmp_path)
    batch = task.collate(task.largest_rows(2))
    assert batch["input_ids"].shape == (2, 16)
    assert task.build_model()(**batch).loss.isfinite()


def test_regression_has_one_output(tmp_path: Path, accelerator: Any) -> None:
    write_model(tmp_path / "model", "deberta")
    rows = [{**row, "label": row["label"] * 2.5} for row in pair_rows(12)]
    for split in ("train", "valid"):
        write_rows(tmp_path / f"data/{split}.jsonl", rows)
    section = {"regression": True}
    prepare(
        tiny_config(tmp_path / "model", tmp_path / "data", "classification", task=section), tmp_path
    )
    task = task_of(tmp_path, task=section)
    model = task.build_model()
    batch = task.collate(list(task.split("train") or [])[:5])
    assert batch["labels"].dtype == torch.float32
    assert model(**batch).logits.shape == (5, 1)
    metrics = scores(task, model, accelerator)
    assert set(metrics) == {"loss", "pearson", "spearmanr"}
    with torch.no_grad():
        all_rows = task.collate(list(task.split("valid") or []))
        expected = float(model(**all_rows).loss)
    assert metrics["loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("family", ["bert", "gpt", "t5"])
def test_exports_learn(family: str, tmp_path: Path, accelerator: Any) -> None:
    """Exports have Megatron's classes and tokenizers without padding or end tokens."""
    export = write_export(tmp_path / "export", family)
    for split, seed in (("train", 1), ("valid", 2)):
        write_rows(tmp_path / f"data/{split}.jsonl", word_rows(32, seed))
    model = {"path": str(export), **({"pad_token": "<|endoftext|>"} if family == "gpt" else {})}
    task_values = WORDS | {"max_length": 48}
    config = tiny_config(export, tmp_path / "data", "classification", model=model, task=task_values)
    examples, pretrained = prepare(config, tmp_path)
    task = build_task(config, examples, pretrained)
    built: Any = task.build_model()
    start = scores(task, built, accelerator, "train")
    learn(task, built, 12)
    end = scores(task, built, accelerator, "train")
    assert end["loss"] < 0.9 * start["loss"]
    assert end["accuracy"] >= start["accuracy"]
    assert built(**task.collate(task.largest_rows(2))).loss.isfinite()


def test_megatron_bert_is_loaded(tmp_path: Path) -> None:
    import transformers

    source = write_model(tmp_path / "model", "bert")
    values = transformers.BertConfig.from_pretrained(source).to_dict()
    values.pop("model_type")
    config = transformers.MegatronBertConfig.from_dict(values)
    transformers.MegatronBertForPreTraining(config).save_pretrained(source)
    write_data(tmp_path / "data", "classification", 8, 4)
    prepare(tiny_config(source, tmp_path / "data", "classification"), tmp_path)
    task = task_of(tmp_path)
    model = task.build_model()
    assert type(model).__name__ == "MegatronBertForSequenceClassification"
    assert "token_type_ids" in task.collate(list(task.split("train") or [])[:2])


def test_trained_head_is_replaced_only_on_request(deberta: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    shutil.copytree(deberta / "model", tmp_path / "model")
    trained = DebertaV2Config.from_pretrained(deberta / "model", num_labels=3)
    DebertaV2ForSequenceClassification(trained).save_pretrained(tmp_path / "model")
    data = deberta / "data"
    with pytest.raises(
        ConfigError,
        match=r"head of 3 outputs .* has 2 classes \(0, 1\): set model\.new_head to true",
    ):
        prepare(tiny_config(tmp_path / "model", data, "classification"), tmp_path / "refused")
    config = tiny_config(tmp_path / "model", data, "classification", model={"new_head": True})
    model = build_task(config, *prepare(config, tmp_path)).build_model()
    loaded, source = model.state_dict(), load_file(tmp_path / "model/model.safetensors")
    assert (loaded["classifier.weight"].shape[0], source["classifier.weight"].shape[0]) == (2, 3)
    name = "deberta.encoder.layer.1.output.dense.weight"
    assert torch.equal(loaded[name], source[name])
    shrunk = trained.to_dict() | {"intermediate_size": 24}  # the body does not fit either
    DebertaV2ForSequenceClassification(DebertaV2Config.from_dict(shrunk)).save_pretrained(
        tmp_path / "other"
    )
    shutil.copy(
        tmp_path / "other/model.safetensors", tmp_path / "pretrained/model/model.safetensors"
    )
    with pytest.raises(ConfigError, match=r"lacks \d+ of the weights"):
        build_task(config, tmp_path / "examples", tmp_path / "pretrained").build_model()


def test_missing_or_damaged_weights_are_refused(deberta: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    (tmp_path / "model").mkdir()
    for path in (deberta / "model").iterdir():
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    tensors = load_file(deberta / "model/model.safetensors")
    remaining = {name: weight for name, weight in tensors.items() if ".layer.1." not in name}
    save_file(remaining, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    config = tiny_config("lost", deberta / "data", "classification")
    with pytest.raises(
        ConfigError, match=r"lost lacks \d+ of the weights of DebertaV2For.*encoder\.layer\.1\."
    ):
        build_task(config, deberta / "examples", tmp_path).build_model()
    (tmp_path / "model/model.safetensors").write_bytes(b"short")
    with pytest.raises(ConfigError, match=r"model\.path lost: model\.safetensors is damaged"):
        build_task(config, deberta / "examples", tmp_path).build_model()


def label_rows(labels: list[Any], names: str | None = None) -> Dataset:
    """Return rows with labels, which the letters of `names` number."""
    features = None if names is None else Features({"label": ClassLabel(names=list(names))})
    return Dataset.from_dict({"label": labels}, features=features)


def mixed_rows(labels: list[Any]) -> Dataset:
    """Return rows with labels of several types, as JSON files have them."""
    return Dataset.from_dict({"label": labels}, features=Features({"label": Json()}))


def read(
    train: list[Any] | Dataset, valid: list[Any] | Dataset, **task: Any
) -> tuple[Any, dict[str, Any]]:
    """Return the classes and the labels of two splits."""
    task_config = ClassificationConfig.model_validate(
        {"kind": "classification", "sentence1_column": "text", **task}
    )
    splits = {
        name: rows if isinstance(rows, Dataset) else label_rows(rows)
        for name, rows in (("train", train), ("valid", valid))
    }
    return read_labels(splits, "label", classification_settings(task_config))


def test_classes_come_from_the_training_split() -> None:
    assert read([1, 0, 2], [2, 2]) == (("0", "1", "2"), {"train": [1, 0, 2], "valid": [2, 2]})
    assert read(["yes", "no"], ["no"]) == (("no", "yes"), {"train": [1, 0], "valid": [0]})
    assert read([True, False], [True]) == (("0", "1"), {"train": [1, 0], "valid": [1]})


def test_configured_classes_need_no_rows() -> None:
    labels = ["a", "b", "c"]
    assert read(["c", "a"], ["b"], labels=labels) == (
        ("a", "b", "c"),
        {"train": [2, 0], "valid": [1]},
    )
    assert read([2, 2], [0], labels=labels) == (("a", "b", "c"), {"train": [2, 2], "valid": [0]})
    assert read([1, 1], [0], glue="rte")[0] == ("entailment", "not_entailment")


@pytest.mark.parametrize(
    ("labels", "train", "valid", "numbers"),
    [
        (["1", "2", "3"], [1, 2, 1], [3, 1], ([0, 1, 0], [2, 0])),
        (["-1", "0", "1"], [-1, 1], ["0", "1"], ([0, 2], [1, 2])),
        (["1", "0"], [0, 1], [True], ([1, 0], [0])),
        (["1", "0"], label_rows([0, 1], "xy"), [1], ([0, 1], [1])),
        (["true", "false"], [True, False], ["false", "true"], ([0, 1], [1, 0])),
        (["true", "false"], [0, 1], [True], ([0, 1], [0])),
        (["1", "one"], [0, 1], [1], ([0, 1], [1])),
        (None, ["5", "4"], [4, 5], ([1, 0], [0, 1])),
        (None, ["true", "false"], [False, True], ([1, 0], [0, 1])),
    ],
)
def test_labels_that_are_names_of_classes_are_not_counted(
    labels: list[str] | None, train: Any, valid: list[Any], numbers: tuple[list[int], list[int]]
) -> None:
    _, found = read(train, valid, labels=labels)
    assert found == {"train": numbers[0], "valid": numbers[1]}


@pytest.mark.parametrize(
    ("train", "valid", "labels"),
    [
        (label_rows([0, 1, 2], "abc"), label_rows([0, 1], "ac"), None),
        (label_rows([0, 1, 2], "abc"), label_rows([1, 0], "cab"), None),
        (label_rows([0, 1, 2], "abc"), label_rows([0, 2], "abc"), None),
        (label_rows([0, 1, 2], "abc"), label_rows(["a", "c"]), None),
        (label_rows([0, 1, 2], "abc"), label_rows([0, 2]), None),
        (label_rows(["a", "b", "c"]), label_rows([2, 0], "cba"), None),
        (label_rows([0, 1, 2]), label_rows([2, 0], "cba"), list("abc")),
        (label_rows([0, 1, 2], "xyz"), label_rows([0, 2], "xyz"), list("abc")),
        (label_rows([2, 1, 0], "cba"), label_rows([0, 1], "ac"), list("abc")),
        (label_rows([2, 1, 0], "CBA"), label_rows([2, 0], "CBA"), list("abc")),
    ],
)
def test_each_split_numbers_its_classes(
    train: Dataset, valid: Dataset, labels: list[str] | None
) -> None:
    classes, numbers = read(train, valid, labels=labels)
    assert (classes, numbers) == (("a", "b", "c"), {"train": [0, 1, 2], "valid": [0, 2]})


@pytest.mark.parametrize(
    ("train", "valid", "labels", "message"),
    [
        (
            label_rows([0, 1], "ab"),
            label_rows([0, 1], "ac"),
            None,
            r"row 1 of the valid split has 'c' .*the 2 classes a, b",
        ),
        (
            label_rows([0, 1, 2], "abc"),
            label_rows([0, -1], "ac"),
            None,
            r"the valid split has -1 .*labels are hidden",
        ),
        (
            label_rows(["a", "b"]),
            label_rows([1, 0]),
            None,
            r"row 0 of the valid split has 1 .*but the train split has the names a, b: write names",
        ),
        (label_rows(["a", "b"]), label_rows([-1, 0]), None, r"the valid split has -1 .*are hidden"),
        (label_rows([0, 1]), label_rows([0, 1], "ab"), None, r"has 'a' .*the 2 classes 0, 1"),
        (
            label_rows([0, 1], "xy"),
            label_rows([0, 1], "yx"),
            ["a", "b"],
            r"of the valid split has the classes y, x, but task\.labels renames .* x, y: give all",
        ),
    ],
)
def test_classes_that_differ_between_splits_are_refused(
    train: Dataset, valid: Dataset, labels: list[str] | None, message: str
) -> None:
    with pytest.raises(DataFormatError, match=message):
        read(train, valid, labels=labels)


def test_regression_reads_numbers() -> None:
    assert read([1, 2], [0.5], regression=True) == (None, {"train": [1.0, 2.0], "valid": [0.5]})
    assert read([1.5, 2.5], [0.5], glue="stsb")[0] is None


@pytest.mark.parametrize(
    ("train", "valid", "task", "message"),
    [
        (
            [0, 2],
            None,
            {},
            r"the classes 0, 2 in training, which are not counted from 0 without a gap",
        ),
        ([1, 2], None, {}, r"the classes 1, 2 in training, .*number them 0 to 1"),
        ([0, 0], None, {}, r"has only the class 0 in training"),
        ([1, 1], None, {}, r"has only the class 1 in training: give two"),
        (["a", "a"], None, {}, r"has only the class 'a' in training"),
        (
            [0, 1],
            [0, 2],
            {},
            (
                r"row 1 of the valid split has 2 in .*but the head has the 2 classes 0, 1, "
                r"numbered 0 to 1"
            ),
        ),
        (
            ["yes", "no"],
            ["yes", "maybe"],
            {},
            r"row 1 of the valid split has 'maybe' .*the 2 classes no, yes",
        ),
        (
            ["equal", "other"],
            None,
            {"labels": ["equal", "others"]},
            r"has 'other' .*\(did you mean others\?\)",
        ),
        (
            [0, 1],
            [0, -1],
            {},
            r"the valid split has -1 .*labels are hidden: give a split whose labels are known",
        ),
        (
            [-1, 1],
            None,
            {},
            r"the train split has -1 .*labels are hidden: .* if -1 is a class, name all classes",
        ),
        ([1, 6], None, {"labels": ["1", "5"]}, r"row 1 .* has 6 .*the 2 classes 1, 5: repair"),
        ([0.5, 1.0], None, {}, r"row 0 of the train split has 0\.5 .*set task\.regression to true"),
        (
            [[0], [1]],
            None,
            {},
            r"has a list in task\.label_column 'label': a class is a number from 0, or a name",
        ),
        (
            [0, None],
            None,
            {},
            r"row 1 of the train split has no value in .*'label': remove the row; in \.csv",
        ),
        (
            mixed_rows(["unknown", True, "yes"]),
            None,
            {},
            r"row 1 of the train split has True .*where row 0 has text: write all labels as text",
        ),
        (
            mixed_rows(["unknown", 7, "yes"]),
            None,
            {"labels": ["unknown", "yes"]},
            r"row 1 of the train split has 7 .*the 2 classes unknown, yes",
        ),
        (
            mixed_rows(["unknown", [1], "yes"]),
            None,
            {},
            r"row 1 of the train split has \[1\] .*where row 0 has text",
        ),
        (["0.5", "1"], None, {"regression": True}, r"has '0\.5' .*but the task predicts numbers"),
        (
            [-1.0, 5.0],
            [-1.0, -1.0],
            {"glue": "stsb"},
            r"the valid split has -1 .*labels are hidden: give a split whose labels are known",
        ),
        ([0.5, float("nan")], None, {"regression": True}, r"row 1 of the train split has no value"),
        ([0.5, 1e39], None, {"regression": True}, r"row 1 of the train split has 1e\+39 .*repair"),
    ],
)
def test_unexpected_labels_are_refused(
    train: list[Any] | Dataset, valid: list[Any] | None, task: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataFormatError, match=message):
        read(train, train if valid is None else valid, **task)
