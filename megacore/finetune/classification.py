"""Classification and regression of single texts and text pairs."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megacore.config.finetune import FinetuneConfig
from megacore.config.finetune_task import (
    LOSS,
    ClassificationConfig,
    ClassificationMetric,
    ClassificationSettings,
    classification_settings,
)
from megacore.errors import DataFormatError
from megacore.finetune.examples import (
    IDS,
    LABELS,
    SEGMENTS,
    Mapper,
    are_numbers,
    check_columns,
    check_head,
    matching_classes,
    text_encoder,
    token_counts,
)
from megacore.finetune.metrics import classification_metrics
from megacore.finetune.task import Batch, TransformersTask, without_labels
from megacore.foreign.files import similar

if TYPE_CHECKING:
    from accelerate import Accelerator
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_HIDDEN = -1
_LARGEST = torch.finfo(torch.float32).max
"""Largest value of a regression's labels, which the model reads in fp32."""
_SHOWN = 10
"""Number of classes that a message lists."""


def read_labels(
    splits: "Mapping[str, Dataset]", column: str, settings: ClassificationSettings
) -> tuple[tuple[str, ...] | None, dict[str, list[int] | list[float]]]:
    """Return the class names in the order of their numbers, and the labels of each split.

    The names are None for regression.

    Raises DataFormatError for labels that are missing, hidden, of another kind than the head, or of
    no class.
    """
    values = {name: _values(rows, name, column) for name, rows in splits.items()}
    if settings.regression:
        return None, {
            name: _numbers(split_values, name, column) for name, split_values in values.items()
        }
    names = _class_names(splits["train"], values["train"], column, settings)
    # Sorted text is an order made here: numbers in another split cannot refer to it.
    by_text = isinstance(values["train"][0], str) and settings.labels is None
    return names, {
        name: _classes(
            split_values,
            name,
            column,
            names,
            _numbered(splits, name, column, names, by_text=by_text),
        )
        for name, split_values in values.items()
    }


def _values(rows: "Dataset", split: str, column: str) -> list[Any]:
    values = list(rows[column])
    for number, value in enumerate(values):
        if value is None or (isinstance(value, float) and math.isnan(value)):
            raise DataFormatError(
                f"row {number} of the {split} split has no value in task.label_column {column!r}: "
                "remove the row; in .csv and .tsv, NA, None, null and nan are no label"
            )
    return values


def _numbers(values: Sequence[Any], split: str, column: str) -> list[float]:
    for number, value in enumerate(values):
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not abs(value) <= _LARGEST
        ):
            raise DataFormatError(
                f"row {number} of the {split} split has {value!r} in task.label_column {column!r}, "
                "but the task predicts numbers: set task.regression to false for classes, or "
                "repair the row"
            )
    if all(value == _HIDDEN for value in values):
        raise DataFormatError(_hidden(split, column))
    return [float(value) for value in values]


def _class_names(
    rows: "Dataset", values: Sequence[Any], column: str, settings: ClassificationSettings
) -> tuple[str, ...]:
    of_feature, configured = _feature_names(rows, column), settings.labels
    if of_feature is not None:
        return _of_feature(of_feature, configured, column)
    if isinstance(values[0], str):
        return configured or _names_of_texts(values, column)
    _refuse_other_kinds(values, column)
    if configured is not None:
        return configured
    return _counted(sorted({int(value) for value in values}), column)


def _names_of_texts(values: Sequence[Any], column: str) -> tuple[str, ...]:
    for number, value in enumerate(values):
        if not isinstance(value, str):
            raise DataFormatError(
                f"row {number} of the train split has {value!r} in task.label_column {column!r}, "
                "where row 0 has text: write all labels as text, in quotes, or name all classes in "
                "task.labels"
            )
    names = sorted(set(values))
    if len(names) < 2:
        raise DataFormatError(
            f"task.label_column {column!r} has only the class {names[0]!r} in training: give two"
        )
    return tuple(names)


def _feature_names(rows: "Dataset", column: str) -> tuple[str, ...] | None:
    """Return the names that the column's type gives its numbers, or None without names."""
    from datasets import ClassLabel

    feature = rows.features[column]
    return tuple(feature.names) if isinstance(feature, ClassLabel) else None


def _of_feature(
    names: tuple[str, ...], configured: tuple[str, ...] | None, column: str
) -> tuple[str, ...]:
    """Return the class names from the configuration, or else those of the data.

    The configuration may order the data's names in another way, or give other names in their order.
    """
    if configured is None:
        return names
    same = matching_classes(configured, names) is not None
    some = {name.casefold() for name in configured} & {name.casefold() for name in names}
    if len(configured) != len(names) or (some and not same):
        raise DataFormatError(
            f"the classes are {_listed(configured)} by the configuration, but the data's column "
            f"{column!r} has {_listed(names)}: give the data's names in task.labels"
        )
    return configured


def _refuse_other_kinds(values: Sequence[Any], column: str) -> None:
    for number, value in enumerate(values):
        if isinstance(value, float):
            raise DataFormatError(
                f"row {number} of the train split has {value!r} in task.label_column {column!r}, a "
                "number with decimals, where classes are counted from 0: set task.regression to "
                "true, or write whole numbers"
            )
        if not isinstance(value, int):
            raise DataFormatError(
                f"row {number} of the train split has a {type(value).__name__} in "
                f"task.label_column {column!r}: a class is a number from 0, or a name"
            )


def _counted(classes: list[int], column: str) -> tuple[str, ...]:
    """Return the names of the classes 0, 1, …; each must occur in the training split."""
    if classes[0] == _HIDDEN:
        raise DataFormatError(_hidden("train", column))
    if len(classes) < 2:
        raise DataFormatError(
            f"task.label_column {column!r} has only the class {classes[0]} in training: give two"
        )
    expected = list(range(len(classes)))
    if classes != expected:
        raise DataFormatError(
            f"task.label_column {column!r} has the classes {', '.join(map(str, classes[:_SHOWN]))} "
            "in training, which are not counted from 0 without a gap: number them 0 to "
            f"{len(classes) - 1}, or name all classes in task.labels"
        )
    return tuple(map(str, expected))


def _numbered(
    splits: "Mapping[str, Dataset]",
    split: str,
    column: str,
    names: tuple[str, ...],
    *,
    by_text: bool,
) -> dict[int, str]:
    """Return the classes of the numbers that a split may have.

    They are empty if no number can be assigned to a class. Each split may number the classes in
    another way. Without names in the data, numbers count the classes from 0, unless the classes
    are named by numbers.

    Raises DataFormatError if task.labels renames other classes than the split has.
    """
    split_names = _feature_names(splits[split], column)
    train_names = _feature_names(splits["train"], column)
    if split_names is None and train_names is None and are_numbers(names):
        return {int(name): name for name in names}
    if split_names is None:
        return {} if by_text else dict(enumerate(names))
    if train_names is None:
        return dict(enumerate(split_names))
    if (spelled := matching_classes(train_names, names)) is not None:
        return {number: spelled.get(name, name) for number, name in enumerate(split_names)}
    if split_names != train_names:
        raise DataFormatError(
            f"the column {column!r} of the {split} split has the classes {_listed(split_names)}, "
            f"but task.labels renames those of the train split, {_listed(train_names)}: give all "
            "splits the same classes in the same order"
        )
    return dict(enumerate(names))


def _classes(
    values: Sequence[Any],
    split: str,
    column: str,
    names: tuple[str, ...],
    numbered: Mapping[int, str],
) -> list[int]:
    by_name = {name: number for number, name in enumerate(names)}
    classes = []
    for number, value in enumerate(values):
        name = _named(value, names, numbered)
        if isinstance(name, str) and name in by_name:
            classes.append(by_name[name])
            continue
        if value == _HIDDEN:
            raise DataFormatError(_hidden(split, column))
        if isinstance(value, int) and not numbered:
            raise DataFormatError(
                f"row {number} of the {split} split has {value!r} in task.label_column {column!r}, "
                f"but the train split has the names {_listed(names)}: write names in all splits, "
                "or list them in task.labels in the order of the numbers"
            )
        hint = similar(name, names) if isinstance(name, str) else ""
        if list(numbered) == list(range(len(names))):
            hint = f", numbered 0 to {len(names) - 1}{hint}"
        raise DataFormatError(
            f"row {number} of the {split} split has {name!r} in task.label_column {column!r}, but "
            f"the head has the {len(names)} classes {_listed(names)}{hint}: repair the row, or "
            "task.labels"
        )
    return classes


def _named(value: Any, names: tuple[str, ...], numbered: Mapping[int, str]) -> Any:
    """Return the class that a label means, or the label if it means none."""
    if isinstance(value, bool):
        truths = {name.lower(): name for name in names}
        if truths.keys() == {"false", "true"}:
            return truths[str(value).lower()]
    return numbered.get(value, value) if isinstance(value, int) else value


def _hidden(split: str, column: str) -> str:
    setting = (
        "set data.source.test to null, or for files to []"
        if split == "test"
        else "give a split whose labels are known"
    )
    if split == "train":
        setting += ", or if -1 is a class, name all classes in task.labels"
    return (
        f"the {split} split has -1 in task.label_column {column!r}, as the test splits of GLUE "
        f"have where labels are hidden: {setting}"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")


def encode_classification(
    config: FinetuneConfig,
    task: ClassificationConfig,
    splits: "Mapping[str, Dataset]",
    model: Any,
    tokenizer: "PreTrainedTokenizerBase",
    mapper: Mapper,
) -> "tuple[dict[str, Dataset], dict[str, Any]]":
    """Return the samples of each split and the task's entries in `task.json`.

    Raises ConfigError, DataFormatError.
    """
    settings = classification_settings(task)
    texts = {"sentence1_column": settings.sentence1}
    if settings.sentence2 is not None:
        texts["sentence2_column"] = settings.sentence2
    for split, rows in splits.items():
        check_columns(rows, split, texts, {"label_column": task.label_column})
    names, labels = read_labels(splits, task.label_column, settings)
    check_head(config, model, names)
    encode = text_encoder(
        tokenizer,
        model,
        first=settings.sentence1,
        second=settings.sentence2,
        max_length=task.max_length,
    )
    columns = list(dict.fromkeys(texts.values()))
    samples = {}
    for split, rows in splits.items():
        encoded = mapper(rows.select_columns(columns), split, encode, columns)
        samples[split] = encoded.add_column(LABELS, labels[split])
        _check_samples(samples[split], split, model)
    return samples, {
        "labels": None if names is None else list(names),
        "num_labels": len(names or (0,)),
    }


def _check_samples(rows: "Dataset", split: str, model: Any) -> None:
    """Raise DataFormatError for a sample without a token.

    With an encoder-decoder, also for a sample with another number of end tokens than the first row,
    because the head locates the end by counting them.
    """
    empty = np.flatnonzero(token_counts(rows) == 0)
    if len(empty):
        raise DataFormatError(
            f"row {empty[0]} of the {split} split has no text, and the tokenizer adds nothing to "
            "it: remove the row"
        )
    if not getattr(model, "is_encoder_decoder", False):
        return
    ends = rows[0][IDS].count(model.eos_token_id)
    for number, ids in enumerate(rows[IDS]):
        if ids.count(model.eos_token_id) != ends:
            raise DataFormatError(
                f"row {number} of the {split} split has another number of end tokens (id "
                f"{model.eos_token_id}) than the first row, which the head of an encoder-decoder "
                "counts: remove them from its text"
            )


class ClassificationTask(TransformersTask):
    """Sequence classification, or regression with one output."""

    draws_head = True
    task: ClassificationConfig

    def __init__(self, config: FinetuneConfig, *directories: Any) -> None:
        super().__init__(config, *directories)
        self.labels: list[str] | None = self.description["labels"]

    def model_config(self) -> Any:
        """Return the transformers configuration with class names and a decoder's padding id."""
        config = super().model_config()
        names = self.labels or ["LABEL_0"]
        config.num_labels = len(names)
        config.id2label = dict(enumerate(names))
        config.label2id = {name: number for number, name in enumerate(names)}
        config.problem_type = "regression" if self.labels is None else "single_label_classification"
        if not getattr(config, "is_encoder_decoder", False):
            config.pad_token_id = self.tokenizer.pad_token_id
        return config

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return a padded batch of samples.

        Its arrays are input_ids and attention_mask [b, s], token_type_ids [b, s] for models with
        segments, and labels [b].
        """
        length = self.task.max_length if self.task.pad_to_max_length else None
        batch = self.padded_inputs(rows, length)
        kind = torch.float32 if self.labels is None else torch.long
        return batch | {LABELS: torch.tensor([row[LABELS] for row in rows], dtype=kind)}

    def largest_rows(self, count: int) -> list[dict[str, Any]]:
        """Return `count` samples of max_length tokens.

        They end with the first training sample: the head of an encoder-decoder looks for its end
        token, after which mBART has a language.
        """
        train = self.split("train")
        assert train is not None
        first = train[0][IDS]
        ids = [self.ordinary_id()] * (self.task.max_length - len(first)) + first
        row: dict[str, Any] = {IDS: ids, LABELS: train[0][LABELS]}
        if SEGMENTS in train.column_names:
            row[SEGMENTS] = [0] * len(ids)
        return [dict(row) for _ in range(count)]

    def scorer(
        self, accelerator: "Accelerator", model: "PreTrainedModel"
    ) -> "ClassificationScorer":
        """Return a new scorer for one pass over a split."""
        names = classification_settings(self.task).metrics
        classes = 1 if self.labels is None else len(self.labels)
        return ClassificationScorer(self, accelerator, model, names, classes)


class ClassificationScorer:
    """Predictions, labels and losses of all samples on all ranks."""

    def __init__(
        self,
        task: TransformersTask,
        accelerator: "Accelerator",
        model: "PreTrainedModel",
        metrics: Sequence[ClassificationMetric],
        classes: int,
    ) -> None:
        """Begin a pass over a split; `classes` is 1 for regression."""
        self._task, self._accelerator, self._model = task, accelerator, model
        self._metrics, self._classes = metrics, classes
        self._predictions: list[float] = []
        self._labels: list[float] = []
        self._loss = 0.0

    @torch.no_grad()
    def add(self, batch: Batch) -> None:
        """Score a batch of this rank.

        Collective; call it while iterating over the prepared loader.
        """
        logits, labels = self._model(**without_labels(batch)).logits.float(), batch[LABELS]
        if labels.is_floating_point():  # regression
            predictions = logits.squeeze(-1)
            losses = torch.nn.functional.mse_loss(predictions, labels.float(), reduction="none")
        else:
            predictions = logits.argmax(-1)
            losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        predictions, labels, losses = self._task.scored(
            self._accelerator, predictions, labels, losses
        )
        self._predictions += predictions.tolist()
        self._labels += labels.tolist()
        self._loss += float(losses.double().sum())

    def metrics(self) -> dict[str, float]:
        """Return `loss` and the metrics over all added batches."""
        scores = classification_metrics(
            self._metrics, self._predictions, self._labels, self._classes
        )
        return {LOSS: self._loss / len(self._labels), **scores}
