"""Flow `export`: the best checkpoint of a finished training as a transformers model in MLflow."""

from typing import Any

from prefect import flow

from flows.evaluate import score_stages
from flows.prepare_data import data_stages
from megacore.artifact import Artifact
from megacore.config.run import RunConfig
from megacore.zeroshot.harness import check_tasks
from tasks._form import PRETRAINING, on_page, with_form
from tasks._stage_runner import StageRunner, run_name, sentence_state
from tasks.contamination import contamination_summary, withheld
from tasks.convert import convert
from tasks.evaluate import kept_checkpoints
from tasks.index import RunData
from tasks.lm_eval import lm_eval_exports, lm_eval_stages, lm_eval_summary
from tasks.preflight import load_checked_config
from tasks.publish import outcome, publish
from tasks.push import check_push, push_stage
from tasks.train import finished_training
from tasks.zeroshot import ScoredRun, zeroshot_summary


def publication_stages(
    pipeline: StageRunner[RunConfig], trained: Artifact, data: RunData[Artifact]
) -> None:
    """Run the stages after a training: scores, conversion, lm-eval, publication and summary."""
    # Another flow may extend the training: its retention must not delete what is exported.
    with kept_checkpoints(trained.directory):
        evaluation, zero_shot = score_stages(pipeline, trained, data)
        assert evaluation is not None, "a finished training has a report"
        exported = pipeline.stage(convert, trained, evaluation, data)
        exports = lm_eval_exports(pipeline, trained, evaluation, exported, data)
    found = pipeline.contamination
    hidden = withheld(pipeline.config, found)
    scored = lm_eval_stages(pipeline, exports, ScoredRun(trained.directory, True, data, hidden))
    all_scores = (*zero_shot, *scored)
    published = pipeline.stage(publish, trained, evaluation, exported, data, all_scores, found)
    pipeline.summary = outcome(
        pipeline.config, trained, evaluation, exported, published, data.index
    )
    pipeline.summary += zeroshot_summary(zero_shot, hidden) + lm_eval_summary(scored, hidden)
    pipeline.summary += contamination_summary(pipeline.config, found)
    push_stage(pipeline, trained, exported, published)


@on_page(PRETRAINING)
@flow(name="export", flow_run_name=run_name, validate_parameters=False)
@sentence_state
@with_form(PRETRAINING)
def export(conf: str = "gpt2-tiny", overrides: dict[str, Any] | None = None) -> None:
    """Export and publish the finished training of `pretrain` for `conf` with these `overrides`."""
    config = load_checked_config(conf, overrides, trains=False)
    check_push(config.export)
    check_tasks(config.evaluate.lm_eval, config.max_position_embeddings)
    with StageRunner.start(config) as pipeline:
        data = data_stages(pipeline)
        trained = finished_training(config, data)
        publication_stages(pipeline, trained, data)


if __name__ == "__main__":
    from tasks._cli import run_flow

    run_flow(export)
