"""Losses that are not finite or jump: who, when, which samples."""

import math

import pytest

from megacore.engine.base import Update
from megacore.errors import TrainingError
from megacore.parallel.mesh import ProcessMesh
from megacore.parallel.rank_layout import RankLayout
from megacore.train.loss_check import LossCheck, MicroBatch
from megacore.train.state import TrainState
from tests.train import _runs

MESH = ProcessMesh(layout=RankLayout(data=2, pipeline=2, tensor=2))
"""Ranks 4, 5 (first replica) and 6, 7 (second) are the last stage."""


def check(warnings: list[str] | None = None, **train: object) -> LossCheck:
    run = _runs.config(train=_runs.config().train.model_dump() | train)
    return LossCheck(run, MESH, (warnings if warnings is not None else []).append)


def update(
    losses: tuple[float, ...], grad_norm: float, applied: bool, fatal: bool = False
) -> Update:
    return Update(losses, {"lm_loss": sum(losses) / len(losses)}, grad_norm, applied, fatal)


def test_a_loss_belongs_to_the_last_stage_of_its_replica_and_to_consecutive_samples() -> None:
    state = TrainState(iteration=5, consumed_samples=40)
    origins = [check().origin(index, state) for index in range(4)]
    assert origins == [
        MicroBatch(4, (40, 41)),
        MicroBatch(6, (42, 43)),
        MicroBatch(4, (44, 45)),
        MicroBatch(6, (46, 47)),
    ]


def test_an_applied_iteration_counts_and_moves_the_average() -> None:
    state, own = TrainState(), check()
    own.take_note(update((4.0, 2.0), 1.0, True), state)
    assert (state.applied_iterations, state.interval.losses, state.recent_loss) == (
        1,
        {"lm_loss": [3.0]},
        3.0,
    )
    own.take_note(update((1.0, 1.0), 1.0, True), state)
    assert state.recent_loss == pytest.approx(0.98 * 3.0 + 0.02 * 1.0)


def test_a_spike_is_a_warning_that_names_rank_iteration_and_samples() -> None:
    warnings: list[str] = []
    own, state = check(warnings, loss_spike_factor=3.0), TrainState(9, 72, 9, 2.0)
    own.take_note(update((2.0, 5.9, 2.0, 2.0), 1.0, True), state)
    assert warnings == []
    state.recent_loss = 2.0
    own.take_note(update((2.0, 6.1, 2.0, 7.0), 1.0, True), state)
    assert len(warnings) == 1
    assert (
        "the loss jumped to 7 on rank 6 at iteration 10 (samples 78, 79), 3.5 times the recent "
        "mean 2"
    ) in warnings[0]
    assert state.applied_iterations == 11


def test_a_spike_can_stop_the_run_or_be_ignored() -> None:
    spike = update((7.0, 2.0), 1.0, True)
    with pytest.raises(
        TrainingError,
        match=r"jumped to 7 on rank 4 at iteration 1 .samples 0, 1.*set train.loss_spike_",
    ):
        check(loss_spike_action="stop").take_note(spike, TrainState(recent_loss=2.0))
    warnings: list[str] = []
    check(warnings, loss_spike_factor=None).take_note(spike, TrainState(recent_loss=2.0))
    check(warnings).take_note(spike, TrainState())  # nothing to compare the first loss with
    assert warnings == []


def test_a_skipped_iteration_is_counted_and_moves_nothing() -> None:
    state, own = TrainState(recent_loss=2.0), check()
    own.take_note(update((2.0, math.inf), math.inf, False), state)
    own.take_note(update((2.0, 2.0), math.inf, False), state)
    assert (state.applied_iterations, state.recent_loss, state.interval.losses) == (0, 2.0, {})
    assert (state.interval.skipped_iterations, state.interval.nan_iterations) == (2, 1)


def test_a_gradient_that_is_not_finite_is_told_from_a_loss() -> None:
    with pytest.raises(
        TrainingError,
        match=r"the loss is nan on rank 6 at iteration 1 .samples 2, 3; 2 micro batches",
    ):
        check().take_note(
            update((2.0, math.nan, 2.0, math.inf), math.nan, False, fatal=True), TrainState()
        )
    with pytest.raises(
        TrainingError,
        match=r"norm is inf at iteration 1 .samples 0 to 7. on all 8 ranks though every",
    ):
        check().take_note(update((2.0,) * 4, math.inf, False, fatal=True), TrainState())


def test_fp16_says_that_the_loss_scale_is_used_up() -> None:
    own = check(precision="fp16")
    with pytest.raises(
        TrainingError,
        match="10 iterations in a row overflowed with the loss scale at its minimum 1",
    ):
        own.take_note(update((2.0,) * 4, math.inf, False, fatal=True), TrainState())
