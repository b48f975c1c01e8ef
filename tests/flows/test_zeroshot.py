"""The stages zeroshot and lm-eval: scores in MLflow, report and summary, and caching."""

import json
import shutil
from pathlib import Path

import pytest

from megacore.artifact import Workspace, open_artifact
from megacore.observe.logging import short_number
from megacore.zeroshot.harness import metrics_of
from tasks import _stage_runner
from tests.flows.conftest import Bench, on_report, outcomes
from tests.zeroshot import _texts
from tests.zeroshot.test_harness import write_task

pytestmark = pytest.mark.slow
CHECKPOINTS = ("iter_0000002", "iter_0000003")
STAGES = [f"zeroshot {name}" for name in CHECKPOINTS]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("texts")
    _texts.write_wikitext(directory / "wiki", 300)
    _texts.write_lambada(directory / "lambada", 8)
    write_task(directory / "tasks")
    return directory


def values(texts: Path) -> dict[str, object]:
    zero_shot = {
        "wikitext": str(texts / "wiki"),
        "lambada": str(texts / "lambada"),
        "overlapping_eval": 16,
        "passkey__lengths": [600],
        "passkey__depths": [0.0, 1.0],
        "passkey__prompts": 2,
        "passkey__candidates": 3,
    }
    # A separate seed, since other tests of this workspace extend the run of the default one.
    lm_eval = {"tasks": ["colours"], "include_path": str(texts / "tasks"), "checkpoints": "all"}
    run = {"seed": 77, "model__max_position_embeddings": 600, "evaluate__lm_eval": lm_eval}
    return run | {f"evaluate__zero_shot__{name}": value for name, value in zero_shot.items()}


def test_text_adds_a_stage_whose_scores_are_in_mlflow(bench: Bench, texts: Path) -> None:
    from mlflow import MlflowClient

    summaries: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_stage_runner, "Markdown", summaries.append)
        run = bench.pretrain(**values(texts))
    assert run.error is None
    assert [run.outcomes[stage] for stage in STAGES] == ["ran", "ran"]
    converted = [run.outcomes[f"convert {name}"] for name in CHECKPOINTS]
    assert sorted(converted) == ["cached", "ran"]  # the best was exported before
    scored = [run.outcomes[f"lm-eval {name}"] for name in CHECKPOINTS]
    assert scored == ["ran", "ran"]
    newest = "iter_0000003"
    (directory,) = (
        path
        for path in Workspace(bench.workspace).folder("zeroshot").glob("[!.]*")
        if open_artifact(path).counts["checkpoint"] == newest
    )
    scores = json.loads((directory / "zeroshot.json").read_text(encoding="utf-8"))
    assert scores["lambada"]["passages"] == 8
    word_ppl = short_number(scores["wikitext"]["word_ppl"], ",.2f")
    assert f"| {newest} | {word_ppl} |" in summaries[0]
    accuracy = {
        open_artifact(path).counts["iteration"]: metrics_of(
            json.loads((path / "lm-eval.json").read_text(encoding="utf-8"))
        )["lm_eval/colours/acc"]
        for path in Workspace(bench.workspace).folder("lm-eval").glob("[!.]*")
    }
    assert sorted(accuracy) == [2, 3]
    assert f"| {newest} | {accuracy[3]:.4g} |" in summaries[0]
    client = MlflowClient()
    runs = [
        json.loads(path.read_text())["run_id"]
        for path in bench.workspace.glob("runs/*/mlflow.json")
    ]
    metrics = [client.get_run(run_id).data.metrics for run_id in runs]
    expected = {
        "wikitext_ppl": scores["wikitext"]["word_ppl"],
        "lambada_accuracy": scores["lambada"]["accuracy"],
        "passkey_accuracy": scores["passkey"]["accuracy"],
        "passkey_ranked_accuracy/0000600/1": scores["passkey"]["cells"][1]["ranked_accuracy"],
        "lm_eval/colours/acc": accuracy[3],
    }
    (measured,) = (each for each in metrics if expected.items() <= each.items())
    assert {
        "validation/loss_by_position/0000000",
        "validation/test_loss_by_position/0000030",
    } <= set(measured)
    pages = [path.read_text() for path in bench.workspace.glob("runs/*/report.html")]
    (page,) = (text for text in pages if "Zero-shot scores" in text)
    assert "<td>colours acc</td>" in page
    assert "Passkey ranked accuracy of iteration " in page
    assert "test of the exported one" in page


def test_copied_text_is_not_scored_again(bench: Bench, texts: Path, tmp_path: Path) -> None:
    shutil.copytree(texts, tmp_path, dirs_exist_ok=True)
    assert bench.pretrain(**values(tmp_path)).stages("ran") == []
    (tmp_path / "wiki").write_text("the value of the sum .", encoding="utf-8")
    assert bench.pretrain(**values(tmp_path)).stages("ran") == [*STAGES, "publish"]


def test_flow_evaluate_has_the_stage_too(bench: Bench, texts: Path) -> None:
    from flows.evaluate import evaluate

    runs: list[dict[str, str]] = []
    overrides = {key.replace("__", "."): value for key, value in values(texts).items()}
    with on_report(lambda runner: runs.append(outcomes(runner))):
        evaluate(str(bench.conf), overrides)
    (rows,) = runs
    assert list(rows.items())[-3:] == [(stage, "cached") for stage in ("evaluate", *STAGES)]


def test_missing_text_is_refused_before_any_stage_runs(bench: Bench, tmp_path: Path) -> None:
    run = bench.pretrain(evaluate__zero_shot__wikitext=str(tmp_path / "nowhere"), seed=99)
    assert "nowhere, which cannot be read: No such file or directory" in str(run.error)
    assert run.outcomes == {}
