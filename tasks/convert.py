"""Stage `convert`: export of the best checkpoint as a transformers model with the same outputs."""

from pathlib import Path
from typing import Any

from megacore.artifact import Artifact, StageKey, lock
from megacore.config import RunConfig
from megacore.config.keys import key_parameters
from megacore.hardware import Hardware
from megacore.jobs.run import ConvertJob
from megacore.ranks import stages
from tasks._cache import StageResult, build, stage_task
from tasks.evaluate import fresh_scratch, log_tail
from tasks.train import job_of


def convert_key(
    config: RunConfig,
    trained: Artifact,
    evaluation: Artifact,
    tokens: Artifact,
    tokenizer: Artifact,
    index: Artifact,
) -> StageKey:
    """Return the key of the exported model."""
    parameters = key_parameters(config, "convert", {"checkpoint": evaluation.counts["best"]})
    return StageKey.of(
        "convert",
        stages.CONVERT_VERSION,
        parameters,
        trained=trained,
        evaluation=evaluation,
        tokenizer=tokenizer,
    )


@stage_task("convert", convert_key)
def convert(
    config: RunConfig,
    trained: Artifact,
    evaluation: Artifact,
    tokens: Artifact,
    tokenizer: Artifact,
    index: Artifact,
) -> StageResult:
    """Export the checkpoint with the lowest validation loss; the stage fails if the gate fails."""
    key = convert_key(config, trained, evaluation, tokens, tokenizer, index)

    def fill(directory: Path) -> dict[str, Any]:
        scratch = fresh_scratch(trained.directory, f"convert-{key.key}")
        best = evaluation.counts["best"]
        job = ConvertJob(
            **job_of(
                # One rank has the whole model, independent of the training's layout and of the
                # host's GPUs.
                config,
                trained.directory,
                tokens,
                tokenizer,
                index,
                ranks=1,
                threads=config.launch.threads_per_rank or Hardware.detect().cores,
            ).model_dump()
            | {
                "exit_directory": str(scratch / "exit"),
                "checkpoint": str(trained.directory / "checkpoints" / best),
                "output_directory": str(directory),
                "card": _card(config, trained, evaluation, tokens),
            }
        )
        report = stages.convert(job, scratch, log_tail(scratch / "convert.log").poll)
        return {
            "checkpoint": best,
            "iteration": evaluation.counts["iteration"],
            "max_logit_difference": report["max_abs_logit_difference"],
            "model_bytes": sum(path.stat().st_size for path in (directory / "model").iterdir()),
        }

    with lock(trained.directory, shared=True):
        return build(config, key, fill, writes=lambda: _model_bytes(config, tokenizer))


def _model_bytes(config: RunConfig, tokenizer: Artifact) -> int:
    """Return about how many bytes the exported model takes."""
    from megacore.config.spec import ModelSpec
    from megacore.models.parameters import parameter_count

    spec = ModelSpec.of(config, tokenizer.counts["vocab_size"])
    return parameter_count(spec) * (4 if config.export.dtype == "float32" else 2)


def _card(
    config: RunConfig, trained: Artifact, evaluation: Artifact, tokens: Artifact
) -> dict[str, str]:
    counts = evaluation.counts
    return {
        "name": config.name,
        "source": "; ".join(
            source.model_dump_json(exclude_none=True) for source in config.data.sources
        ),
        "tokens": f"{tokens.counts['tokens']:,} tokens, artifact {tokens.key}",
        "run": trained.directory.name,
        "iteration": str(counts["iteration"]),
        "valid_ppl": f"{counts['valid_ppl']:.2f}",
        "test_ppl": f"{counts['test_ppl']:.2f}",
        "unigram_test_ppl": f"{counts['unigram_test_ppl']:.1f}",
    }
