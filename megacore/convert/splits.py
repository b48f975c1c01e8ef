"""The samples on which an export is compared with the model."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch

from megacore.convert.outputs import to_device
from megacore.convert.parity import Batches
from megacore.data.build import open_split
from megacore.data.samples import Dataset
from megacore.errors import DataFormatError
from megacore.jobs.run import ConvertJob
from megacore.models.inputs import InputRules, MaskRules, ModelInput, input_rules

_LOGITS = 1 << 24
"""Logits of a batch that is scored: 64 MiB of them."""


@dataclass(frozen=True)
class Samples:
    """Validation samples for logits and choices, and a split for perplexity."""

    rows: npt.NDArray[np.int64]
    """[samples, width] of the validation split, padding -1."""
    validation: ModelInput
    """The same, as the model takes it."""
    split: str
    """The split for perplexity: test, or valid where there is no test split."""
    batches: Batches
    """Its micro batches."""

    def texts(self, job: ConvertJob) -> list[list[int]]:
        """The ids of each validation sample that are a text: what a model reads, without padding."""
        length = self.rows.shape[1] if job.config.family == "gpt" else job.config.data.seq_length
        return [[token for token in row[:length].tolist() if token >= 0] for row in self.rows]


def samples_of(job: ConvertJob, device: torch.device | str, on_batch: Callable[[], None] = lambda: None) -> Samples:
    """The samples of a run; `on_batch` is called before each batch is read.

    Raises DataFormatError when its validation split has none.
    """
    rules = _rules(job)
    rows = validation_rows(job)
    split, test = "test", _open(job, "test")
    if len(test) == 0:
        split, test = "valid", _open(job, "valid")
    return Samples(
        rows,
        to_device(rules.read(torch.from_numpy(rows)), device),
        split,
        lambda: _batches(job, test, rules, device, on_batch),
    )


def validation_rows(job: ConvertJob) -> npt.NDArray[np.int64]:
    """The first `export.parity_samples` samples of the validation split (all, if it has fewer), [samples, width].

    Raises DataFormatError when the split has none.
    """
    dataset = _open(job, "valid")
    count = min(job.config.export.parity_samples, len(dataset))
    if count == 0:
        raise DataFormatError(
            f"{job.index_directory} has no validation samples on which the export can be compared: "
            f"give data.split {job.config.data.split_weights!r} a larger second weight"
        )
    return np.ascontiguousarray(dataset.gather(range(count)), dtype=np.int64)


def _rules(job: ConvertJob) -> InputRules:
    """How rows are read: each as one text, though training may have kept its documents apart."""
    rules = input_rules(job.config, job.special_tokens)
    if isinstance(rules, MaskRules):
        return replace(rules, reset_position_ids=False, reset_attention_mask=False)
    return rules


def _open(job: ConvertJob, split: str) -> Dataset:
    return open_split(
        job.token_prefixes,
        job.index_directory,
        split,
        job.config,
        tokenizer_directory=job.tokenizer_directory,
    )


def _batches(
    job: ConvertJob, dataset: Dataset, rules: InputRules, device: torch.device | str, on_batch: Callable[[], None]
) -> Iterator[ModelInput]:
    limit = job.config.export.max_test_samples
    count = len(dataset) if limit is None else min(limit, len(dataset))
    size = max(1, _LOGITS // (job.config.data.seq_length * job.spec.padded_vocab_size))
    for numbers in _grouped(range(count), size):
        on_batch()
        rows = torch.from_numpy(np.ascontiguousarray(dataset.gather(numbers), dtype=np.int64))
        yield to_device(rules.read(rows), device)


def _grouped(numbers: Iterable[int], size: int) -> Iterator[list[int]]:
    remaining = iter(numbers)
    while group := list(islice(remaining, size)):
        yield group
