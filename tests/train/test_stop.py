"""Early ends of a run by a signal, a stop file, an interval or a duration."""

import errno
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
from megacore.train.loop import Trainer
from megacore.train.stop import StopRequest
from tests._dist import run_distributed
from tests.train import _runs
from tests.train.test_loop import assert_same_run

KEEP = {"save_interval": 100, "keep_last": 9}


def run(**train: Any) -> RunConfig:
    """Return the configuration of six iterations with dropout and one checkpoint at the end."""
    values = _runs.config().train.model_dump() | {"eval_interval": 100} | train
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    return _runs.config(model=dropout, train=values, checkpoint=KEEP)


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide the run without a break."""
    directory = tmp_path_factory.mktemp("whole")
    _runs.train(run(), data, directory)
    return directory


def train_with_action(
    iteration: int, action: Callable[[], None], config: RunConfig, data: Path, directory: Path
) -> None:
    """Train, and call `action` while iteration `iteration` is computed."""
    mesh = _runs.mesh(config)
    with Recorder(directory, attempt=1, rank=mesh.rank, tensorboard=False) as recorder:
        trainer = _runs.trainer(config, data, directory, mesh, recorder)
        engine: Any = trainer._engine
        forward_backward, calls = engine.forward_backward, iter(range(1, 100))

        def intercepted(*arguments: Any, **options: Any) -> None:
            if next(calls) == iteration:
                action()
            forward_backward(*arguments, **options)

        engine.forward_backward = intercepted
        trainer.run()


def exits(directory: Path) -> list[tuple[str, int]]:
    """Return reason and iteration of each attempt's end."""
    return [(event["reason"], event["iteration"]) for event in _runs.events(directory, "exit")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_signal_saves_a_checkpoint_and_the_resumed_run_is_bit_identical(
    data: Path, whole: Path, tmp_path: Path, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    with pytest.raises(
        PreemptedError,
        match=rf"stopped at iteration 3 of 6 since a signal .*{number.name}.*iter_0000003",
    ):
        train_with_action(3, lambda: os.kill(os.getpid(), number), run(), data, tmp_path)
    assert signal.getsignal(number) is before
    assert exits(tmp_path) == [("signal", 3)]
    assert read_tracker(tmp_path / "checkpoints") == 3
    _runs.train(run(), data, tmp_path, attempt=2)
    assert_same_run(whole, tmp_path, 6)
    assert exits(tmp_path) == [("signal", 3), ("finished", 6)]


def test_stop_file_is_removed_so_that_the_run_can_be_resumed(data: Path, tmp_path: Path) -> None:
    with pytest.raises(
        TrainingStoppedError, match=r"iteration 1 of 6 since .*stop was there .it is removed now."
    ):
        train_with_action(1, _nothing, run(), data, _with_stop_file(tmp_path))
    assert exits(tmp_path) == [("stop_file", 1)]
    assert not (tmp_path / STOP_FILE).exists()
    _runs.train(run(), data, tmp_path, attempt=2)
    assert exits(tmp_path)[-1] == ("finished", 6)


def _with_stop_file(directory: Path) -> Path:
    (directory / STOP_FILE).touch()
    return directory


def test_exit_interval_ends_each_attempt_without_changing_the_run(
    data: Path, whole: Path, tmp_path: Path
) -> None:
    for attempt, iteration in ((1, 2), (2, 4)):
        with pytest.raises(
            TrainingStoppedError,
            match=rf"iteration {iteration} of 6 since train.exit_interval is 2",
        ):
            _runs.train(run(exit_interval=2), data, tmp_path, attempt)
    _runs.train(run(exit_interval=2), data, tmp_path, 3)
    assert exits(tmp_path) == [("exit_interval", 2), ("exit_interval", 4), ("finished", 6)]
    assert_same_run(whole, tmp_path, 6)


def test_elapsed_exit_duration_ends_the_run(data: Path, tmp_path: Path) -> None:
    with pytest.raises(
        TrainingStoppedError, match=r"since train.exit_duration_minutes \(1e-05\) is over"
    ) as caught:
        _runs.train(run(exit_duration_minutes=1e-5), data, tmp_path)
    assert not isinstance(caught.value, PreemptedError)
    assert exits(tmp_path) == [("exit_duration", 1)]


def test_resumed_run_does_the_validation_a_signal_prevented(data: Path, tmp_path: Path) -> None:
    config = run(eval_interval=3)
    with pytest.raises(PreemptedError):
        train_with_action(3, lambda: os.kill(os.getpid(), signal.SIGTERM), config, data, tmp_path)
    kinds = ("evaluation", "perplexity")
    assert [_runs.events(tmp_path, kind) for kind in kinds] == [[], []]
    _runs.train(config, data, tmp_path, attempt=2)
    for kind in kinds:
        assert [event["iteration"] for event in _runs.events(tmp_path, kind)] == [3, 6]


@pytest.mark.parametrize("validation", ["_evaluate", "_measure_perplexity"])
def test_signal_within_a_validation_ends_the_run_after_one_save(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, validation: str
) -> None:
    config = run(eval_interval=3).model_copy(
        update={"checkpoint": _runs.config(checkpoint={"save_interval": 3}).checkpoint}
    )
    validate = getattr(Trainer, validation)

    def interrupted(trainer: Trainer) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return validate(trainer)

    monkeypatch.setattr(Trainer, validation, interrupted)
    with pytest.raises(PreemptedError, match="stopped at iteration 3 of 6"):
        _runs.train(config, data, tmp_path)
    assert exits(tmp_path) == [("signal", 3)]
    assert [event["iteration"] for event in _runs.events(tmp_path, "checkpoint")] == [3]
    measured = [3] if validation == "_measure_perplexity" else []
    assert [event["iteration"] for event in _runs.events(tmp_path, "perplexity")] == measured


def stop_two_ranks(data: Path, root: Path) -> list[str]:
    """Train twice; only rank 1 gets the signal and only rank 0 sees the stop file."""
    rank, messages = int(os.environ["RANK"]), []
    kill = partial(os.kill, os.getpid(), signal.SIGUSR1) if rank == 1 else _nothing
    if rank == 0:
        (root / "file").mkdir()
        (root / "file" / STOP_FILE).touch()
    for name, action in (("signal", kill), ("file", _nothing)):
        with pytest.raises(TrainingStoppedError) as caught:
            train_with_action(2, action, run(), data, root / name)
        messages.append(str(caught.value))
    return messages


def _nothing() -> None:
    """Do nothing."""


def test_ranks_stop_after_the_same_iteration_when_one_is_notified(
    data: Path, tmp_path: Path
) -> None:
    first, second = run_distributed(2, stop_two_ranks, data, tmp_path)
    assert "iteration 2 of 6 since a signal asked for it (another rank got it)" in first[0]
    assert "iteration 2 of 6 since a signal asked for it (SIGUSR1)" in second[0]
    assert exits(tmp_path / "signal") == [("signal", 2)]
    assert "iteration 1 of 6 since" in first[1]
    assert "stop was there" in first[1]
    assert first[1] == second[1]
    assert not (tmp_path / "file" / STOP_FILE).exists()


def test_an_unreadable_stop_file_requests_no_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = StopRequest(run().train, tmp_path, rank=0)

    def fail(path: Path) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", fail)
        assert request.notices() == (False, False, False)
    request.file.touch()
    monkeypatch.setattr("megacore.train.stop._LOOK_INTERVAL", 0.0)
    assert request.notices() == (False, False, True)


def test_reason_with_the_least_time_takes_precedence() -> None:
    request = StopRequest(run(exit_interval=1).train, Path("none"), rank=1)
    assert request.reason((True, True, True), 1) == "signal"
    assert request.reason((False, True, True), 1) == "exit_duration"
    assert request.reason((False, False, True), 1) == "stop_file"
    assert request.reason((False, False, False), 1) == "exit_interval"
    # a skipped batch has no notices
    assert request.reason((), 1) == "exit_interval"
    assert request.notices() == (False, False, False)
