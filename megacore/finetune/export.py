"""The stage: the best model of a fine-tuning as a transformers directory that has passed the gate."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import megacore
from megacore.artifact.files import workspace_errors, write_json
from megacore.errors import ConversionError
from megacore.finetune.best import MODEL_NAME, read_best
from megacore.finetune.build import build_task
from megacore.finetune.card import finetuned_card
from megacore.finetune.gate import compare_losses, compare_tokenizers, load_exported
from megacore.finetune.job import FinetuneExportJob
from megacore.finetune.samples import sample_text
from megacore.finetune.task import FinetuneTask

REPORT_NAME = "parity.json"
SAMPLE_NAME = "sample.txt"


def export(job: FinetuneExportJob, device: torch.device, beat: Callable[[str], None] = lambda phase: None) -> None:
    """Fill `job.output_directory` with `model/`, `parity.json` and `sample.txt`.

    When the gate refuses the model, why is also left as `parity.json` in `job.exit_directory`, because a failed stage's
    output is discarded.

    Raises:
        ConversionError: the directory is not the model that was trained.
        CheckpointError: the best model is damaged or incomplete.
        DataFormatError: the validation split has no sample.
        WorkspaceError: the output cannot be written.
    """
    beat("verify")
    task = build_task(job.config, Path(job.examples_directory), Path(job.pretrained_directory))
    try:
        export_best(job, task, device, beat)
    except ConversionError as error:
        directory = Path(job.exit_directory)
        with workspace_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            write_json(directory / REPORT_NAME, {"passed": False, "problem": str(error)})
        raise


def export_best(
    job: FinetuneExportJob, task: FinetuneTask, device: torch.device, beat: Callable[[str], None] = lambda phase: None
) -> dict[str, Any]:
    """As `export`, for a task that is there already; returns the gate's report."""
    best, output = Path(job.best), Path(job.output_directory)
    directory = output / MODEL_NAME
    recorded = read_best(best)
    beat("copy")
    with workspace_errors(output):
        shutil.copytree(best / MODEL_NAME, directory)
    beat("load")
    exported = load_exported(directory, job.config.task.kind)
    exported.model.to(device)
    texts = compare_tokenizers(exported, task, directory)
    report = {"passed": True, "texts": texts, **compare_losses(exported, task, recorded, directory, beat)}
    beat("sample")
    with workspace_errors(output):
        sample = sample_text(job.config, task, exported)
        (output / SAMPLE_NAME).write_text(sample, encoding="utf-8")
        card = finetuned_card(
            job.config,
            exported.model,
            version=megacore.__version__,
            recorded=recorded,
            report=report,
            facts=job.card,
        )
        (directory / "README.md").write_text(card, encoding="utf-8")
        write_json(output / REPORT_NAME, report)
    return report
