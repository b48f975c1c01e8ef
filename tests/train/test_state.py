"""The loop's state as JSON."""

import json

import pytest

from megacore.errors import CheckpointError
from megacore.train.state import LogInterval, TrainState


def test_a_state_survives_json() -> None:
    state = TrainState(7, 56, 5, 1.0 / 7.0, LogInterval([2.5, 1.0 / 3.0], 1, 1))
    assert TrainState.from_json(json.loads(json.dumps(state.to_json()))) == state


def test_a_state_of_another_version_or_form_is_refused() -> None:
    values = TrainState().to_json()
    with pytest.raises(CheckpointError, match="version 99"):
        TrainState.from_json(values | {"version": 99})
    with pytest.raises(CheckpointError, match="damaged"):
        TrainState.from_json(values | {"surprise": 1})


def test_the_mean_is_over_applied_iterations() -> None:
    interval = LogInterval()
    assert interval.mean_loss != interval.mean_loss  # NaN
    interval.losses += [1.0, 2.0]
    interval.skipped_iterations += 1
    assert interval.mean_loss == 1.5
