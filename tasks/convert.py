"""Stage `convert`: export of a checkpoint as a transformers model with the same outputs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megacore.artifact import Artifact, StageKey
from megacore.artifact.workspace import CHECKPOINTS_NAME, MODEL_DIRECTORY
from megacore.checkpoint.format import protected
from megacore.config import RunConfig
from megacore.config.keys import key_parameters
from megacore.config.launch import LaunchConfig
from megacore.hardware import Hardware
from megacore.jobs.run import ConvertJob
from megacore.observe.logging import short_number
from megacore.ranks import stages
from tasks._cache import StageResult, build, fresh_scratch, stage_task
from tasks._devices import devices
from tasks._monitor import log_tail
from tasks.evaluate import read_evaluation
from tasks.index import RunData
from tasks.train import job_of


def convert_key(
    config: RunConfig,
    trained: Artifact,
    evaluation: Artifact,
    data: RunData[Artifact],
    checkpoint: str | None = None,
) -> StageKey:
    """Return the key of the exported model; None stands for the best checkpoint.

    Raises CheckpointError, ConversionError or DataFormatError for damaged files of the checkpoint
    that the run continues from, or of the tokenizer.
    """
    chosen = {"checkpoint": checkpoint or evaluation.counts["best"]}
    named = _named_tokens(config, trained, data)
    parameters = key_parameters(config, "convert", chosen | named)
    version = stages.CONVERT_VERSION
    if config.family == "bert":
        version = stages.CONVERT_VERSION_OF_BERT
    return StageKey.of(
        "convert",
        version,
        parameters,
        trained=trained,
        evaluation=evaluation,
        tokenizer=data.tokenizer,
    )


def _named_tokens(config: RunConfig, trained: Artifact, data: RunData[Artifact]) -> dict[str, Any]:
    """Return begin, further ends and a GPT's padding that the export names, where there are any.

    Without them its content is that of earlier versions, which had eod only.
    """
    from megacore.convert.tokenizers import with_begin

    job = job_of(config, trained.directory, data, ranks=1, threads=1)
    special = with_begin(job.spec, data.tokenizer.directory).special_tokens
    roles = {"bos", "ends"} | ({"pad"} if config.family == "gpt" else set())
    values = special.model_dump(mode="json", include=roles)
    return {role: value for role, value in values.items() if value not in (None, [])}


@stage_task("convert", convert_key)
def convert(
    config: RunConfig,
    trained: Artifact,
    evaluation: Artifact,
    data: RunData[Artifact],
    checkpoint: str | None = None,
) -> StageResult:
    """Export a checkpoint, or the one with the lowest validation loss.

    The stage fails if the gate fails.
    """
    key = convert_key(config, trained, evaluation, data, checkpoint)

    def fill(directory: Path) -> dict[str, Any]:
        scratch = fresh_scratch(trained.directory, f"convert-{key.key}")
        chosen = checkpoint or evaluation.counts["best"]
        rows = read_evaluation(evaluation)["checkpoints"]
        (scores,) = (row for row in rows if row["checkpoint"] == chosen)
        job = ConvertJob(
            **job_of(
                # One rank has the whole model, independent of the training's layout and of the
                # host's GPUs.
                config,
                trained.directory,
                data,
                ranks=1,
                threads=config.launch.threads_per_rank or Hardware.detect().cores,
            ).model_dump()
            | {
                "exit_directory": str(scratch / "exit"),
                "checkpoint": str(trained.directory / CHECKPOINTS_NAME / chosen),
                "output_directory": str(directory),
                "card": _card(config, trained, evaluation, data.tokens, scores),
            }
        )
        # Not the run's lock, which a flow that extends the training may hold for days.
        # The ranks of an export are always on this host.
        with devices(LaunchConfig(), trains=False), protected(Path(job.checkpoint)):
            report = stages.convert(job, scratch, log_tail(stages.conversion_log(scratch)).poll)
        return {
            "checkpoint": chosen,
            "iteration": scores["iteration"],
            "max_logit_difference": report["max_abs_logit_difference"],
            "model_bytes": sum(
                path.stat().st_size for path in (directory / MODEL_DIRECTORY).iterdir()
            ),
        }

    return build(config, key, fill, writes=lambda: _model_bytes(config, data.tokenizer))


def _model_bytes(config: RunConfig, tokenizer: Artifact) -> int:
    """Return about how many bytes the exported model takes."""
    from megacore.config.spec import ModelSpec
    from megacore.models.parameters import parameter_count

    spec = ModelSpec.of(config, tokenizer.counts["vocab_size"])
    return parameter_count(spec) * (4 if config.export.dtype == "float32" else 2)


def _card(
    config: RunConfig,
    trained: Artifact,
    evaluation: Artifact,
    tokens: Artifact,
    scores: Mapping[str, Any],
) -> dict[str, str]:
    return {
        "name": config.name,
        "source": "; ".join(
            source.model_dump_json(exclude_none=True) for source in config.data.sources
        ),
        "tokens": f"{tokens.counts['tokens']:,} tokens, artifact {tokens.key}",
        "run": trained.directory.name,
        "iteration": str(scores["iteration"]),
        "valid_ppl": short_number(scores["valid_ppl"]),
        "test_ppl": short_number(scores["test_ppl"]),
        "unigram_test_ppl": short_number(evaluation.counts["unigram_test_ppl"], ".1f"),
    }
