"""Hosts that are killed, frozen or disconnected during a training, which then resumes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megacore.jobs.run import TrainJob
from tests._limits import HANG
from tests.hosts import _jobs
from tests.hosts._rig import Rig
from tests.train import _runs

ITERATIONS = 160
HOST_TIMEOUT = 5.0


pytestmark = pytest.mark.slow


def training(rig: Rig, name: str, **changes: Any) -> TrainJob:
    """Return a run with enough iterations to lose a host three times."""
    launch = {
        "host_timeout": HOST_TIMEOUT,
        "stop_grace": 3.0,
        "nnodes": "1:2",
        **changes.pop("launch", {}),
    }
    run = _jobs.config(
        rig,
        train={"train_iters": ITERATIONS, "global_batch_size": 32, "eval_interval": 1000},
        checkpoint={"save_interval": 10, "keep_last": 2},
        launch=launch,
    )
    return _jobs.job(rig, run, name, **changes)


@pytest.fixture(scope="module")
def data(rig: Rig) -> Rig:
    """Provide the hosts, with the data on host a."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_runs, "SAMPLES", ITERATIONS * 32)
        _jobs.write_data(rig.disk("a"))
    return rig


def losses(run: Path) -> dict[int, float]:
    return {
        event["iteration"]: event["lm_loss"]
        for event in _jobs.events(run)
        if event["kind"] == "step"
    }


@pytest.fixture(scope="module")
def undisturbed(data: Rig, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the losses of an undisturbed run on two hosts."""
    attempt = _jobs.Attempt(
        data, training(data, "undisturbed"), tmp_path_factory.mktemp("undisturbed")
    )
    outcome = attempt.outcome(HANG)
    assert outcome["error"] == "", outcome
    return losses(attempt.run)


def lose(attempt: _jobs.Attempt, disable: Callable[[str], None]) -> int:
    """Lose host b during the training; return the newest checkpoint reported before.

    The run must end on host a with an error that names host b.
    """
    last_saved = attempt.until_saved()
    disable("b")
    outcome = attempt.outcome(HANG)
    assert outcome["error"] == "HostLostError", outcome
    assert "host b" in outcome["message"]
    _jobs.wait_for(lambda: not attempt.rig.ranks("a"), HANG, "the end of every rank on host a")
    return last_saved


def test_run_resumes_after_a_killed_a_frozen_and_a_disconnected_host(
    data: Rig, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    def attempt(number: int) -> _jobs.Attempt:
        return _jobs.Attempt(data, training(data, "disturbed", attempt=number), tmp_path)

    first = attempt(1)
    killed_at = lose(first, data.kill)
    assert data.ranks("b") == []
    data.restore("b")

    second = attempt(2)
    frozen_at = lose(second, data.freeze)
    data.restore("b")
    _jobs.wait_for(
        lambda: not data.ranks("b"), HANG, "the end of the ranks on host b after it continues"
    )

    third = attempt(3)
    cut_at = lose(third, data.cut)
    _jobs.wait_for(
        lambda: not data.ranks("b"), HANG, "the end of the ranks on the disconnected host b"
    )

    fourth = attempt(4)  # host b is still disconnected
    outcome = fourth.outcome(HANG)
    data.restore("b")
    assert outcome["error"] == "", outcome

    events = _jobs.events(first.run)
    starts = [event for event in events if event["kind"] == "start"]
    assert [event["attempt"] for event in starts] == [1, 2, 3, 4]
    assert [(event["ranks"], event["hosts"]) for event in starts] == [(2, ["a", "b"])] * 3 + [
        (1, ["a"])
    ]
    resumed_from = [event["resumed_from"] for event in starts]
    assert resumed_from[0] is None
    assert all(
        resumed >= lost
        for resumed, lost in zip(resumed_from[1:], (killed_at, frozen_at, cut_at), strict=True)
    )
    disturbed = losses(first.run)
    assert disturbed.keys() == undisturbed.keys()
    single_from = resumed_from[3]
    assert {n: x for n, x in disturbed.items() if n <= single_from} == {
        n: x for n, x in undisturbed.items() if n <= single_from
    }
    # One rank sums the same samples in another order than two, so the last digits differ.
    worst = max(abs(disturbed[n] - undisturbed[n]) for n in disturbed)
    assert worst < 1e-5, worst
    steps = [event for event in events if event["kind"] == "step"]
    consumed = {event["iteration"]: event["consumed_samples"] for event in steps}
    assert consumed == {n: 32 * n for n in consumed}


def test_host_lost_before_the_start_is_named(data: Rig, tmp_path: Path) -> None:
    data.kill("b")
    outcome = _jobs.Attempt(data, training(data, "absent", launch={"nnodes": 2}), tmp_path).outcome(
        HANG
    )
    data.restore("b")
    assert outcome["error"] == "LaunchError"
    assert "host b" in outcome["message"]
