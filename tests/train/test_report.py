"""Metrics of a log interval."""

import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacore.engine.base import Update
from megacore.observe.flops import Peaks, TransformerShape
from megacore.observe.recorder import Recorder
from megacore.observe.timers import Timers
from megacore.parallel.mesh import ProcessMesh
from megacore.parallel.rank_layout import RankLayout
from megacore.train import report
from megacore.train.report import RateMeter, SlowRanks
from megacore.train.state import TrainState
from tests._dist import run_distributed
from tests.train import _runs

GPU = torch.device("cuda")


def test_rates_are_those_of_the_computed_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    config, device = _runs.config(), torch.device("cpu")
    shape = TransformerShape.of(config, 64)
    meter = RateMeter(config, shape, Timers(device), ranks=1, peaks=None)
    update = Update((2.0,) * 4, {"lm_loss": 2.0}, 1.0, True)
    clock = iter([0.0, 6.0, 6.0, 12.0, 12.0])
    monkeypatch.setattr(report, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    meter.start(2, 16)
    whole, _ = meter.report(TrainState(5, 40), update, 1.0, device)
    # the first range was skipped in an earlier interval
    skips = TrainState(9, 72, passed_over=[(8, 15), (56, 63)])
    partial, _ = meter.report(skips, update, 1.0, device)
    assert (partial.ms_per_iteration, partial.samples_per_second) == (2000.0, 4.0)
    assert partial.tokens_per_second == whole.tokens_per_second == 4.0 * _runs.SEQ_LENGTH
    assert (partial.tflops, partial.model_tflops) == (whole.tflops, whole.model_tflops)


def test_report_has_rates_of_each_rank_and_excludes_all_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, device = _runs.config(), torch.device("cpu")
    peaks = Peaks(measured=4.0, vendor=8.0)
    shape = TransformerShape.of(config, 64)
    meter = RateMeter(config, shape, Timers(device), ranks=2, peaks=peaks)
    clock = iter([0.0, 1.0, 2.0, 3.0, 5.0, 9.0, 9.0])
    monkeypatch.setattr(report, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    meter.start(2, 16)
    for _ in range(2):
        with meter.paused():
            pass
    state = TrainState(5, 40, applied_iterations=1)
    state.interval.add({"lm_loss": 2.0, "sop_loss": 0.5})
    update = Update((2.0,) * 4, {"lm_loss": 2.0, "sop_loss": 0.5}, 1.0, True)
    step, _ = meter.report(state, update, 1.0, device)
    assert (step.ms_per_iteration, step.samples_per_second) == (2000.0, 4.0)
    assert step.tokens_per_second_per_rank == 2.0 * _runs.SEQ_LENGTH
    assert step.mfu == step.model_tflops / 8.0
    assert step.mfu_measured == step.model_tflops / 4.0
    assert step.lr == 0.5 * config.optim.lr  # two iterations of warmup
    assert (step.lm_loss, step.further_losses) == (2.0, {"sop_loss": 0.5})


def test_phases_before_an_interval_are_not_in_its_report() -> None:
    config, device = _runs.config(), torch.device("cpu")
    timers = Timers(device)
    shape = TransformerShape.of(config, 64)
    meter = RateMeter(config, shape, timers, ranks=1, peaks=None)
    with timers("world wait"):  # of a validation that a resume makes up for
        time.sleep(0.05)
    meter.start(2, 16)
    with timers("optimizer"):
        pass
    update = Update((2.0,) * 4, {"lm_loss": 2.0}, 1.0, True)
    step, milliseconds = meter.report(TrainState(3, 24), update, 1.0, device)
    assert milliseconds.keys() == {"optimizer"}
    assert step.exposed_communication_ms == 0.0


def test_rank_that_computes_longer_than_its_peers_is_named_once_until_it_recovers() -> None:
    warnings: list[str] = []
    hosts = ["node-1"] * 4 + ["node-2"] * 4
    slow_ranks = SlowRanks(RankLayout(data=2, pipeline=2, tensor=2), hosts, GPU, warnings.append)
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


def test_slower_one_of_two_ranks_is_named_from_a_fifth_more() -> None:
    for slow, named in ((119.0, 0), (121.0, 1)):
        warnings: list[str] = []
        slow_ranks = SlowRanks(RankLayout(data=2), ["node-1"] * 2, GPU, warnings.append)
        for _ in range(3):
            slow_ranks.look([100.0, slow])
        assert len(warnings) == named


def train_with_a_slow_rank(data: Path, run_directory: Path) -> None:
    """Train with a second rank that computes several times as long, as if on GPUs."""
    run = _runs.config(train={"log_interval": 1, "train_iters": 12})
    mesh = ProcessMesh.build(RankLayout(data=2), timers=Timers(torch.device("cpu")))
    with Recorder(run_directory, attempt=1, rank=mesh.rank, tensorboard=False) as recorder:
        trainer = _runs.trainer(run, data, run_directory, mesh, recorder)
        trainer._slow_ranks = SlowRanks(mesh.layout, trainer._hosts, GPU, recorder.warning)
        forward_backward = trainer._engine.forward_backward

        def slow(*arguments: Any, **options: Any) -> Any:
            began = time.monotonic()
            result = forward_backward(*arguments, **options)
            time.sleep(max(0.04, 3 * (time.monotonic() - began)) * mesh.rank)
            return result

        trainer._engine.forward_backward = slow  # type: ignore[method-assign]
        trainer.run()


def test_training_names_its_slow_rank(tmp_path: Path) -> None:
    data = tmp_path / "data"
    _runs.write_data(data, _runs.config())
    run_distributed(2, train_with_a_slow_rank, data, tmp_path / "run")
    warnings = [
        event["message"]
        for event in _runs.events(tmp_path / "run", "warning")
        if "the ranks with the same work" in event["message"]
    ]
    assert warnings
    # It is named again if both were as slow for a while, because of other processes.
    beginning = f"rank 1 on {socket.gethostname()} computes "
    assert all(warning.startswith(beginning) for warning in warnings)


def test_ranks_without_peers_are_not_compared() -> None:
    without_peers = [RankLayout(), RankLayout(pipeline=4), RankLayout(context=2)]
    on_cpu = (RankLayout(data=2), torch.device("cpu"))
    for layout, device in (*((layout, GPU) for layout in without_peers), on_cpu):
        slow_ranks = SlowRanks(layout, ["node-1"] * layout.world_size, device, pytest.fail)
        assert not slow_ranks.compares
        slow_ranks.look([100.0] * (layout.world_size - 1) + [900.0])
