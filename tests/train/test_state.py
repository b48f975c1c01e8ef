"""JSON form of the training state."""

import json
import math

import pytest

from megacore.errors import CheckpointError
from megacore.train.state import PLANNED_KEY, LogInterval, TrainState, planned_samples


def test_state_survives_json() -> None:
    state = TrainState(
        7,
        56,
        5,
        1.0 / 7.0,
        LogInterval({"lm_loss": [2.5, 1.0 / 3.0], "sop_loss": [0.5, 0.1]}, 1, 1),
    )
    assert TrainState.from_json(json.loads(json.dumps(state.to_json()))) == state


def test_state_of_another_version_or_form_is_refused() -> None:
    values = TrainState().to_json()
    with pytest.raises(CheckpointError, match="version 99, this version reads 3 and 4"):
        TrainState.from_json(values | {"version": 99})
    with pytest.raises(CheckpointError, match="damaged"):
        TrainState.from_json(values | {"surprise": 1})


def test_stored_recent_loss_that_is_not_finite_is_ignored() -> None:
    for loss in (math.inf, math.nan):
        stored = json.loads(json.dumps(TrainState(recent_loss=loss).to_json()))
        assert TrainState.from_json(stored).recent_loss is None


def test_interval_mean_is_over_applied_iterations() -> None:
    interval = LogInterval()
    assert math.isnan(interval.mean("lm_loss"))
    for step in ({"lm_loss": 1.0, "sop_loss": 0.5}, {"lm_loss": 2.0, "sop_loss": 0.75}):
        interval.add(step)
    interval.skipped_iterations += 1
    assert (interval.mean("lm_loss"), interval.mean("sop_loss")) == (1.5, 0.625)
    assert interval.iterations == 3
    interval.clear()
    assert interval == LogInterval()


def test_planned_samples_are_those_of_the_checkpoints_run() -> None:
    """A run of an earlier version planned at least the samples of its batch size from the start."""
    train = {"train_iters": 100, "global_batch_size": 4, "micro_batch_size": 2, "gone": 1}
    saved = {"config": {"train": train}, "train": TrainState(40, 160).to_json()}
    assert planned_samples(saved) == 400
    assert planned_samples(saved | {"train": TrainState(40, 80).to_json()}) == 400
    assert planned_samples(saved | {"train": TrainState(40, 320).to_json()}) == 320 + 60 * 4
    ramp = {"rampup_batch_size": {"start": 2, "increment": 2, "samples": 20}}
    ramped = {"config": {"train": train | ramp}, "train": TrainState(40, 20 + 30 * 4).to_json()}
    assert planned_samples(ramped) == 20 + 90 * 4
    assert planned_samples(saved | {PLANNED_KEY: 7}) == 7
    for damaged in ({"config": {"train": {}}}, {"config": {}}, {"train": {}}):
        with pytest.raises(CheckpointError, match=r"how many samples its run planned|is damaged"):
            planned_samples(saved | damaged)
