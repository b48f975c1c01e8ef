"""Dynamic loss scaling, iteration by iteration."""

import pytest

from megacore.config.optim import LossScaleConfig
from megacore.optim.grad_scaler import DynamicLossScaler


def scales(scaler: DynamicLossScaler, outcomes: str) -> list[float]:
    """Return the scale after each iteration; x is an overflow."""
    result = []
    for outcome in outcomes:
        scaler.update(overflow=outcome == "x")
        result.append(scaler.scale)
    return result


def test_hysteresis_delays_the_first_backoff_only() -> None:
    scaler = DynamicLossScaler(LossScaleConfig(initial=1024, window=4, hysteresis=2, minimum=1))
    assert scales(scaler, "xxx") == [1024, 512, 256]


def test_the_scale_doubles_after_a_window_and_hysteresis_is_reset() -> None:
    scaler = DynamicLossScaler(LossScaleConfig(initial=1024, window=4, hysteresis=2, minimum=1))
    assert scales(scaler, "xx....xx") == [1024, 512, 512, 512, 512, 1024, 1024, 512]


def test_each_doubling_takes_a_whole_window() -> None:
    scaler = DynamicLossScaler(LossScaleConfig(initial=1024, window=3, hysteresis=2, minimum=1))
    assert scales(scaler, "......") == [1024, 1024, 2048, 2048, 2048, 4096]


def test_an_overflow_restarts_the_window() -> None:
    scaler = DynamicLossScaler(LossScaleConfig(initial=1024, window=4, hysteresis=2, minimum=1))
    assert scales(scaler, "...x....") == [1024] * 7 + [2048]


def test_overflows_halve_the_default_scale_from_2_to_the_32() -> None:
    scaler = DynamicLossScaler(LossScaleConfig())
    assert scales(scaler, "x" * 15)[-1] == 2.0**18


def exhausted(scaler: DynamicLossScaler, outcomes: str) -> list[bool]:
    """Return after each iteration if the scaler is exhausted; x is an overflow."""
    result = []
    for outcome in outcomes:
        scaler.update(overflow=outcome == "x")
        result.append(scaler.exhausted)
    return result


def test_the_scale_stays_at_the_minimum() -> None:
    scaler = DynamicLossScaler(LossScaleConfig(initial=2, window=4, hysteresis=1, minimum=1))
    assert scales(scaler, "xxx") == [1, 1, 1]


@pytest.mark.parametrize("hysteresis", [1, 2, 5])
def test_patience_counts_skipped_iterations_in_a_row_at_the_minimum(hysteresis: int) -> None:
    config = LossScaleConfig(initial=1, window=100, hysteresis=hysteresis, minimum=1, patience=3)
    assert exhausted(DynamicLossScaler(config), "xx.xx.xxxx") == [False] * 8 + [True] * 2


def test_overflows_above_the_minimum_do_not_count() -> None:
    scaler = DynamicLossScaler(
        LossScaleConfig(initial=4, window=100, hysteresis=1, minimum=1, patience=2)
    )
    assert exhausted(scaler, "xxxx") == [False, False, False, True]


def test_a_restored_scaler_continues_to_count_skipped_iterations() -> None:
    config = LossScaleConfig(initial=1, window=100, hysteresis=1, minimum=1, patience=3)
    first, second, old = (
        DynamicLossScaler(config),
        DynamicLossScaler(config),
        DynamicLossScaler(config),
    )
    assert exhausted(first, "xx") == [False, False]
    second.load_state(first.state())
    assert exhausted(second, "x") == [True]
    state = first.state()
    del state["skipped_at_minimum"]
    old.load_state(state)
    assert exhausted(old, "xxx") == [False, False, True]


def test_a_restored_scaler_continues_with_the_same_scales() -> None:
    config = LossScaleConfig(initial=1024, window=3, hysteresis=2, minimum=1)
    uninterrupted, first = DynamicLossScaler(config), DynamicLossScaler(config)
    expected = scales(uninterrupted, "x..xx...x")
    scales(first, "x..x")
    second = DynamicLossScaler(config)
    second.load_state(first.state())
    assert scales(second, "x...x") == expected[4:]
