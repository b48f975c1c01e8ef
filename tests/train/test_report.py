"""Metrics of a log interval."""

import time

import pytest
import torch

from megacore.engine.base import Update
from megacore.observe.flops import TransformerShape
from megacore.observe.timers import Timers
from megacore.parallel.rank_layout import RankLayout
from megacore.train.report import RateMeter, SlowRanks
from megacore.train.state import TrainState
from tests.train import _runs


def test_rates_are_those_of_the_computed_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    config, device = _runs.config(), torch.device("cpu")
    shape = TransformerShape.of(config, 64)
    meter = RateMeter(config, shape, Timers(device), ranks=1, peaks=None)
    update = Update((2.0,) * 4, {"lm_loss": 2.0}, 1.0, True)
    clock = iter([0.0, 6.0, 6.0, 12.0, 12.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    meter.start(2, 16)
    whole, _ = meter.report(TrainState(5, 40), update, 1.0, device)
    # the first range was skipped in an earlier interval
    skips = TrainState(9, 72, passed_over=[(8, 15), (56, 63)])
    partial, _ = meter.report(skips, update, 1.0, device)
    assert (partial.ms_per_iteration, partial.samples_per_second) == (2000.0, 4.0)
    assert partial.tokens_per_second == whole.tokens_per_second == 4.0 * _runs.SEQ_LENGTH
    assert (partial.tflops, partial.model_tflops) == (whole.tflops, whole.model_tflops)


def test_rank_that_computes_longer_than_its_peers_is_named_once_until_it_recovers() -> None:
    warnings: list[str] = []
    hosts = ["node-1"] * 4 + ["node-2"] * 4
    slow_ranks = SlowRanks(RankLayout(data=2, pipeline=2, tensor=2), hosts, warnings.append)
    assert slow_ranks.compares
    # The second stage has more work than the first one, which is no fault of its ranks.
    usual = [100.0] * 4 + [180.0] * 4
    throttled = [*usual[:5], 225.0, *usual[6:]]
    for milliseconds in (usual, throttled, throttled, usual, throttled, throttled):
        slow_ranks.look(milliseconds)
    assert not warnings
    for _ in range(4):
        slow_ranks.look(throttled)
    assert len(warnings) == 1
    assert warnings[0].startswith(
        "rank 5 on node-2 computes 225 ms per iteration and the ranks with the same work 180 ms"
    )
    slow_ranks.look(usual)
    for _ in range(3):
        slow_ranks.look(throttled)
    assert len(warnings) == 2


def test_ranks_without_peers_are_not_compared() -> None:
    for layout in (RankLayout(), RankLayout(pipeline=4), RankLayout(context=2)):
        slow_ranks = SlowRanks(layout, ["node-1"] * layout.world_size, pytest.fail)
        assert not slow_ranks.compares
        slow_ranks.look([100.0] * (layout.world_size - 1) + [900.0])
