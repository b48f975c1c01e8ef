"""Reruns of only the stages that failed, were damaged or changed.

The tests of this file share one workspace and run in order: each starts with the result of the
previous one.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.settings import PREFECT_LOCAL_STORAGE_PATH, temporary_settings

from megacore.errors import DataFormatError
from tests._limits import HANG
from tests.flows.conftest import ROOT, Bench, server_environment

SCORES = ["evaluate iter_0000002", "evaluate iter_0000003"]
EVALUATION = [*SCORES, "evaluate unigram", "evaluate"]
DATA = ["collect", "tokenizer", "tokenize", "index"]
STAGES = [*DATA, "train", *EVALUATION, "convert", "publish"]

INJECTIONS = {
    "collect": "megacore.corpus.collect.collect",
    "tokenizer": "megacore.tokenizer.build.build_tokenizer",
    "tokenize": "megacore.tokenizer.tokenize.tokenize_corpus",
    "index": "megacore.data.index_maps.build_index_maps",
    "train": "megacore.ranks.stages.train",
    "evaluate iter_0000002": "megacore.ranks.stages.evaluate",
    "convert": "megacore.ranks.stages.convert",
    "publish": "tasks.publish.publish_model",
}
"""Function that each stage calls to do its work."""

FOLDERS = {
    "collect": "corpora",
    "tokenizer": "tokenizers",
    "tokenize": "tokenized",
    "index": "index",
    "evaluate": "evaluations",
    "convert": "exports",
    "publish": "published",
}


FAST = {
    "failed": {"publish"},
    "damaged": {"publish"},
    "changed": {"evaluate"},
}
"""Stages that `make test` runs, by test."""
LONG = {"changed": {"publish", "convert", "index", "collect"}}
"""Stages that `make test-long` runs: tests/tasks/test_keys.py changes every field."""


def stages_of(test: str, stages: Iterable[str]) -> list[Any]:
    long = LONG.get(test, set())
    marks = {stage: pytest.mark.long if stage in long else pytest.mark.slow for stage in stages}
    return [
        pytest.param(stage, marks=() if stage in FAST[test] else mark)
        for stage, mark in marks.items()
    ]


@pytest.fixture(scope="module")
def completed() -> list[str]:
    """Return the stages that have an output so far."""
    return []


def fail(*args: Any, **kwargs: Any) -> None:
    raise DataFormatError("injected failure")


def only_artifact(bench: Bench, folder: str) -> Path:
    """Return the single artifact of a folder, which holds until a parameter is changed."""
    (artifact,) = (
        path for path in (bench.workspace / folder).iterdir() if not path.name.startswith(".")
    )
    return artifact


def largest_file(directory: Path) -> Path:
    return max(
        (path for path in directory.rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )


@pytest.mark.parametrize("stage", stages_of("failed", INJECTIONS))
def test_only_the_failed_stage_runs_again(bench: Bench, completed: list[str], stage: str) -> None:
    before = STAGES[: STAGES.index(stage)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(INJECTIONS[stage], fail)
        run = bench.pretrain()
    assert isinstance(run.error, DataFormatError)
    assert "injected failure" in str(run.error)
    assert run.outcomes.pop(stage) == "failed"
    assert run.stages("cached") == completed
    assert run.stages("ran") == before[len(completed) :]
    completed[:] = before
    if stage in FOLDERS:
        assert not list((bench.workspace / FOLDERS[stage]).glob("[!.]*")), (
            "a failed stage left something behind"
        )


def test_last_stage_completes_and_then_all_stages_are_cached(bench: Bench) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(INJECTIONS["publish"], fail)
        assert bench.pretrain().outcomes["publish"] == "failed"
    run = bench.pretrain()
    assert run.error is None
    assert run.stages("ran") == ["publish"]
    run = bench.pretrain()
    assert run.error is None
    assert run.stages("cached") == STAGES


@pytest.fixture(scope="module")
def finished(bench: Bench) -> Bench:
    """Provide the workspace after a complete run, also if the tests before are not selected."""
    assert bench.pretrain().error is None
    return bench


@pytest.mark.slow
@pytest.mark.parametrize("stage", FOLDERS)
def test_only_the_stage_of_a_deleted_output_runs_again(finished: Bench, stage: str) -> None:
    shutil.rmtree(only_artifact(finished, FOLDERS[stage]))
    run = finished.pretrain()
    assert run.error is None
    # The rebuilt output has the same digest, so the later stages are unchanged.
    assert run.stages("ran") == [stage]


@pytest.mark.parametrize("stage", stages_of("damaged", FOLDERS))
def test_only_the_stage_of_a_damaged_output_runs_again(finished: Bench, stage: str) -> None:
    damaged_file = largest_file(only_artifact(finished, FOLDERS[stage]))
    content = bytearray(damaged_file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    damaged_file.write_bytes(content)
    run = finished.pretrain()
    assert run.error is None
    assert run.stages("ran") == [stage]


@pytest.mark.slow
def test_damaged_checkpoint_is_trained_again_from_the_previous_one(finished: Bench) -> None:
    (run_directory,) = (path for path in (finished.workspace / "runs").iterdir() if path.is_dir())
    damaged_file = largest_file(run_directory / "checkpoints" / "iter_0000003")
    damaged_file.write_bytes(damaged_file.read_bytes()[:-7])
    run = finished.pretrain()
    assert run.error is None
    assert "train" in run.stages("ran")
    events = (run_directory / "events.jsonl").read_text(encoding="utf-8")
    assert '"resumed_from": 2' in events.replace('":2', '": 2')


CHANGES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "publish": ({"tracking__registered_model": "another-name"}, ["publish"]),
    "convert": ({"export__sample_prompt": "class "}, ["convert", "publish"]),
    "evaluate": ({"evaluate__max_samples": 6}, STAGES[STAGES.index("train") + 1 :]),
    "train": (
        {"optim__lr": 2e-3},
        ["train", *SCORES, "evaluate", "convert", "publish"],
    ),
    "index": ({"data__split": "70,15,15"}, STAGES[STAGES.index("index") :]),
    "tokenize": ({"data__append_eod": False}, STAGES[STAGES.index("tokenize") :]),
    "tokenizer": ({"data__tokenizer": {"kind": "train-bpe", "vocab_size": 330}}, STAGES[1:]),
    "collect": ({"data__source__pattern": "*[0-7].py"}, STAGES),
}


@pytest.mark.parametrize("stage", stages_of("changed", CHANGES))
def test_changed_parameter_reruns_its_stage_and_later_ones(finished: Bench, stage: str) -> None:
    overrides, expected = CHANGES[stage]
    run = finished.pretrain(**overrides)
    assert run.error is None
    assert run.stages("ran") == expected
    assert run.stages("cached") == [name for name in STAGES if name not in expected]


@pytest.mark.slow
def test_flow_run_retry_reruns_only_the_failed_stage(finished: Bench) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(INJECTIONS["publish"], fail)
        failed = finished.pretrain(tracking__registered_model="retried")
    assert failed.outcomes["publish"] == "failed"
    command = [sys.executable, "-m", "prefect", "flow-run", "retry", failed.flow_run_id]
    result = subprocess.run(
        [*command, "--entrypoint", "flows/pretrain.py:pretrain"],
        cwd=ROOT,
        env=os.environ | server_environment(finished.workspace),
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(UUID(failed.flow_run_id)).state_name == "Completed"
        task_runs = client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[UUID(failed.flow_run_id)]))
        )
    states = [(run.name.removesuffix("-flow-test"), run.state_name) for run in task_runs]
    assert {name for name, state in states if state == "Cached"} == set(STAGES[:-1])
    assert ("publish", "Completed") in states
    assert not [name for name, state in states if state == "Completed" and name != "publish"]


def test_stages_are_cached_in_a_moved_workspace(
    finished: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert finished.pretrain().error is None
    old, moved = finished.workspace, tmp_path / "moved"
    old.rename(moved)
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(moved))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{moved / 'mlflow.db'}")
    try:
        with temporary_settings({PREFECT_LOCAL_STORAGE_PATH: moved / "prefect" / "results"}):
            # The last stage writes to MLflow, whose store names its files by their old paths.
            monkeypatch.setattr("tasks._publication.Forwarder", fail)
            run = finished.pretrain()
            assert (run.stages("cached"), run.stages("failed")) == (STAGES[:-1], ["publish"])
            assert not old.exists()
    finally:
        moved.rename(old)


@pytest.mark.slow
def test_more_iterations_extend_the_run(finished: Bench) -> None:
    run = finished.pretrain(train__train_iters=4)
    assert run.error is None
    new = "evaluate iter_0000004"
    assert run.stages("ran") == ["train", new, "evaluate", "convert", "publish"]
    assert {*DATA, "evaluate unigram"} <= set(run.stages("cached"))


@pytest.mark.slow
def test_extension_by_further_epochs_is_cached_afterwards(finished: Bench) -> None:
    values = {"data__split": "4,48,48", "checkpoint__save_interval": 20, "train__eval_interval": 60}
    assert finished.pretrain(**values).error is None
    longer = values | {"train__train_iters": 60}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(INJECTIONS["train"], fail)
        interrupted = finished.pretrain(**longer)
    assert interrupted.stages("ran") == ["index"]
    assert interrupted.stages("failed") == ["train"]
    run = finished.pretrain(**longer)
    assert run.error is None
    assert {*DATA, "evaluate unigram"} <= set(run.stages("cached"))
    assert "evaluate iter_0000060" in run.stages("ran")
    run = finished.pretrain(**longer)
    assert run.error is None
    assert run.stages("ran") == []


def test_fewer_iterations_than_trained_are_refused(finished: Bench) -> None:
    run = finished.pretrain(train__train_iters=2)
    assert "train.train_iters is 2" in str(run.error)
