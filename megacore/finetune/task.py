"""What differs between the tasks; the loop knows nothing else of them."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import nn

from megacore.config.finetune import FinetuneConfig
from megacore.config.finetune_task import (
    CausalLmConfig,
    ClassificationConfig,
    Seq2SeqConfig,
    best_metric,
)
from megacore.errors import ConfigError, DataFormatError
from megacore.finetune.dataset import open_split
from megacore.finetune.examples import IDS, LABELS, read_task
from megacore.finetune.pretrained import MODEL_DIRECTORY, quiet, read_model_config, read_tokenizer
from megacore.train.memory import is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        """The metrics of everything that was added on all ranks, with `loss`.

        They are the same on each rank.
        """


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
        """The model with its head in fp32, from the pretrained weights or from the seed.

        The seed serves where random ones are asked.

        What the pretrained weights lack (a head) is drawn from the seed, the same on each rank.
        """

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> "dict[str, torch.Tensor]":
        """A batch of samples, padded.

        Every array [b, s], labels [b] or [b, s] with -100 where nothing is learned.
        """

    def largest_rows(self, count: int) -> list[dict[str, Any]]:
        """`count` samples of the greatest length that the task allows.

        What a micro batch may have to hold.
        """

    def scorer(self, accelerator: "Accelerator", model: "PreTrainedModel") -> Scorer:
        """A new one for a pass over a split; `model` is the prepared one."""


IGNORED = -100
"""Label of a place where nothing is learned."""


class TransformersTask:
    """A task on a model of transformers; its subclasses say what a sample and a score are."""

    auto_class: ClassVar[str]
    """Class of transformers that makes the model with the right head."""
    draws_head: ClassVar[bool] = False
    """Whether the head may be missing from the pretrained weights."""

    def __init__(
        self, config: FinetuneConfig, examples_directory: Path, pretrained_directory: Path
    ) -> None:
        """Read `task.json` and the tokenizer. Raises ConfigError, DataFormatError."""
        self.config = config
        self.description = read_task(examples_directory)
        self.tokenizer = read_tokenizer(config.model, pretrained_directory)
        self.metric, self.larger_is_better = best_metric(config.task, config.train.best_metric)
        self._examples, self._pretrained = examples_directory, pretrained_directory

    def split(self, name: str) -> "Dataset | None":
        """The tokenized samples of a split; None where there is no such split.

        Raises DataFormatError.
        """
        return open_split(self._examples, name)

    def model_config(self) -> Any:
        """The configuration of transformers for the model with its head. Raises ConfigError."""
        return read_model_config(self.config.model, self._pretrained)

    def build_model(self) -> "PreTrainedModel":
        """The model with its head in fp32; what is drawn from the seed is the same on each rank.

        Raises ConfigError when transformers refuses the weights, or weights beside the head are
        missing.
        """
        import transformers
        from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

        kind = getattr(transformers, self.auto_class)
        config = self.model_config()
        options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False}
        model: PreTrainedModel
        with quiet(), _seeded(self.config.seed):
            if self.config.model.random_weights:
                model = kind.from_config(config, **options)
                return model
            try:
                directory: Path | None = self._pretrained / MODEL_DIRECTORY
                if self.config.model.new_head and is_deepspeed_zero3_enabled():  # type: ignore[no-untyped-call]
                    # transformers then takes every weight as it is: those that do not fit are left
                    # out before.
                    kind = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
                    options["state_dict"] = _fitting_weights(
                        self._pretrained / MODEL_DIRECTORY, kind, config
                    )
                    directory = None
                model, info = kind.from_pretrained(
                    directory,
                    config=config,
                    local_files_only=True,
                    use_safetensors=True,
                    output_loading_info=True,
                    ignore_mismatched_sizes=self.config.model.new_head,
                    **options,
                )
            except Exception as error:  # safetensors raises plain Exception
                if is_out_of_memory(error):
                    raise
                raise ConfigError(
                    f"transformers cannot load the weights of model.path {self.config.model.path}: "
                    f"{' '.join(str(error).split())[:300]}"
                ) from error
        # With a new head transformers draws anew whatever does not fit: of the body nothing may.
        replaced = [entry[0] for entry in info["mismatched_keys"]]
        self._refuse_missing(model, [*info["missing_keys"], *replaced])
        return model

    def _refuse_missing(self, model: "PreTrainedModel", missing: Sequence[str]) -> None:
        body = f"{model.base_model_prefix}."
        parameters = {name for name, _ in model.named_parameters()}
        lost = sorted(name for name in missing if name in parameters)
        if self.draws_head:
            lost = [name for name in lost if name.startswith(body) and ".pooler." not in name]
        if lost:
            raise ConfigError(
                f"model.path {self.config.model.path} lacks {len(lost)} of the weights of "
                f"{type(model).__name__}, {lost[0]} first: give a whole model, or set "
                "model.random_weights to true"
            )

    def ordinary_id(self) -> int:
        """An id that has no role."""
        special = set(self.tokenizer.all_special_ids)
        ids = sorted(self.tokenizer.get_vocab().values())
        return next((number for number in reversed(ids) if number not in special), 0)

    def scored(
        self, accelerator: "Accelerator", *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Tensors [b, ...] of all ranks on the CPU, without what fills up the last batch."""
        gathered = accelerator.gather_for_metrics(tensors)
        return tuple(tensor.cpu() for tensor in gathered)


def _fitting_weights(directory: Path, kind: Any, config: Any) -> dict[str, torch.Tensor]:
    """The weights of a directory whose shapes are those of the model of `kind` and `config`.

    Their values are on the first rank alone, which under ZeRO-3 gives the others their parts.
    """
    from safetensors import safe_open

    with torch.device("meta"):
        empty = kind(config)
    shapes = {name: list(parameter.shape) for name, parameter in empty.named_parameters()}
    device = "cpu" if dist.get_rank() == 0 else "meta"
    kept = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  it is no mapping
                if shapes.get(name) in (None, file.get_slice(name).get_shape()):
                    kept[name] = file.get_tensor(name).to(device)
    return kept


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw from `seed`, and leave the generators as they were."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


def padded(
    rows: Sequence[Mapping[str, Any]],
    key: str,
    value: int,
    length: int | None,
    *,
    left: bool = False,
) -> torch.Tensor:
    """The ids of `key` of each row, filled up to one length: [b, s].

    Padding is on the right, or the left, to `length` or to the longest.
    """
    longest = length or max(len(row[key]) for row in rows)
    fills = [[value] * (longest - len(row[key])) for row in rows]
    whole = [
        [*fill, *row[key]] if left else [*row[key], *fill]
        for row, fill in zip(rows, fills, strict=True)
    ]
    return torch.tensor(whole, dtype=torch.long)


def mask_of(rows: Sequence[Mapping[str, Any]], length: int) -> torch.Tensor:
    """1 where a row has an id, 0 where it is filled up: [b, s]."""
    counts = torch.tensor([len(row[IDS]) for row in rows])
    return (torch.arange(length) < counts[:, None]).long()


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed loss [b] of each row's tokens, and their number [b].

    Args:
        logits: [b, s, v].
        labels: [b, s], -100 where nothing is learned.
    """
    losses = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return losses.view_as(labels).sum(1), (labels != IGNORED).sum(1)


def without_labels(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the model reads."""
    return {name: tensor for name, tensor in batch.items() if name != LABELS}


def build_task(
    config: FinetuneConfig, examples_directory: Path, pretrained_directory: Path
) -> FinetuneTask:
    """The task on the artifacts of the stages `examples` and `pretrained`.

    Raises ConfigError, DataFormatError.
    """
    match config.task:
        case ClassificationConfig():
            from megacore.finetune.classification import ClassificationTask

            return ClassificationTask(config, examples_directory, pretrained_directory)
        case Seq2SeqConfig():
            from megacore.finetune.seq2seq import Seq2SeqTask

            return Seq2SeqTask(config, examples_directory, pretrained_directory)
        case CausalLmConfig():
            from megacore.finetune.causal_lm import CausalLmTask

            return CausalLmTask(config, examples_directory, pretrained_directory)


@dataclass(frozen=True)
class Score:
    """What one pass over a split gave; the same on each rank."""

    metrics: dict[str, float]
    """By name, `loss` among them."""
    samples: int
    seconds: float


class SplitScorer:
    """Scores one split again and again, on all ranks together."""

    def __init__(
        self, task: FinetuneTask, split: Split, accelerator: "Accelerator", batch_size: int
    ) -> None:
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
        """Score every sample.

        Collective; training goes on as if this had not been: its random numbers are kept.

        Args:
            model: the prepared one.
            beat: is told each batch.
            stopped: asked before each batch whether to break off, with the same answer on every
                rank: then None.
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
        raise DataFormatError(
            f"the {split} split has no sample: look at data.source and the limits in data"
        )
    return rows


def sample_losses(
    task: FinetuneTask,
    model: Any,
    device: torch.device,
    count: int,
    beat: Callable[[str], None] = lambda phase: None,
) -> list[float]:
    """The loss of each of the first `count` validation samples, alone in its batch.

    No padding, no partner tells on it.

    Every rank scores all of them, since under ZeRO-3 all take part in each forward pass.
    """
    rows = rows_of(task, "valid")
    losses = []
    with _evaluating(model, device):
        for number in range(min(count, len(rows))):
            beat("evaluate")
            batch = {
                name: tensor.to(device) for name, tensor in task.collate([rows[number]]).items()
            }
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
