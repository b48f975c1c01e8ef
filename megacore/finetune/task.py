"""Tasks of a fine-tuning: models, samples and scores.

The training loop depends on a task only through the interface `FinetuneTask`.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn

from megacore.artifact.workspace import MODEL_DIRECTORY
from megacore.config.finetune import FinetuneConfig
from megacore.config.finetune_task import (
    CausalLmConfig,
    ClassificationConfig,
    MultipleChoiceConfig,
    Seq2SeqConfig,
    TaskConfig,
    best_metric,
)
from megacore.errors import ConfigError, DataFormatError, one_line
from megacore.finetune.dataset import open_split
from megacore.finetune.examples import IDS, LABELS, SEGMENTS, read_task
from megacore.finetune.metrics import Answer
from megacore.finetune.pretrained import LOCAL_ONLY, quiet, read_model_config, read_tokenizer
from megacore.paths import glob
from megacore.train.memory import is_out_of_memory

if TYPE_CHECKING:
    from accelerate import Accelerator
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Batch = Mapping[str, torch.Tensor]
Split = str
"""train, valid or test."""


class Scorer(Protocol):
    """Accumulator of the scores of one pass over a split, on every rank."""

    def add(self, batch: Batch) -> None:
        """Score a batch of this rank. Collective."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics over all batches added on all ranks, including `loss`.

        They are identical on each rank.
        """


@runtime_checkable
class AnswerScorer(Scorer, Protocol):
    """Scorer of a task whose metrics are computed from generated texts."""

    def answers(self, rows: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """Return the scored texts of `rows`, which are the first samples of the split."""


class FinetuneTask(Protocol):
    """A model, its samples and their scores."""

    tokenizer: "PreTrainedTokenizerBase"
    metric: str
    """Name of the metric that selects the best model."""
    larger_is_better: bool
    """True if a larger value of `metric` means a better model."""

    def split(self, name: Split) -> "Dataset | None":
        """Return the tokenized samples of a split, or None if the split does not exist."""

    def build_model(self) -> "PreTrainedModel":
        """Return the model with its head in fp32, with pretrained or random weights.

        Random weights, and a head that the pretrained weights lack, are drawn from the seed and are
        identical on each rank.
        """

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return a padded batch of samples with its attention_mask.

        The arrays have shape [b, s], or [b, c, s] with c choices of each sample. Labels are [b] or
        [b, s], with -100 at positions without a loss.
        """

    def largest_rows(self, count: int) -> list[dict[str, Any]]:
        """Return `count` samples of the greatest length that the task allows.

        They form the largest micro batch that can occur.
        """

    def scorer(self, accelerator: "Accelerator", model: "PreTrainedModel") -> Scorer:
        """Return a new scorer for one pass over a split; `model` is the prepared model."""


SHOWN_ANSWERS = 8
"""Number of samples of a split whose generated texts are recorded at each evaluation."""
IGNORED = -100
"""Label of a position without a loss."""


AUTO_CLASSES = {
    "classification": "AutoModelForSequenceClassification",
    "multiple_choice": "AutoModelForMultipleChoice",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "causal_lm": "AutoModelForCausalLM",
}
"""Name of the transformers class that builds the model with the right head, by `task.kind`."""


class TransformersTask:
    """Task on a transformers model; subclasses define samples and scores."""

    draws_head: ClassVar[bool] = False
    """True if the pretrained weights may lack the head."""
    task: TaskConfig
    """Section `task` of the configuration."""

    def __init__(
        self, config: FinetuneConfig, examples_directory: Path, pretrained_directory: Path
    ) -> None:
        """Read `task.json` and the tokenizer. Raises ConfigError, DataFormatError."""
        self.config, self.task = config, config.task
        self.description = read_task(examples_directory)
        self.tokenizer = read_tokenizer(config.model, pretrained_directory)
        self.metric, self.larger_is_better = best_metric(config.task, config.train.best_metric)
        self._examples, self._pretrained = examples_directory, pretrained_directory
        rows = self.split("train")
        if rows is not None and SEGMENTS in rows.column_names:
            return_segments(self.tokenizer)

    def split(self, name: str) -> "Dataset | None":
        """Return the tokenized samples of a split, or None if the split does not exist.

        Raises DataFormatError.
        """
        return open_split(self._examples, name)

    def model_config(self) -> Any:
        """Return the transformers configuration of the model with its head. Raises ConfigError."""
        return read_model_config(self.config.model, self._pretrained)

    def build_model(self) -> "PreTrainedModel":
        """Return the model with its head in fp32; random weights are identical on each rank.

        Raises ConfigError when transformers refuses the weights, or weights other than the head's
        are missing.
        """
        import transformers
        from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

        kind = getattr(transformers, AUTO_CLASSES[self.config.task.kind])
        config = self.model_config()
        model: PreTrainedModel
        with quiet(), _seeded(self.config.seed):
            if self.config.model.random_weights:
                model = kind.from_config(config, dtype=torch.float32, trust_remote_code=False)
                return model
            try:
                directory = self._pretrained / MODEL_DIRECTORY
                weights: dict[str, torch.Tensor] | None = None
                if self.config.model.new_head and is_deepspeed_zero3_enabled():  # type: ignore[no-untyped-call]
                    # Under ZeRO-3 transformers loads every weight unchecked, so pass only the
                    # fitting ones.
                    kind = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
                    weights = _fitting_weights(directory, kind, config)
                model, info = kind.from_pretrained(
                    directory if weights is None else None,
                    config=config,
                    state_dict=weights,
                    dtype=torch.float32,
                    use_safetensors=True,
                    output_loading_info=True,
                    ignore_mismatched_sizes=self.config.model.new_head,
                    **LOCAL_ONLY,
                )
            except Exception as error:  # safetensors raises plain Exception
                if is_out_of_memory(error):
                    raise
                raise ConfigError(
                    f"transformers cannot load the weights of model.path {self.config.model.path}: "
                    f"{one_line(error, 300)}"
                ) from error
        # With a new head transformers draws all mismatched weights again. The body's must match.
        replaced = [entry[0] for entry in info["mismatched_keys"]]
        self._refuse_missing(model, [*info["missing_keys"], *replaced])
        return model

    def _refuse_missing(self, model: "PreTrainedModel", missing: Sequence[str]) -> None:
        body = f"{model.base_model_prefix}."
        parameters = {name for name, _ in model.named_parameters()}
        lacking = sorted(name for name in missing if name in parameters)
        if self.draws_head:
            lacking = [name for name in lacking if name.startswith(body) and ".pooler." not in name]
        if lacking:
            raise ConfigError(
                f"model.path {self.config.model.path} lacks {len(lacking)} of the weights of "
                f"{type(model).__name__}, {lacking[0]} first: give a whole model, or set "
                "model.random_weights to true"
            )

    @property
    def pad_id(self) -> int:
        """Id of the padding; only causal language modeling needs none."""
        pad = self.tokenizer.pad_token_id
        assert isinstance(pad, int)  # checked by the stage `examples`
        return pad

    @cached_property
    def _pads_left(self) -> bool:
        """True for XLNet, whose heads read the last position, even if it is padding."""
        config = read_model_config(self.config.model, self._pretrained)
        return getattr(config, "summary_type", None) == "last"

    def padded_inputs(
        self, rows: Sequence[Mapping[str, Any]], length: int | None
    ) -> dict[str, torch.Tensor]:
        """Return the padded inputs of the model: input_ids and attention_mask [b, s].

        Rows with segments also give token_type_ids [b, s]. `length` is that of `padded`.
        """
        left = self._pads_left
        ids = padded(rows, IDS, self.pad_id, length, left=left)
        counts = torch.tensor([len(row[IDS]) for row in rows])
        mask = (torch.arange(ids.shape[1]) < counts[:, None]).long()
        inputs = {IDS: ids, "attention_mask": mask.flip(1) if left else mask}
        if SEGMENTS in rows[0]:
            inputs[SEGMENTS] = padded(rows, SEGMENTS, 0, length, left=left)
        return inputs

    def ordinary_id(self) -> int:
        """Return the id of a token that is not a special token."""
        special = set(self.tokenizer.all_special_ids)
        ids = sorted(self.tokenizer.get_vocab().values())
        return next((number for number in reversed(ids) if number not in special), 0)

    def scored(
        self, accelerator: "Accelerator", *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Gather tensors [b, ...] of all ranks on the CPU, without samples added as padding."""
        gathered = accelerator.gather_for_metrics(tensors)
        return tuple(tensor.cpu() for tensor in gathered)


def return_segments(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Make a tokenizer return segment ids by default, also after it was saved and loaded.

    Users of the exported model must give it the inputs that the samples have. Tokenizers of no
    model's own class, such as those of megacore's exports, return none.
    """
    names = tokenizer.model_input_names
    if SEGMENTS not in names:
        tokenizer.model_input_names = [*names[:1], SEGMENTS, *names[1:]]
        tokenizer.init_kwargs["model_input_names"] = tokenizer.model_input_names


def _fitting_weights(directory: Path, kind: Any, config: Any) -> dict[str, torch.Tensor]:
    """Return a directory's weights without those whose shape differs in the model.

    The model is that of `kind` and `config`. Only the first rank has the values; under ZeRO-3 it
    distributes them to the other ranks.
    """
    from safetensors import safe_open

    with torch.device("meta"):
        empty = kind(config)
    shapes = {name: list(parameter.shape) for name, parameter in empty.named_parameters()}
    device = "cpu" if dist.get_rank() == 0 else "meta"
    weights = {}
    for path in sorted(glob(directory, "*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  safe_open is no mapping
                if shapes.get(name) in (None, file.get_slice(name).get_shape()):
                    weights[name] = file.get_tensor(name).to(device)
    return weights


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the random number generators with `seed` in the body, and restore them afterwards."""
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
    """Pad the ids of `key` of each row to one length: [b, s].

    Padding is on the right, or on the left if `left` is true. The length is `length`, or that of
    the longest row if `length` is None.
    """
    longest = length or max(len(row[key]) for row in rows)
    fills = [[value] * (longest - len(row[key])) for row in rows]
    filled = [
        [*fill, *row[key]] if left else [*row[key], *fill]
        for row, fill in zip(rows, fills, strict=True)
    ]
    return torch.tensor(filled, dtype=torch.long)


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss [b] of each row's tokens, and their number [b].

    Args:
        logits: [b, s, v].
        labels: [b, s], -100 at positions without a loss.
    """
    losses = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return losses.view_as(labels).sum(1), (labels != IGNORED).sum(1)


def batch_loss(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean loss of a batch with labels.

    That of a regression is computed here in fp32: within the model, DeepSpeed and FSDP round its
    labels to the type of the weights, in bf16 2010.4 to 2008.
    """
    labels = batch[LABELS]
    if not labels.is_floating_point():
        loss: torch.Tensor = model(**batch).loss
        return loss
    predictions = model(**without_labels(batch)).logits.float().squeeze(-1)
    return torch.nn.functional.mse_loss(predictions, labels)


def without_labels(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a batch that are inputs of the model."""
    return {name: tensor for name, tensor in batch.items() if name != LABELS}


def build_task(
    config: FinetuneConfig, examples_directory: Path, pretrained_directory: Path
) -> FinetuneTask:
    """Build the task from the artifacts of the stages `examples` and `pretrained`.

    Raises ConfigError, DataFormatError.
    """
    match config.task:
        case ClassificationConfig():
            from megacore.finetune.classification import ClassificationTask

            return ClassificationTask(config, examples_directory, pretrained_directory)
        case MultipleChoiceConfig():
            from megacore.finetune.multiple_choice import MultipleChoiceTask

            return MultipleChoiceTask(config, examples_directory, pretrained_directory)
        case Seq2SeqConfig():
            from megacore.finetune.seq2seq import Seq2SeqTask

            return Seq2SeqTask(config, examples_directory, pretrained_directory)
        case CausalLmConfig():
            from megacore.finetune.causal_lm import CausalLmTask

            return CausalLmTask(config, examples_directory, pretrained_directory)


@dataclass(frozen=True)
class Score:
    """Result of one pass over a split, identical on each rank."""

    metrics: dict[str, float]
    """Values by metric, including `loss`."""
    samples: int
    seconds: float
    answers: tuple[Answer, ...]
    """Generated texts of the split's first samples, always the same ones; empty for a task that
    generates none."""


class SplitScorer:
    """Repeatable evaluation of one split on all ranks together."""

    def __init__(
        self, task: FinetuneTask, split: Split, accelerator: "Accelerator", batch_size: int
    ) -> None:
        """Prepare to score a split.

        Args:
            task: task that defines samples and scores.
            split: split to score.
            accelerator: Accelerator of the job.
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
        """Score every sample of the split. Collective.

        Training is not affected: random number generators and the training mode are restored.

        Args:
            model: prepared model.
            beat: callback, called with the current phase before each batch.
            stopped: callback, called before each batch. If it returns True, the evaluation stops.
                It must return the same on all ranks.

        Returns:
            The score, or None if `stopped` ended the evaluation.
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
            answers: list[Answer] = []
            if isinstance(scorer, AnswerScorer):
                shown = range(min(SHOWN_ANSWERS, self.samples))
                answers = scorer.answers([self._rows[number] for number in shown])
        return Score(metrics, self.samples, time.monotonic() - started, tuple(answers))


def rows_of(task: FinetuneTask, split: Split) -> Any:
    """Return the samples of a split. Raises DataFormatError if there are none."""
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
    """Compute the loss of each of the first `count` validation samples, in batches of one.

    Neither padding nor other samples influence a loss. Every rank scores all samples, since under
    ZeRO-3 all ranks take part in each forward pass.
    """
    rows = rows_of(task, "valid")
    losses = []
    with _evaluating(model, device):
        for number in range(min(count, len(rows))):
            beat("evaluate")
            batch = {
                name: tensor.to(device) for name, tensor in task.collate([rows[number]]).items()
            }
            losses.append(float(batch_loss(model, batch)))
    return losses


@contextmanager
def _evaluating(model: nn.Module, device: torch.device) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        model.train(was_training)
