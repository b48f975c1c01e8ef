"""Dynamic loss scaling, step by step."""

from megacore.config.optim import LossScaleConfig
from megacore.optim.grad_scaler import DynamicLossScaler


def scales(scaler: DynamicLossScaler, outcomes: str) -> list[float]:
    """The scale after each iteration; x is an overflow."""
    result = []
    for outcome in outcomes:
        scaler.update(overflow=outcome == "x")
        result.append(scaler.scale)
    return result


def test_hysteresis_delays_the_first_backoff_only() -> None:
    scaler = DynamicLossScaler(LossScaleConfig(initial=1024, window=4, hysteresis=2, minimum=1))
    assert scales(scaler, "xxx") == [1024, 512, 256]


def test_the_scale_doubles_after_a_window_and_the_hysteresis_starts_afresh() -> None:
    scaler = DynamicLossScaler(LossScaleConfig(initial=1024, window=4, hysteresis=2, minimum=1))
    assert scales(scaler, "xx....xx") == [1024, 512, 512, 512, 512, 1024, 1024, 512]


def test_an_overflow_restarts_the_window() -> None:
    scaler = DynamicLossScaler(LossScaleConfig(initial=1024, window=4, hysteresis=2, minimum=1))
    assert scales(scaler, "...x....") == [1024] * 7 + [2048]


def test_the_first_345m_iterations_halve_from_2_to_the_32() -> None:
    scaler = DynamicLossScaler(LossScaleConfig())
    assert scales(scaler, "x" * 15)[-1] == 2.0**18


def test_the_minimum_holds_and_says_when_it_is_exhausted() -> None:
    scaler = DynamicLossScaler(LossScaleConfig(initial=2, window=4, hysteresis=1, minimum=1))
    assert not scaler.exhausted
    assert scales(scaler, "xx") == [1, 1]
    assert scaler.exhausted


def test_a_restored_scaler_goes_on_alike() -> None:
    config = LossScaleConfig(initial=1024, window=3, hysteresis=2, minimum=1)
    whole, first = DynamicLossScaler(config), DynamicLossScaler(config)
    expected = scales(whole, "x..xx...x")
    scales(first, "x..x")
    second = DynamicLossScaler(config)
    second.load_state(first.state())
    assert scales(second, "x...x") == expected[4:]
