"""Flow `pretrain`: text → tokens → maps → training → perplexity → transformers model → MLflow."""

from typing import Any

from prefect import State, flow

from flows.export import publication_stages
from flows.prepare_data import data_stages
from tasks._form import PRETRAINING, on_page, with_form
from tasks._stage_runner import StageRunner, run_name, sentence_state
from tasks.index import report_epochs
from tasks.preflight import dry_run_report, load_checked_config
from tasks.train import train


@on_page(PRETRAINING)
@flow(name="pretrain", flow_run_name=run_name, validate_parameters=False)
@sentence_state
@with_form(PRETRAINING)
def pretrain(
    conf: str = "gpt2-tiny", overrides: dict[str, Any] | None = None, dry_run: bool = False
) -> State[Any] | None:
    """Pretrain as the configuration `conf` describes, with dotted `overrides`.

    `conf` is a name in conf/ or a path. `dry_run` shows keys, cached stages, memory and days, and
    runs nothing. A training that is stopped on request ends the run in the state Stopped.
    """
    if dry_run:
        dry_run_report(conf, overrides, data_stages)
        return None
    config = load_checked_config(conf, overrides)
    with StageRunner.start(config) as pipeline:
        data = data_stages(pipeline)
        # Kept if the training fails; otherwise the outcome, which repeats it, replaces it.
        pipeline.summary = report_epochs(config, data.index)
        trained = pipeline.stage(train, data)
        publication_stages(pipeline, trained, data)
    return pipeline.ended


if __name__ == "__main__":
    from tasks._cli import run_flow

    run_flow(pretrain)
