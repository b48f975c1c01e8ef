"""What differs between the tasks; the loop knows nothing else of them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Batch = Mapping[str, "torch.Tensor"]
Split = str
"""train, valid or test."""


class Scorer(Protocol):
    """Gathers what one pass over a split gives, on every rank."""

    def add(self, batch: Batch) -> None:
        """Score a batch of this rank; a collective call."""

    def metrics(self) -> dict[str, float]:
        """The metrics of everything that was added on all ranks, `loss` among them; the same on each rank."""


class FinetuneTask(Protocol):
    """A model, its samples and their scores."""

    tokenizer: "PreTrainedTokenizerBase"
    metric: str
    """Name of the metric that tells the best model."""
    larger_is_better: bool
    """Whether a larger value of `metric` is a better model."""

    def split(self, name: Split) -> "Dataset | None":
        """The tokenized samples of a split; None where there is no such split."""

    def build_model(self) -> "PreTrainedModel":
        """The model with its head in fp32, from the pretrained weights, or from the seed where random ones are asked.

        What the pretrained weights lack (a head) is drawn from the seed, the same on each rank.
        """

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> "dict[str, torch.Tensor]":
        """A batch of samples, padded; every array [b, s], labels [b] or [b, s] with -100 where nothing is learned."""

    def largest_rows(self, count: int) -> list[dict[str, Any]]:
        """`count` samples of the greatest length that the task allows: what a micro batch may have to hold."""

    def scorer(self, accelerator: "Accelerator", model: "PreTrainedModel") -> Scorer:
        """A new one for a pass over a split; `model` is the prepared one."""
