"""The zero-shot stage: its scores in MLflow and in the summary, and its caching."""

import json
from pathlib import Path

import pytest

from megacore.artifact import Workspace, open_artifact
from tasks import _pipeline
from tests.flows.conftest import Bench
from tests.zeroshot import _texts

pytestmark = pytest.mark.slow
STAGES = ["zeroshot iter_0000002", "zeroshot iter_0000003"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("texts")
    _texts.write_wikitext(directory / "wiki", 300)
    _texts.write_lambada(directory / "lambada", 8)
    return directory


def values(texts: Path) -> dict[str, object]:
    paths = {
        "wikitext": str(texts / "wiki"),
        "lambada": str(texts / "lambada"),
        "overlapping_eval": 16,
    }
    # A separate seed, since other tests of this workspace extend the run of the default one.
    return {"seed": 77} | {f"evaluate__zero_shot__{name}": value for name, value in paths.items()}


def test_text_adds_a_stage_whose_scores_are_in_mlflow(bench: Bench, texts: Path) -> None:
    from mlflow import MlflowClient

    summaries: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_pipeline, "Markdown", summaries.append)
        run = bench.pretrain(**values(texts))
    assert run.error is None
    assert [run.outcomes[stage] for stage in STAGES] == ["ran", "ran"]
    newest = "iter_0000003"
    (directory,) = (
        path
        for path in Workspace(bench.workspace).folder("zeroshot").glob("[!.]*")
        if open_artifact(path).counts["checkpoint"] == newest
    )
    scores = json.loads((directory / "zeroshot.json").read_text(encoding="utf-8"))
    assert scores["lambada"]["passages"] == 8
    assert f"| {newest} | {scores['wikitext']['word_ppl']:,.2f} |" in summaries[0]
    client = MlflowClient()
    runs = [
        json.loads(path.read_text())["run_id"]
        for path in bench.workspace.glob("runs/*/mlflow.json")
    ]
    metrics = [client.get_run(run_id).data.metrics for run_id in runs]
    expected = {
        "wikitext_ppl": scores["wikitext"]["word_ppl"],
        "lambada_accuracy": scores["lambada"]["accuracy"],
    }
    assert any(expected.items() <= run_metrics.items() for run_metrics in metrics)


def test_copied_text_is_not_scored_again(bench: Bench, texts: Path, tmp_path: Path) -> None:
    for path in texts.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert bench.pretrain(**values(tmp_path)).stages("ran") == []
    (tmp_path / "wiki").write_text("the value of the sum .", encoding="utf-8")
    assert bench.pretrain(**values(tmp_path)).stages("ran") == STAGES


def test_flow_evaluate_has_the_stage_too(bench: Bench, texts: Path) -> None:
    from flows.evaluate import evaluate

    stages: list[list[str]] = []
    report = _pipeline.StageRunner._report
    with pytest.MonkeyPatch.context() as patch:

        def remember(pipeline: _pipeline.StageRunner) -> None:
            stages.append([f"{row.stage} {row.outcome}" for row in pipeline.rows[-3:]])
            report(pipeline)

        patch.setattr(_pipeline.StageRunner, "_report", remember)
        overrides = {key.replace("__", "."): value for key, value in values(texts).items()}
        evaluate(str(bench.conf), overrides)
    assert stages == [["evaluate cached", *(f"{stage} cached" for stage in STAGES)]]


def test_missing_text_is_refused_before_any_stage_runs(bench: Bench, tmp_path: Path) -> None:
    run = bench.pretrain(evaluate__zero_shot__wikitext=str(tmp_path / "nowhere"), seed=99)
    assert "nowhere, which cannot be read: No such file or directory" in str(run.error)
    assert run.outcomes == {}
