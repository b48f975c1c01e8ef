"""The best model of a run: a transformers directory in fp32 with its metrics, one at a time.

`best/iter_0000100/` holds `model/`, `metrics.json` and, written last, `complete.json`. The one
before is removed only once a better one is whole. With DeepSpeed in bf16 or fp16 the weights are
those that the evaluation measured: of 16 bits, written as fp32.
"""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megacore.artifact.files import read_json, workspace_errors, write_json
from megacore.checkpoint.collective import RankGroup
from megacore.checkpoint.format import checkpoint_directories, directory_name, read_state, verify
from megacore.checkpoint.retain import remove_stale, rename_away
from megacore.errors import CheckpointError, TrainingError
from megacore.finetune.checkpoints import WholeDirectory, barrier, writing
from megacore.finetune.pretrained import quiet
from megacore.finetune.task import FinetuneTask

if TYPE_CHECKING:
    from accelerate import Accelerator

    from megacore.observe.recorder import Recorder

BEST_NAME = "best"
"""Below the run directory."""
MODEL_NAME = "model"
METRICS_NAME = "metrics.json"


@dataclass(frozen=True)
class Best:
    """The best model so far."""

    iteration: int
    value: float
    """Of the metric that tells."""
    metrics: dict[str, float]
    """Of the validation split."""
    test_metrics: dict[str, float] | None
    """Of the test split; None where there is none."""


class BestModel:
    """Keeps the best model; every rank calls the same methods in the same order."""

    def __init__(
        self,
        task: FinetuneTask,
        accelerator: "Accelerator",
        recorder: "Recorder",
        run_directory: Path,
    ) -> None:
        """Nothing is read or written yet.

        Args:
            task: whose metric tells, and whose tokenizer is kept with the model.
            accelerator: of the job, with the model prepared.
            recorder: where the account goes.
            run_directory: below which it lies.
        """
        self.root = run_directory / BEST_NAME
        self.best: Best | None = None
        self.metric, self._larger = task.metric, task.larger_is_better
        self._task, self._accelerator, self._recorder = task, accelerator, recorder
        self._ranks = RankGroup(None)
        self._directory = WholeDirectory(self.root, self._ranks)

    def find(self) -> None:
        """Take up what an earlier attempt has kept, and clear what it left. Collective."""
        self.best = self._ranks.on_first(self._find)

    def beats(self, iteration: int, metrics: dict[str, float]) -> bool:
        """Whether a model of these metrics, after so many steps, is better than all before.

        Raises:
            TrainingError: the metric that tells is not among them.
        """
        value = self._value(metrics)
        return self.best is None or (
            iteration != self.best.iteration and self._is_better(value, self.best.value)
        )

    def keep(
        self, iteration: int, metrics: dict[str, float], model: Any, facts: dict[str, Any]
    ) -> None:
        """Keep the model as it is now in the place of the best before. Collective.

        Args:
            iteration: optimizer steps behind it.
            metrics: of the validation split.
            model: the prepared one.
            facts: what `metrics.json` holds beside the metrics, `test_metrics` among it.

        Raises:
            WorkspaceError: it cannot be written.
        """
        value = self._value(metrics)
        staged = self._directory.stage(iteration)
        # collective under ZeRO-3, where the others get None
        state = self._accelerator.get_state_dict(model)

        def write() -> None:
            with writing(staged):
                write_model(
                    staged / MODEL_NAME,
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

    def _is_better(self, value: float, than: float) -> bool:
        if math.isnan(than):
            return not math.isnan(value)
        return value > than if self._larger else value < than

    def _find(self) -> Best | None:
        if not self.root.is_dir():
            return None
        with workspace_errors(self.root):
            remove_stale(self.root)
        for path in checkpoint_directories(self.root):
            try:
                verify(path)
                values = read_state(path, METRICS_NAME)
                found = Best(
                    values["iteration"], values["value"], values["metrics"], values["test_metrics"]
                )
            except (CheckpointError, KeyError) as error:
                self._recorder.warning(f"{error}; passing over this best model")
                continue
            if self.best is None or self._is_better(found.value, self.best.value):
                self.best = found
        if self.best is not None:
            self._remove_others()
        return self.best

    def _remove_others(self) -> None:
        assert self.best is not None
        with workspace_errors(self.root):
            for path in checkpoint_directories(self.root):
                if path.name != directory_name(self.best.iteration):
                    shutil.rmtree(rename_away(path))


def write_model(
    directory: Path, model: Any, state: dict[str, torch.Tensor], tokenizer: Any
) -> None:
    """A transformers directory with `state` in fp32, and the tokenizer.

    The type that `model` computes in does not matter.
    """
    owners = {
        name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    whole: dict[int, torch.Tensor] = {}
    kept = {}
    for name, tensor in state.items():
        # What is one parameter in the model is one tensor in the file, though DeepSpeed has copied
        # it for each name.
        key = owners.get(name, id(tensor))
        if key not in whole:
            whole[key] = tensor.detach().to(
                "cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype
            )
        kept[name] = whole[key]
    with quiet():
        model.save_pretrained(directory, state_dict=kept, safe_serialization=True)
        tokenizer.save_pretrained(directory)
    path = directory / "config.json"
    values = read_json(path)
    values.pop("torch_dtype", None)
    write_json(path, values | {"dtype": "float32"})


def read_best(directory: Path) -> dict[str, Any]:
    """The verified `metrics.json` of a best model. Raises CheckpointError."""
    verify(directory)
    return read_state(directory, METRICS_NAME)
