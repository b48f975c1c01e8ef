"""The schedule against its closed form and against published log lines."""

import math

import pytest

from megacore.optim.lr_schedule import LrSchedule

RECIPE_345M = LrSchedule(lr=1.5e-4, min_lr=1e-5, warmup_steps=3200, decay_steps=320_000, style="cosine")


@pytest.mark.parametrize(("iteration", "skipped", "logged"), [(100, 15, "3.984E-06"), (1000, 17, "4.608E-05")])
def test_the_345m_recipe_logs_the_published_learning_rates(iteration: int, skipped: int, logged: str) -> None:
    assert f"{RECIPE_345M.at(iteration - skipped):.3E}" == logged


@pytest.mark.parametrize("style", ["cosine", "linear", "constant"])
def test_warm_up_is_a_straight_line_from_zero(style: str) -> None:
    schedule = LrSchedule(1e-3, 1e-4, 10, 100, style)  # type: ignore[arg-type]
    assert [schedule.at(step) for step in (0, 1, 5, 10)] == pytest.approx([0.0, 1e-4, 5e-4, 1e-3], rel=1e-15)


def test_cosine_follows_half_a_wave_and_stays_at_the_floor() -> None:
    schedule = LrSchedule(1e-3, 1e-4, 10, 110, "cosine")
    for step in (11, 35, 60, 109):
        expected = 1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi * (step - 10) / 100))
        assert schedule.at(step) == pytest.approx(expected, rel=1e-14)
    assert schedule.at(60) == pytest.approx(5.5e-4)
    assert schedule.at(110) == pytest.approx(1e-4)
    assert schedule.at(111) == schedule.at(10_000) == 1e-4


def test_linear_and_constant() -> None:
    assert LrSchedule(1e-3, 1e-4, 10, 110, "linear").at(35) == pytest.approx(1e-4 + 9e-4 * 0.75)
    assert LrSchedule(1e-3, 1e-4, 10, 110, "constant").at(5000) == 1e-3


def test_without_warm_up_the_first_step_is_on_the_decay() -> None:
    schedule = LrSchedule(1e-3, 0.0, 0, 10, "linear")
    assert schedule.at(1) == pytest.approx(0.9e-3)
    assert schedule.at(10) == 0.0
