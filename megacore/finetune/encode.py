"""Rows of text to rows of ids; the functions that run in processes of `datasets` are at the top level."""

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megacore.artifact.files import workspace_errors
from megacore.errors import DataFormatError, WorkerLostError

if TYPE_CHECKING:
    import numpy.typing as npt
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

IDS = "input_ids"
SEGMENTS = "token_type_ids"
LABELS = "labels"
_ROWS_PER_READ = 10_000
_ROWS_PER_WORKER = 5_000
"""A process for fewer takes longer to start than to run."""

Rows = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Mapper:
    """How `datasets` maps: with how many processes, and where it may keep its files."""

    workers: int
    scratch: Path

    def __call__(
        self, rows: "Dataset", split: str, encode: Callable[[Rows], dict[str, Any]], columns: Sequence[str]
    ) -> "Dataset":
        """`encode` applied to batches of rows, whose `columns` are dropped; other columns stay.

        Raises WorkerLostError, WorkspaceError.
        """
        count = max(1, min(self.workers, len(rows) // _ROWS_PER_WORKER))
        try:
            with workspace_errors(self.scratch):
                return rows.map(
                    encode,
                    batched=True,
                    remove_columns=list(columns),
                    num_proc=count if count > 1 else None,
                    load_from_cache_file=False,
                    cache_file_name=str(self.scratch / f"{split}.arrow"),
                    new_fingerprint=f"encoded-{split}",
                )
        except RuntimeError as error:
            if "abruptly died" not in str(error):
                raise
            raise WorkerLostError(
                "a process that tokenized was killed, perhaps for want of memory: set data.workers to fewer, or free "
                "memory"
            ) from error


def workers_of(choice: int | str) -> int:
    """How many processes `data.workers` means."""
    return choice if isinstance(choice, int) else len(os.sched_getaffinity(0))


def token_counts(rows: "Dataset", column: str = IDS) -> "npt.NDArray[np.int64]":
    """The number of ids in each row."""
    import pyarrow.compute as pc

    batches = rows.select_columns([column]).with_format("arrow").iter(_ROWS_PER_READ)
    counts = [pc.list_value_length(batch[column]).to_numpy() for batch in batches]
    return np.concatenate(counts).astype(np.int64)


def check_columns(
    rows: "Dataset", split: str, texts: Mapping[str, str], others: Mapping[str, str] | None = None
) -> None:
    """Raise DataFormatError unless every column is there, and those of texts hold text in every row.

    Args:
        rows: of one split.
        split: its name.
        texts: names of columns with text, by the field of `task` that says them.
        others: those with anything else.
    """
    for field, column in {**texts, **(others or {})}.items():
        if column not in rows.column_names:
            close = difflib.get_close_matches(column, rows.column_names, n=1, cutoff=0.5)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise DataFormatError(
                f"task.{field} is {column!r}, but the {split} split has the columns {', '.join(rows.column_names)}"
                f"{hint}: name one of them"
            )
    for field, column in texts.items():
        _check_text(rows, split, field, column)


def _check_text(rows: "Dataset", split: str, field: str, column: str) -> None:
    feature = rows.features[column]
    kind = getattr(feature, "dtype", type(feature).__name__)
    if kind not in ("string", "large_string", "null"):
        raise DataFormatError(
            f"task.{field} is {column!r}, which holds {kind} in the {split} split instead of text: name another"
        )
    empty = True
    for number, text in enumerate(rows[column]):
        if text is None:
            raise DataFormatError(
                f"row {number} of the {split} split has no text in column {column!r} (task.{field}): fill or remove it"
            )
        empty = empty and not text.strip()
    if empty:
        raise DataFormatError(
            f"column {column!r} (task.{field}) is empty in every row of the {split} split: name another, or repair it"
        )


def encode_texts(
    rows: Rows,
    *,
    tokenizer: "PreTrainedTokenizerBase",
    first: str,
    second: str | None,
    max_length: int,
    segments: bool,
    end: int | None,
) -> dict[str, Any]:
    """Ids of each text or pair, cut to `max_length`.

    Where the tokenizer puts nothing between the two of a pair, a line break divides them. `end` is put after each
    where it is given.
    """
    pairs = None if second is None else list(rows[second])
    if pairs is not None and not tokenizer.num_special_tokens_to_add(pair=True):
        pairs = [f"\n{text}" for text in pairs]
    found = tokenizer(
        list(rows[first]),
        pairs,
        truncation=True,
        max_length=max_length if end is None else max_length - 1,
        return_attention_mask=False,
        return_token_type_ids=segments,
    )
    after = [] if end is None else [end]
    encoded: dict[str, Any] = {IDS: [[*ids, *after] for ids in found[IDS]]}
    if segments:
        encoded[SEGMENTS] = [[*kinds, *(kinds[-1:] if after else [])] for kinds in found[SEGMENTS]]
    return encoded


def text_encoder(
    tokenizer: "PreTrainedTokenizerBase", model: Any, *, first: str, second: str | None, max_length: int
) -> Callable[[Rows], dict[str, Any]]:
    """What encodes the texts of a classification by a model, of which `model` is transformers' configuration."""
    return partial(
        encode_texts,
        tokenizer=tokenizer,
        first=first,
        second=second,
        max_length=max_length,
        segments=getattr(model, "type_vocab_size", 0) > 1,
        end=missing_end(tokenizer, model) if getattr(model, "is_encoder_decoder", False) else None,
    )


def missing_end(tokenizer: "PreTrainedTokenizerBase", model: Any) -> int | None:
    """The id that ends a text, where the model has one and its tokenizer does not write it."""
    end = end_id(tokenizer, model)
    return None if end is None or tokenizer("a")[IDS][-1:] == [end] else end


def end_id(tokenizer: "PreTrainedTokenizerBase", model: Any) -> int | None:
    """The id that ends a text, by the model's configuration or else by its tokenizer."""
    end = getattr(model, "eos_token_id", None)
    end = end[0] if isinstance(end, list) else end
    return tokenizer.eos_token_id if end is None else int(end)
