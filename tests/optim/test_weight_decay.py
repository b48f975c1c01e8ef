"""Schedules of weight decay, compared with closed forms."""

import math

import pytest

from megacore.optim.param_schedule import WeightDecaySchedule
from tests._tiny import tiny_config


def test_linear_rises_in_a_line_and_stays_at_the_end() -> None:
    schedule = WeightDecaySchedule(0.02, 0.1, 100, "linear")
    assert [schedule.at(step) for step in (0, 1, 25, 100)] == pytest.approx(
        [0.02, 0.0208, 0.04, 0.1], rel=1e-14
    )
    assert schedule.at(101) == 0.1


def test_cosine_rises_along_half_a_wave() -> None:
    schedule = WeightDecaySchedule(0.02, 0.1, 100, "cosine")
    for step in (1, 30, 77):
        expected = 0.02 + 0.08 * 0.5 * (1 - math.cos(math.pi * step / 100))
        assert schedule.at(step) == pytest.approx(expected, rel=1e-14)
    assert schedule.at(50) == pytest.approx(0.06)
    assert schedule.at(100) == schedule.at(1000) == 0.1


def test_weight_decay_may_fall_to_zero() -> None:
    schedule = WeightDecaySchedule(0.1, 0.0, 10, "linear")
    assert [schedule.at(step) for step in (1, 5, 10, 11)] == pytest.approx([0.09, 0.05, 0.0, 0.0])


def test_schedule_is_built_from_the_configuration() -> None:
    config = tiny_config(train={"train_iters": 50})
    schedule = WeightDecaySchedule.of(config.optim, config.lr_decay_iters)
    assert schedule == WeightDecaySchedule(0.01, 0.01, 50, "constant")
    assert schedule.at(1) == schedule.at(999) == 0.01
    changes = {"weight_decay_incr_style": "cosine", "start_weight_decay": 0.0, "lr_decay_iters": 30}
    changed = config.model_copy(update={"optim": config.optim.model_copy(update=changes)})
    schedule = WeightDecaySchedule.of(changed.optim, changed.lr_decay_iters)
    assert schedule == WeightDecaySchedule(0.0, 0.01, 30, "cosine")
