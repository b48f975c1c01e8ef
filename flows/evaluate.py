"""Flow `evaluate`: perplexity and zero-shot scores of the kept checkpoints."""

from typing import Any

from prefect import flow

from flows.prepare_data import data_stages
from megacore.artifact import Artifact
from megacore.config import RunConfig
from tasks._form import PRETRAINING, on_page, with_form
from tasks._stage_runner import StageRunner, run_name, sentence_state
from tasks.contamination import contamination_summary, withheld
from tasks.evaluate import (
    best_row,
    evaluation_summary,
    kept_checkpoints,
    perplexity_report,
    score_checkpoints,
)
from tasks.evaluate import evaluate as report_scores
from tasks.index import RunData
from tasks.preflight import load_checked_config
from tasks.train import open_finished_training, training_directory
from tasks.zeroshot import ScoredRun, zeroshot, zeroshot_summary


def score_stages(
    pipeline: StageRunner[RunConfig], trained: Artifact | None, data: RunData[Artifact]
) -> tuple[Artifact | None, tuple[Artifact, ...]]:
    """Score the kept checkpoints; `trained` is None while the training is not finished.

    Returns the report, if the training is finished, and the zero-shot scores by iteration.
    """
    directory = training_directory(pipeline.config, data)
    hidden = withheld(pipeline.config, pipeline.contamination)
    with kept_checkpoints(directory) as kept:
        scores = score_checkpoints(pipeline, directory, kept, data)
        evaluation = trained and pipeline.stage(report_scores, trained, scores.unigram, scores.rows)
        report = perplexity_report(scores.unigram, scores.rows)
        pipeline.summary = evaluation_summary(report)
        run = ScoredRun(directory, trained is not None, data, hidden)
        best = best_row(report)["checkpoint"]
        zero_shot = zeroshot(pipeline, scores.checkpoints, best, run)
    return evaluation, zero_shot


@on_page(PRETRAINING)
@flow(name="evaluate", flow_run_name=run_name, validate_parameters=False)
@sentence_state
@with_form(PRETRAINING)
def evaluate(conf: str = "gpt2-tiny", overrides: dict[str, Any] | None = None) -> None:
    """Score the checkpoints of `pretrain` for `conf` with these `overrides`.

    The training may be finished, running or stopped.
    """
    with StageRunner.start(load_checked_config(conf, overrides, trains=False)) as pipeline:
        data = data_stages(pipeline)
        trained = open_finished_training(pipeline.config, data)
        _, zero_shot = score_stages(pipeline, trained, data)
        hidden = withheld(pipeline.config, pipeline.contamination)
        pipeline.summary += zeroshot_summary(zero_shot, hidden)
        pipeline.summary += contamination_summary(pipeline.config, pipeline.contamination)


if __name__ == "__main__":
    from tasks._cli import run_flow

    run_flow(evaluate)
