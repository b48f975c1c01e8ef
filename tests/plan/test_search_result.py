"""Figures of a found layout, and the summary of a search."""

import pytest

from megacore.config import load_config
from megacore.plan.machine import load_machine
from megacore.plan.search import search


def test_figures_follow_from_the_time() -> None:
    config = load_config("gpt2-13b-3d", {"engine": "native", "launch.nproc_per_node": "auto"})
    best = search(config, 50_257, load_machine("h100"), 64, top=1).best[0]
    assert best.tokens_per_second == pytest.approx(1024 * 2048 / best.seconds)
    assert best.days == pytest.approx(143_051 * best.seconds / 86_400)
    assert best.device_hours == pytest.approx(best.days * 24 * 64)
    # 6 operations for each weight and token, and attention's
    assert best.utilisation == pytest.approx(
        best.tokens_per_second * (6 * 12.85e9 + 12 * 40 * 2048 * 5120) / (64 * 989.4e12), rel=0.02
    )


def test_the_error_is_that_of_the_hardware() -> None:
    config = load_config("gpt2-tiny", {"train.precision": "bf16"})
    errors = [
        search(config, 2000, load_machine(name), 1, top=1).error
        for name in ("a100-80gb", "h100", "b200")
    ]
    assert errors == [0.06, 0.074, None]
    summary = search(config, 2000, load_machine("b200"), 1).summary()
    assert "are not validated against measured runs" in summary
