"""Resuming with another configuration and from another run's checkpoint."""

import json
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.checkpoint.format import STATE_NAME, FileRecord, Marker, read_state
from megacore.config.run import RunConfig
from megacore.errors import CheckpointError, ConfigError, DataFormatError
from megacore.observe.recorder import Recorder
from megacore.parallel.mesh import ProcessMesh
from megacore.train.checkpoints import check_skipped
from megacore.train.state import PLANNED_KEY, TrainState, planned_samples
from tests.checkpoint._read import read_tensors
from tests.train import _runs
from tests.train.test_loop import assert_same_run


def run(train_iters: int = 6, *, optim: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    train = _runs.config().train.model_dump() | {"train_iters": train_iters, "eval_interval": 100}
    return _runs.config(
        train=train, optim=optim or {}, checkpoint={"save_interval": 3, "keep_last": 9}, **sections
    )


@pytest.fixture
def half(data: Path, tmp_path: Path) -> Path:
    """Provide a run stopped after three iterations."""
    _runs.train(run(3), data, tmp_path / "half")
    return tmp_path / "half"


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return read_tensors(directory / "checkpoints/iter_0000006")


def rewrite_state(checkpoint: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the state of a checkpoint, as if it had been written so."""
    state = checkpoint / STATE_NAME
    values = json.loads(state.read_text())
    change(values)
    state.write_text(json.dumps(values))
    marker = Marker.read(checkpoint)
    replace(marker, files=marker.files | {STATE_NAME: FileRecord.of(state)}).write(checkpoint)


def test_keyed_change_is_refused_until_overridden(data: Path, half: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"iter_0000003 was written with .*optim.lr: 0.01 -> 0.02.*override: \[optim.lr",
    ):
        _runs.train(run(optim={"lr": 2e-2}), data, half, attempt=2)
    assert [path.name for path in (half / "checkpoints").glob("iter_*")] == ["iter_0000003"]
    _runs.train(run(optim={"lr": 2e-2}, resume={"override": ["optim.lr"]}), data, half, attempt=3)
    start = _runs.events(half, "start")[-1]
    assert start["resumed_from"] == 3
    assert "optim.lr: 0.01 -> 0.02" in start["changes"]
    steps = {event["iteration"]: event["lr"] for event in _runs.events(half, "step")}
    assert steps[4] > 1.5 * steps[3]


def test_a_run_with_only_damaged_checkpoints_does_not_start_at_iteration_0(
    data: Path, half: Path
) -> None:
    checkpoint = half / "checkpoints/iter_0000003"
    (checkpoint / STATE_NAME).write_text("damaged")
    with pytest.raises(
        CheckpointError, match=r"all complete checkpoints in .* are damaged.*\(iter_0000003\)"
    ):
        _runs.train(run(), data, half, attempt=2)
    checkpoint.rename(half / "moved")
    (half / "checkpoints/iter_0000004").mkdir()  # an incomplete one holds no work
    _runs.train(run(3), data, half, attempt=3)
    assert _runs.events(half, "start")[-1]["resumed_from"] is None


def test_comparing_and_loading_a_checkpoint_beat(
    data: Path, half: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers: list[str] = []

    def beat(mesh: ProcessMesh, phase: str, iteration: int | None = None) -> None:
        if phase == "load":
            callers.extend(frame.name for frame in traceback.extract_stack())

    monkeypatch.setattr(ProcessMesh, "beat", beat)
    _runs.train(run(3), data, half, attempt=2)
    assert callers.count("on_read") >= 3, "each file is compared"
    assert callers.count("read") >= 9, "each tensor is read"


def test_unkeyed_changes_are_allowed_and_reported(data: Path, half: Path) -> None:
    _runs.train(run(6, parallel={"grad_reduce_bucket_mb": 1.0}), data, half, attempt=2)
    assert _runs.events(half, "start")[-1]["changes"] == [
        "parallel.grad_reduce_bucket_mb: 25.0 -> 1.0",
        "train.train_iters: 3 -> 6",
    ]


def test_run_resumed_from_another_runs_checkpoint_is_bit_identical(
    data: Path, half: Path, tmp_path: Path
) -> None:
    checkpoint = str(half / "checkpoints/iter_0000003")
    _runs.train(run(6), data, tmp_path / "whole")
    _runs.train(run(6, resume={"checkpoint": checkpoint}), data, tmp_path / "other")
    assert_same_run(tmp_path / "whole", tmp_path / "other", 6)
    assert [event["iteration"] for event in _runs.events(tmp_path / "other", "step")] == [4, 5, 6]
    # Once it has its own checkpoints, it resumes from these.
    _runs.train(run(7, resume={"checkpoint": checkpoint}), data, tmp_path / "other", attempt=2)
    assert _runs.events(tmp_path / "other", "start")[-1]["resumed_from"] == 6


def test_checkpoint_of_a_resumed_run_has_the_samples_of_its_plan(
    data: Path, half: Path, tmp_path: Path
) -> None:
    checkpoint = half / "checkpoints/iter_0000003"
    assert PLANNED_KEY not in read_state(checkpoint)
    assert planned_samples(read_state(checkpoint)) == 3 * 8
    config, directory = run(6, resume={"checkpoint": str(checkpoint)}), tmp_path / "other"
    ranks = _runs.mesh(config)
    with Recorder(directory, attempt=1, rank=ranks.rank, tensorboard=False) as recorder:
        _runs.trainer(config, data, directory, ranks, recorder, planned_samples=24).run()
    assert planned_samples(read_state(directory / "checkpoints/iter_0000006")) == 24


@pytest.mark.parametrize(
    ("samples", "batch"), [(32, 16), (16, 2)], ids=["within the warm-up", "back into the warm-up"]
)
def test_warm_up_in_samples_refuses_another_batch_size(
    data: Path, tmp_path: Path, samples: int, batch: int
) -> None:
    warmup = {"lr_warmup_iters": None, "lr_warmup_samples": samples, "lr_decay_iters": 20}
    _runs.train(run(3, optim=warmup), data, tmp_path / "half")
    changed = run(
        6,
        optim=warmup,
        resume={
            "checkpoint": str(tmp_path / "half/checkpoints/iter_0000003"),
            "override": ["train.global_batch_size"],
        },
    )
    changed = changed.model_copy(
        update={"train": changed.train.model_copy(update={"global_batch_size": batch})}
    )
    with pytest.raises(
        ConfigError,
        match=r"iter_0000003 is within that warm-up, at sample 24 after 3 optimizer steps, where",
    ):
        _runs.train(changed, data, tmp_path / "other")


def test_samples_consumed_before_the_checkpoint_count(data: Path, half: Path) -> None:
    checkpoint = half / "checkpoints/iter_0000003"
    rewrite_state(checkpoint, lambda values: values["train"].update(consumed_samples=4000))
    with pytest.raises(
        DataFormatError,
        match=r"4000 consumed by iteration 3 \+ the remaining 3 of .* 6 x .* 8 = 4024 are read",
    ):
        _runs.train(run(6, resume={"checkpoint": str(checkpoint)}), data, half.parent / "other")


def test_run_with_documents_packed_by_best_fit_resumes_bit_identically(tmp_path: Path) -> None:
    packed = {"packing": "best_fit", "reset_attention_mask": True, "reset_position_ids": True}
    values = _runs.config().data.model_dump() | packed
    _runs.write_data(tmp_path, run(data=values))
    _runs.train(run(6, data=values), tmp_path, tmp_path / "whole")
    for attempt, iterations in enumerate((3, 6), 1):
        _runs.train(run(iterations, data=values), tmp_path, tmp_path / "resumed", attempt)
    assert _runs.events(tmp_path / "resumed", "start")[-1]["resumed_from"] == 3
    assert_same_run(tmp_path / "whole", tmp_path / "resumed", 6)


def test_another_runs_checkpoint_with_keyed_changes_is_refused(
    data: Path, half: Path, tmp_path: Path
) -> None:
    changed = {"checkpoint": str(half / "checkpoints/iter_0000003")}
    with pytest.raises(ConfigError, match=r"seed: 1234 -> 7.*override: \[seed\]"):
        _runs.train(run(resume=changed).model_copy(update={"seed": 7}), data, tmp_path / "other")


def test_checkpoint_without_training_state_is_refused(
    data: Path, half: Path, tmp_path: Path
) -> None:
    checkpoint = half / "checkpoints/iter_0000003"
    rewrite_state(checkpoint, lambda values: values.pop("train"))
    with pytest.raises(
        CheckpointError,
        match=r"holds weights without the state of a training: begin with them through train",
    ):
        _runs.train(run(resume={"checkpoint": str(checkpoint)}), data, tmp_path / "other")


def test_different_automatic_precision_counts_as_a_change(data: Path, half: Path) -> None:
    rewrite_state(half / "checkpoints/iter_0000003", lambda values: values.update(precision="bf16"))
    with pytest.raises(
        ConfigError, match=r"train.precision: bf16 -> fp32.*override: \[train.precision\]"
    ):
        _runs.train(run(), data, half, attempt=2)
    _runs.train(run(resume={"override": ["train.precision"]}), data, half, attempt=3)
    assert "train.precision: bf16 -> fp32" in _runs.events(half, "start")[-1]["changes"]


def test_many_skipped_samples_are_checked_by_their_batches() -> None:
    """Sample by sample, a resume would take hours."""
    batches = [(first, first + 2**20 - 1) for first in range(0, 4 * 10**9, 2**20)]
    state = TrainState(consumed_samples=4 * 10**9, passed_over=batches[::-1])
    check_skipped([range(3 * 10**9), range(3 * 10**9, 5 * 10**9)], state, Path("iter_0000001"))
    del batches[2000]
    state.passed_over = batches
    with pytest.raises(ConfigError, match="names 0-2999999999, but iter_0000001"):
        check_skipped([range(3 * 10**9), range(3 * 10**9, 5 * 10**9)], state, Path("iter_0000001"))
