"""Learning rate schedules, compared with closed forms and published log lines."""

import math
from typing import get_args

import pytest

from megacore.config.optim import LrDecayStyle, LrWsdDecayStyle
from megacore.optim.param_schedule import LrSchedule
from tests._tiny import tiny_config

RECIPE_345M = LrSchedule(
    lr=1.5e-4, min_lr=1e-5, warmup_steps=3200, decay_steps=320_000, style="cosine"
)


@pytest.mark.parametrize(
    ("iteration", "skipped", "logged"), [(100, 15, "3.984E-06"), (1000, 17, "4.608E-05")]
)
def test_the_345m_recipe_logs_the_published_learning_rates(
    iteration: int, skipped: int, logged: str
) -> None:
    assert f"{RECIPE_345M.at(iteration - skipped):.3E}" == logged


@pytest.mark.parametrize("style", get_args(LrDecayStyle))
def test_warm_up_is_a_straight_line_from_zero(style: LrDecayStyle) -> None:
    schedule = LrSchedule(1e-3, 1e-4, 10, 100, style, wsd_steps=5)
    assert [schedule.at(step) for step in (0, 1, 5, 10)] == pytest.approx(
        [0.0, 1e-4, 5e-4, 1e-3], rel=1e-15
    )


def test_warm_up_may_start_above_zero() -> None:
    schedule = LrSchedule(1e-3, 0.0, 10, 100, "cosine", init_lr=5e-4)
    assert [schedule.at(step) for step in (0, 1, 5, 10)] == pytest.approx(
        [5e-4, 5.5e-4, 7.5e-4, 1e-3], rel=1e-15
    )


def test_logarithmic_warm_up_reaches_the_peak_one_step_early() -> None:
    schedule = LrSchedule(1e-3, 0.0, 8, 100, "linear", init_lr=1e-4, warmup_style="log")
    assert [schedule.at(step) for step in (0, 1, 3, 7, 8)] == pytest.approx(
        [1e-4, 1e-4 + 9e-4 / 3, 1e-4 + 9e-4 * 2 / 3, 1e-3, 1e-3], rel=1e-15
    )
    assert schedule.at(9) == pytest.approx(1e-3 * 91 / 92)
    for steps in (1, 2):
        assert LrSchedule(1e-3, 0.0, steps, 100, "constant", warmup_style="log").at(1) == 1e-3


def test_cosine_follows_half_a_wave_and_stays_at_the_minimum() -> None:
    schedule = LrSchedule(1e-3, 1e-4, 10, 110, "cosine")
    for step in (11, 35, 60, 109):
        expected = 1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi * (step - 10) / 100))
        assert schedule.at(step) == pytest.approx(expected, rel=1e-14)
    assert schedule.at(60) == pytest.approx(5.5e-4)
    assert schedule.at(110) == pytest.approx(1e-4)
    assert schedule.at(111) == schedule.at(10_000) == 1e-4


def test_linear_falls_in_a_line_and_constant_stays_at_the_peak() -> None:
    assert LrSchedule(1e-3, 1e-4, 10, 110, "linear").at(35) == pytest.approx(1e-4 + 9e-4 * 0.75)
    assert LrSchedule(1e-3, 1e-4, 10, 110, "constant").at(5000) == 1e-3


def test_decay_begins_at_the_first_step_without_warm_up() -> None:
    schedule = LrSchedule(1e-3, 0.0, 0, 10, "linear")
    assert schedule.at(1) == pytest.approx(0.9e-3)
    assert schedule.at(10) == 0.0


def test_a_decay_may_end_with_the_warm_up() -> None:
    schedule = LrSchedule(1e-3, 1e-4, 10, 10, "cosine")
    assert [schedule.at(step) for step in (5, 10, 11)] == [5e-4, 1e-3, 1e-4]


def test_inverse_square_root_falls_from_the_end_of_the_warm_up_to_the_minimum() -> None:
    schedule = LrSchedule(1e-3, 2e-4, 16, 10_000, "inverse-square-root")
    assert [schedule.at(step) for step in (16, 64, 100, 256)] == pytest.approx(
        [1e-3, 5e-4, 4e-4, 2.5e-4], rel=1e-14
    )
    assert schedule.at(400) == pytest.approx(2e-4)
    assert schedule.at(401) == schedule.at(9_999) == schedule.at(10_001) == 2e-4


def test_inverse_square_root_begins_at_the_peak_without_warm_up() -> None:
    schedule = LrSchedule(1e-3, 0.0, 0, 100, "inverse-square-root")
    # The rate of step 0 is reported as long as all iterations are skipped.
    assert [schedule.at(step) for step in (0, 1, 4)] == [1e-3, 1e-3, 5e-4]


def test_inverse_square_root_drops_to_the_minimum_after_the_decay() -> None:
    assert LrSchedule(1e-3, 1e-5, 16, 100, "inverse-square-root").at(100) == pytest.approx(4e-4)
    assert LrSchedule(1e-3, 1e-5, 16, 100, "inverse-square-root").at(101) == 1e-5


WSD_AT_A_QUARTER = {
    "linear": 0.75,
    "cosine": 0.5 * (1 + math.sqrt(0.5)),
    "exponential": 2 * 0.5**0.25 - 1,
    "minus_sqrt": 0.5,
}


@pytest.mark.parametrize("style", get_args(LrWsdDecayStyle))
def test_wsd_stays_at_the_peak_until_its_decay(style: LrWsdDecayStyle) -> None:
    schedule = LrSchedule(1e-3, 2e-4, 10, 100, "WSD", wsd_style=style, wsd_steps=40)
    assert schedule.at(11) == schedule.at(60) == pytest.approx(1e-3, rel=1e-15)
    assert schedule.at(61) < 1e-3
    assert schedule.at(70) == pytest.approx(2e-4 + 8e-4 * WSD_AT_A_QUARTER[style], rel=1e-14)
    assert schedule.at(100) == pytest.approx(2e-4, rel=1e-14)
    assert schedule.at(101) == 2e-4


def test_schedule_is_built_from_the_configuration() -> None:
    config = tiny_config(train={"train_iters": 100, "global_batch_size": 4})
    optim = config.optim.model_copy(
        update={
            "lr": 2e-3,
            "min_lr": 1e-4,
            "lr_decay_style": "WSD",
            "lr_wsd_decay_style": "minus_sqrt",
            "lr_wsd_decay_iters": 20,
            "lr_decay_iters": 80,
            "lr_warmup_samples": 39,
            "lr_warmup_init": 1e-5,
            "lr_warmup_style": "log",
        }
    )
    schedule = LrSchedule.of(config.model_copy(update={"optim": optim}))
    assert schedule == LrSchedule(2e-3, 1e-4, 10, 80, "WSD", 1e-5, "minus_sqrt", 20, "log")
    assert LrSchedule.of(config) == LrSchedule(1e-3, 0.0, 0, 100, "cosine")
