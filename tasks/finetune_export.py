"""Stage `finetune-export`: the best model as a transformers directory.

Its scores must equal those in training.
"""

from pathlib import Path
from typing import Any

from megacore.artifact import Artifact, StageKey, lock
from megacore.artifact.workspace import MODEL_DIRECTORY
from megacore.config.finetune import FinetuneConfig
from megacore.config.keys import key_parameters
from megacore.config.launch import LaunchConfig
from megacore.hardware import Hardware
from megacore.jobs.finetune import FinetuneExportJob
from megacore.ranks import stages
from megacore.redact import redact
from tasks._cache import StageResult, build, fresh_scratch, stage_task
from tasks._devices import devices
from tasks._monitor import log_tail
from tasks._parent import parent_of
from tasks.finetune import finetune_job


def export_key(
    config: FinetuneConfig, finetuned: Artifact, pretrained: Artifact, examples: Artifact
) -> StageKey:
    """Return the key of the exported model, including the parent that its card names."""
    resolved = {"best": finetuned.counts["best"], "parent": parent_of(config).tags()}
    parameters = key_parameters(config, "finetune-export", resolved)
    return StageKey.of(
        "finetune-export",
        stages.FINETUNE_EXPORT_VERSION,
        parameters,
        finetuned=finetuned,
        examples=examples,
    )


@stage_task("finetune-export", export_key)
def finetune_export(
    config: FinetuneConfig, finetuned: Artifact, pretrained: Artifact, examples: Artifact
) -> StageResult:
    """Export the best model; the stage fails if the gate fails."""
    key = export_key(config, finetuned, pretrained, examples)

    def fill(directory: Path) -> dict[str, Any]:
        scratch = fresh_scratch(finetuned.directory, f"export-{key.key}")
        job = FinetuneExportJob(
            **finetune_job(config, finetuned.directory, pretrained, examples).model_dump()
            | {
                "exit_directory": str(scratch / "exit"),
                "ranks": 1,
                "threads_per_rank": config.launch.threads_per_rank or Hardware.detect().cores,
                "hosts": {},
                "best": str(finetuned.directory / finetuned.counts["best"]),
                "output_directory": str(directory),
                "card": _card(config, finetuned, examples),
            }
        )
        with devices(LaunchConfig(), trains=False):  # its ranks are always on this host
            report = stages.convert(job, scratch, log_tail(stages.conversion_log(scratch)).poll)
        plain = {
            name: value for name, value in report.items() if isinstance(value, (int, float, str))
        }
        model_bytes = sum(path.stat().st_size for path in (directory / MODEL_DIRECTORY).iterdir())
        return {"best": finetuned.counts["best"], **plain, "model_bytes": model_bytes}

    with lock(finetuned.directory, shared=True):
        return build(config, key, fill)


def _card(config: FinetuneConfig, finetuned: Artifact, examples: Artifact) -> dict[str, str]:
    counts = finetuned.counts
    return {
        "name": config.name,
        "task": config.task.kind,
        "data": redact(config.data.source.model_dump_json(exclude_none=True)),
        "samples": f"{examples.counts['train']:,} training samples, artifact {examples.key}",
        "run": finetuned.directory.name,
        "iteration": str(counts["best_iteration"]),
        **{f"valid_{name}": f"{value:.4g}" for name, value in counts["metrics"].items()},
        **parent_of(config).tags(),
    }
