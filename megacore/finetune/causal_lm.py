"""Causal language modeling: the next token of running text, cut into blocks."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megacore.config.finetune_task import LOSS, CausalLmConfig
from megacore.errors import ConfigError, DataFormatError
from megacore.finetune.examples import IDS, LABELS, Mapper, Rows, check_columns, token_counts
from megacore.finetune.task import Batch, TransformersTask, padded, token_losses, without_labels
from megacore.observe.logging import perplexity

if TYPE_CHECKING:
    from accelerate import Accelerator
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_ROWS = 1_000
"""Number of texts whose ids are in memory at a time."""


def encode_causal_lm(
    task: CausalLmConfig,
    splits: "Mapping[str, Dataset]",
    tokenizer: "PreTrainedTokenizerBase",
    mapper: Mapper,
) -> "tuple[dict[str, Dataset], dict[str, Any]]":
    """Return the blocks of each split and the task's entries in `task.json`.

    Raises ConfigError, DataFormatError.
    """
    if task.append_eos and tokenizer.eos_token_id is None:
        raise ConfigError(
            "task.append_eos is true but the tokenizer has no end-of-text token: set it to false"
        )
    for split, rows in splits.items():
        check_columns(rows, split, {"text_column": task.text_column})
    encode = partial(
        encode_running,
        tokenizer=tokenizer,
        column=task.text_column,
        end=tokenizer.eos_token_id if task.append_eos else None,
    )
    samples = {}
    for split, rows in splits.items():
        ids = mapper(
            rows.select_columns([task.text_column]), f"{split}-texts", encode, [task.text_column]
        )
        samples[split] = _blocks(ids, split, task.block_size, mapper)
    return samples, {}


def encode_running(
    rows: Rows, *, tokenizer: "PreTrainedTokenizerBase", column: str, end: int | None
) -> dict[str, Any]:
    """Return the ids of each text, followed by `end` unless that is None."""
    tokenized = tokenizer(
        list(rows[column]), return_attention_mask=False, return_token_type_ids=False, verbose=False
    )
    suffix = [] if end is None else [end]
    return {IDS: [[*ids, *suffix] for ids in tokenized[IDS]]}


def _blocks(texts: "Dataset", split: str, block_size: int, mapper: Mapper) -> "Dataset":
    from datasets import Dataset, Features, List, Value

    total = int(token_counts(texts).sum())
    if total < block_size:
        raise DataFormatError(
            f"the {split} split has {total} tokens, fewer than the {block_size} of one block: give "
            "more text, or lower task.block_size"
        )
    rows: Dataset = Dataset.from_generator(
        cut_blocks,
        features=Features({IDS: List(Value("int32"))}),
        gen_kwargs={"texts": texts, "block_size": block_size},
        cache_dir=str(mapper.scratch / f"{split}-blocks"),
        fingerprint=f"blocks-{split}",
    )
    return rows


def cut_blocks(texts: "Dataset", block_size: int) -> Iterator[dict[str, Any]]:
    """Yield samples of `block_size` ids from the concatenated texts.

    An incomplete block at the end is dropped.
    """
    rest = np.empty(0, np.int32)
    for batch in texts.with_format("arrow").iter(_ROWS):
        rest = np.concatenate(
            [rest, batch[IDS].combine_chunks().flatten().to_numpy(zero_copy_only=False)]
        )
        full = len(rest) - len(rest) % block_size
        for start in range(0, full, block_size):
            yield {IDS: rest[start : start + block_size]}
        rest = rest[full:]


class CausalLmTask(TransformersTask):
    """Task of a language model with its own head.

    A sample's labels are its ids; the model shifts them.
    """

    task: CausalLmConfig

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return input_ids, attention_mask and labels, all [b, s]."""
        ids = padded(rows, IDS, 0, self.task.block_size)
        return {IDS: ids, "attention_mask": torch.ones_like(ids), LABELS: ids.clone()}

    def largest_rows(self, count: int) -> list[dict[str, Any]]:
        """Return `count` blocks."""
        return [{IDS: [self.ordinary_id()] * self.task.block_size} for _ in range(count)]

    def scorer(self, accelerator: "Accelerator", model: "PreTrainedModel") -> "CausalLmScorer":
        """Return a new scorer for one pass over a split."""
        return CausalLmScorer(self, accelerator, model)


class CausalLmScorer:
    """Losses of all tokens on all ranks."""

    def __init__(
        self, task: CausalLmTask, accelerator: "Accelerator", model: "PreTrainedModel"
    ) -> None:
        self._task, self._accelerator, self._model = task, accelerator, model
        self._loss, self._tokens = 0.0, 0

    @torch.no_grad()
    def add(self, batch: Batch) -> None:
        """Score a batch of this rank.

        Collective; call it while iterating over the prepared loader.
        """
        logits = self._model(**without_labels(batch)).logits
        losses, tokens = self._task.scored(
            self._accelerator, *token_losses(logits[:, :-1], batch[LABELS][:, 1:])
        )
        self._loss += float(losses.double().sum())
        self._tokens += int(tokens.sum())

    def metrics(self) -> dict[str, float]:
        """Return `loss`, the mean over all added tokens, and `ppl`, its exponential."""
        loss = self._loss / self._tokens
        return {LOSS: loss, "ppl": perplexity(loss)}
