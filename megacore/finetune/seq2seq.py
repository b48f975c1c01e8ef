"""Sequence-to-sequence tasks: a target text for each source text."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megacore.artifact.files import copy_tree, workspace_errors
from megacore.config.data import Splitter
from megacore.config.finetune_task import LOSS, Seq2SeqConfig
from megacore.convert.tokenizers import missing_end
from megacore.errors import ConfigError, DataFormatError, DownloadError
from megacore.finetune.examples import (
    IDS,
    LABELS,
    Mapper,
    Rows,
    check_columns,
    encode_texts,
    token_counts,
)
from megacore.finetune.metrics import Answer, text_metrics
from megacore.finetune.task import (
    IGNORED,
    Batch,
    TransformersTask,
    padded,
    token_losses,
)
from megacore.tokenizer.sentences import (
    SplitterChoice,
    download_punkt,
    find_punkt,
    make_splitter,
    model_directory,
)

if TYPE_CHECKING:
    from accelerate import Accelerator
    from datasets import Dataset
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

PUNKT = "punkt"
"""Directory of nltk's models below the artifact of the stage `examples`, so that no rank
downloads them."""
_LANGUAGE = "english"


def sentence_splitter(kind: Splitter, punkt: Path) -> Callable[[str], list[str]]:
    """Return a function that splits a text into sentences.

    `punkt` is the directory of nltk's models. Raises DataFormatError when they are damaged.
    """
    return make_splitter(SplitterChoice(kind, _LANGUAGE, data=str(punkt)))


def store_punkt(directory: Path) -> None:
    """Fill the new `directory` with nltk's models, copied from this host or downloaded.

    Raises DownloadError.
    """
    installed = find_punkt(_LANGUAGE)
    with workspace_errors(directory):
        directory.mkdir()
        if installed is not None:
            source = model_directory(installed, _LANGUAGE)
            copy_tree(source, directory / source.relative_to(installed))
            return
    try:
        download_punkt(directory, _LANGUAGE)
    except DownloadError as error:
        raise DownloadError(
            "task.sentence_splitter is punkt: "
            f"{str(error).replace('data.sentence_splitter', 'task.sentence_splitter')}"
        ) from error


def encode_seq2seq(
    task: Seq2SeqConfig,
    splits: "Mapping[str, Dataset]",
    model: Any,
    tokenizer: "PreTrainedTokenizerBase",
    mapper: Mapper,
    directory: Path,
) -> "tuple[dict[str, Dataset], dict[str, Any]]":
    """Return the samples of each split and the task's entries in `task.json`.

    Raises ConfigError, DataFormatError; DownloadError when nltk's models are needed and cannot be
    downloaded.
    """
    if getattr(model, "decoder_start_token_id", None) is None:
        raise ConfigError(
            f"the config.json of model.path ({model.model_type}) has no decoder_start_token_id, "
            "the token that its output begins with: set it there"
        )
    columns = {"source_column": task.source_column, "target_column": task.target_column}
    for split, rows in splits.items():
        check_columns(rows, split, columns)
    encode = partial(
        encode_pairs,
        tokenizer=tokenizer,
        task=task,
        end=missing_end(tokenizer, model, target=True),
        source_end=missing_end(tokenizer, model),
    )
    samples = {}
    for split, rows in splits.items():
        texts = list(dict.fromkeys(columns.values()))
        samples[split] = mapper(rows.select_columns(texts), split, encode, texts)
        _check_samples(samples[split], split)
    description: dict[str, Any] = {}
    if task.sentence_splitter == "punkt" and "rougeLsum" in task.metrics:
        store_punkt(directory / PUNKT)
    return samples, description


def encode_pairs(
    rows: Rows,
    *,
    tokenizer: "PreTrainedTokenizerBase",
    task: Seq2SeqConfig,
    end: int | None,
    source_end: int | None,
) -> dict[str, Any]:
    """Return the ids of each source and target, truncated to their maximum lengths.

    `end` is appended to each target that does not end with it, and `source_end` to each source,
    unless they are None.
    """
    column = task.source_column
    sources = encode_texts(
        {column: [task.source_prefix + text for text in rows[column]]},
        tokenizer=tokenizer,
        first=column,
        second=None,
        max_length=task.max_source_length,
        segments=False,
        end=source_end,
    )
    targets = tokenizer(
        text_target=list(rows[task.target_column]),
        max_length=task.max_target_length,
        truncation=True,
        return_attention_mask=False,
        return_token_type_ids=False,
    )
    return {
        IDS: sources[IDS],
        LABELS: [_ended(ids, end, task.max_target_length) for ids in targets[IDS]],
    }


def _ended(ids: list[int], end: int | None, length: int) -> list[int]:
    return ids if end is None or ids[-1:] == [end] else [*ids[: length - 1], end]


def _check_samples(rows: "Dataset", split: str) -> None:
    for column, name in ((IDS, "source"), (LABELS, "target")):
        empty = np.flatnonzero(token_counts(rows, column) == 0)
        if len(empty):
            raise DataFormatError(
                f"row {empty[0]} of the {split} split has an empty {name}, and the tokenizer adds "
                "nothing to it: remove the row"
            )


class Seq2SeqTask(TransformersTask):
    """Task of an encoder-decoder with its own head."""

    task: Seq2SeqConfig

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return input_ids and attention_mask [b, s] of the sources, labels [b, t] of targets."""
        to_maximum = self.task.pad_to_max_length
        inputs = self.padded_inputs(rows, self.task.max_source_length if to_maximum else None)
        labels = padded(rows, LABELS, IGNORED, self.task.max_target_length if to_maximum else None)
        return inputs | {LABELS: labels}

    def largest_rows(self, count: int) -> list[dict[str, Any]]:
        """Return `count` samples of the longest source and target."""
        id_ = self.ordinary_id()
        return [
            {IDS: [id_] * self.task.max_source_length, LABELS: [id_] * self.task.max_target_length}
            for _ in range(count)
        ]

    def scorer(self, accelerator: "Accelerator", model: "PreTrainedModel") -> "Seq2SeqScorer":
        """Return a new scorer for one pass over a split.

        Raises DataFormatError when nltk's models are damaged.
        """
        splitter = self.task.sentence_splitter if "rougeLsum" in self.task.metrics else "rules"
        sentences = sentence_splitter(splitter, self._examples / PUNKT)
        return Seq2SeqScorer(self, accelerator, model, sentences)

    def generation(self, model: "PreTrainedModel") -> "GenerationConfig":
        """Return the settings of generation: beam search in the task's lengths, no sampling."""
        from transformers import GenerationConfig

        settings = model.generation_config.to_dict()
        for name in (
            "max_length",
            "min_length",
            "do_sample",
            "temperature",
            "top_k",
            "top_p",
            "transformers_version",
        ):
            settings.pop(name, None)
        return GenerationConfig.from_dict(
            {
                **settings,
                "num_beams": self.task.num_beams,
                "max_new_tokens": self.task.max_target_length,
                "min_new_tokens": self.task.min_target_length,
                "do_sample": False,
                "num_return_sequences": 1,
                "return_dict_in_generate": False,
                "pad_token_id": self.pad_id,
            }
        )


class Seq2SeqScorer:
    """Losses of all target tokens and all generated texts of all ranks."""

    def __init__(
        self,
        task: Seq2SeqTask,
        accelerator: "Accelerator",
        model: "PreTrainedModel",
        sentences: Callable[[str], list[str]],
    ) -> None:
        self._task, self._accelerator, self._model = task, accelerator, model
        self._sentences = sentences
        self._writer: Any = accelerator.unwrap_model(model)
        self._generation = task.generation(self._writer)
        # A rank that has finished its texts must keep generating: the others need its shard of the
        # weights.
        self._together = _divides_weights(accelerator)
        self._written: list[str] = []
        self._targets: list[str] = []
        self._loss, self._tokens = 0.0, 0

    @torch.no_grad()
    def add(self, batch: Batch) -> None:
        """Score a batch of this rank.

        Collective; call it while iterating over the prepared loader.
        """
        labels = batch[LABELS]
        losses, tokens = token_losses(self._model(**batch).logits, labels)
        # generate() calls the encoder directly, without the autocast of the prepared model.
        with self._accelerator.autocast():
            written = self._writer.generate(
                input_ids=batch[IDS],
                attention_mask=batch["attention_mask"],
                generation_config=self._generation,
                synced_gpus=self._together,
            )
        pad = self._task.pad_id
        written = self._accelerator.pad_across_processes(written, dim=1, pad_index=pad)
        targets = self._accelerator.pad_across_processes(
            labels.masked_fill(labels == IGNORED, pad), 1, pad
        )
        written, targets, losses, tokens = self._task.scored(
            self._accelerator, written, targets, losses, tokens
        )
        self._written += self._texts(written)
        self._targets += self._texts(targets)
        self._loss += float(losses.double().sum())
        self._tokens += int(tokens.sum())

    def _texts(self, ids: torch.Tensor | list[list[int]]) -> list[str]:
        return [
            text.strip()
            for text in self._task.tokenizer.batch_decode(ids, skip_special_tokens=True)
        ]

    def answers(self, rows: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """Return the scored texts of `rows`, which are the first samples of the split."""
        questions = self._texts([row[IDS] for row in rows])
        return list(map(Answer, questions, self._targets, self._written))

    def metrics(self) -> dict[str, float]:
        """Return `loss`, the mean over all target tokens, and the task's metrics over all texts."""
        names = tuple(dict.fromkeys(self._task.task.metrics))
        return {
            LOSS: self._loss / self._tokens,
            **text_metrics(names, self._written, self._targets, self._sentences),
        }


def _divides_weights(accelerator: "Accelerator") -> bool:
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return plugin is not None and plugin.zero_stage == 3 and accelerator.num_processes > 1
