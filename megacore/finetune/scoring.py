"""A pass over a split: its metrics, or the losses of its first samples one by one."""

import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megacore.errors import DataFormatError
from megacore.finetune.task import FinetuneTask, Split

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accelerate import Accelerator


@dataclass(frozen=True)
class Score:
    """What one pass over a split gave; the same on each rank."""

    metrics: dict[str, float]
    """By name, `loss` among them."""
    samples: int
    seconds: float


class SplitScorer:
    """Scores one split again and again, on all ranks together."""

    def __init__(self, task: FinetuneTask, split: Split, accelerator: "Accelerator", batch_size: int) -> None:
        """Nothing is read yet.

        Args:
            task: whose samples are scored, and how.
            split: which of them.
            accelerator: of the job.
            batch_size: samples per rank and forward pass.

        Raises:
            DataFormatError: the split has no sample.
        """
        self._task, self._accelerator = task, accelerator
        self._rows = rows_of(task, split)
        self.samples = len(self._rows)
        loader = torch.utils.data.DataLoader(
            self._rows, batch_size=batch_size, collate_fn=task.collate, generator=torch.Generator()
        )
        self._loader = accelerator.prepare_data_loader(loader)

    def score(
        self,
        model: Any,
        beat: Callable[[str], None] = lambda phase: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Score | None:
        """Score every sample. Collective; training goes on as if this had not been: its random numbers are kept.

        Args:
            model: the prepared one.
            beat: is told each batch.
            stopped: asked before each batch whether to break off, with the same answer on every rank: then None.
        """
        started = time.monotonic()
        with _evaluating(model, self._accelerator.device):
            scorer = self._task.scorer(self._accelerator, model)
            for batch in self._loader:
                beat("evaluate")
                if stopped():
                    self._loader.end()
                    return None
                scorer.add(batch)
            beat("metrics")
            metrics = scorer.metrics()
        return Score(metrics, self.samples, time.monotonic() - started)


def rows_of(task: FinetuneTask, split: Split) -> Any:
    """The samples of a split. Raises DataFormatError where there is none."""
    rows = task.split(split)
    if rows is None or len(rows) == 0:
        raise DataFormatError(f"the {split} split has no sample: look at data.source and the limits in data")
    return rows


def sample_losses(
    task: FinetuneTask, model: Any, device: torch.device, count: int, beat: Callable[[str], None] = lambda phase: None
) -> list[float]:
    """The loss of each of the first `count` validation samples, alone in its batch: no padding, no partner tells on it.

    Every rank scores all of them, since under ZeRO-3 all take part in each forward pass.
    """
    rows = rows_of(task, "valid")
    losses = []
    with _evaluating(model, device):
        for number in range(min(count, len(rows))):
            beat("evaluate")
            batch = {name: tensor.to(device) for name, tensor in task.collate([rows[number]]).items()}
            losses.append(float(model(**batch).loss))
    return losses


@contextmanager
def _evaluating(model: nn.Module, device: torch.device) -> "Iterator[None]":
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        model.train(was_training)


def token_count(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Tokens of a batch, padding left out; it stays on the batch's device."""
    mask = batch.get("attention_mask")
    return (torch.ones_like(batch["input_ids"]) if mask is None else mask).sum()
