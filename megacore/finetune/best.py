"""Best model of a run: a transformers directory in fp32 with its metrics.

`best/iter_0000100/` contains `model/`, `metrics.json` and, written last, `complete.json`. The
previous best model is removed only after a better one is complete. With DeepSpeed in bf16 or fp16
the weights are the 16-bit weights that were evaluated, written as fp32.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megacore.artifact.files import read_object, workspace_errors, write_json
from megacore.artifact.workspace import BEST_NAME, MODEL_DIRECTORY
from megacore.checkpoint.collective import RankGroup
from megacore.checkpoint.format import checkpoint_directories, directory_name, read_state, verify
from megacore.checkpoint.retain import delete_stale, remove_stale, rename_to_stale
from megacore.errors import CheckpointError, TrainingError
from megacore.finetune.checkpoints import AtomicDirectory, barrier, writing
from megacore.finetune.pretrained import quiet
from megacore.finetune.task import FinetuneTask
from megacore.paths import is_dir

if TYPE_CHECKING:
    from accelerate import Accelerator

    from megacore.observe.recorder import Recorder

METRICS_NAME = "metrics.json"


@dataclass(frozen=True)
class Best:
    """The best model so far."""

    iteration: int
    value: float
    """Value of the metric that selects the best model."""
    metrics: dict[str, float]
    """Metrics of the validation split."""
    test_metrics: dict[str, float] | None
    """Metrics of the test split; None if there is no such split."""


class BestModelStore:
    """Storage of the best model; every rank calls the same methods in the same order."""

    def __init__(
        self,
        task: FinetuneTask,
        accelerator: "Accelerator",
        recorder: "Recorder",
        run_directory: Path,
    ) -> None:
        """Initialize without reading or writing any file.

        Args:
            task: task whose metric selects the best model, and whose tokenizer is saved with it.
            accelerator: Accelerator of the job, with the model prepared.
            recorder: recorder of events and warnings.
            run_directory: directory of the run, the parent of `best`.
        """
        self.root = run_directory / BEST_NAME
        self.best: Best | None = None
        self.metric, self._larger = task.metric, task.larger_is_better
        self._task, self._accelerator, self._recorder = task, accelerator, recorder
        self._ranks = RankGroup(None)
        self._directory = AtomicDirectory(self.root, self._ranks)

    def find(self) -> None:
        """Load the best model of an earlier attempt; remove incomplete ones. Collective."""
        self.best = self._ranks.on_first(self._find)

    def beats(self, iteration: int, metrics: dict[str, float]) -> bool:
        """Return True if a model with these metrics, after `iteration` steps, is the best so far.

        Raises:
            TrainingError: the metric that selects the best model is missing.
        """
        value = self._value(metrics)
        return self.best is None or (
            iteration != self.best.iteration and self._is_better(value, self.best.value)
        )

    def keep(
        self, iteration: int, metrics: dict[str, float], model: Any, facts: dict[str, Any]
    ) -> None:
        """Save the current model in place of the previous best model. Collective.

        Args:
            iteration: number of optimizer steps taken.
            metrics: metrics of the validation split.
            model: prepared model.
            facts: further entries of `metrics.json`, including `test_metrics`.

        Raises:
            WorkspaceError: the model cannot be written.
        """
        value = self._value(metrics)
        staged = self._directory.stage(iteration)
        # Collective under ZeRO-3, where only the first rank gets the state.
        state = self._accelerator.get_state_dict(model)

        def write() -> None:
            with writing(staged):
                write_model(
                    staged / MODEL_DIRECTORY,
                    self._accelerator.unwrap_model(model),
                    state,
                    self._task.tokenizer,
                )
            values = {
                "iteration": iteration,
                "metric": self.metric,
                "value": value,
                "metrics": metrics,
                **facts,
            }
            write_json(staged / METRICS_NAME, values)

        self._ranks.on_first(write)
        barrier()
        self._directory.finish(staged, iteration, metrics.get("loss"))
        self.best = Best(iteration, value, metrics, facts["test_metrics"])
        self._ranks.on_first(self._remove_others)
        path = f"{BEST_NAME}/{directory_name(iteration)}"
        self._recorder.event(
            "best", iteration=iteration, path=path, metric=self.metric, value=value
        )

    def _value(self, metrics: dict[str, float]) -> float:
        if self.metric not in metrics:
            raise TrainingError(
                f"train.best_metric is {self.metric} and the evaluation gave "
                f"{', '.join(sorted(metrics))}: choose one of these"
            )
        return metrics[self.metric]

    def _is_better(self, value: float, previous: float) -> bool:
        if math.isnan(previous):
            return not math.isnan(value)
        return value > previous if self._larger else value < previous

    def _find(self) -> Best | None:
        if not is_dir(self.root):
            return None
        with workspace_errors(self.root):
            remove_stale(self.root)
        for path in checkpoint_directories(self.root):
            try:
                verify(path)
                values = read_state(path, METRICS_NAME)
                candidate = Best(
                    values["iteration"], values["value"], values["metrics"], values["test_metrics"]
                )
            except (CheckpointError, KeyError) as error:
                self._recorder.warning(f"{error}; skipping this best model")
                continue
            if self.best is None or self._is_better(candidate.value, self.best.value):
                self.best = candidate
        if self.best is not None:
            self._remove_others()
        return self.best

    def _remove_others(self) -> None:
        assert self.best is not None
        with workspace_errors(self.root):
            for path in checkpoint_directories(self.root):
                if path.name != directory_name(self.best.iteration):
                    delete_stale(rename_to_stale(path))


def write_model(
    directory: Path, model: Any, state: dict[str, torch.Tensor], tokenizer: Any
) -> None:
    """Write a transformers directory with `state` in fp32, and the tokenizer.

    The result does not depend on the type that `model` computes in.
    """
    owners = {
        name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    converted: dict[int, torch.Tensor] = {}
    weights = {}
    for name, tensor in state.items():
        # A shared parameter is one tensor in the file, although DeepSpeed copies it for each name.
        key = owners.get(name, id(tensor))
        if key not in converted:
            converted[key] = tensor.detach().to(
                "cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype
            )
        weights[name] = converted[key]
    with quiet():
        model.save_pretrained(directory, state_dict=weights, safe_serialization=True)
        tokenizer.save_pretrained(directory)
    path = directory / "config.json"
    values = read_object(path)
    values.pop("torch_dtype", None)
    write_json(path, values | {"dtype": "float32"})


def read_best(directory: Path) -> dict[str, Any]:
    """Return the verified `metrics.json` of a best model. Raises CheckpointError."""
    verify(directory)
    return read_state(directory, METRICS_NAME)
