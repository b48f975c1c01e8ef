"""Flow `evaluate`: perplexity of the checkpoints of a finished training."""

from typing import Any

from prefect import flow

from flows.prepare_data import data_stages
from tasks._pipeline import Pipeline
from tasks.evaluate import evaluate as score
from tasks.evaluate import evaluation_summary
from tasks.preflight import load_checked_config
from tasks.train import finished_training


@flow(name="evaluate", flow_run_name="evaluate-{conf}", validate_parameters=False)
def evaluate(conf: str = "gpt2-tiny", overrides: dict[str, Any] | None = None) -> None:
    """Score what `pretrain` has trained for `conf` with these `overrides`."""
    with Pipeline.start(load_checked_config(conf, overrides, trains=False)) as pipeline:
        data = data_stages(pipeline)
        trained = finished_training(pipeline.config, *data)
        pipeline.summary = evaluation_summary(pipeline.stage(score, trained, *data))


if __name__ == "__main__":
    from tasks._cli import run_flow

    run_flow(evaluate)
