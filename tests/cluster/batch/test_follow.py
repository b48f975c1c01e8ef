"""The follower, with a scheduler that records its calls."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megacore.artifact.files import read_json
from megacore.cluster.batch import follow
from megacore.cluster.batch.follow import Follower
from megacore.cluster.batch.scheduler import End, Look, Submission
from megacore.cluster.batch.spec import BatchSpec
from megacore.config.launch import LaunchConfig
from megacore.errors import LaunchError, WorkspaceError
from megacore.launch.watch import LauncherState, read_launcher_state


class RecordingScheduler:
    """A scheduler with an endless job that records its calls."""

    silence = "error: You must be logged in to the server"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def remove(self, submission: Submission) -> None:
        self.calls.append("remove")

    def submit(self, submission: Submission, stopped: Callable[[], bool]) -> Submission:
        self.calls.append("submit")
        return Submission(submission.token, "7")

    def look(self) -> Look | None:
        return Look("running", "RUNNING")

    def copy_output(self) -> None:
        pass

    def cancel(self, *, at_once: bool) -> None:
        self.calls.append("cancel")

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def spec(tmp_path: Path) -> Iterator[BatchSpec]:
    paths = {"job_file": str(tmp_path / "run.json"), "exit_directory": str(tmp_path / "exit")}
    values: dict[str, Any] = {
        "module": "m",
        "environment": {},
        "directory": "/",
        "python": "python",
    }
    launch = LaunchConfig.model_validate({"kind": "slurm", "nproc_per_node": 1})
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    before = [(number, signal.getsignal(number)) for number in numbers]
    yield BatchSpec(**paths, **values, launch=launch, workspace=str(tmp_path), follower_limit=300.0)
    for number, handler in before:
        signal.signal(number, handler)


def test_job_is_cancelled_if_following_it_fails(
    spec: BatchSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The submission file stays, so that the next attempt sees that the job has ended."""

    def full(directory: Path, state: str, detail: str) -> None:
        if detail == "RUNNING":
            raise WorkspaceError("the disk is full")

    monkeypatch.setattr(follow, "write_launcher_state", full)
    monkeypatch.setattr(follow, "_QUICK", 0.0)
    scheduler = RecordingScheduler()
    with pytest.raises(WorkspaceError, match="the disk is full"):
        Follower(spec, scheduler).follow()
    assert scheduler.calls == ["submit", "cancel"]
    submission = Submission.read(spec.folder)
    assert submission is not None
    assert submission.job == "7"


def test_beat_is_that_of_the_submission_that_was_accepted(spec: BatchSpec) -> None:
    class Again(RecordingScheduler):
        def submit(self, submission: Submission, stopped: Callable[[], bool]) -> Submission:
            return Submission("accepted", "7")

        def look(self) -> Look | None:
            return Look("running", "COMPLETED", End(0))

    assert Follower(spec, Again()).follow() == 0
    assert read_json(spec.folder / "follower.json")["token"] == "accepted"


def test_no_limit_counts_while_the_job_of_an_earlier_attempt_ends(spec: BatchSpec) -> None:
    class Removing(RecordingScheduler):
        state: LauncherState | None = None

        def remove(self, submission: Submission) -> None:
            self.state = read_launcher_state(Path(spec.exit_directory))

        def look(self) -> Look | None:
            return Look("running", "COMPLETED", End(0))

    Submission("earlier", "6").write(spec.folder)
    scheduler = Removing()
    assert Follower(spec, scheduler).follow() == 0
    assert scheduler.state is not None
    assert scheduler.state.state == "ending"


def test_refused_submission_removes_the_spec_file(spec: BatchSpec) -> None:
    class Refusing(RecordingScheduler):
        def submit(self, submission: Submission, stopped: Callable[[], bool]) -> Submission:
            raise LaunchError("no such partition")

    spec.write()
    with pytest.raises(LaunchError, match="no such partition"):
        Follower(spec, Refusing()).follow()
    assert not spec.path.exists()
    assert Submission.read(spec.folder) is not None, (
        "the next attempt asks whether the scheduler accepted the job"
    )


def test_a_signal_ends_the_submission_and_removes_the_spec_file(
    spec: BatchSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    class Unanswered(RecordingScheduler):
        def submit(self, submission: Submission, stopped: Callable[[], bool]) -> Submission:
            assert not stopped()
            os.kill(os.getpid(), signal.SIGTERM)
            assert stopped()
            raise LaunchError("this run ends before the answer")

    spec.write()
    assert Follower(spec, Unanswered()).follow() == 128 + signal.SIGTERM
    assert not spec.path.exists()
    assert Submission.read(spec.folder) is not None
    assert not list(Path(spec.exit_directory).glob("launcher_reason*"))
    assert "this run ends before the answer" in capsys.readouterr().out


def test_silence_of_the_scheduler_is_logged_with_its_error(
    spec: BatchSpec, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Silent(RecordingScheduler):
        looks = 0

        def look(self) -> Look | None:
            self.looks += 1
            return None if self.looks < 3 else Look("running", "Completed", End(0))

    for name, seconds in (("_QUICK", 0.0), ("_TICK", 0.01), ("_SILENCE", 0.001)):
        monkeypatch.setattr(follow, name, seconds)
    assert Follower(spec, Silent()).follow() == 0
    assert (
        "no answer for 0.001 s (error: You must be logged in to the server); the job continues"
        in capsys.readouterr().out
    )


def test_error_keeps_its_code_if_its_reason_cannot_be_written(
    spec: BatchSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(RecordingScheduler):
        def __init__(self, spec: BatchSpec) -> None:
            super().__init__()

        def submit(self, submission: Submission, stopped: Callable[[], bool]) -> Submission:
            raise LaunchError("no such partition")

    def full(directory: Path, error: Exception) -> None:
        raise WorkspaceError("the disk is full")

    monkeypatch.setattr(follow, "SCHEDULERS", {"slurm": Refusing})
    monkeypatch.setattr(follow, "write_launcher_reason", full)
    spec.write()
    assert follow.main([f"--spec={spec.path}"]) == LaunchError.exit_code
