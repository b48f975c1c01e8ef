"""Following a JobSet, with a stand-in for kubectl whose pods are processes of this machine."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megacore.config.launch import LaunchConfig
from megacore.errors import LaunchError, LossError
from tests.cluster.batch import _kubectl_words
from tests.cluster.batch._attempt import LIMIT, Attempt, StoppedByTestError
from tests.launch._processes import REPOSITORY, alive, none_alive, wait_until


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a cluster, which `kubectl` of PATH speaks for."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    _kubectl_words.install(tmp_path / "bin", folder, monkeypatch)
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    with _kubectl_words.serving(folder):
        yield folder


def launch(**values: Any) -> LaunchConfig:
    own = {"image": "registry.example/megacore:1", "workspace_claim": "workspace"}
    settings: dict[str, Any] = {
        "kind": "kubernetes",
        "nproc_per_node": 1,
        "threads_per_rank": 1,
        "allow_cpu": True,
    }
    settings |= {"rdzv_endpoint": "127.0.0.1", "interface": "lo", "stop_grace": 10.0}
    return LaunchConfig.model_validate({**settings, "kubernetes": own, **values})


def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, **values: Any) -> Attempt:
    monkeypatch.setenv("MEGACORE_RANK_DOES", does)
    return Attempt.of(launch(**values), tmp_path / "runs" / "run")


def test_pods_run_their_ranks_and_the_jobset_is_deleted(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cluster / "pending").touch()
    attempt = fake(tmp_path, monkeypatch, "end", nnodes=2)
    attempt.wait_for("0 of 2 pods run; Pending")
    (cluster / "pending").unlink()
    assert attempt.end() is None, attempt.said
    assert "rank 0 of 2, 1 threads" in attempt.said
    assert "rank 1 of 2, 1 threads" in attempt.said
    assert "kubernetes: Completed" in attempt.said
    assert [state.split(":")[0] for state in attempt.states][:2] == ["queued", "queued"]
    assert not (cluster / "jobset.json").exists()
    assert len((cluster / "applied.txt").read_text().split()) == 1


def test_a_failed_rank_says_why(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = fake(tmp_path, monkeypatch, "fail")
    error = attempt.end()
    assert isinstance(error, LossError), (error, attempt.said)
    assert not (cluster / "jobset.json").exists()


def test_a_cancelled_run_deletes_its_jobset(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = fake(tmp_path, monkeypatch, "wait")
    pid = attempt.rank_pid()
    attempt.wait_for("Running on worker")
    attempt.stop()
    assert isinstance(attempt.end(), StoppedByTestError)
    none_alive([pid], 1)
    assert not (cluster / "jobset.json").exists()
    reason = json.loads((tmp_path / "runs" / "run" / "exit" / "rank_0.json").read_text())
    assert reason["message"] == "stopped by SIGTERM"


def test_a_jobset_that_somebody_deletes_is_not_applied_again(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = fake(tmp_path, monkeypatch, "wait")
    attempt.rank_pid()
    _kubectl_words.run(cluster, "delete", "jobsets", "any")
    error = attempt.end()
    assert type(error) is LaunchError, (error, attempt.said)
    assert "was deleted, not by this run" in str(error)


def test_an_earlier_jobset_is_deleted_before_another_is_applied(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = fake(tmp_path, monkeypatch, "wait")
    first = attempt.rank_pid()
    note = tmp_path / "runs" / "run" / "batch" / "submission.json"
    wait_until(lambda: json.loads(note.read_text())["job"] is not None, LIMIT, "the name was noted")
    left = note.read_text()
    attempt.stop()
    attempt.end()
    note.write_text(left)  # as a follower leaves it that was killed
    again = fake(tmp_path, monkeypatch, "end")
    assert again.end() is None, again.said
    assert "an earlier attempt submitted" in again.said
    assert not alive(first)
    assert (
        f"delete --namespace=default jobsets.jobset.x-k8s.io {json.loads(left)['job']}"
        in (cluster / "calls.txt").read_text()
    )


def test_a_suspended_jobset_is_queued(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cluster / "answer.json").write_text(json.dumps({"spec": {"suspend": True}}))
    (cluster / "pending").touch()
    attempt = fake(tmp_path, monkeypatch, "end")
    attempt.wait_for("Suspended: it waits to be admitted")
    (cluster / "answer.json").unlink()
    (cluster / "pending").unlink()
    assert attempt.end() is None, attempt.said
    assert "queued: Suspended: it waits to be admitted" in attempt.states


def test_a_cluster_without_jobsets_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "kubectl").write_text(
        f"#!{sys.executable}\nraise SystemExit('no matches for kind \"JobSet\"')\n"
    )
    (folder / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path))
    error = fake(tmp_path, monkeypatch, "end").end()
    assert type(error) is LaunchError
    assert 'no matches for kind "JobSet": correct launch.kubernetes, or see whether JobSet' in str(
        error
    )
