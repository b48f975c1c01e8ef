"""Recomputed iterations, which distinguish bad data from bad hardware, and skipped batches."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megacore.checkpoint import save
from megacore.checkpoint.format import read_state
from megacore.config.run import RunConfig
from megacore.errors import ConfigError, LossError, WorkspaceError
from megacore.observe.recorder import Recorder
from tests._dist import run_distributed
from tests.train import _runs
from tests.train.test_loop import assert_same_checkpoint, assert_same_run

ITERATION = 4


def run(**train: Any) -> RunConfig:
    values = _runs.config().train.model_dump() | {"eval_interval": 100} | train
    return _runs.config(
        model={"hidden_dropout": 0.1, "attention_dropout": 0.1},
        train=values,
        checkpoint={"save_interval": 3, "keep_last": 9},
    )


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide the run in which nothing fails."""
    directory = tmp_path_factory.mktemp("whole")
    _runs.train(run(), data, directory)
    return directory


Fault = Callable[[Any, Callable[[], None]], None]
"""Function that gets the engine and the computation of the gradients, and disturbs the latter."""


def train_with_fault(
    config: RunConfig,
    data: Path,
    directory: Path,
    fault: Fault,
    *,
    calls: tuple[int, ...],
    attempt: int = 1,
) -> None:
    """Train, with the fault in the computations with these numbers, counted from 1."""
    mesh = _runs.mesh(config)
    with Recorder(directory, attempt=attempt, rank=mesh.rank, tensorboard=False) as recorder:
        trainer = _runs.trainer(config, data, directory, mesh, recorder)
        engine: Any = trainer._engine
        forward_backward, numbers = engine.forward_backward, iter(range(1, 100))

        def intercepted(*arguments: Any, **options: Any) -> None:
            if next(numbers) in calls:
                trainer._checkpoints.finish_copy()  # a fault may write into the weights
                fault(engine, lambda: forward_backward(*arguments, **options))
            else:
                forward_backward(*arguments, **options)

        engine.forward_backward = intercepted
        trainer.run()


def nan_loss(engine: Any, compute: Callable[[], None]) -> None:
    """Replace a weight by NaN during one computation."""
    weight = next(iter(engine._stage.named_parameters.values())).data
    original = weight.clone()
    weight.fill_(math.nan)
    compute()
    weight.copy_(original)


def nan_gradient(engine: Any, compute: Callable[[], None]) -> None:
    """Set one gradient to NaN after a correct forward pass."""
    compute()
    engine._syncs[0].buckets[0].buffer[0] = math.nan


def loss_spike(engine: Any, compute: Callable[[], None]) -> None:
    """Multiply one loss by a hundred."""
    compute()
    engine._losses[0].mul_(100.0)


def no_fault(engine: Any, compute: Callable[[], None]) -> None:
    compute()


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (nan_loss, "loss_not_finite"),
        (nan_gradient, "gradient_not_finite"),
        (loss_spike, "loss_spike"),
    ],
    ids=["loss", "gradient", "spike"],
)
def test_fault_that_is_not_reproduced_blames_hardware_and_changes_nothing(
    data: Path, whole: Path, tmp_path: Path, fault: Fault, cause: str
) -> None:
    train_with_fault(run(), data, tmp_path, fault, calls=(ITERATION,))
    (bad,) = _runs.events(tmp_path, "bad_batch")
    assert (bad["cause"], bad["iteration"], bad["reproduced"]) == (cause, ITERATION, False)
    assert bad["global_batch"] == [24, 31]
    (warning,) = _runs.events(tmp_path, "warning")
    assert "computed again from the same weights and samples it was not" in warning["message"]
    assert "suspect the hardware" in warning["message"]
    assert_same_run(whole, tmp_path, 6)


def test_reproduced_fault_blames_data_and_its_batch_can_be_skipped(
    data: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        LossError, match=r"it came out bad again, so data or numerics.*iter_0000003"
    ) as caught:
        train_with_fault(run(), data, tmp_path, nan_loss, calls=(ITERATION, ITERATION + 1))
    advised = 'train.skip_samples: ["24-31"]'
    assert advised in str(caught.value)
    (bad,) = _runs.events(tmp_path, "bad_batch")
    assert (bad["reproduced"], bad["rank"], bad["samples"]) == (True, 0, [24, 25])
    _runs.train(run(skip_samples=["24-31"]), data, tmp_path, attempt=2)
    steps = {event["iteration"]: event for event in _runs.events(tmp_path, "step")}
    assert steps[ITERATION]["lm_loss"] is None
    assert steps[ITERATION]["skipped_iterations"] == 1
    assert steps[ITERATION]["tokens_per_second"] == steps[ITERATION]["mfu"] == 0
    assert [steps[i]["consumed_samples"] for i in (3, 4, 5, 6)] == [24, 32, 40, 48]
    state = read_state(tmp_path / "checkpoints/iter_0000006")["train"]
    assert (state["applied_iterations"], state["passed_over"]) == (5, [[24, 31]])
    assert "skips samples 24 to 31" in _runs.events(tmp_path, "warning")[-1]["message"]


def test_failed_save_does_not_hide_the_loss_error(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise WorkspaceError("the disk is full")

    monkeypatch.setattr(save, "write_checkpoint", fail)
    with pytest.raises(
        LossError, match=r"no checkpoint was saved before; the save .* failed \(the disk is full\)"
    ):
        train_with_fault(run(), data, tmp_path, nan_loss, calls=(ITERATION, ITERATION + 1))


def test_skipped_batch_does_not_move_later_samples(data: Path, tmp_path: Path) -> None:
    _runs.train(run(train_iters=3, skip_samples=[1]), data, tmp_path / "skipped")
    losses = _runs.losses(tmp_path / "skipped")
    _runs.train(run(train_iters=3), data, tmp_path / "whole")
    assert losses[1] is None
    # The second batch meets the initial weights instead of those after one step, so its loss is
    # near but not equal.
    assert losses[2] == pytest.approx(_runs.losses(tmp_path / "whole")[2], rel=0.05)
    with pytest.raises(
        ConfigError,
        match=r"skip_samples names 9-9, but .*iter_0000003 was trained on samples up to 23",
    ):
        _runs.train(run(skip_samples=[9]), data, tmp_path / "skipped", attempt=2)
    _runs.train(run(skip_samples=[1]), data, tmp_path / "skipped", attempt=2)


def test_reproduced_spike_is_applied_with_a_warning_or_stops_the_run(
    data: Path, tmp_path: Path
) -> None:
    train_with_fault(run(), data, tmp_path / "warn", loss_spike, calls=(ITERATION, ITERATION + 1))
    (warning,) = _runs.events(tmp_path / "warn", "warning")
    assert "the loss jumped to" in warning["message"]
    assert (
        read_state(tmp_path / "warn/checkpoints/iter_0000006")["train"]["applied_iterations"] == 6
    )
    spiky = run(loss_spike_action="stop")
    with pytest.raises(
        LossError,
        match=r"the loss jumped to .* at iteration 4 .*or set train.loss_spike_action to w",
    ):
        train_with_fault(
            spiky, data, tmp_path / "stop", loss_spike, calls=(ITERATION, ITERATION + 1)
        )
    assert [path.name for path in (tmp_path / "stop/checkpoints").glob("iter_*")] == [
        "iter_0000003"
    ]


@pytest.mark.parametrize(
    ("fault", "option"),
    [
        (loss_spike, "loss_spike_action"),
        (nan_loss, "nonfinite_action"),
        (nan_gradient, "nonfinite_action"),
    ],
    ids=["spike", "loss", "gradient"],
)
def test_reproduced_fault_can_be_skipped_as_if_it_had_been_known(
    data: Path, tmp_path: Path, fault: Fault, option: str
) -> None:
    calls = (ITERATION, ITERATION + 1)
    train_with_fault(run(**{option: "skip"}), data, tmp_path / "found", fault, calls=calls)
    (warning,) = _runs.events(tmp_path / "found", "warning")
    assert "computed again" in warning["message"]
    assert warning["message"].endswith("the batch is skipped, number 1 in a row of at most 5")
    (bad,) = _runs.events(tmp_path / "found", "bad_batch")
    assert (bad["reproduced"], bad["global_batch"]) == (True, [24, 31])
    _runs.train(run(skip_samples=["24-31"]), data, tmp_path / "known")
    assert_same_checkpoint(tmp_path / "known", tmp_path / "found", 6)
    steps = {event["iteration"]: event for event in _runs.events(tmp_path / "found", "step")}
    assert steps[ITERATION]["skipped_iterations"] == 1
    assert steps[ITERATION]["tokens_per_second"] == 0, "it trains nothing"
    assert _runs.losses(tmp_path / "known") == _runs.losses(tmp_path / "found")


def fail_on_rank_1(data: Path, root: Path) -> None:
    """Train with the fault only on rank 1, without it, and with skipped samples."""
    fault = nan_loss if os.environ["RANK"] == "1" else no_fault
    train_with_fault(run(), data, root / "fault", fault, calls=(ITERATION,))
    _runs.train(run(), data, root / "whole")
    _runs.train(run(skip_samples=["8-11"]), data, root / "skipped")


def test_ranks_agree_on_the_fault_of_one(data: Path, tmp_path: Path) -> None:
    run_distributed(2, fail_on_rank_1, data, tmp_path)
    (bad,) = _runs.events(tmp_path / "fault", "bad_batch")
    assert (bad["rank"], bad["samples"], bad["reproduced"]) == (1, [26, 27], False)
    assert_same_run(tmp_path / "whole", tmp_path / "fault", 6)
    _runs.train(run(skip_samples=["8-11"]), data, tmp_path / "serial")
    serial, parallel = _runs.losses(tmp_path / "serial"), _runs.losses(tmp_path / "skipped")
    assert [iteration for iteration, loss in serial.items() if loss is None] == [2]
    for iteration, loss in serial.items():
        assert parallel[iteration] == (None if loss is None else pytest.approx(loss, rel=1e-5))
