"""The flow `finetune` on a tiny DeBERTa: caching, MLflow and a lost rank.

The tests of this file share one workspace and run in order.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from megacore.errors import ConfigError, DataFormatError
from tests._limits import HANG
from tests.finetune._tiny_models import word_rows, write_model, write_rows
from tests.flows.conftest import ROOT, on_report, outcomes, server_environment, use_workspace

STAGES = ["pretrained", "dataset", "examples", "finetune", "finetune-export", "finetune-publish"]
PARENT = "tiny-parent"


@dataclass
class Place:
    """A separate workspace on the session's Prefect server."""

    workspace: Path
    conf: Path
    model: Path
    outcomes: dict[str, str] = field(default_factory=dict)
    summary: str = ""

    def finetune(self, **overrides: Any) -> None:
        """Run the flow and record the outcome of each stage."""
        from flows.finetune import finetune

        def remember(runner: Any) -> None:
            self.outcomes, self.summary = outcomes(runner), runner.summary

        with on_report(remember):
            finetune(
                str(self.conf), {key.replace("__", "."): value for key, value in overrides.items()}
            )

    def stages(self, outcome: str) -> list[str]:
        return [stage for stage, result in self.outcomes.items() if result == outcome]

    @property
    def runs(self) -> list[Path]:
        """Directories of all runs, the newest last."""
        return sorted(
            (path.parent for path in self.workspace.glob("finetuned/*/run.json")),
            key=os.path.getmtime,
        )


def events(directory: Path, kind: str) -> list[dict[str, Any]]:
    lines = (directory / "events.jsonl").read_text(encoding="utf-8").splitlines(True)
    return [
        event
        for event in map(json.loads, (line for line in lines if line.endswith("\n")))
        if event["kind"] == kind
    ]


@pytest.fixture(scope="module")
def place(
    workspace: Path,
    warm_ranks: None,
    empty_store: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("finetune")
    data = tmp_path_factory.mktemp("finetune-data")
    write_rows(data / "train.jsonl", word_rows(96, 1))
    write_rows(data / "valid.jsonl", word_rows(40, 2))
    config = {
        "name": "tiny-words",
        "model": {"path": str(write_model(data / "export" / "model", "deberta"))},
        "data": {
            "source": {
                "kind": "files",
                "train": [str(data / "train.jsonl")],
                "valid": [str(data / "valid.jsonl")],
            },
            "workers": 1,
        },
        "task": {"kind": "classification", "sentence1_column": "sentence", "max_length": 16},
        "optim": {"lr": 1e-2},
        "train": {
            "num_epochs": 3,
            "micro_batch_size": 8,
            "eval_batch_size": 40,
            "precision": "fp32",
            "log_interval": 2,
        },
        "launch": {"nproc_per_node": 2, "threads_per_rank": 1, "retries": 0},
    }
    conf = data / "tiny-words.yaml"
    conf.write_text(yaml.safe_dump(config), encoding="utf-8")
    with use_workspace(root, empty_store):
        yield Place(root, conf, data / "export")


def register_parent(place: Place) -> tuple[str, str]:
    """Publish the pretrained model like the flow `pretrain`; return version and run."""
    from megacore.artifact import Workspace
    from tasks._mlflow import Tracking
    from tasks._registry import publish_model

    for name in ("parity.json", "sample.txt"):
        (place.model / name).write_text("{}", encoding="utf-8")
    tracking = Tracking(Workspace.of(), "pretrain")
    run = tracking.client.create_run(tracking.experiment_id)
    receipt = publish_model(
        tracking,
        run.info.run_id,
        place.model,
        PARENT,
        digest="d" * 64,
        iteration=7,
        metrics={},
        tags={},
    )
    return receipt["version"], receipt["run_id"]


@pytest.fixture(scope="module")
def finished(place: Place) -> Place:
    """Provide the workspace after a run, also if the tests of that run are not selected."""
    if not place.runs:
        register_parent(place)
        place.finetune(model__path=f"models:/{PARENT}@candidate")
    return place


def test_two_ranks_improve_the_model_and_record_its_parent(place: Place) -> None:
    version, run_id = register_parent(place)
    place.finetune(model__path=f"models:/{PARENT}@candidate")
    assert place.stages("ran") == STAGES
    (run,) = place.runs
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    assert result["value"] > 0.9 > result["start_metrics"]["accuracy"]
    assert f"validation accuracy {result['value']:.4f}" in place.summary
    assert f"`models:/{PARENT}/{version}` of MLflow run {run_id}" in place.summary
    assert json.loads((run / "run.json").read_text(encoding="utf-8"))["ranks"] == 2
    lineage = json.loads(
        next(place.workspace.glob("pretrained/*/lineage.json")).read_text(encoding="utf-8")
    )
    assert (lineage["registry"]["parent_version"], lineage["registry"]["parent_run_id"]) == (
        version,
        run_id,
    )


def test_mlflow_contains_curves_checkpoints_and_the_child_model(finished: Place) -> None:
    from mlflow import MlflowClient

    client = MlflowClient()
    child = client.get_model_version_by_alias("tiny-words", "candidate")
    tags = child.tags
    assert (tags["parent_model"], tags["parent_name"], tags["parent_digest"]) == (
        f"models:/{PARENT}/1",
        PARENT,
        "d" * 64,
    )
    run = client.get_run(child.run_id)
    assert run.info.status == "FINISHED"
    assert client.get_experiment(run.info.experiment_id).name == "finetune"
    assert run.data.tags["megacore.parent_run_id"] == tags["parent_run_id"]
    assert run.data.params["model.path"] == f"models:/{PARENT}/1"
    (directory,) = finished.runs
    evaluations = events(directory, "evaluation")
    history = client.get_metric_history(child.run_id, "validation/accuracy")
    assert [(point.step, point.value) for point in history] == [
        (event["iteration"], event["metrics"]["accuracy"]) for event in evaluations
    ]
    steps = [event["iteration"] for event in events(directory, "step")]
    assert [point.step for point in client.get_metric_history(child.run_id, "train/loss")] == steps
    assert len(client.get_metric_history(child.run_id, "vitals/epoch_train_seconds")) == 3
    assert run.data.metrics["valid_accuracy"] == max(point.value for point in history)
    assert [item.dataset.name.partition("-")[0] for item in run.inputs.dataset_inputs] == [
        "examples"
    ]
    models = client.search_logged_models([run.info.experiment_id], "model_type = 'checkpoint'")
    assert {model.tags["checkpoint_state"] for model in models} == {"kept", "deleted"}
    last = next(model for model in models if model.params["step"] == str(steps[-1]))
    assert {metric.key for metric in last.metrics} >= {"valid_accuracy", "valid_loss"}


def test_mlflow_loads_the_classifier(finished: Place) -> None:
    import mlflow

    row = word_rows(1, 2)[0]
    prediction = mlflow.transformers.load_model("models:/tiny-words@candidate")(row["sentence"])[0]
    assert prediction["label"].endswith(str(row["label"])), prediction
    assert mlflow.pyfunc.load_model("models:/tiny-words/1").predict([row["sentence"]]) is not None


@pytest.mark.slow
def test_repeated_run_of_the_same_model_is_cached(finished: Place) -> None:
    finished.finetune(model__path=f"models:/{PARENT}@candidate")
    assert finished.stages("cached") == STAGES
    # The same files by their path: the child gets no other parent, since nobody has published this
    # directory.
    finished.finetune()
    assert finished.stages("cached") == STAGES[:4]
    assert len(finished.runs) == 1


@pytest.mark.slow
def test_another_registered_name_only_publishes_again(finished: Place) -> None:
    finished.finetune(tracking__registered_model="another")
    assert finished.stages("ran") == ["finetune-publish"]


@pytest.mark.slow
def test_damaged_artifact_is_built_again(finished: Place) -> None:
    (examples,) = finished.workspace.glob("examples/*/train/*.arrow")
    content = bytearray(examples.read_bytes())
    content[len(content) // 2] ^= 0xFF
    examples.write_bytes(content)
    shutil.rmtree(next(finished.workspace.glob("datasets/[!.]*")))
    finished.finetune()
    assert finished.stages("ran") == ["dataset", "examples"]


@pytest.mark.slow
@pytest.mark.usefixtures("lost_rank")
def test_another_learning_rate_trains_again_and_survives_a_lost_rank(
    finished: Place,
) -> None:
    before = set(finished.runs)
    finished.finetune(
        optim__lr=5e-3,
        train__max_steps=60,
        checkpoint__save_interval=20,
        launch__retries=1,
        launch__retry_delay=0,
    )
    assert finished.stages("ran") == STAGES[3:]
    (run,) = set(finished.runs) - before
    starts = events(run, "start")
    assert [event["attempt"] for event in starts] == [1, 2]
    assert starts[1]["resumed_from"] == 20
    assert max(event["iteration"] for event in events(run, "step")) == 60


def test_invalid_configurations_are_refused_before_training(finished: Place) -> None:
    count = len(list(finished.workspace.glob("finetuned/*")))
    with pytest.raises(
        ConfigError, match=r"models:/nobody@candidate, which the model registry .* does not have"
    ):
        finished.finetune(model__path="models:/nobody@candidate")
    with pytest.raises(
        ConfigError, match=r"would be registered as tiny-parent, the name of model\.path"
    ):
        finished.finetune(model__path=f"models:/{PARENT}/1", tracking__registered_model=PARENT)
    with pytest.raises(ConfigError, match="zero2, which divides a model"):
        finished.finetune(launch__distributed="zero2")
    with pytest.raises(DataFormatError, match="sentense"):
        finished.finetune(task__sentence1_column="sentense")
    assert finished.outcomes == {"pretrained": "cached", "dataset": "cached", "examples": "failed"}
    assert len(list(finished.workspace.glob("finetuned/*"))) == count


def test_dry_run_prints_the_plan_and_a_one_line_error(finished: Place) -> None:
    environment = os.environ | server_environment(finished.workspace)
    command = [sys.executable, "-m", "flows.finetune", "--conf", str(finished.conf), "--dry-run"]
    plan = subprocess.run(
        [*command, "-o", "train.precision=fp16"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert plan.returncode == ConfigError.exit_code, plan.stderr
    assert plan.stderr.splitlines()[-1].startswith(
        "error: train.precision is fp16, which needs a GPU"
    )
    assert "known after finetune" in plan.stdout
    assert plan.stdout.count("cached") == 3
