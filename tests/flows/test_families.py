"""Small configurations of each family through the whole flow, on the standard library's source."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megacore.artifact import Workspace
from tests.flows import conftest

SHORT = {
    "data.source.pattern": "[ab]*.py",
    "data.split": "90,5,5",
    "data.tokenizer.vocab_size": 1024,
    "model.num_layers": 2,
    "train.train_iters": 20,
    "train.eval_interval": 10,
    "train.eval_iters": 1,
    "train.log_interval": 2,
    "train.micro_batch_size": 16,
    "train.global_batch_size": 16,
    "optim.lr_decay_iters": 20,
    "checkpoint.save_interval": 20,
    "evaluate.max_samples": 16,
    "export.parity_samples": 2,
    "export.max_test_samples": 32,
    "launch.nproc_per_node": 1,
    "launch.threads_per_rank": 1,
}
FAMILIES = {
    "bert-tiny": ("MegatronBertForPreTraining", {"lm_loss", "sop_loss"}),
    "t5-tiny": ("T5ForConditionalGeneration", {"lm_loss"}),
    "llama-tiny": ("LlamaForCausalLM", {"lm_loss"}),
}


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_ranks")]


@pytest.fixture(scope="module")
def separate_workspace(
    workspace: Path, empty_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Provide a workspace for all tests of this file; other files count the session's content."""
    root = tmp_path_factory.mktemp("families")
    with conftest.use_workspace(root, empty_store):
        yield root


@pytest.fixture(scope="module", params=FAMILIES)
def trained(
    request: pytest.FixtureRequest, separate_workspace: Path
) -> tuple[str, dict[str, str], Path]:
    """Return the configuration's name, the outcome of each stage, and the run's directory."""
    from flows.pretrain import pretrain

    rows: dict[str, str] = {}
    with conftest.on_report(lambda runner: rows.update(conftest.outcomes(runner))):
        pretrain(request.param, SHORT)
    runs = Workspace(separate_workspace).folder("train")
    (directory,) = [
        path.parent
        for path in runs.glob("*/run.json")
        if _json(path)["config"]["name"] == request.param
    ]
    return request.param, rows, directory


def _json(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


def events(directory: Path, kind: str) -> list[dict[str, Any]]:
    lines = (directory / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def test_all_stages_run_and_the_export_has_the_familys_class(
    trained: tuple[str, dict[str, str], Path],
) -> None:
    name, rows, _ = trained
    # All families read one corpus, which is collected once.
    assert {stage for stage, outcome in rows.items() if outcome != "ran"} <= {"collect"}
    exports = Workspace.of().folder("convert")
    classes = [_json(path)["architectures"] for path in exports.glob("*/model/config.json")]
    assert [FAMILIES[name][0]] in classes


def test_losses_are_reported_separately_and_fall(
    trained: tuple[str, dict[str, str], Path],
) -> None:
    name, _, directory = trained
    expected = FAMILIES[name][1]
    steps, evaluations = events(directory, "step"), events(directory, "evaluation")
    for event in (*steps, *evaluations):
        assert {key for key in event if key.endswith("_loss")} == expected
    assert steps[-1]["lm_loss"] < steps[0]["lm_loss"] - 0.5
    assert evaluations[-1]["lm_loss"] < evaluations[0]["lm_loss"]


def test_mlflow_contains_all_losses_and_the_perplexity(
    trained: tuple[str, dict[str, str], Path],
) -> None:
    from mlflow import MlflowClient

    name, _, directory = trained
    metrics = MlflowClient().get_run(_json(directory / "mlflow.json")["run_id"]).data.metrics
    for loss in FAMILIES[name][1]:
        assert {f"train/{loss}", f"validation/{loss}"} <= metrics.keys()
    assert metrics["test_ppl"] > 1
    assert ("test_sop_loss" in metrics) == ("sop_loss" in FAMILIES[name][1])
