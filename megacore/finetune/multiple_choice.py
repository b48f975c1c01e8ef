"""Choice of one of several answers to a text, such as RACE, SWAG and HellaSwag.

The model reads each choice with the context as a pair of texts; the pooled [CLS] gives one score,
and the loss is the cross entropy over a sample's choices. A question and a choice are joined as in
Megatron-LM's fine-tuning on RACE (`tasks/race/data.py`). Unlike there, a choice replaces `____`
once, and a long choice is not cut to 128 tokens: the longer text of the pair is cut first.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from megacore.config.finetune import FinetuneConfig
from megacore.config.finetune_task import MultipleChoiceConfig
from megacore.errors import DataFormatError
from megacore.finetune.classification import ClassificationScorer
from megacore.finetune.examples import (
    IDS,
    LABELS,
    SEGMENTS,
    Mapper,
    Rows,
    check_columns,
    encode_texts,
)
from megacore.finetune.task import TransformersTask

if TYPE_CHECKING:
    from accelerate import Accelerator
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_LENGTHS = "choice_lengths"
"""Column with the number of tokens of each choice; a sample's ids are those of all its choices."""


def encode_multiple_choice(
    task: MultipleChoiceConfig,
    splits: "Mapping[str, Dataset]",
    model: Any,
    tokenizer: "PreTrainedTokenizerBase",
    mapper: Mapper,
) -> "tuple[dict[str, Dataset], dict[str, Any]]":
    """Return the samples of each split and the task's entries in `task.json`.

    Raises DataFormatError for columns, choices or labels that do not fit the task, and for a row
    with another number of choices than the first training row.
    """
    texts = {"context_column": task.context_column}
    if task.question_column is not None:
        texts["question_column"] = task.question_column
    several = task.choices_columns if len(task.choices_columns) > 1 else ()
    texts |= {f"choices_columns[{number}]": column for number, column in enumerate(several)}
    others = {"label_column": task.label_column}
    if not several:
        others["choices_columns"] = task.choices_columns[0]
    for split, rows in splits.items():
        check_columns(rows, split, texts, others)
    count = len(several) or _count(splits["train"], task.choices_columns[0])
    encode = partial(
        encode_choices,
        task=task,
        tokenizer=tokenizer,
        segments=getattr(model, "type_vocab_size", 0) > 1,
    )
    columns = list(dict.fromkeys([*texts.values(), *task.choices_columns]))
    samples = {}
    for split, rows in splits.items():
        if several:
            for column in several:
                _check_texts(rows, split, column)
        else:
            _check_choices(rows, split, task.choices_columns[0], count)
        labels = read_choice_labels(list(rows[task.label_column]), split, task.label_column, count)
        encoded = mapper(rows.select_columns(columns), split, encode, columns)
        samples[split] = encoded.add_column(LABELS, labels)
    return samples, {"num_choices": count}


def _count(rows: "Dataset", column: str) -> int:
    """Return the number of choices of the first training row, at least 2."""
    choices = rows[0][column]
    if not isinstance(choices, list) or len(choices) < 2:
        content = f"{len(choices)}" if isinstance(choices, list) else f"a {type(choices).__name__}"
        raise DataFormatError(
            f"row 0 of the train split has {content} in column {column!r} (task.choices_columns), "
            "where a list of two or more choices is expected: repair it, or name one column for "
            "each choice"
        )
    return len(choices)


def _check_choices(rows: "Dataset", split: str, column: str, count: int) -> None:
    for number, choices in enumerate(rows[column]):
        if not isinstance(choices, list) or len(choices) != count:
            found = len(choices) if isinstance(choices, list) else "no list of"
            raise DataFormatError(
                f"row {number} of the {split} split has {found} choices in column {column!r}, and "
                f"the first row of training has {count}: give every row as many"
            )
        other = next((each for each in choices if not isinstance(each, str | None)), None)
        if other is not None:
            raise DataFormatError(
                f"row {number} of the {split} split has the choice {other} in column {column!r}, "
                "where every row needs texts: write all choices as text, in quotes"
            )
        if not all(choice and choice.strip() for choice in choices):
            raise _empty_choice(number, split, column)


def _check_texts(rows: "Dataset", split: str, column: str) -> None:
    for number, choice in enumerate(rows[column]):
        if not choice.strip():
            raise _empty_choice(number, split, column)


def _empty_choice(number: int, split: str, column: str) -> DataFormatError:
    return DataFormatError(
        f"row {number} of the {split} split has a choice without text in column {column!r}: fill "
        "it, or remove the row"
    )


def read_choice_labels(values: Sequence[Any], split: str, column: str, count: int) -> list[int]:
    """Return the number from 0 of each row's right choice.

    Args:
        values: numbers from 0, also as text (HellaSwag), or letters from A (RACE).
        split: name of the split.
        column: column of the values.
        count: number of choices of a row.

    Raises:
        DataFormatError: a value is none of the choices.
    """
    names: dict[Any, int] = {str(number): number for number in range(count)}
    names |= {chr(ord("A") + number): number for number in range(min(count, 26))}
    labels = []
    for number, value in enumerate(values):
        known = value is not None and not isinstance(value, bool | float)
        label = names.get(str(value)) if known else None
        if label is None:
            raise DataFormatError(
                f"row {number} of the {split} split has {value!r} in task.label_column {column!r}, "
                f"but its {count} choices are numbered 0 to {count - 1}, or A to "
                f"{chr(ord('A') + min(count, 26) - 1)}: repair the row, or give a split whose "
                "labels are known"
            )
        labels.append(label)
    return labels


def encode_choices(
    rows: Rows, *, task: MultipleChoiceConfig, tokenizer: "PreTrainedTokenizerBase", segments: bool
) -> dict[str, Any]:
    """Return the ids of each row's choices, one after the other, and the length of each."""
    contexts: Sequence[str] = rows[task.context_column]
    columns = [rows[column] for column in task.choices_columns]
    choices = columns[0] if len(columns) == 1 else [list(row) for row in zip(*columns, strict=True)]
    count = len(choices[0])
    if task.question_column is not None:
        choices = [
            [_answered(question, choice) for choice in row]
            for question, row in zip(rows[task.question_column], choices, strict=True)
        ]
    encoded = encode_texts(
        {
            "context": [context for context in contexts for _ in range(count)],
            "choice": [choice for row in choices for choice in row],
        },
        tokenizer=tokenizer,
        first="context",
        second="choice",
        max_length=task.max_length,
        segments=segments,
        end=None,
    )
    starts = range(0, len(encoded[IDS]), count)
    joined: dict[str, Any] = {
        name: [list(chain.from_iterable(lists[start : start + count])) for start in starts]
        for name, lists in encoded.items()
    }
    lengths = [len(ids) for ids in encoded[IDS]]
    return joined | {_LENGTHS: [lengths[start : start + count] for start in starts]}


def _answered(question: str, choice: str) -> str:
    if "_" not in question:
        return f"{question} {choice}"
    return re.sub("_+", lambda blank: choice, question)  # a blank may be long: ____


class MultipleChoiceTask(TransformersTask):
    """Choice of one of several answers by the score of each."""

    draws_head = True
    task: MultipleChoiceConfig

    def __init__(self, config: FinetuneConfig, *directories: Any) -> None:
        super().__init__(config, *directories)
        self.choices: int = self.description["num_choices"]

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return a padded batch of samples with c choices each.

        Its arrays are input_ids and attention_mask [b, c, s], token_type_ids [b, c, s] for models
        with segments, and labels [b].
        """
        names = [name for name in (IDS, SEGMENTS) if name in rows[0]]
        pairs = [
            {name: row[name][end - length : end] for name in names}
            for row in rows
            for end, length in _ends(row[_LENGTHS])
        ]
        length = self.task.max_length if self.task.pad_to_max_length else None
        inputs = self.padded_inputs(pairs, length)
        batch = {name: tensor.view(len(rows), self.choices, -1) for name, tensor in inputs.items()}
        return batch | {LABELS: torch.tensor([row[LABELS] for row in rows])}

    def largest_rows(self, count: int) -> list[dict[str, Any]]:
        """Return `count` samples whose choices have max_length tokens each."""
        train = self.split("train")
        assert train is not None
        total = self.task.max_length * self.choices
        row: dict[str, Any] = {
            IDS: [self.ordinary_id()] * total,
            _LENGTHS: [self.task.max_length] * self.choices,
            LABELS: train[0][LABELS],
        }
        if SEGMENTS in train.column_names:
            row[SEGMENTS] = [0] * total
        return [dict(row) for _ in range(count)]

    def scorer(self, accelerator: "Accelerator", model: "PreTrainedModel") -> ClassificationScorer:
        """Return a new scorer for one pass over a split."""
        return ClassificationScorer(self, accelerator, model, ("accuracy",), self.choices)


def _ends(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return the end of each choice in a sample's ids, and its length."""
    return [(sum(lengths[: number + 1]), length) for number, length in enumerate(lengths)]
