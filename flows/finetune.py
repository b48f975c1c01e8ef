"""Flow `finetune`: fine-tune a pretrained model for a task.

Model and task → samples → training with Accelerate → transformers model → MLflow.
"""

from typing import Any

from prefect import State, flow
from prefect.artifacts import create_markdown_artifact

from megacore.artifact import Artifact
from megacore.config.finetune import FinetuneConfig
from tasks._form import FINE_TUNING, on_page, with_form
from tasks._stage_runner import StageRunner, run_name, sentence_state
from tasks.find_batch_size import check_find_batch_size, find_batch_sizes
from tasks.finetune import finetune as train
from tasks.finetune_data import dataset, examples, pretrained
from tasks.finetune_export import finetune_export
from tasks.finetune_preflight import finetune_dry_run, load_checked_finetuning
from tasks.finetune_publish import finetune_publish, outcome
from tasks.push import check_push, push_stage


def prepared(pipeline: StageRunner[FinetuneConfig]) -> tuple[Artifact, Artifact]:
    """Prepare the inputs of the training: the model and the samples."""
    model = pipeline.stage(pretrained)
    rows = pipeline.stage(dataset)
    return model, pipeline.stage(examples, model, rows)


@on_page(FINE_TUNING)
@flow(name="finetune", flow_run_name=run_name, validate_parameters=False)
@sentence_state
@with_form(FINE_TUNING)
def finetune(
    conf: str = "mrpc",
    overrides: dict[str, Any] | None = None,
    dry_run: bool = False,
    find_batch_size: bool = False,
) -> State[Any] | None:
    """Fine-tune as the configuration `conf` describes, with dotted `overrides`.

    `conf` is a name in conf/finetune/ or a path. `dry_run` shows keys and cached stages, and runs
    nothing. `find_batch_size` finds the largest micro batch that fits for each distribution, and
    then ends. A training that is stopped on request ends the run in the state Stopped.
    """
    if dry_run:
        finetune_dry_run(conf, overrides, find_batch_size=find_batch_size)
        return None
    config = load_checked_finetuning(conf, overrides)
    if find_batch_size:
        check_find_batch_size(config)
    else:
        check_push(config.export)
    with StageRunner.start(config) as pipeline:
        model, samples = prepared(pipeline)
        if find_batch_size:
            pipeline.summary = find_batch_sizes(pipeline, model, samples)
            create_markdown_artifact(
                pipeline.summary, key="batch-sizes-table", description=f"of {config.name}"
            )
            return None
        trained = pipeline.stage(train, model, samples)
        exported = pipeline.stage(finetune_export, trained, model, samples)
        published = pipeline.stage(finetune_publish, model, samples, trained, exported)
        pipeline.summary = outcome(config, trained, exported, published)
        push_stage(pipeline, trained, exported, published)
    return pipeline.ended


if __name__ == "__main__":
    from tasks._cli import run_flow

    run_flow(finetune)
