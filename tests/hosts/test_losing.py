"""A host is killed, frozen or cut off in the middle of a training.

The run ends everywhere, and goes on.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megacore.jobs.run import TrainJob
from tests.hosts import _jobs
from tests.hosts._rig import Rig
from tests.train import _runs

ITERATIONS = 160
LIMIT = 60.0
"""Seconds in which the run must have ended on every host that can still run."""
HOST_TIMEOUT = 5.0


def training(rig: Rig, name: str, **changes: Any) -> TrainJob:
    """A run over as many iterations as leave time to lose a host three times."""
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
    """Host a has the data."""
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
    """Losses of the run when nothing happens to it, on two hosts."""
    attempt = _jobs.Attempt(
        data, training(data, "undisturbed"), tmp_path_factory.mktemp("undisturbed")
    )
    said = attempt.outcome(120)
    assert said["error"] == "", said
    return losses(attempt.run)


def lose(attempt: _jobs.Attempt, how: Callable[[str], None]) -> int:
    """Lose host b in the middle: the run ends on host a with its name.

    The newest checkpoint that it had reported.
    """
    reached = attempt.until_saved()
    began = time.time()
    how("b")
    said = attempt.outcome(LIMIT)
    assert said["error"] == "HostLostError", said
    assert "host b" in said["message"]
    assert said["at"] - began < LIMIT
    _jobs.wait_for(lambda: not attempt.rig.ranks("a"), 5, "the end of every rank on host a")
    return reached


def test_a_run_survives_the_loss_of_a_host_in_every_way(
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
        lambda: not data.ranks("b"), 10, "the end of the ranks on host b once it goes on"
    )

    third = attempt(3)
    cut_at = lose(third, data.cut)
    _jobs.wait_for(
        lambda: not data.ranks("b"), LIMIT, "the end of the ranks on host b, which nobody can tell"
    )

    fourth = attempt(4)  # host b is still gone
    said = fourth.outcome(120)
    data.restore("b")
    assert said["error"] == "", said

    found = _jobs.events(first.run)
    starts = [event for event in found if event["kind"] == "start"]
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
    together = losses(first.run)
    assert together.keys() == undisturbed.keys()
    alone_from = resumed_from[3]
    assert {n: x for n, x in together.items() if n <= alone_from} == {
        n: x for n, x in undisturbed.items() if n <= alone_from
    }
    # One rank sums in another order than two: the same samples in the same order, another last
    # digit.
    worst = max(abs(together[n] - undisturbed[n]) for n in together)
    assert worst < 1e-5, worst
    steps = [event for event in found if event["kind"] == "step"]
    consumed = {event["iteration"]: event["consumed_samples"] for event in steps}
    assert consumed == {n: 32 * n for n in consumed}


def test_a_host_that_is_gone_before_the_start_is_named(data: Rig, tmp_path: Path) -> None:
    data.kill("b")
    said = _jobs.Attempt(data, training(data, "absent", launch={"nnodes": 2}), tmp_path).outcome(60)
    data.restore("b")
    assert said["error"] == "LaunchError"
    assert "host b" in said["message"]
