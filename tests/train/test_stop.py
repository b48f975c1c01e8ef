"""Ending early: by a signal, a file, an interval, or the clock.

The rest of the run then equals one in one go.
"""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megacore.artifact.workspace import STOP_FILE
from megacore.checkpoint.format import read_tracker
from megacore.config.run import RunConfig
from megacore.errors import PreemptedError, TrainingStoppedError
from megacore.observe.recorder import Recorder
from megacore.train.stop import StopRequest
from tests._dist import run_distributed
from tests.train import _runs
from tests.train.test_loop import assert_same_run

KEEP = {"save_interval": 100, "keep_last": 9}


def run(**train: Any) -> RunConfig:
    """Six iterations with dropout; no checkpoint is due before the last."""
    values = _runs.config().train.model_dump() | {"eval_interval": 100} | train
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    return _runs.config(model=dropout, train=values, checkpoint=KEEP)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    _runs.write_data(directory, _runs.config())
    return directory


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one go."""
    directory = tmp_path_factory.mktemp("whole")
    _runs.train(run(), data, directory)
    return directory


def after(
    iteration: int, action: Callable[[], None], config: RunConfig, data: Path, directory: Path
) -> None:
    """Train, and do `action` while iteration number `iteration` is computed."""
    mesh = _runs.mesh(config)
    with Recorder(directory, attempt=1, rank=mesh.rank, tensorboard=False) as recorder:
        trainer = _runs.trainer(config, data, directory, mesh, recorder)
        engine: Any = trainer._engine
        forward_backward, calls = engine.forward_backward, iter(range(1, 100))

        def intercepted(*arguments: Any) -> None:
            if next(calls) == iteration:
                action()
            forward_backward(*arguments)

        engine.forward_backward = intercepted
        trainer.run()


def ended(directory: Path) -> list[tuple[str, int]]:
    return [(event["reason"], event["iteration"]) for event in _runs.events(directory, "exit")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_signal_saves_after_the_iteration_and_the_rest_is_the_same(
    data: Path, whole: Path, tmp_path: Path, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    with pytest.raises(
        PreemptedError,
        match=rf"stopped at iteration 3 of 6 since a signal .*{number.name}.*iter_0000003",
    ):
        after(3, lambda: os.kill(os.getpid(), number), run(), data, tmp_path)
    assert signal.getsignal(number) is before
    assert ended(tmp_path) == [("signal", 3)]
    assert read_tracker(tmp_path / "checkpoints") == 3
    _runs.train(run(), data, tmp_path, attempt=2)
    assert_same_run(whole, tmp_path, 6)
    assert ended(tmp_path) == [("signal", 3), ("finished", 6)]


def test_a_stop_file_is_taken_away_so_that_the_run_can_go_on(data: Path, tmp_path: Path) -> None:
    with pytest.raises(
        TrainingStoppedError, match=r"iteration 1 of 6 since .*stop was there .it is removed now."
    ):
        after(1, _nothing, run(), data, _with_stop_file(tmp_path))
    assert ended(tmp_path) == [("stop_file", 1)]
    assert not (tmp_path / STOP_FILE).exists()
    _runs.train(run(), data, tmp_path, attempt=2)
    assert ended(tmp_path)[-1] == ("finished", 6)


def _with_stop_file(directory: Path) -> Path:
    (directory / STOP_FILE).touch()
    return directory


def test_an_interval_ends_each_attempt_and_is_no_part_of_the_course(
    data: Path, whole: Path, tmp_path: Path
) -> None:
    for attempt, iteration in ((1, 2), (2, 4)):
        with pytest.raises(
            TrainingStoppedError,
            match=rf"iteration {iteration} of 6 since train.exit_interval is 2",
        ):
            _runs.train(run(exit_interval=2), data, tmp_path, attempt)
    _runs.train(run(exit_interval=2), data, tmp_path, 3)
    assert ended(tmp_path) == [("exit_interval", 2), ("exit_interval", 4), ("finished", 6)]
    assert_same_run(whole, tmp_path, 6)


def test_time_that_is_over_ends_the_run(data: Path, tmp_path: Path) -> None:
    with pytest.raises(
        TrainingStoppedError, match=r"since train.exit_duration_minutes \(1e-05\) is over"
    ) as caught:
        _runs.train(run(exit_duration_minutes=1e-5), data, tmp_path)
    assert not isinstance(caught.value, PreemptedError)
    assert ended(tmp_path) == [("exit_duration", 1)]


def test_a_validation_that_a_signal_left_out_is_made_up_for(data: Path, tmp_path: Path) -> None:
    config = run(eval_interval=3)
    with pytest.raises(PreemptedError):
        after(3, lambda: os.kill(os.getpid(), signal.SIGTERM), config, data, tmp_path)
    assert _runs.events(tmp_path, "evaluation") == []
    _runs.train(config, data, tmp_path, attempt=2)
    assert [event["iteration"] for event in _runs.events(tmp_path, "evaluation")] == [3, 6]


def two_ranks(data: Path, root: Path) -> list[str]:
    """Rank 1 alone gets the signal; rank 0 alone looks for the file."""
    rank, messages = int(os.environ["RANK"]), []
    kill = partial(os.kill, os.getpid(), signal.SIGUSR1) if rank == 1 else _nothing
    if rank == 0:
        (root / "file").mkdir()
        (root / "file" / STOP_FILE).touch()
    for name, action in (("signal", kill), ("file", _nothing)):
        with pytest.raises(TrainingStoppedError) as caught:
            after(2, action, run(), data, root / name)
        messages.append(str(caught.value))
    return messages


def _nothing() -> None:
    """Let the training be."""


def test_two_ranks_stop_after_the_same_iteration_though_one_knows(
    data: Path, tmp_path: Path
) -> None:
    first, second = run_distributed(2, two_ranks, data, tmp_path)
    assert "iteration 2 of 6 since a signal asked for it (another rank got it)" in first[0]
    assert "iteration 2 of 6 since a signal asked for it (SIGUSR1)" in second[0]
    assert ended(tmp_path / "signal") == [("signal", 2)]
    assert "iteration 1 of 6 since" in first[1]
    assert "stop was there" in first[1]
    assert first[1] == second[1]
    assert not (tmp_path / "file" / STOP_FILE).exists()


def test_the_reason_that_leaves_least_time_wins() -> None:
    request = StopRequest(run(exit_interval=1).train, Path("none"), rank=1)
    assert request.reason((True, True, True), 1) == "signal"
    assert request.reason((False, True, True), 1) == "exit_duration"
    assert request.reason((False, False, True), 1) == "stop_file"
    assert request.reason((False, False, False), 1) == "exit_interval"
    # a batch that was passed over brings no notices
    assert request.reason((), 1) == "exit_interval"
    assert request.notices() == (False, False, False)
