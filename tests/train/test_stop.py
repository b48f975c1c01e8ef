"""Early ends of a run by a signal, a stop file, an interval or a duration."""

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.artifact.workspace import STOP_FILE
from megacore.checkpoint.format import checkpoint_directories, iteration_of, read_tracker
from megacore.config.run import RunConfig
from megacore.errors import PreemptedError, TrainingStoppedError
from megacore.models.base import LossTotals
from megacore.models.stage import Stage
from megacore.observe.recorder import Recorder
from megacore.train.evaluate import Evaluation
from megacore.train.stop import SIGNALS, StopLimits, StopRequest
from tests._dist import run_distributed
from tests.checkpoint._read import read_tensors
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
    iteration: int,
    action: Callable[[], None],
    config: RunConfig,
    data: Path,
    directory: Path,
    *,
    attempt: int = 1,
) -> None:
    """Train, and call `action` while iteration `iteration` is computed."""
    train_with_call(iteration, action, config, data, directory, "forward_backward", attempt)


def train_with_call(
    number: int,
    action: Callable[[], None],
    config: RunConfig,
    data: Path,
    directory: Path,
    method: str,
    attempt: int = 1,
) -> None:
    """Train, and call `action` before call `number` of a method of the engine, from 1."""
    mesh = _runs.mesh(config)
    with Recorder(directory, attempt=attempt, rank=mesh.rank, tensorboard=False) as recorder:
        trainer = _runs.trainer(config, data, directory, mesh, recorder)
        engine: Any = trainer._engine
        call, calls = getattr(engine, method), iter(range(1, 1000))

        def intercepted(*arguments: Any, **options: Any) -> Any:
            if next(calls) == number:
                action()
            return call(*arguments, **options)

        setattr(engine, method, intercepted)
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


def test_signal_that_c_code_handled_has_the_default_handler_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [(number, signal.getsignal(number)) for number in SIGNALS]
    install = signal.signal
    try:
        with monkeypatch.context() as patch:
            # Python does not know a handler that was there before its start.
            patch.setattr(
                signal, "signal", lambda number, handler: (install(number, handler), None)[1]
            )
            with StopRequest(run().train, tmp_path, rank=0).signals():
                assert callable(signal.getsignal(signal.SIGTERM))
        assert {signal.getsignal(number) for number in SIGNALS} == {signal.SIG_DFL}
    finally:
        for number, handler in before:
            signal.signal(number, handler)


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


def test_best_checkpoint_is_kept_that_was_measured_after_a_signal(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluated(*arguments: Any, **options: Any) -> Evaluation:
        return Evaluation({"lm_loss": next(losses)}, samples=1, tokens=1)

    monkeypatch.setattr("megacore.train.loop.evaluate", evaluated)
    keep = {"save_interval": 1, "keep_last": 1, "keep_best": True}
    config = run().model_copy(update={"checkpoint": _runs.config(checkpoint=keep).checkpoint})
    losses = iter([3.0, 2.0])
    with pytest.raises(PreemptedError):
        train_with_action(3, preempt, config, data, tmp_path)
    losses = iter([1.0, 4.0])
    with pytest.raises(PreemptedError):
        train_with_action(2, preempt, config, data, tmp_path, attempt=2)
    assert reported(tmp_path, "checkpoint", "validation_loss")[-2:] == [(4, 4.0), (5, None)]
    losses = iter([5.0, 7.0, 6.0])  # 7.0 is the loss on train.eval_iters batches at the end
    _runs.train(config, data, tmp_path, attempt=3)
    assert kept(tmp_path) == [3, 6]
    # nothing has to be measured in a start after the last one: the loss is in the events
    _runs.train(config, data, tmp_path, attempt=4)
    assert kept(tmp_path) == [3, 6]


def kept(directory: Path) -> list[int | None]:
    """Return the iterations of a run's checkpoints."""
    return [iteration_of(path) for path in checkpoint_directories(directory / "checkpoints")]


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the micro batches of each round; a busy host does not change their number."""
    monkeypatch.setattr("megacore.train.evaluate._ROUND_SECONDS", 1e9)
    sizes: list[int] = []
    loss_sum = Stage.loss_sum

    def recorded(
        stage: Stage, batches: Iterator[Tensor], counts: Sequence[int], *totals: LossTotals
    ) -> Tensor:
        sizes.append(len(counts))
        return loss_sum(stage, batches, counts, *totals)

    monkeypatch.setattr(Stage, "loss_sum", recorded)
    return sizes


def preempt() -> None:
    """Send SIGTERM to this process."""
    os.kill(os.getpid(), signal.SIGTERM)


def reported(directory: Path, kind: str, value: str) -> list[tuple[int, float]]:
    """Return iteration and value of each event."""
    return [(event["iteration"], event[value]) for event in _runs.events(directory, kind)]


@pytest.mark.parametrize("number", [2, 5], ids=["validation", "perplexity"])
def test_signal_within_a_validation_ends_it_and_the_resumed_run_repeats_it(
    data: Path, tmp_path: Path, rounds: list[int], number: int
) -> None:
    train = run(eval_interval=3)
    config = train.model_copy(
        update={"checkpoint": _runs.config(checkpoint={"save_interval": 3}).checkpoint}
    )
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    _runs.train(config, data, whole)
    assert rounds[:5] == [1, 2, 1, 1, 2]  # 4 micro batches of the validation, then the perplexity
    rounds.clear()
    with pytest.raises(PreemptedError, match="stopped at iteration 3 of 6"):
        train_with_call(number, preempt, config, data, stopped, "loss_sum")
    assert len(rounds) == number
    assert exits(stopped) == [("signal", 3)]
    assert reported(stopped, "checkpoint", "validation_loss") == [(3, None)]
    assert _runs.events(stopped, "perplexity") == []
    _runs.train(config, data, stopped, attempt=2)
    assert_same_run(whole, stopped, 6)
    for kind, value in (("evaluation", "lm_loss"), ("perplexity", "valid_loss")):
        measured = reported(stopped, kind, value)
        assert sorted(set(measured)) == reported(whole, kind, value)
    assert len(_runs.events(stopped, "perplexity")) == 2


def at_the_end(number: int, method: str, config: RunConfig, data: Path, directory: Path) -> None:
    """Train with a signal that leaves no time for the final evaluation."""
    with pytest.raises(PreemptedError, match=r"stopped at iteration 6 of 6 since a signal"):
        train_with_call(number, preempt, config, data, directory, method)


@pytest.mark.parametrize(
    ("method", "number", "scored"),
    [("forward_backward", 6, 0), ("loss_sum", 2, 2), ("loss_sum", 3, 3), ("loss_sum", 5, 5)],
)
def test_signal_at_the_last_iteration_saves_first_and_the_next_start_evaluates(
    data: Path,
    whole: Path,
    tmp_path: Path,
    rounds: list[int],
    method: str,
    number: int,
    scored: int,
) -> None:
    at_the_end(number, method, run(), data, tmp_path)
    assert len(rounds) == scored
    assert exits(tmp_path) == [("signal", 6)]
    assert reported(tmp_path, "checkpoint", "validation_loss") == [(6, None)]
    _runs.train(run(), data, tmp_path, attempt=2)
    assert exits(tmp_path) == [("signal", 6), ("finished", 6)]
    for kind, value in (("evaluation", "lm_loss"), ("perplexity", "valid_loss")):
        assert set(reported(tmp_path, kind, value)) == set(reported(whole, kind, value))
    _runs.train(run(), data, tmp_path, attempt=3)  # measures nothing again
    for kind in ("evaluation", "perplexity"):
        assert len(_runs.events(tmp_path, kind)) == 1
    weights = [
        read_tensors(directory / "checkpoints/iter_0000006") for directory in (whole, tmp_path)
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_signal_after_the_last_measurement_lets_the_run_finish(
    data: Path, tmp_path: Path, rounds: list[int]
) -> None:
    _runs.train(run(), data, tmp_path / "first")
    last = len(rounds)
    train_with_call(last, preempt, run(), data, tmp_path / "second", "loss_sum")
    assert exits(tmp_path / "second") == [("finished", 6)]
    (loss,) = reported(tmp_path / "second", "checkpoint", "validation_loss")
    assert loss == (
        6,
        pytest.approx(_runs.events(tmp_path / "first", "perplexity")[0]["valid_loss"]),
    )


@pytest.mark.parametrize("another", [False, True], ids=["same run", "another run"])
def test_signal_within_a_missed_validation_leaves_it_to_the_next_start(
    data: Path, tmp_path: Path, rounds: list[int], *, another: bool
) -> None:
    config, first, second = run(eval_interval=3), tmp_path / "first", tmp_path / "first"
    with pytest.raises(PreemptedError):
        train_with_action(3, preempt, config, data, first)
    checkpoint = first / "checkpoints/iter_0000003"
    if another:
        second = tmp_path / "second"
        config = config.model_copy(
            update={"resume": config.resume.model_copy(update={"checkpoint": str(checkpoint)})}
        )
    with pytest.raises(
        PreemptedError, match=rf"iteration 3 of 6 since .*: {checkpoint} is complete"
    ):
        train_with_call(2, preempt, config, data, second, "loss_sum", attempt=2)
    assert len(rounds) == 2
    assert exits(second)[-1] == ("signal", 3)
    assert _runs.events(second, "evaluation") == []
    _runs.train(config, data, second, attempt=3)
    assert exits(second)[-1] == ("finished", 6)
    for kind in ("evaluation", "perplexity"):
        assert [event["iteration"] for event in _runs.events(second, kind)] == [3, 6]


def stop_two_ranks(data: Path, root: Path) -> list[str]:
    """Train three times; only rank 1 gets the signals and only rank 0 sees the stop file.

    The last run has two pipeline stages, and the signal comes in the second round of a validation.
    """
    rank, messages = int(os.environ["RANK"]), []
    kill = partial(os.kill, os.getpid(), signal.SIGUSR1) if rank == 1 else _nothing
    if rank == 0:
        (root / "file").mkdir()
        (root / "file" / STOP_FILE).touch()
    for name, action in (("signal", kill), ("file", _nothing)):
        with pytest.raises(TrainingStoppedError) as caught:
            train_with_action(2, action, run(), data, root / name)
        messages.append(str(caught.value))
    two = _runs.config(parallel={"pipeline_model_parallel_size": 2}, launch={"nproc_per_node": 2})
    stages = run(eval_interval=2, eval_iters=4).model_copy(
        update={"parallel": two.parallel, "launch": two.launch}
    )
    with pytest.raises(PreemptedError) as caught:
        train_with_call(2, kill, stages, data, root / "stages", "loss_sum")
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
    assert "iteration 2 of 6 since a signal asked for it (another rank got it)" in first[2]
    assert "iteration 2 of 6 since a signal asked for it (SIGUSR1)" in second[2]
    assert exits(tmp_path / "stages") == [("signal", 2)]
    assert _runs.events(tmp_path / "stages", "evaluation") == []
    assert reported(tmp_path / "stages", "checkpoint", "validation_loss") == [(2, None)]


def test_an_unreadable_stop_file_requests_no_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = StopRequest(run().train, tmp_path, rank=0)

    def fail(path: Path) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("megacore.train.stop.exists", fail)
        assert request.notices() == (False, False, False)
    request.file.touch()
    monkeypatch.setattr("megacore.train.stop._LOOK_INTERVAL", 0.0)
    assert request.notices() == (False, False, True)


def test_only_the_first_rank_watches_the_clock_and_the_stop_file(tmp_path: Path) -> None:
    (tmp_path / STOP_FILE).touch()
    limits = StopLimits(6, exit_duration_minutes=1.0)
    for rank, late, seen in ((0, True, True), (1, False, False)):
        request = StopRequest(limits, tmp_path, rank=rank, started=time.monotonic() - 60.0)
        assert request.notices() == (False, late, seen)
        request.remove_stop_file()
        assert request.file.exists() is not seen
        request.file.touch()
    early = StopRequest(limits, tmp_path, rank=0, started=time.monotonic() - 30.0)
    assert early.notices() == (False, False, True)


def test_reason_with_the_least_time_takes_precedence() -> None:
    request = StopRequest(run(exit_interval=1).train, Path("none"), rank=1)
    assert request.reason((True, True, True), 1) == "signal"
    assert request.reason((False, True, True), 1) == "exit_duration"
    assert request.reason((False, False, True), 1) == "stop_file"
    assert request.reason((False, False, False), 1) == "exit_interval"
    # a skipped batch has no notices
    assert request.reason((), 1) == "exit_interval"
    assert request.notices() == (False, False, False)
