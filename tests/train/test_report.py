"""Metrics of a log interval."""

import time

import pytest
import torch

from megacore.engine.base import Update
from megacore.observe.flops import TransformerShape
from megacore.observe.timers import Timers
from megacore.train.report import RateMeter
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
