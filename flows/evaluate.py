"""Flow `evaluate`: perplexity of the kept checkpoints, and zero-shot scores of the best."""

from typing import Any

from prefect import flow

from flows.prepare_data import data_stages
from megacore.artifact import Artifact
from tasks._pipeline import StageRunner, sentence_state
from tasks.evaluate import evaluate as score
from tasks.evaluate import evaluation_summary
from tasks.preflight import load_checked_config
from tasks.train import finished_training
from tasks.zeroshot import zeroshot, zeroshot_summary


def zero_shot_stage(pipeline: StageRunner, *inputs: Artifact) -> Artifact | None:
    """Score the best checkpoint on the texts of `evaluate.zero_shot`; return None without texts."""
    return (
        pipeline.stage(zeroshot, *inputs) if pipeline.config.evaluate.zero_shot.requested else None
    )


@flow(name="evaluate", flow_run_name="evaluate-{conf}", validate_parameters=False)
@sentence_state
def evaluate(conf: str = "gpt2-tiny", overrides: dict[str, Any] | None = None) -> None:
    """Score the finished training of `pretrain` for `conf` with these `overrides`."""
    with StageRunner.start(load_checked_config(conf, overrides, trains=False)) as pipeline:
        data = data_stages(pipeline)
        trained = finished_training(pipeline.config, *data)
        evaluation = pipeline.stage(score, trained, *data)
        pipeline.summary = evaluation_summary(evaluation)
        scored = zero_shot_stage(pipeline, trained, evaluation, *data)
        pipeline.summary += zeroshot_summary(scored)


if __name__ == "__main__":
    from tasks._cli import run_flow

    run_flow(evaluate)
