from typing import Any

import pytest
from datasets import Dataset

from megacore.config.finetune_task import ClassificationConfig, classification_settings
from megacore.errors import DataFormatError
from megacore.finetune.classification import read_labels


def read(train: list[Any], valid: list[Any], **task: Any) -> tuple[Any, dict[str, Any]]:
    """Names of the classes and labels of two splits."""
    given = ClassificationConfig.model_validate({"kind": "classification", "sentence1_column": "text", **task})
    splits = {"train": Dataset.from_dict({"label": train}), "valid": Dataset.from_dict({"label": valid})}
    return read_labels(splits, "label", classification_settings(given))


def test_classes_are_counted_or_named_by_the_training_split() -> None:
    assert read([1, 0, 2], [2, 2]) == (("0", "1", "2"), {"train": [1, 0, 2], "valid": [2, 2]})
    assert read(["yes", "no"], ["no"]) == (("no", "yes"), {"train": [1, 0], "valid": [0]})
    assert read([True, False], [True]) == (("0", "1"), {"train": [1, 0], "valid": [1]})


def test_classes_that_the_configuration_names_need_no_row() -> None:
    labels = ["a", "b", "c"]
    assert read(["c", "a"], ["b"], labels=labels) == (("a", "b", "c"), {"train": [2, 0], "valid": [1]})
    assert read([2, 2], [0], labels=labels) == (("a", "b", "c"), {"train": [2, 2], "valid": [0]})
    assert read([1, 1], [0], glue="rte")[0] == ("entailment", "not_entailment")


def test_numbers_are_read_for_a_regression() -> None:
    assert read([1, 2], [0.5], regression=True) == (None, {"train": [1.0, 2.0], "valid": [0.5]})
    assert read([1.5, 2.5], [0.5], glue="stsb")[0] is None


@pytest.mark.parametrize(
    ("train", "valid", "task", "message"),
    [
        ([0, 2], None, {}, r"the classes 0, 2 in training, which are not counted from 0 without a gap"),
        ([1, 2], None, {}, r"the classes 1, 2 in training, .*number them 0 to 1"),
        ([0, 0], None, {}, r"has only the class 0 in training"),
        (["a", "a"], None, {}, r"has only the class 'a' in training"),
        (
            [0, 1],
            [0, 2],
            {},
            r"row 1 of the valid split has 2 in .*but the head has the 2 classes 0, 1, numbered 0 to 1",
        ),
        (["yes", "no"], ["yes", "maybe"], {}, r"row 1 of the valid split has 'maybe' .*the 2 classes no, yes"),
        (["equal", "other"], None, {"labels": ["equal", "others"]}, r"has 'other' .*\(did you mean others\?\)"),
        ([0, 1], [0, -1], {}, r"the valid split has -1 .*labels are hidden: give a split whose labels are known"),
        ([-1, -1], None, {}, r"the train split has -1 .*labels are hidden"),
        ([0.5, 1.0], None, {}, r"row 0 of the train split has 0\.5 .*set task\.regression to true"),
        ([[0], [1]], None, {}, r"has a list in task\.label_column 'label': a class is a number from 0, or a name"),
        ([0, None], None, {}, r"row 1 of the train split has no value in task\.label_column 'label'"),
        (["0.5", "1"], None, {"regression": True}, r"has '0\.5' .*but the task predicts numbers"),
        ([0.5, float("nan")], None, {"regression": True}, r"row 1 of the train split has no value"),
    ],
)
def test_labels_that_the_head_does_not_expect_are_refused(
    train: list[Any], valid: list[Any] | None, task: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataFormatError, match=message):
        read(train, train if valid is None else valid, **task)
