"""Kinds of fault tests around a training: checkpoints, one rank, two ranks, and the export."""

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megacore.artifact import Manifest
from megacore.checkpoint.format import (
    STALE_SUFFIX,
    checkpoint_directories,
    complete_checkpoints,
    latest_complete,
    read_state,
    verify,
)
from megacore.checkpoint.retain import apply_retention, remove_stale
from megacore.checkpoint.save import save_checkpoint
from megacore.convert.export import export
from megacore.errors import CheckpointError
from megacore.jobs.run import ConvertJob, TrainJob
from megacore.observe.events import EventReader
from megacore.ranks import stages
from megacore.ranks.pretrain import pretrain
from tests.checkpoint._read import read_tensors
from tests.convert._tiny import tiny_config, tiny_job
from tests.faults import _data
from tests.faults._cases import Kind
from tests.train import _runs

SAVES = 4
SAVED_NUMBERS = 3_000_000
"""Number of elements of each saved tensor (12 MB)."""
ITERATIONS = 12


def visible(inputs: Path, place: Path) -> list[str]:
    """Return the problems of checkpoints that look complete and are not."""
    problems = []
    for root in (place / "checkpoints", place / "best"):
        for directory in checkpoint_directories(root):
            try:
                verify(directory, "full")
            except CheckpointError as error:
                problems.append(str(error))
    return problems


def tensor_digests(checkpoint: Path) -> dict[str, str]:
    """Return the sha256 of every tensor: weights and optimizer."""
    return {
        name: hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in read_tensors(checkpoint).items()
    }


# saving


def _tensors(iteration: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(iteration)
    return {
        f"model.part_{number}": torch.rand(SAVED_NUMBERS, generator=generator)
        for number in range(3)
    }


def _remove_remains(root: Path) -> None:
    """Remove what an earlier call left, as the start of a run does."""
    if root.is_dir():
        remove_stale(root)
        assert not [*root.glob(f"*{STALE_SUFFIX}*")]


def _save(inputs: Path, place: Path, attempt: int) -> None:
    """Save, resuming from the existing checkpoints; keep two."""
    root = place / "checkpoints"
    _remove_remains(root)
    newest = latest_complete(root)
    done = 0 if newest is None else int(read_state(newest)["iteration"])
    for iteration in range(done + 1, SAVES + 1):
        save_checkpoint(
            root,
            iteration,
            _tensors(iteration),
            {"iteration": iteration},
            validation_loss=1.0 / iteration,
        )
        apply_retention(root, keep_last=2)
    apply_retention(root, keep_last=2)


def _save_in_background(inputs: Path, place: Path, attempt: int) -> None:
    """Save the same checkpoints in the background."""
    from megacore.checkpoint.background import CheckpointSaver

    root = place / "checkpoints"
    _remove_remains(root)
    newest = latest_complete(root)
    done = 0 if newest is None else int(read_state(newest)["iteration"])
    saver = CheckpointSaver(root, asynchronous=True, keep_last=2, keep_every=None, keep_best=False)
    for iteration in range(done + 1, SAVES + 1):
        saver.save(
            iteration,
            _tensors(iteration),
            {"iteration": iteration},
            validation_loss=1.0 / iteration,
        )
        time.sleep(0.02)
    saver.wait()
    saver.close()
    apply_retention(root, keep_last=2)


def _saved(inputs: Path, place: Path) -> Any:
    root = place / "checkpoints"
    return {
        "checkpoints": {
            path.name: tensor_digests(path) for path in complete_checkpoints(root, "full")
        },
        # A deletion that failed is a warning, and the next call makes up for it.
        "files": sorted(
            path.name
            for path in root.iterdir()
            if not path.name.endswith(("-deleted", "-replaced"))
        ),
    }


# training


def _config(ranks: int, *, asynchronous: bool, engine: str = "native") -> Any:
    return _runs.config(
        engine,
        model={"hidden_dropout": 0.1, "attention_dropout": 0.1},
        optim={"lr_decay_iters": ITERATIONS},
        train={"train_iters": ITERATIONS, "eval_interval": 6, "eval_iters": 1},
        checkpoint={"save_interval": 3, "keep_last": 2, "asynchronous": asynchronous},
        launch={"nproc_per_node": ranks, "stop_grace": 2.0, "retries": 0},
    )


def _prepare(inputs: Path) -> None:
    _runs.write_data(inputs / "data", _runs.config())


def job_of(inputs: Path, place: Path, attempt: int, ranks: int, *, asynchronous: bool) -> TrainJob:
    """Return the job, which is the same for every rank of an attempt."""
    return _runs.job(
        _config(ranks, asynchronous=asynchronous),
        inputs / "data",
        place,
        ranks=ranks,
        attempt=attempt,
    )


def _train(ranks: int, asynchronous: bool, inputs: Path, place: Path, attempt: int) -> None:
    job = job_of(inputs, place, attempt, ranks, asynchronous=asynchronous)
    if os.environ.get("RANK", "0") == "0":
        job.write(place / "run.json")
    pretrain(job)


def train_1(inputs: Path, place: Path, attempt: int) -> None:
    _train(1, False, inputs, place, attempt)


def train_1_async(inputs: Path, place: Path, attempt: int) -> None:
    _train(1, True, inputs, place, attempt)


def train_2(inputs: Path, place: Path, attempt: int) -> None:
    _train(2, True, inputs, place, attempt)


def launch_2(inputs: Path, place: Path, attempt: int) -> None:
    """Train through the guard and torchrun, like a task."""
    stages.train(job_of(inputs, place, attempt, 2, asynchronous=True))


def trained(inputs: Path, place: Path) -> Any:
    """Return final weights and optimizer, losses by iteration and remaining checkpoints."""
    root = place / "checkpoints"
    complete = complete_checkpoints(root, "full")
    return {
        "tensors": tensor_digests(root / f"iter_{ITERATIONS:07d}"),
        "checkpoints": {path.name: marker.validation_loss for path, marker in complete.items()},
        "steps": losses(place, "step"),
        "evaluations": losses(place, "evaluation"),
        "exits": [
            event["iteration"]
            for event, _ in EventReader(place / "events.jsonl")
            if event["kind"] == "exit"
        ][-1],
        "temporaries": sorted(path.name for path in place.rglob("*.tmp-*")),
    }


def losses(place: Path, kind: str) -> dict[str, float]:
    """Return the losses by iteration; two attempts must agree on each."""
    losses_by_iteration: dict[str, float] = {}
    for event, _ in EventReader(place / "events.jsonl"):
        if event["kind"] == kind:
            loss = losses_by_iteration.setdefault(str(event["iteration"]), event["lm_loss"])
            assert loss == event["lm_loss"], (
                f"two attempts computed {loss} and {event['lm_loss']} in {event}"
            )
    return losses_by_iteration


# conversion


def _prepare_export(inputs: Path) -> None:
    job, _ = tiny_job(inputs / "model", tiny_config(max_position_embeddings=64))
    job.write(inputs / "job.json")


def _export(inputs: Path, place: Path, attempt: int) -> None:
    job = ConvertJob.read(inputs / "job.json")

    def fill(directory: Path) -> dict[str, Any]:
        paths = {"output_directory": str(directory), "exit_directory": str(place / "exit")}
        export(job.model_copy(update=paths))
        return {
            "passed": json.loads((directory / "parity.json").read_text(encoding="utf-8"))["passed"]
        }

    _data.build(place, "convert", fill)


def _exported(inputs: Path, place: Path) -> Any:
    (directory,) = _data.artifacts(place)
    return _data.result(inputs, place) | {"counts": Manifest.read(directory).counts}


def _kind(name: str, run: Callable[[Path, Path, int], None], **values: Any) -> Kind:
    return Kind(name, run, trained, visible, _prepare, **values)


TRAINING_KINDS = (
    Kind("save", _save, _saved, visible),
    Kind("save-async", _save_in_background, _saved, visible),
    Kind("export", _export, _exported, _data.visible, _prepare_export),
    _kind("train", train_1),
    _kind("train-async", train_1_async),
    _kind("train-2", train_2, ranks=2, victims=("rank here", "all")),
)
LAUNCHER_KINDS = (
    _kind(
        "launcher",
        launch_2,
        victims=("supervisor", "guard", "torchrun", "rank"),
        same_as="train-2",
        seconds=6.0,
    ),
)
