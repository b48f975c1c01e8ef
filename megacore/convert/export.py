"""The stage: one checkpoint to a transformers directory that has passed the gate."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import megacore
from megacore.artifact.files import workspace_errors, write_json
from megacore.checkpoint.format import reading, verify
from megacore.convert.exportable import exportable
from megacore.convert.hf.forms import form_of
from megacore.convert.hf.write import copy_tokenizer, write_model
from megacore.convert.model_card import model_card
from megacore.convert.outputs import Pair
from megacore.convert.parity import (
    check_models,
    compare_native,
    load_exported,
    load_exported_tokenizer,
    our_perplexity,
)
from megacore.convert.report import ParityReport
from megacore.convert.sample import write_sample
from megacore.convert.source import CheckpointTensors
from megacore.convert.splits import samples_of
from megacore.convert.tokenizer_parity import compare_tokenizers
from megacore.convert.weights import load_weights
from megacore.errors import ConversionError
from megacore.jobs.run import ConvertJob
from megacore.models.base import Model
from megacore.tokenizer import load_tokenizer

MODEL_DIRECTORY = "model"
"""The transformers directory, below the stage's output."""
REPORT_NAME = "parity.json"
SAMPLE_NAME = "sample.txt"


def export(job: ConvertJob, beat: Callable[[str], None] = lambda phase: None) -> ParityReport:
    """Fill `job.output_directory` with `model/`, `parity.json` and `sample.txt`.

    The weights are the checkpoint's fp32 main weights, written in `export.dtype`. When the gate fails its report is
    also left in `job.exit_directory`, because a failed stage's output is discarded. `beat` is told each phase, and of
    the long ones each tensor and each batch.

    Raises:
        ConversionError: the model has no counterpart, or the export differs from it.
        CheckpointError: the checkpoint is damaged or of another model.
        DataFormatError: the validation split has no samples.
    """
    exportable(job.config)
    output, directory = Path(job.output_directory), Path(job.output_directory) / MODEL_DIRECTORY
    found, form = form_of(job.spec)
    with reading(Path(job.checkpoint)):
        beat("verify")
        marker = verify(Path(job.checkpoint))
        tensors = _Told(CheckpointTensors(Path(job.checkpoint)), lambda: beat("read weights"))
        write_export(directory, job, tensors)
        model = load_weights(job.spec, tensors, _device())
    report, exported = pass_gate(job, model, beat)
    beat("sample")
    table = form.key_map(job.spec)
    card = model_card(
        job.config,
        job.spec,
        found,
        version=megacore.__version__,
        parameters=sum(int(np.prod(shape)) for shape in table.their_shapes.values()),
        iterations=marker.iteration,
        facts=job.card,
        report=report,
    )
    with workspace_errors(output):
        (directory / "README.md").write_text(card, encoding="utf-8")
    write_sample(
        output / SAMPLE_NAME,
        job.config.family,
        exported.to("cpu"),
        load_exported_tokenizer(directory),
        prompt=job.config.export.sample_prompt,
        new_tokens=job.config.export.sample_tokens,
        seed=job.config.seed,
    )
    return report


class _Told(Mapping[str, Tensor]):
    """Tensors of which each look-up is told first."""

    def __init__(self, tensors: Mapping[str, Tensor], tell: Callable[[], None]) -> None:
        self._tensors, self._tell = tensors, tell

    def __getitem__(self, name: str) -> Tensor:
        self._tell()
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def write_export(directory: Path, job: ConvertJob, tensors: Mapping[str, Tensor]) -> None:
    """Write weights, configuration and tokenizer; one tensor is in memory at a time.

    Raises ConversionError when `tensors` are not those of the configuration, WorkspaceError.
    """
    write_model(directory, job.spec, tensors, dtype=job.config.export.dtype)
    copy_tokenizer(Path(job.tokenizer_directory), directory, job.config.max_position_embeddings)


def pass_gate(
    job: ConvertJob, model: Model, beat: Callable[[str], None] = lambda phase: None
) -> tuple[ParityReport, Any]:
    """Compare what transformers loads from the job's output with `model`, and write `parity.json`.

    The weights of `model` are rounded to the export's type. Returns the report and the loaded model.

    Raises ConversionError when they differ.
    """
    config = job.config.export
    directory = Path(job.output_directory) / MODEL_DIRECTORY
    beat("load the export")
    exported, tokenizer = load_exported(directory), load_exported_tokenizer(directory)
    device = next(model.parameters()).device
    beat("compare")
    samples = samples_of(job, device, lambda: beat("compare perplexities"))
    report = ParityReport(config.parity_tolerance, config.dtype, perplexity_split=samples.split)
    pair = Pair(job.spec, form_of(job.spec)[1], model, exported.to(device))
    compare_tokenizers(
        report,
        load_tokenizer(Path(job.tokenizer_directory)),
        tokenizer,
        job.special_tokens,
        samples.texts(job),
    )
    if config.dtype != "float32":
        trained = our_perplexity(pair, samples.batches)
        _round(model, getattr(torch, config.dtype))
        native = load_exported(directory, getattr(torch, config.dtype)).to(device)
        compare_native(report, native, trained, samples.batches)
    check_models(report, pair, samples.validation, samples.batches)
    _write_report(job, report)
    return report, exported


def _write_report(job: ConvertJob, report: ParityReport) -> None:
    """Write the report where the output is; of a failure also where it outlives the output, and raise it."""
    write_json(Path(job.output_directory) / REPORT_NAME, report.to_json())
    if report.passed:
        return
    kept = Path(job.exit_directory) / REPORT_NAME
    with workspace_errors(kept):
        kept.parent.mkdir(parents=True, exist_ok=True)
    write_json(kept, report.to_json())
    raise ConversionError(
        f"the export of {job.checkpoint} is not the model that was trained and is not published: "
        f"{report.sentence()}; every number is in {kept}"
    )


def _round(model: Model, dtype: torch.dtype) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))


def _device() -> torch.device:
    """A GPU where there is one: a test split is scored there in seconds."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
