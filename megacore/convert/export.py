"""The stage: one checkpoint to a transformers directory that has passed the gate."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

import megacore
from megacore.artifact.files import workspace_errors, write_json
from megacore.checkpoint.format import verify
from megacore.convert import hf_gpt2
from megacore.convert.exportable import exportable
from megacore.convert.key_map import KeyMap
from megacore.convert.model_card import model_card
from megacore.convert.parity import check_parity, load_exported
from megacore.convert.report import ParityReport
from megacore.convert.safetensors_stream import write_float32
from megacore.convert.sample import write_sample
from megacore.convert.source import CheckpointTensors
from megacore.data.build import open_split
from megacore.errors import ConversionError, DataFormatError
from megacore.launch.job import ConvertJob
from megacore.models.build import build_model
from megacore.models.gpt import GPTModel
from megacore.parallel.mesh import ProcessMesh
from megacore.tokenizer import load_tokenizer

MODEL_DIRECTORY = "model"
"""The transformers directory, below the stage's output."""
REPORT_NAME = "parity.json"
SAMPLE_NAME = "sample.txt"
_TOKENIZER_FILES = ("tokenizer.json", "special_tokens_map.json", "vocab.json", "merges.txt")


def export(job: ConvertJob) -> ParityReport:
    """Fill `job.output_directory` with `model/`, `parity.json` and `sample.txt`.

    The weights are the checkpoint's fp32 main weights, written in float32. When the gate fails its report is also
    left in `job.exit_directory`, because a failed stage's output is discarded.

    Raises:
        ConversionError: the model has no counterpart, or the export differs from it.
        CheckpointError: the checkpoint is damaged or of another model.
        DataFormatError: the validation split has no samples.
    """
    exportable(job.config)
    output = Path(job.output_directory)
    marker = verify(Path(job.checkpoint))
    tensors = CheckpointTensors(Path(job.checkpoint))
    model = build_model(job.config, job.vocab_size, ProcessMesh.serial(), device="meta")
    table = hf_gpt2.key_map(job.config, job.vocab_size, model.padded_vocab_size)
    write_model(output / MODEL_DIRECTORY, job, table, tensors)
    take_weights(model, tensors)
    exported, tokenizer = load_exported(output / MODEL_DIRECTORY)
    report = pass_gate(job, table, model, exported, tokenizer)
    card = model_card(
        job.config,
        version=megacore.__version__,
        vocab_size=job.vocab_size,
        parameters=sum(int(np.prod(shape)) for shape in table.their_shapes.values()),
        iterations=marker.iteration,
        facts=job.card,
        report=report,
    )
    with workspace_errors(output):
        (output / MODEL_DIRECTORY / "README.md").write_text(card, encoding="utf-8")
    write_sample(
        output / SAMPLE_NAME,
        exported,
        tokenizer,
        prompt=job.config.export.sample_prompt,
        new_tokens=job.config.export.sample_tokens,
        seed=job.config.seed,
    )
    return report


def write_model(directory: Path, job: ConvertJob, table: KeyMap, tensors: Mapping[str, Tensor]) -> None:
    """Write weights, configuration and tokenizer; one tensor is in memory at a time.

    Raises ConversionError when `tensors` are not those of the configuration, WorkspaceError.
    """
    with workspace_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    write_float32(directory / "model.safetensors", table.their_shapes, table.forward(tensors))
    write_json(directory / "config.json", hf_gpt2.model_config(job.config, job.vocab_size, job.eod_id))
    write_json(directory / "generation_config.json", hf_gpt2.generation_config(job.eod_id))
    copy_tokenizer(Path(job.tokenizer_directory), directory, job.config.max_position_embeddings)


def copy_tokenizer(source: Path, directory: Path, positions: int) -> None:
    """Copy the tokenizer's files; its `model_max_length` becomes the model's positions.

    Raises ConversionError when the tokenizer has no configuration.
    """
    path = source / "tokenizer_config.json"
    try:
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConversionError(f"{path} cannot be read ({error}): build the tokenizer again") from error
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            with workspace_errors(directory):
                shutil.copyfile(source / name, directory / name)
    write_json(directory / path.name, {**settings, "model_max_length": positions})


def take_weights(model: GPTModel, tensors: Mapping[str, Tensor]) -> None:
    """Give a model built on the meta device its weights. Raises ConversionError when names or shapes differ."""
    try:
        model.load_state_dict(dict(tensors.items()), strict=True, assign=True)
    except RuntimeError as error:
        raise ConversionError(
            f"the checkpoint is of another model than the configuration: {' '.join(str(error).split())[:500]}"
        ) from error


def pass_gate(job: ConvertJob, table: KeyMap, model: GPTModel, exported: Any, exported_tokenizer: Any) -> ParityReport:
    """Compare what transformers loaded with `model` and write `parity.json`.

    Raises ConversionError when they differ.
    """
    report = check_parity(
        exported,
        exported_tokenizer,
        model,
        load_tokenizer(Path(job.tokenizer_directory)),
        validation_samples(job),
        table,
        hf_gpt2.module_pairs(job.config.model.num_layers),
        job.config.export.parity_tolerance,
    )
    write_json(Path(job.output_directory) / REPORT_NAME, report.to_json())
    if not report.passed:
        kept = Path(job.exit_directory) / REPORT_NAME
        with workspace_errors(kept):
            kept.parent.mkdir(parents=True, exist_ok=True)
        write_json(kept, report.to_json())
        raise ConversionError(
            f"the export of {job.checkpoint} is not the model that was trained and is not published: "
            f"{report.sentence()}; every number is in {kept}"
        )
    return report


def validation_samples(job: ConvertJob) -> npt.NDArray[np.int64]:
    """The first `export.parity_samples` samples of the validation split (all, if it has fewer), [samples, s + 1].

    Padding becomes token 0: both models are compared on whatever they read.

    Raises DataFormatError when the split has none.
    """
    dataset = open_split(
        job.token_prefixes,
        job.index_directory,
        "valid",
        job.config.data,
        seed=job.config.seed,
        tokenizer_directory=job.tokenizer_directory,
    )
    count = min(job.config.export.parity_samples, len(dataset))
    if count == 0:
        raise DataFormatError(
            f"{job.index_directory} has no validation samples on which the export can be compared: "
            f"give data.split {job.config.data.split_weights!r} a larger second weight"
        )
    return np.maximum(dataset.gather(range(count)), 0)
