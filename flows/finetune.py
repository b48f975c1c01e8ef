"""Flow `finetune`: fine-tune a pretrained model for a task.

Model and task → samples → training with Accelerate → transformers model → MLflow.
"""

from typing import Any

from prefect import State, flow

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


def input_stages(pipeline: StageRunner[FinetuneConfig]) -> tuple[Artifact, Artifact]:
    """Run the stages of a training's inputs: the model and the samples."""
    model = pipeline.stage(pretrained)
    rows = pipeline.stage(dataset)
    return model, pipeline.stage(examples, model, rows)


def training_stages(pipeline: StageRunner[FinetuneConfig]) -> None:
    """Run all stages in order, from the inputs to the published model."""
    model, samples = input_stages(pipeline)
    trained = pipeline.stage(train, model, samples)
    exported = pipeline.stage(finetune_export, trained, model, samples)
    published = pipeline.stage(finetune_publish, model, samples, trained, exported)
    pipeline.report(outcome, trained, exported, published)
    push_stage(pipeline, trained, exported, published)


def search_stages(pipeline: StageRunner[FinetuneConfig]) -> None:
    """Run the stages that compare distributions, after their inputs."""
    find_batch_sizes(pipeline, *input_stages(pipeline))


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
    stages = search_stages if find_batch_size else training_stages
    if dry_run:
        finetune_dry_run(conf, overrides, stages, find_batch_size=find_batch_size)
        return None
    config = load_checked_finetuning(conf, overrides)
    if find_batch_size:
        check_find_batch_size(config)
    else:
        check_push(config.export)
    with StageRunner.start(config) as pipeline:
        stages(pipeline)
    return pipeline.ended


if __name__ == "__main__":
    from tasks._cli import run_flow

    run_flow(finetune)
