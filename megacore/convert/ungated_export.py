"""Export of checkpoints to the formats of other programs, without data and without the gate.

The tokenizer is exported too, if the checkpoint has one.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megacore
from megacore.artifact.files import read_json, staged, workspace_errors, write_json
from megacore.artifact.manifest import file_digest
from megacore.artifact.workspace import RUN_FILE
from megacore.checkpoint.format import MARKER_NAME, Marker, reading, verify
from megacore.config.spec import ModelSpec
from megacore.convert.counterparts import Dtype, counterpart, replaces_tokenizer
from megacore.convert.hf.write import copy_tokenizer, write_model
from megacore.convert.model_card import bare_card
from megacore.convert.model_source import check_vocabulary, find_model
from megacore.convert.source import CheckpointTensors
from megacore.convert.tokenizers import tokenizer_size, with_begin
from megacore.errors import ConfigError, ConversionError
from megacore.jobs.model import ModelSource
from megacore.paths import is_file
from megacore.tokenizer.load import TOKENIZER_CONFIG_NAME, TOKENIZER_NAME

RECORD_NAME = "export.json"
_REPLACED = (
    "AutoTokenizer of transformers 5 reads the tokenizer of this {} as another one, which encodes "
    "texts otherwise: load it with PreTrainedTokenizerFast.from_pretrained"
)


@dataclass(frozen=True)
class Source:
    """Complete megacore checkpoint and its tokenizer."""

    checkpoint: Path
    marker: Marker
    spec: ModelSpec
    tokenizer: Path | None
    """Directory of the tokenizer; None if the checkpoint has none, or it no longer exists."""

    @property
    def exported_spec(self) -> ModelSpec:
        """Spec that names the tokenizer of the export."""
        directory = self.tokenizer and str(self.tokenizer)
        return self.spec.model_copy(update={"tokenizer_directory": directory})


def open_source(path: Path, tokenizer: Path | None = None) -> Source:
    """Open and fully verify the checkpoint at `path`, or the newest complete one of a run.

    `tokenizer` replaces the tokenizer that the checkpoint names.

    Raises:
        CheckpointError: if there is no checkpoint, it is damaged, or it does not describe its
            model.
        ConversionError: if `path` is a transformers directory.
        ConfigError: if `tokenizer` contains no tokenizer, or a tokenizer is of another vocabulary.
        DataFormatError: if the tokenizer's files are damaged.
    """
    source = find_model(path)
    if source.exported:
        raise ConversionError(
            f"{path} is a transformers directory already: give a checkpoint (iter_*)"
        )
    directory = _tokenizer(source, tokenizer)
    checkpoint = Path(source.directory)
    return Source(checkpoint, verify(checkpoint), source.spec, directory)


def _tokenizer(source: ModelSource, requested: Path | None) -> Path | None:
    """Return the directory of the requested tokenizer, or of the model's own; None without one.

    Raises:
        ConfigError: if there is none as requested, or one of another vocabulary.
        DataFormatError: if the tokenizer's files are damaged.
    """
    named = source.spec.tokenizer_directory if requested is None else requested.absolute()
    if named is None:
        return None
    directory = Path(named)
    size = tokenizer_size(directory) if is_file(directory / TOKENIZER_CONFIG_NAME) else None
    if size is not None:
        check_vocabulary(source, directory, size)
        return directory
    if requested is None:
        return None
    raise ConfigError(
        f"--tokenizer {directory} has no tokenizer: give a directory with "
        f"{TOKENIZER_CONFIG_NAME} and tokenizer.json"
    )


def export_hf(source: Source, output: Path, *, dtype: Dtype = "float32") -> str | None:
    """Write a transformers directory: weights, configuration, tokenizer, card and export.json.

    `output` must not exist or be empty. It is created completely or not at all.

    Returns:
        A sentence if transformers reads the tokenizer as another one, which the card has too.

    Raises:
        ConversionError: if no class of transformers has this configuration.
        ConfigError: if `output` is not empty.
        CheckpointError: if the checkpoint is damaged.
        DataFormatError: if the tokenizer's files are damaged.
        WorkspaceError: if `output` cannot be written.
    """
    hf_class = counterpart(source.spec.family, source.spec.model)
    spec = source.spec
    remark: str | None = None
    facts = {"checkpoint": str(source.checkpoint), **_run_facts(source.checkpoint)}
    if source.tokenizer is None:
        facts["tokenizer"] = "none: put the model's own next to its weights"
    else:
        spec = with_begin(spec, source.tokenizer)
    with reading(source.checkpoint), staged(output) as staging:
        write_model(staging, spec, CheckpointTensors(source.checkpoint), dtype=dtype)
        if source.tokenizer is not None:
            copy_tokenizer(source.tokenizer, staging, spec)
            if replaces_tokenizer(hf_class, staging / TOKENIZER_NAME):
                remark = facts["tokenizer"] = _REPLACED.format(hf_class.architecture)
        card = bare_card(
            output.absolute().name,
            source.spec,
            iterations=source.marker.iteration,
            dtype=dtype,
            facts=facts,
        )
        with workspace_errors(staging):
            (staging / "README.md").write_text(card, encoding="utf-8")
        write_json(staging / RECORD_NAME, _record(source, "hf", hf_class.architecture, dtype))
    return remark


def export_megatron(source: Source, output: Path, *, tensor: int, pipeline: int) -> None:
    """Write a checkpoint in Megatron-LM's file format and export.json.

    It raises the errors of `write_megatron` and `staged`.
    """
    from megacore.convert.megatron.args import check_megatron
    from megacore.convert.megatron.checkpoint import write_megatron

    spec = source.exported_spec
    check_megatron(spec, tensor=tensor, pipeline=pipeline)
    with reading(source.checkpoint), staged(output) as staging:
        write_megatron(
            spec,
            CheckpointTensors(source.checkpoint),
            staging,
            iteration=source.marker.iteration,
            tensor=tensor,
            pipeline=pipeline,
        )
        layout = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
        record = _record(source, "megatron", f"Megatron-LM {spec.family}", "float32")
        write_json(staging / RECORD_NAME, record | layout)


def export_core(source: Source, output: Path) -> None:
    """Write a checkpoint in Megatron core's distributed form and export.json.

    It raises the errors of `write_core` and `staged`.
    """
    from megacore.convert.megatron.core_write import check_core, write_core

    spec = source.exported_spec
    check_core(spec)
    with reading(source.checkpoint), staged(output) as staging:
        tensors = CheckpointTensors(source.checkpoint)
        write_core(spec, tensors, staging, iteration=source.marker.iteration)
        record = _record(source, "torch_dist", f"Megatron core {spec.family}", "float32")
        write_json(staging / RECORD_NAME, record)


def _record(source: Source, form: str, kind: str, dtype: str) -> dict[str, Any]:
    """Return the content of export.json. `gate` is None because only publication requires one."""
    return {
        "megacore": megacore.__version__,
        "source": str(source.checkpoint),
        "digest": file_digest(source.checkpoint / MARKER_NAME),
        "iteration": source.marker.iteration,
        "form": form,
        "class": kind,
        "dtype": dtype,
        "tokenizer": None if source.tokenizer is None else str(source.tokenizer),
        "gate": None,
    }


def _run_facts(checkpoint: Path) -> dict[str, str]:
    """Return name and token files of the checkpoint's run; empty if it belongs to none."""
    try:
        job = read_json(checkpoint.parent.parent / RUN_FILE)
        return {"run": job["config"]["name"], "tokens": ", ".join(job["token_prefixes"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
