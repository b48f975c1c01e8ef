"""Only the failed stage is rerun: failures injected, outputs deleted and damaged, one parameter
changed at a time.

The tests of this file share one workspace and run in order: each begins where the one before ended.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

from megacore.errors import DataFormatError
from tests.flows.conftest import ROOT, Bench, server_environment

STAGES = ["collect", "tokenizer", "tokenize", "index", "train", "evaluate", "convert", "publish"]

INJECTIONS = {
    "collect": "megacore.corpus.collect.collect",
    "tokenizer": "megacore.tokenizer.build.build_tokenizer",
    "tokenize": "megacore.tokenizer.tokenize.tokenize_corpus",
    "index": "megacore.data.index_maps.build_index_maps",
    "train": "megacore.ranks.stages.train",
    "evaluate": "megacore.ranks.stages.evaluate",
    "convert": "megacore.ranks.stages.convert",
    "publish": "tasks.publish.publish_model",
}
"""What each stage calls to do its work."""

FOLDERS = {
    "collect": "corpora",
    "tokenizer": "tokenizers",
    "tokenize": "tokenized",
    "index": "index",
    "evaluate": "evaluations",
    "convert": "exports",
    "publish": "published",
}


def fail(*args: Any, **kwargs: Any) -> None:
    raise DataFormatError("injected failure")


def only_artifact(bench: Bench, folder: str) -> Path:
    """The one artifact of a folder (there is one as long as no parameter was changed)."""
    (artifact,) = (
        path for path in (bench.workspace / folder).iterdir() if not path.name.startswith(".")
    )
    return artifact


def largest_file(directory: Path) -> Path:
    return max(
        (path for path in directory.rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )


@pytest.mark.parametrize("stage", STAGES)
def test_failed_stage_alone_runs_again(bench: Bench, stage: str) -> None:
    place = STAGES.index(stage)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(INJECTIONS[stage], fail)
        run = bench.pretrain()
    assert isinstance(run.error, DataFormatError)
    assert "injected failure" in str(run.error)
    assert run.outcomes.pop(stage) == "failed"
    # The stage before it ran in this run: it had failed in the run before.
    assert run.stages("cached") == STAGES[: max(place - 1, 0)]
    assert run.stages("ran") == STAGES[max(place - 1, 0) : place]
    if stage != "train":
        assert not list((bench.workspace / FOLDERS[stage]).glob("[!.]*")), (
            "a failed stage left something behind"
        )


def test_last_stage_completes_then_everything_is_cached(bench: Bench) -> None:
    run = bench.pretrain()
    assert run.error is None
    assert run.stages("ran") == ["publish"]
    run = bench.pretrain()
    assert run.error is None
    assert run.stages("cached") == STAGES


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "train"])
def test_deleted_output_is_built_again_and_nothing_else(bench: Bench, stage: str) -> None:
    shutil.rmtree(only_artifact(bench, FOLDERS[stage]))
    run = bench.pretrain()
    assert run.error is None
    # What is built again alike has the same digest, so the stages after it stay as they are.
    assert run.stages("ran") == [stage]


@pytest.mark.parametrize(
    "stage", ["collect", "tokenizer", "tokenize", "index", "evaluate", "convert", "publish"]
)
def test_damaged_output_is_built_again(bench: Bench, stage: str) -> None:
    victim = largest_file(only_artifact(bench, FOLDERS[stage]))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 0xFF
    victim.write_bytes(content)
    run = bench.pretrain()
    assert run.error is None
    assert run.stages("ran") == [stage]


def test_damaged_checkpoint_is_trained_again_from_the_one_before(bench: Bench) -> None:
    (run_directory,) = (path for path in (bench.workspace / "runs").iterdir() if path.is_dir())
    victim = largest_file(run_directory / "checkpoints" / "iter_0000003")
    victim.write_bytes(victim.read_bytes()[:-7])
    run = bench.pretrain()
    assert run.error is None
    assert "train" in run.stages("ran")
    events = (run_directory / "events.jsonl").read_text(encoding="utf-8")
    assert '"resumed_from": 2' in events.replace('":2', '": 2')


CHANGES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "publish": ({"tracking__registered_model": "another-name"}, ["publish"]),
    "convert": ({"export__sample_prompt": "class "}, ["convert", "publish"]),
    "evaluate": ({"evaluate__max_samples": 6}, ["evaluate", "convert", "publish"]),
    "train": ({"optim__lr": 2e-3}, ["train", "evaluate", "convert", "publish"]),
    "index": ({"data__split": "70,15,15"}, ["index", "train", "evaluate", "convert", "publish"]),
    "tokenize": (
        {"data__append_eod": False},
        ["tokenize", "index", "train", "evaluate", "convert", "publish"],
    ),
    "tokenizer": ({"data__tokenizer": {"kind": "train-bpe", "vocab_size": 330}}, STAGES[1:]),
    "collect": ({"data__source__pattern": "*[0-7].py"}, STAGES),
}


@pytest.mark.parametrize("stage", list(CHANGES))
def test_changed_parameter_reruns_its_stage_and_those_after(bench: Bench, stage: str) -> None:
    overrides, expected = CHANGES[stage]
    run = bench.pretrain(**overrides)
    assert run.error is None
    assert run.stages("ran") == expected
    assert run.stages("cached") == [name for name in STAGES if name not in expected]


def test_flow_run_retry_reruns_the_failed_stage_alone(bench: Bench) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(INJECTIONS["publish"], fail)
        failed = bench.pretrain(tracking__registered_model="retried")
    assert failed.outcomes["publish"] == "failed"
    command = [sys.executable, "-m", "prefect", "flow-run", "retry", failed.flow_run_id]
    result = subprocess.run(
        [*command, "--entrypoint", "flows/pretrain.py:pretrain"],
        cwd=ROOT,
        env=os.environ | server_environment(bench.workspace),
        capture_output=True,
        text=True,
        timeout=120,
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


def test_more_iterations_extend_the_run(bench: Bench) -> None:
    run = bench.pretrain(train__train_iters=4)
    assert run.error is None
    assert run.stages("cached") == ["collect", "tokenizer", "tokenize", "index"]
    assert run.stages("ran") == ["train", "evaluate", "convert", "publish"]


def test_fewer_iterations_than_trained_are_refused(bench: Bench) -> None:
    run = bench.pretrain(train__train_iters=2)
    assert "train.train_iters is 2" in str(run.error)
