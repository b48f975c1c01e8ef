"""A class, or a number, for a sentence or a pair of sentences."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megacore.config.finetune import FinetuneConfig
from megacore.config.finetune_task import ClassificationConfig
from megacore.errors import DataFormatError
from megacore.finetune.base import TransformersTask, mask_of, padded, without_labels
from megacore.finetune.encode import IDS, LABELS, SEGMENTS, Mapper, check_columns, text_encoder, token_counts
from megacore.finetune.fit import check_head
from megacore.finetune.glue import classification_settings
from megacore.finetune.labels import read_labels
from megacore.finetune.metrics import LOSS, classification_metrics
from megacore.finetune.task import Batch

if TYPE_CHECKING:
    from accelerate import Accelerator
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def encode_classification(
    config: FinetuneConfig,
    task: ClassificationConfig,
    splits: "Mapping[str, Dataset]",
    model: Any,
    tokenizer: "PreTrainedTokenizerBase",
    mapper: Mapper,
) -> "tuple[dict[str, Dataset], dict[str, Any]]":
    """The samples of each split, and what `task.json` says of them. Raises ConfigError, DataFormatError."""
    settings = classification_settings(task)
    texts = {"sentence1_column": settings.sentence1}
    if settings.sentence2 is not None:
        texts["sentence2_column"] = settings.sentence2
    for split, rows in splits.items():
        check_columns(rows, split, texts, {"label_column": task.label_column})
    names, labels = read_labels(splits, task.label_column, settings)
    check_head(config, model, names)
    encode = text_encoder(
        tokenizer, model, first=settings.sentence1, second=settings.sentence2, max_length=task.max_length
    )
    columns = list(dict.fromkeys(texts.values()))
    samples = {}
    for split, rows in splits.items():
        encoded = mapper(rows.select_columns(columns), split, encode, columns)
        samples[split] = encoded.add_column(LABELS, labels[split])
        _check_samples(samples[split], split, model)
    return samples, {"labels": None if names is None else list(names), "num_labels": len(names or (0,))}


def _check_samples(rows: "Dataset", split: str, model: Any) -> None:
    """Raise DataFormatError for a sample without a token, and for one that the head would not find the end of."""
    empty = np.flatnonzero(token_counts(rows) == 0)
    if len(empty):
        raise DataFormatError(
            f"row {empty[0]} of the {split} split has no text, and the tokenizer adds nothing to it: remove the row"
        )
    if not getattr(model, "is_encoder_decoder", False):
        return
    ends = rows[0][IDS].count(model.eos_token_id)
    for number, ids in enumerate(rows[IDS]):
        if ids.count(model.eos_token_id) != ends:
            raise DataFormatError(
                f"row {number} of the {split} split has another number of end tokens (id {model.eos_token_id}) than "
                "the first row, which the head of an encoder-decoder counts: remove them from its text"
            )


class ClassificationTask(TransformersTask):
    """Sequence classification, or regression with one output."""

    auto_class = "AutoModelForSequenceClassification"
    draws_head = True
    task: ClassificationConfig

    def __init__(self, config: FinetuneConfig, *directories: Any) -> None:
        super().__init__(config, *directories)
        assert isinstance(config.task, ClassificationConfig)
        self.task = config.task
        self.labels: list[str] | None = self.description["labels"]
        # XLNet's head takes the last place, whatever is there.
        self._reads_last = getattr(super().model_config(), "summary_type", None) == "last"

    def model_config(self) -> Any:
        """The configuration of transformers, with the names of the classes and the padding that a decoder looks for."""
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
        """input_ids, attention_mask and, of a model with segments, token_type_ids [b, s]; labels [b]."""
        length = self.task.max_length if self.task.pad_to_max_length else None
        pad = self.tokenizer.pad_token_id
        assert isinstance(pad, int)  # the stage `examples` refuses a tokenizer without
        left = self._reads_last
        ids = padded(rows, IDS, pad, length, left=left)
        mask = mask_of(rows, ids.shape[1])
        batch = {IDS: ids, "attention_mask": mask.flip(1) if left else mask}
        if SEGMENTS in rows[0]:
            batch[SEGMENTS] = padded(rows, SEGMENTS, 0, ids.shape[1], left=left)
        kind = torch.float32 if self.labels is None else torch.long
        return batch | {LABELS: torch.tensor([row[LABELS] for row in rows], dtype=kind)}

    def largest_rows(self, count: int) -> list[dict[str, Any]]:
        """`count` samples of max_length tokens; the last is the end token, which the head of a T5 looks for."""
        train = self.split("train")
        assert train is not None
        ids = [self.ordinary_id()] * (self.task.max_length - 1) + [train[0][IDS][-1]]
        row: dict[str, Any] = {IDS: ids, LABELS: train[0][LABELS]}
        if SEGMENTS in train.column_names:
            row[SEGMENTS] = [0] * len(ids)
        return [dict(row) for _ in range(count)]

    def scorer(self, accelerator: "Accelerator", model: "PreTrainedModel") -> "ClassificationScorer":
        """A new one for a pass over a split."""
        return ClassificationScorer(self, accelerator, model)


class ClassificationScorer:
    """Predictions, labels and losses of all samples of all ranks."""

    def __init__(self, task: ClassificationTask, accelerator: "Accelerator", model: "PreTrainedModel") -> None:
        self._task, self._accelerator, self._model = task, accelerator, model
        self._predictions: list[float] = []
        self._labels: list[float] = []
        self._loss = 0.0

    @torch.no_grad()
    def add(self, batch: Batch) -> None:
        """Score a batch of this rank; a collective call, while the prepared loader is iterated."""
        logits, labels = self._model(**without_labels(batch)).logits.float(), batch[LABELS]
        if self._task.labels is None:
            predictions = logits.squeeze(-1)
            losses = torch.nn.functional.mse_loss(predictions, labels.float(), reduction="none")
        else:
            predictions = logits.argmax(-1)
            losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        predictions, labels, losses = self._task.scored(self._accelerator, predictions, labels, losses)
        self._predictions += predictions.tolist()
        self._labels += labels.tolist()
        self._loss += float(losses.double().sum())

    def metrics(self) -> dict[str, float]:
        """`loss` and the task's metrics of everything that was added."""
        names = classification_settings(self._task.task).metrics
        classes = 1 if self._task.labels is None else len(self._task.labels)
        return {
            LOSS: self._loss / len(self._labels),
            **classification_metrics(names, self._predictions, self._labels, classes),
        }
