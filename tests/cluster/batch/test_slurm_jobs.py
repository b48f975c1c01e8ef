"""Batch jobs of a real Slurm with two nodes, both on this host."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.config.launch import LaunchConfig
from megacore.errors import LaunchError, LossError, PreemptedError, RankLostError
from megacore.launch.guard import descendants
from megacore.ranks import stages
from tests._limits import HANG
from tests.cluster.batch._attempt import Attempt, StoppedByTestError
from tests.cluster.batch._slurm import Slurm
from tests.launch._processes import alive, none_alive, wait_until
from tests.train import _runs

ITERATIONS, SAMPLES = 120, 16
"""Size of a run that is long enough to be preempted; SAMPLES is its global batch size."""
pytestmark = pytest.mark.slow
TRAIN = {"train_iters": ITERATIONS, "global_batch_size": SAMPLES, "eval_interval": 1000}


def launch(*, slurm: dict[str, Any] | None = None, **values: Any) -> LaunchConfig:
    defaults: dict[str, Any] = {
        "kind": "slurm",
        "nproc_per_node": 1,
        "threads_per_rank": 1,
        "allow_cpu": True,
    }
    return LaunchConfig.model_validate(
        {**defaults, "stop_grace": 10.0, "slurm": slurm or {}, **values}
    )


def fake(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    behaviour: str,
    settings: LaunchConfig | None = None,
) -> Attempt:
    """Start an attempt with fake ranks of one behaviour."""
    monkeypatch.setenv("MEGACORE_RANK_DOES", behaviour)
    return Attempt.with_fake_ranks(settings or launch(), directory)


def training(directory: Path, data: Path, settings: LaunchConfig, ranks: int) -> Attempt:
    run = _runs.config(launch=settings.model_dump(), train=TRAIN, checkpoint={"save_interval": 5})
    job = _runs.job(run, data, directory, ranks=ranks)
    return Attempt(lambda on_poll: stages.train(job, on_poll), job.attempt_log, directory / "exit")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_runs, "SAMPLES", SAMPLES * ITERATIONS)
        _runs.write_data(directory, _runs.config())
    return directory


def test_losses_of_two_nodes_equal_one_process_after_a_preemption(
    slurm: Slurm, data: Path, tmp_path: Path
) -> None:
    """The preempted job is queued again and resumes from its last checkpoint."""
    attempt = training(tmp_path / "two", data, launch(nnodes=2), 2)
    checkpoints = tmp_path / "two" / "checkpoints"
    wait_until(lambda: any(checkpoints.glob("iter_*")) or attempt.ended, HANG, "a checkpoint")
    job = next(iter(slurm.jobs()))
    command = (
        "sbatch",
        "--parsable",
        "--partition=urgent",
        "--nodes=2",
        "--exclusive",
        "--output=/dev/null",
    )
    urgent = slurm.run(*command, "--wrap=sleep 600").strip()
    attempt.wait_for("PENDING")
    slurm.run("scancel", urgent)
    wait_until(lambda: slurm.jobs().get(job) == "PENDING", HANG, "queued again")
    # Slurm delays the start of a preempted job by two minutes.
    slurm.run("scontrol", "update", f"jobid={job}", "StartTime=now")
    assert attempt.join() is None, attempt.log_text
    assert "RUNNING on node-[1-2], start 2" in attempt.log_text
    assert attempt.states[0] == "queued: submitted"
    assert any(state == "running: RUNNING on node-[1-2]" for state in attempt.states), (
        attempt.states
    )
    assert any(state.startswith("queued: PENDING") for state in attempt.states[2:]), attempt.states
    # Slurm may be seen while it cleans up after the end.
    states = [state for state in attempt.states if "COMPLETING" not in state]
    assert states[-1] == "running: RUNNING on node-[1-2], start 2"
    starts = [event["iteration"] for event in _runs.events(tmp_path / "two", "start")]
    assert len(starts) == 2
    assert starts[1] > 0
    single = tmp_path / "one"
    single.mkdir()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    _runs.train(_runs.config(train=TRAIN, checkpoint={"save_interval": 1000}), data, single)
    torch.set_num_threads(threads)
    assert _runs.losses(tmp_path / "two") == pytest.approx(_runs.losses(single), rel=1e-5)


def test_error_of_a_rank_is_raised(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = fake(tmp_path / "run", monkeypatch, "fail")
    error = attempt.join()
    assert isinstance(error, LossError), (error, attempt.log_text)
    assert str(error) == "rank 0: the loss is nan"
    assert "rank 0 of 1, 1 threads" in attempt.log_text
    assert "FAILED" in attempt.log_text


def test_cancellation_stops_the_ranks_and_ends_the_job(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = fake(tmp_path / "run", monkeypatch, "wait")
    pid = attempt.rank_pid()
    attempt.stop()
    assert isinstance(attempt.join(), StoppedByTestError)
    none_alive([pid], HANG)
    assert slurm.jobs() == {}
    assert (
        json.loads((tmp_path / "run" / "exit" / "rank_0.json").read_text())["message"]
        == "stopped by SIGTERM"
    )
    assert not (tmp_path / "run" / "batch" / "submission.json").exists()


def test_sigusr1_of_scheduler_and_follower_reaches_the_ranks(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, sender in enumerate(("the scheduler", "the follower")):
        attempt = fake(tmp_path / f"run{number}", monkeypatch, "wait")
        attempt.rank_pid()
        job = next(iter(slurm.jobs()))
        if sender == "the scheduler":  # like --signal=USR1@120 before the time limit
            slurm.run("scancel", "--signal=USR1", job)
        else:
            os.kill(follower_pid(attempt), signal.SIGUSR1)
        error = attempt.join()
        assert isinstance(error, PreemptedError), (error, attempt.log_text)
        assert str(error) == "stopped by SIGUSR1"


def follower_pid(attempt: Attempt) -> int:
    for pid in descendants(os.getpid()):
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        is_follower = {
            b"megacore.cluster.batch.follow",
            f"--spec={attempt.directory}/batch/spec.json".encode(),
        } <= {*arguments}
        if is_follower and b"megacore.launch.guard" not in arguments:
            return pid
    raise AssertionError("there is no follower")


def test_job_cancelled_by_a_user_is_not_retryable(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = fake(tmp_path / "run", monkeypatch, "wait")
    attempt.rank_pid()
    slurm.run("scancel", next(iter(slurm.jobs())))
    error = attempt.join()
    assert type(error) is LaunchError, (error, attempt.log_text)
    assert not error.retryable
    assert "was cancelled" in str(error)


def test_preemption_without_requeue_is_retryable(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = launch(slurm={"partition": "spot", "arguments": ["--no-requeue"]}, stop_grace=1.0)
    attempt = fake(tmp_path / "run", monkeypatch, "nothing", settings)
    pid = attempt.rank_pid()
    command = (
        "sbatch",
        "--parsable",
        "--partition=urgent",
        "--nodes=2",
        "--exclusive",
        "--output=/dev/null",
    )
    slurm.run(*command, "--wrap=sleep 600")
    error = attempt.join()
    assert isinstance(error, RankLostError), (error, attempt.log_text)
    assert re.search(r"Slurm preempted job \d+ on node-\d without queueing it again", str(error))
    none_alive([pid], HANG)


def test_next_attempt_ends_the_job_of_a_killed_follower(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt ends the job of the killed follower before it submits another."""
    attempt = fake(tmp_path / "run", monkeypatch, "wait")
    first_rank = attempt.rank_pid()
    job = next(iter(slurm.jobs()))
    os.kill(follower_pid(attempt), signal.SIGKILL)
    assert isinstance(attempt.join(), RankLostError)
    assert alive(first_rank)
    (tmp_path / "run" / "pid_0").unlink()
    attempt = fake(tmp_path / "run", monkeypatch, "wait")
    attempt.wait_for(f"an earlier attempt submitted {job}")
    second_rank = attempt.rank_pid()
    assert not alive(first_rank)
    assert list(slurm.jobs()) != [job]
    attempt.stop()
    attempt.join()
    none_alive([second_rank], HANG)


def test_job_without_a_follower_ends(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megacore.cluster.batch.start.FOLLOWER_LIMIT", 3.0)
    attempt = fake(tmp_path / "run", monkeypatch, "wait")
    pid = attempt.rank_pid()
    os.kill(follower_pid(attempt), signal.SIGKILL)
    attempt.join()
    none_alive([pid], HANG)
    wait_until(lambda: slurm.jobs() == {}, HANG, "the job ended")


def test_elastic_job_runs_on_the_free_nodes(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.run(
        "sbatch", "--nodelist=node-2", "--exclusive", "--output=/dev/null", "--wrap=sleep 600"
    )
    attempt = fake(tmp_path / "run", monkeypatch, "end", launch(nnodes="1:2", nproc_per_node=1))
    assert attempt.join() is None, attempt.log_text
    assert "#SBATCH --nodes=1-2" in (tmp_path / "run" / "batch" / "job.sbatch").read_text()
    assert "rank 0 of 1" in attempt.log_text


def test_refusal_of_sbatch_is_reported(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = fake(
        tmp_path / "run", monkeypatch, "end", launch(slurm={"partition": "no $(such) 'one'"})
    )
    error = attempt.join()
    assert type(error) is LaunchError, (error, attempt.log_text)
    assert "invalid partition specified: no $(such) 'one'" in str(error)
