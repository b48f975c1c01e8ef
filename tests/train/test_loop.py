"""Complete training runs: resuming, extension, layouts, evaluation and checkpoints."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.artifact.workspace import CONFIG_KEY
from megacore.checkpoint.format import read_state
from megacore.config.run import RunConfig
from megacore.engine.base import Update
from megacore.errors import (
    DataFormatError,
    MemoryExhaustedError,
    TrainingError,
    WorkspaceError,
)
from megacore.observe.recorder import Recorder
from megacore.parallel.mesh import ProcessMesh
from megacore.train.checkpoints import RunCheckpoints
from megacore.train.evaluate import Evaluation
from megacore.train.loop import Trainer
from tests._dist import run_distributed
from tests.checkpoint._read import read_tensors
from tests.train import _runs

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


def until(train_iters: int, **changes: object) -> RunConfig:
    """Return a configuration with dropout.

    The checkpoint at iteration 3 divides a log interval.
    """
    train = (
        _runs.config().train.model_dump()
        | {"train_iters": train_iters, "log_interval": 4}
        | changes
    )
    return _runs.config(model=DROPOUT, train=train, checkpoint={"save_interval": 3, "keep_last": 9})


def assert_same_run(first: Path, second: Path, iteration: int) -> None:
    """Assert that two runs are equal bit for bit.

    Compares weights, optimizer, state and the events after the third iteration.
    """
    assert_same_checkpoint(first, second, iteration)
    for kind, values in (
        ("step", ("interval_iterations", "lm_loss", "grad_norm", "lr")),
        ("evaluation", ("lm_loss",)),
        ("perplexity", ("valid_loss", "valid_ppl", "samples")),
    ):
        reported = [
            [
                [event[value] for value in ("iteration", *values)]
                for event in _runs.events(directory, kind)
                # a stop saves and measures at further iterations
                if event["iteration"] > (3 if kind != "perplexity" else iteration - 1)
            ]
            for directory in (first, second)
        ]
        assert reported[0] == reported[1]
        assert reported[0]


def assert_same_checkpoint(first: Path, second: Path, iteration: int) -> None:
    """Assert that weights, optimizer and state of two runs are equal bit for bit."""
    paths = [directory / f"checkpoints/iter_{iteration:07d}" for directory in (first, second)]
    one, other = (read_tensors(path) for path in paths)
    assert one.keys() == other.keys()
    assert any(name.startswith("optimizer.exp_avg_sq.") for name in one)
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
    states = [read_state(path) for path in paths]
    for state in states:
        state.pop(CONFIG_KEY)  # intervals may differ
    assert states[0] == states[1]


def train_whole_and_resumed(data: Path, root: Path) -> None:
    """Train 6 iterations without a break, and 3 more after a resumed checkpoint of 3."""
    _runs.train(until(6), data, root / "whole")
    _runs.train(until(3), data, root / "resumed")
    _runs.train(until(6), data, root / "resumed", attempt=2)


def test_resumed_run_is_bit_identical_to_an_unbroken_one(data: Path, tmp_path: Path) -> None:
    train_whole_and_resumed(data, tmp_path)
    assert_same_run(tmp_path / "whole", tmp_path / "resumed", 6)
    starts = [event["resumed_from"] for event in _runs.events(tmp_path / "resumed", "start")]
    assert starts == [None, 3]


def train_two_ranks(data: Path, root: Path) -> None:
    train_whole_and_resumed(data, root)
    _runs.train(_runs.config(), data, root / "dp2")


@pytest.fixture(scope="module")
def distributed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dp2")
    run_distributed(2, train_two_ranks, data, root)
    return root


def test_resumed_run_of_two_ranks_is_bit_identical(distributed: Path) -> None:
    assert_same_run(distributed / "whole", distributed / "resumed", 6)


def test_two_ranks_reproduce_the_losses_of_one(
    distributed: Path, data: Path, tmp_path: Path
) -> None:
    _runs.train(_runs.config(), data, tmp_path)
    serial, parallel = _runs.losses(tmp_path), _runs.losses(distributed / "dp2")
    assert list(serial) == [1, 2, 3, 4, 5, 6]
    assert [parallel[i] for i in serial] == pytest.approx(list(serial.values()), rel=1e-5)
    validation = [
        [event["lm_loss"] for event in _runs.events(directory, "evaluation")]
        for directory in (tmp_path, distributed / "dp2")
    ]
    assert validation[1] == pytest.approx(validation[0], rel=1e-5)


def test_accumulated_micro_batches_equal_one_large_batch(data: Path, tmp_path: Path) -> None:
    for size in (1, 8):
        train = _runs.config().train.model_dump() | {"micro_batch_size": size}
        _runs.train(_runs.config(train=train), data, tmp_path / str(size))
    small, large = _runs.losses(tmp_path / "1"), _runs.losses(tmp_path / "8")
    assert list(small.values()) == pytest.approx(list(large.values()), rel=1e-5)


def test_ramp_up_grows_the_batch_and_can_be_resumed(data: Path, tmp_path: Path) -> None:
    def run(train_iters: int, directory: str, attempt: int = 1) -> None:
        rampup = {"start": 2, "increment": 2, "samples": 18}
        train = _runs.config().train.model_dump() | {
            "train_iters": train_iters,
            "rampup_batch_size": rampup,
        }
        _runs.train(_runs.config(train=train), data, tmp_path / directory, attempt)

    run(8, "whole")
    steps = _runs.events(tmp_path / "whole", "step")
    assert [step["global_batch_size"] for step in steps] == [2, 2, 2, 4, 4, 6, 8, 8]
    assert [step["consumed_samples"] for step in steps] == [2, 4, 6, 10, 14, 20, 28, 36]
    run(4, "resumed")
    run(8, "resumed", attempt=2)
    assert_same_run(tmp_path / "whole", tmp_path / "resumed", 8)


def test_loss_falls(data: Path, tmp_path: Path) -> None:
    train = _runs.config().train.model_dump() | {"train_iters": 20, "eval_interval": 100}
    _runs.train(_runs.config(train=train, checkpoint={"save_interval": 20}), data, tmp_path)
    losses = _runs.losses(tmp_path)
    assert losses[1] == pytest.approx(4.13, abs=0.1)  # ln of the padded vocabulary's 64 is 4.16
    assert losses[20] < 0.8 * losses[1]


def test_each_iteration_is_evaluated_and_saved_once(data: Path, tmp_path: Path) -> None:
    keep_all = {"save_interval": 3, "keep_last": 9}
    _runs.train(_runs.config(checkpoint=keep_all), data, tmp_path)
    train = _runs.config().train.model_dump() | {"train_iters": 8}
    _runs.train(_runs.config(train=train, checkpoint=keep_all), data, tmp_path, attempt=2)
    assert [event["iteration"] for event in _runs.events(tmp_path, "evaluation")] == [4, 6, 8]
    assert [event["samples"] for event in _runs.events(tmp_path, "evaluation")] == [8, 8, 8]
    measured, saved = (_runs.events(tmp_path, kind) for kind in ("perplexity", "checkpoint"))
    assert [event["iteration"] for event in measured] == [3, 6, 8]
    assert [(event["iteration"], event["validation_loss"]) for event in saved] == [
        (event["iteration"], event["valid_loss"]) for event in measured
    ]


def test_finished_run_exits_without_training(data: Path, tmp_path: Path) -> None:
    _runs.train(_runs.config(), data, tmp_path)
    _runs.train(_runs.config(), data, tmp_path, attempt=2)
    second = [event for event in _runs.events(tmp_path) if event["attempt"] == 2]
    assert [event["kind"] for event in second] == ["start", "exit"]
    assert second[1]["reason"] == "finished"
    assert second[1]["iteration"] == 6


def test_retention_deletes_checkpoints_and_reports_them(data: Path, tmp_path: Path) -> None:
    checkpoint = {"save_interval": 1, "keep_last": 2, "keep_every": 2, "keep_best": False}
    _runs.train(_runs.config(checkpoint=checkpoint), data, tmp_path)
    checkpoints = sorted(path.name for path in (tmp_path / "checkpoints").glob("iter_*"))
    assert checkpoints == ["iter_0000002", "iter_0000004", "iter_0000005", "iter_0000006"]
    assert [event["iteration"] for event in _runs.events(tmp_path, "checkpoint_deleted")] == [1, 3]


def test_damaged_checkpoint_is_skipped_with_a_warning(data: Path, tmp_path: Path) -> None:
    _runs.train(_runs.config(), data, tmp_path)
    before = _runs.losses(tmp_path)
    damaged = tmp_path / "checkpoints/iter_0000006/state.json"
    damaged.write_bytes(b"{}")
    _runs.train(_runs.config(), data, tmp_path, attempt=2)
    assert str(damaged) in _runs.events(tmp_path, "warning")[0]["message"]
    repeated = {
        e["iteration"]: e["lm_loss"] for e in _runs.events(tmp_path, "step") if e["attempt"] == 2
    }
    assert repeated == {iteration: before[iteration] for iteration in (4, 5, 6)}


def test_damaged_checkpoint_without_an_event_is_skipped(data: Path, tmp_path: Path) -> None:
    """Its size and time are right; the attempt that wrote it died before reporting it."""
    _runs.train(_runs.config(), data, tmp_path)
    events = tmp_path / "events.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    remaining = [
        line
        for line in lines
        if json.loads(line)["kind"] != "checkpoint" or json.loads(line)["iteration"] != 6
    ]
    events.write_text("".join(remaining))
    damaged = tmp_path / "checkpoints/iter_0000006/state.json"
    written = damaged.stat()
    damaged.write_bytes(b"}" + damaged.read_bytes()[1:])
    os.utime(damaged, ns=(written.st_atime_ns, written.st_mtime_ns))
    _runs.train(_runs.config(), data, tmp_path, attempt=2)
    assert str(damaged) in _runs.events(tmp_path, "warning")[0]["message"]
    assert [event["iteration"] for event in _runs.events(tmp_path, "checkpoint")] == [3, 6]


def test_step_events_report_consumed_samples_and_throughput(data: Path, tmp_path: Path) -> None:
    _runs.train(_runs.config(), data, tmp_path)
    last = _runs.events(tmp_path, "step")[-1]
    assert (last["consumed_samples"], last["consumed_tokens"]) == (48, 48 * _runs.SEQ_LENGTH)
    assert last["tokens_per_second"] == pytest.approx(8 * 16 * 1000 / last["ms_per_iteration"])
    assert last["mfu"] == pytest.approx(last["tflops"])
    assert last["mfu_measured"] == pytest.approx(last["tflops"] / 2)
    assert last["skipped_iterations"] == last["nan_iterations"] == 0
    assert last["interval_iterations"] == 1


def test_losses_by_source_are_those_of_applied_iterations(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[int] = []
    cleared: list[int] = []
    with Recorder(tmp_path, attempt=1, rank=0, tensorboard=False) as recorder:
        train = _runs.config().train.model_dump() | {"log_interval": 2}
        config = _runs.config(train=train)
        trainer = _runs.trainer(config, data, tmp_path, ProcessMesh.serial(), recorder)
        compute, calls = trainer._engine.update, iter(range(6))

        def update(*arguments: Any, **options: Any) -> Update:
            return replace(compute(*arguments, **options), applied=next(calls) != 2)

        monkeypatch.setattr(trainer._engine, "update", update)
        monkeypatch.setattr(
            trainer._source_losses, "add", lambda first, losses: added.append(first)
        )
        monkeypatch.setattr(
            trainer._source_losses, "clear", lambda: cleared.append(trainer.state.iteration)
        )
        trainer.run()
    assert added == [0, 8, 24, 32, 40]
    assert cleared == [2, 4, 6]  # each interval has its own losses


def test_dataset_with_too_few_samples_is_refused(data: Path, tmp_path: Path) -> None:
    train = _runs.config().train.model_dump() | {"train_iters": 10_000}
    with pytest.raises(DataFormatError, match=r"10000 x train.global_batch_size 8 = 80000"):
        _runs.train(_runs.config(train=train), data, tmp_path)


def test_validation_reads_a_small_split_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def evaluated(*arguments: Any, samples: int, **options: Any) -> Evaluation:
        read.append(samples)
        return Evaluation({"lm_loss": 1.0}, samples=samples, tokens=samples)

    monkeypatch.setattr("megacore.train.loop.evaluate", evaluated)
    config = _runs.config()
    with Recorder(tmp_path, attempt=1, rank=0, tensorboard=False) as recorder:
        trainer = _runs.trainer(config, data, tmp_path, ProcessMesh.serial(), recorder)
        trainer.state.consumed_samples = 3
        for samples in (1000, 5, 0):
            valid: Any = range(samples)
            monkeypatch.setattr(trainer, "_data", replace(trainer._data, valid=valid))
            trainer._evaluate()
    assert read == [8 * config.train.eval_iters, 5]
    events = _runs.events(tmp_path, "evaluation")
    assert [event["samples"] for event in events] == read
    assert [event["consumed_tokens"] for event in events] == [3 * _runs.SEQ_LENGTH] * 2


def test_error_of_a_prediction_is_a_warning(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise ValueError("no such processor")

    monkeypatch.setattr("megacore.train.loop.planned_iteration", fail)
    with Recorder(tmp_path, attempt=1, rank=0, tensorboard=False) as recorder:
        trainer = _runs.trainer(_runs.config(), data, tmp_path, ProcessMesh.serial(), recorder)
        assert trainer._prediction() == {}
    (warning,) = _runs.events(tmp_path, "warning")
    assert "no such processor" in warning["message"]


def test_loss_error_waits_for_the_save_and_names_its_failure(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(checkpoints: RunCheckpoints) -> None:
        raise WorkspaceError("the disk is full")

    monkeypatch.setattr(RunCheckpoints, "wait", fail)
    with Recorder(tmp_path, attempt=1, rank=0, tensorboard=False) as recorder:
        trainer = _runs.trainer(_runs.config(), data, tmp_path, ProcessMesh.serial(), recorder)
        assert trainer._last_good() == (
            "no checkpoint was saved before; the save that was under way failed (the disk is full)"
        )


def test_time_of_validations_and_saves_is_no_time_of_iterations(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused: list[bool] = [False]

    @contextmanager
    def pause() -> Iterator[None]:
        paused[0] = True
        yield
        paused[0] = False

    train = _runs.config().train.model_dump() | {"train_iters": 1}
    with Recorder(tmp_path, attempt=1, rank=0, tensorboard=False) as recorder:
        trainer = _runs.trainer(
            _runs.config(train=train), data, tmp_path, ProcessMesh.serial(), recorder
        )
        calls: list[tuple[str, bool]] = []
        for part, name in ((trainer, "_evaluate"), (trainer._checkpoints, "save")):
            monkeypatch.setattr(
                part, name, lambda *_, name=name, **__: calls.append((name, paused[0]))
            )
        monkeypatch.setattr(trainer._meter, "paused", pause)
        trainer.run()
    assert calls == [("_evaluate", True), ("save", True)]


def test_a_failed_save_ends_the_run_after_the_iteration_that_notices_it(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(checkpoints: RunCheckpoints) -> None:
        raise WorkspaceError("the disk is full")

    monkeypatch.setattr(RunCheckpoints, "failed", True)
    monkeypatch.setattr(RunCheckpoints, "wait", fail)
    with Recorder(tmp_path, attempt=1, rank=0, tensorboard=False) as recorder:
        trainer = _runs.trainer(_runs.config(), data, tmp_path, ProcessMesh.serial(), recorder)
        with pytest.raises(WorkspaceError, match="the disk is full"):
            trainer.run()
    assert trainer.state.iteration == 1


def test_dataset_must_have_the_samples_of_the_remaining_iterations(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Recorder(tmp_path, attempt=1, rank=0, tensorboard=False) as recorder:
        trainer = _runs.trainer(_runs.config(), data, tmp_path, ProcessMesh.serial(), recorder)

    def require(samples: int) -> None:
        train: Any = range(samples)
        monkeypatch.setattr(trainer, "_data", replace(trainer._data, train=train))
        trainer._require_samples()

    require(6 * 8)
    with pytest.raises(DataFormatError, match=r"47 samples but train.train_iters 6 x .* = 48 are"):
        require(47)
    trainer.state.iteration, trainer.state.consumed_samples = 3, 24
    require(48)
    with pytest.raises(DataFormatError, match=r"24 consumed by iteration 3 \+ the remaining 3 of"):
        require(47)
    trainer.state.iteration, trainer.state.consumed_samples = 6, 48
    require(1)


def _write_nan_weight(trainer: Trainer) -> None:
    weight = trainer._engine.tensors()["model.encoder.final_layernorm.weight"]
    assert isinstance(weight, torch.Tensor)
    weight[0] = float("nan")


def train_with_nan_weight(data: Path, root: Path) -> str:
    """Train with a NaN in the last rank's final norm; return the error's message."""
    mesh = _runs.mesh()
    with Recorder(root, attempt=1, rank=mesh.rank, tensorboard=False) as recorder:
        trainer: Trainer = _runs.trainer(_runs.config(), data, root, mesh, recorder)
        if mesh.rank == mesh.world_size - 1:
            _write_nan_weight(trainer)
        with pytest.raises(TrainingError) as caught:
            trainer.run()
    assert not list(root.glob("checkpoints/iter_*"))
    return str(caught.value)


def test_nan_loss_error_names_rank_iteration_and_samples_on_every_rank(
    data: Path, tmp_path: Path
) -> None:
    messages = run_distributed(2, train_with_nan_weight, data, tmp_path)
    assert messages[0] == messages[1]
    assert (
        "the loss is nan on rank 1 at iteration 1 (samples 2, 3; 2 micro batches in all)"
        in messages[0]
    )
    assert messages[0].endswith("no checkpoint was saved before")


def test_out_of_memory_error_names_the_settings_that_help(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = ProcessMesh.serial()
    with Recorder(tmp_path, attempt=1, rank=0, tensorboard=False) as recorder:
        trainer = _runs.trainer(_runs.config(), data, tmp_path, mesh, recorder)

        def fail(*_: object, **__: object) -> None:
            torch.empty(1 << 60)

        monkeypatch.setattr(trainer._engine, "forward_backward", fail)
        with pytest.raises(
            MemoryExhaustedError,
            match=r"at iteration 1 .*helps most: .*train\.micro_batch_size: 2 -> 1",
        ):
            trainer.run()
