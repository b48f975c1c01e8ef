"""Following a JobSet, with a stand-in for kubectl whose pods are processes of this host."""

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megacore.config.launch import LaunchConfig
from megacore.errors import LaunchError, LossError
from tests._limits import HANG
from tests.cluster.batch import _kubectl_setup
from tests.cluster.batch._attempt import Attempt, StoppedByTestError
from tests.launch._processes import REPOSITORY, alive, none_alive, wait_until


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provide the directory of a cluster that `kubectl` on PATH serves."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    _kubectl_setup.install(tmp_path / "bin", folder, monkeypatch)
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    with _kubectl_setup.serving(folder):
        yield folder


def launch(**values: Any) -> LaunchConfig:
    kubernetes = {"image": "registry.example/megacore:1", "workspace_claim": "workspace"}
    settings: dict[str, Any] = {
        "kind": "kubernetes",
        "nproc_per_node": 1,
        "threads_per_rank": 1,
        "allow_cpu": True,
    }
    settings |= {"rdzv_endpoint": "127.0.0.1", "interface": "lo", "stop_grace": 25.0}
    return LaunchConfig.model_validate({**settings, "kubernetes": kubernetes, **values})


def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: str, **values: Any) -> Attempt:
    monkeypatch.setenv("MEGACORE_RANK_DOES", behaviour)
    return Attempt.with_fake_ranks(launch(**values), tmp_path / "runs" / "run")


@pytest.mark.slow
def test_jobset_is_deleted_after_its_ranks_have_run(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cluster / "pending").touch()
    attempt = fake(tmp_path, monkeypatch, "end", nnodes=2)
    attempt.wait_for("0 of 2 pods run; Pending")
    (cluster / "pending").unlink()
    assert attempt.join() is None, attempt.log_text
    assert "rank 0 of 2, 1 threads" in attempt.log_text
    assert "rank 1 of 2, 1 threads" in attempt.log_text
    assert "kubernetes: Completed" in attempt.log_text
    assert [state.split(":")[0] for state in attempt.states][:2] == ["queued", "queued"]
    assert not (cluster / "jobset.json").exists()
    assert len((cluster / "applied.txt").read_text().split()) == 1


def test_error_of_a_rank_is_raised_and_the_jobset_deleted(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = fake(tmp_path, monkeypatch, "fail")
    error = attempt.join()
    assert isinstance(error, LossError), (error, attempt.log_text)
    assert not (cluster / "jobset.json").exists()


def test_cancellation_stops_the_ranks_and_deletes_the_jobset(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = fake(tmp_path, monkeypatch, "wait")
    pid = attempt.rank_pid()
    attempt.wait_for("Running on worker")
    attempt.stop()
    assert isinstance(attempt.join(), StoppedByTestError)
    none_alive([pid], HANG)
    assert not (cluster / "jobset.json").exists()
    reason = json.loads((tmp_path / "runs" / "run" / "exit" / "rank_0.json").read_text())
    assert reason["message"] == "stopped by SIGTERM"


def test_jobset_deleted_by_a_user_ends_the_run(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = fake(tmp_path, monkeypatch, "wait")
    attempt.rank_pid()
    _kubectl_setup.run(cluster, "delete", "jobsets", "any")
    error = attempt.join()
    assert type(error) is LaunchError, (error, attempt.log_text)
    assert "was deleted, not by this run" in str(error)


def test_deleted_jobset_has_not_ended_while_a_pod_saves(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = fake(tmp_path, monkeypatch, "save")
    attempt.rank_pid()
    deletion = threading.Thread(
        target=_kubectl_setup.run, args=(cluster, "delete", "jobsets", "any")
    )
    deletion.start()
    attempt.wait_for("deleted; 1 of its pods have not ended yet")
    assert not attempt.ended
    (tmp_path / "runs" / "run" / "saved").touch()
    deletion.join(HANG)
    error = attempt.join()
    assert "was deleted, not by this run" in str(error), (error, attempt.log_text)


@pytest.mark.slow
def test_jobset_of_an_earlier_attempt_is_deleted_first(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = fake(tmp_path, monkeypatch, "wait")
    first_rank = attempt.rank_pid()
    submission_file = tmp_path / "runs" / "run" / "batch" / "submission.json"
    wait_until(
        lambda: json.loads(submission_file.read_text())["job"] is not None,
        HANG,
        "the name was noted",
    )
    submission = submission_file.read_text()
    attempt.stop()
    attempt.join()
    submission_file.write_text(submission)  # a killed follower leaves this file
    second = fake(tmp_path, monkeypatch, "end")
    assert second.join() is None, second.log_text
    assert "an earlier attempt submitted" in second.log_text
    assert not alive(first_rank)
    assert (
        f"delete --namespace=default jobsets.jobset.x-k8s.io {json.loads(submission)['job']}"
        in (cluster / "calls.txt").read_text()
    )


def test_suspended_jobset_is_reported_as_queued(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cluster / "answer.json").write_text(json.dumps({"spec": {"suspend": True}}))
    (cluster / "pending").touch()
    attempt = fake(tmp_path, monkeypatch, "end")
    attempt.wait_for("Suspended: it waits to be admitted")
    (cluster / "answer.json").unlink()
    (cluster / "pending").unlink()
    assert attempt.join() is None, attempt.log_text
    assert "queued: Suspended: it waits to be admitted" in attempt.states


def test_cluster_without_jobset_support_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "kubectl").write_text(
        f"#!{sys.executable}\nraise SystemExit('no matches for kind \"JobSet\"')\n"
    )
    (folder / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path))
    error = fake(tmp_path, monkeypatch, "end").join()
    assert type(error) is LaunchError
    assert 'no matches for kind "JobSet": correct launch.kubernetes, or see whether JobSet' in str(
        error
    )
