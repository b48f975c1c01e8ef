"""Import of other programs' models as megacore checkpoints.

The checkpoints have no data. They have a tokenizer if the model comes with one.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import megacore
from megacore.artifact.files import check_output, staged, write_json
from megacore.artifact.manifest import file_digest
from megacore.artifact.workspace import WEIGHTS_PREFIX
from megacore.checkpoint.format import directory_name
from megacore.checkpoint.save import save_checkpoint
from megacore.checkpoint.shard import DeferredTensor
from megacore.checkpoint.spec import MODEL_KEY
from megacore.config.spec import ModelSpec
from megacore.convert.tokenizers import adopt_tokenizer, with_begin, with_special_tokens
from megacore.errors import ConfigError, ConversionError
from megacore.models.build import build_bare
from megacore.parallel.mesh import ProcessMesh

RECORD_NAME = "import.json"
TOKENIZER_DIRECTORY = "tokenizer"
OPTIMIZER_PREFIX = "optimizer."
"""Prefix of the moments' names in a checkpoint, followed by kind and parameter."""


@dataclass(frozen=True)
class Foreign:
    """Opened model in the format of another program."""

    form: str
    """Format: a key of OPENERS."""
    kind: str
    """Class of the model, or its description in that format."""
    spec: ModelSpec
    tensors: Mapping[str, Tensor]
    """Parameters in fp32 by our global names, each read on access."""
    files: tuple[Path, ...]
    """Files that contain the model."""
    iteration: int = 0
    """Number of optimizer steps; 0 if unknown."""
    remarks: tuple[str, ...] = ()
    """Sentences about information that the files lack."""
    moments: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """Adam's exp_avg and exp_avg_sq of every parameter, by kind and name; empty if missing."""
    optimizer_steps: int | None = None
    """Number of steps behind the moments; None without moments."""


def open_from_hf(directory: Path) -> Foreign:
    """Open a transformers directory.

    Raises:
        ConversionError: if the model has no counterpart here, or the files are damaged.
    """
    from megacore.convert.hf.directory import open_hf, weight_files

    hf_class, spec, tensors = open_hf(directory)
    return Foreign("hf", hf_class.architecture, spec, tensors, weight_files(directory))


def open_from_megatron(directory: Path) -> Foreign:
    """Open a checkpoint of Megatron-LM.

    Raises:
        CheckpointError: if files are missing or damaged.
        ConversionError: if the model has no counterpart here.
    """
    from megacore.convert.megatron.checkpoint import read_megatron
    from megacore.convert.megatron.core import core_files, is_distributed, read_core
    from megacore.convert.megatron.files import checkpoint_directory, rank_files

    iteration_directory, iteration = checkpoint_directory(directory)
    if is_distributed(iteration_directory):
        opened = read_core(iteration_directory, iteration)
        files = core_files(iteration_directory)
        kind = f"Megatron core {opened.spec.family}"
    else:
        opened = read_megatron(directory)
        files = tuple(rank_files(iteration_directory).values())
        kind = f"Megatron-LM {opened.spec.family}"
    return Foreign(
        "megatron", kind, opened.spec, opened.tensors, files, opened.iteration, opened.remarks
    )


def open_from_deepspeed(directory: Path) -> Foreign:
    """Open a checkpoint of DeepSpeed.

    Raises:
        CheckpointError: if files are missing or damaged.
        ConversionError: if the model has no counterpart here.
        ParallelLayoutError: if one of our models cannot be divided like the files.
    """
    from megacore.convert.deepspeed.read import read_deepspeed

    opened = read_deepspeed(directory)
    return Foreign(
        "deepspeed",
        opened.kind,
        opened.spec,
        opened.tensors,
        opened.files,
        opened.iteration,
        opened.remarks,
        opened.moments,
        opened.optimizer_steps,
    )


def open_from_neox(directory: Path) -> Foreign:
    """Open a checkpoint of GPT-NeoX.

    Raises:
        CheckpointError: if files are missing or damaged.
        ConversionError: if the model has no counterpart here.
    """
    from megacore.convert.neox import read_neox

    opened = read_neox(directory)
    return Foreign(
        "neox",
        "GPT-NeoX gpt",
        opened.spec,
        opened.tensors,
        opened.files,
        opened.iteration,
        opened.remarks,
    )


def open_from_nanotron(directory: Path) -> Foreign:
    """Open a checkpoint of nanotron.

    Raises:
        CheckpointError: if files are missing or damaged.
        ConversionError: if the model has no counterpart here.
    """
    from megacore.convert.nanotron import read_nanotron

    opened = read_nanotron(directory)
    return Foreign(
        "nanotron",
        f"nanotron {opened.kind}",
        opened.spec,
        opened.tensors,
        opened.files,
        opened.iteration,
        opened.remarks,
    )


OPENERS: Mapping[str, Callable[[Path], Foreign]] = {
    "hf": open_from_hf,
    "megatron": open_from_megatron,
    "deepspeed": open_from_deepspeed,
    "neox": open_from_neox,
    "nanotron": open_from_nanotron,
}
"""Functions that open a model, by format."""


def import_model(
    foreign: Foreign, source: Path, output: Path, tokenizer: Path | None = None
) -> Path:
    """Write `foreign` as a checkpoint `output/iter_…` and return the checkpoint's path.

    It also writes `output/import.json` and, if there is a tokenizer, `output/tokenizer`.

    Args:
        foreign: opened model.
        source: directory of the model.
        output: directory that does not exist or is empty. It is created completely or not at all.
        tokenizer: directory with the model's tokenizer; None means `source`.

    Raises:
        ConfigError: if `output` is not empty, or `tokenizer` contains no tokenizer.
        ConversionError: if weights or tokenizer are of another model than the configuration.
        DataFormatError: if the tokenizer is damaged.
        WorkspaceError: if `output` cannot be written.
    """
    check_output(output)
    with staged(output) as staging:
        spec = _with_tokenizer(
            foreign.spec, tokenizer or source, staging, output, required=tokenizer is not None
        )
        tensors = {
            WEIGHTS_PREFIX + name: tensor for name, tensor in _deferred(spec, foreign.tensors)
        }
        state: dict[str, Any] = {MODEL_KEY: spec.model_dump(mode="json")}
        for kind, moments in foreign.moments.items():
            tensors |= {
                f"{OPTIMIZER_PREFIX}{kind}.{name}": tensor
                for name, tensor in _deferred(spec, moments)
            }
            state["engine"] = {"optimizer_steps": foreign.optimizer_steps, "loss_scaler": None}
        checkpoint = save_checkpoint(staging, foreign.iteration, tensors, state)
        write_json(staging / RECORD_NAME, _record(foreign, source, spec, checkpoint))
    return output / directory_name(foreign.iteration)


def _deferred(
    spec: ModelSpec, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, DeferredTensor]]:
    """Yield the tensors of a model so that each is read and checked when it is written.

    Raises:
        ConversionError: if `tensors` are of another model than `spec`.
    """
    model = build_bare(spec, ProcessMesh.serial())
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    if shapes.keys() != tensors.keys():
        differing = sorted(shapes.keys() ^ tensors.keys())
        raise ConversionError(
            f"the model has other tensors than its description says: {', '.join(differing[:4])}"
        )
    for name, shape in shapes.items():
        yield name, DeferredTensor(shape, torch.float32, partial(_finite, tensors, name))


def _finite(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a tensor after checking its values."""
    tensor = tensors[name]
    # The sum of finite fp32 values is finite in fp64, and needs no memory as large as the tensor.
    if not tensor.sum(dtype=torch.float64).isfinite():
        count = int(tensor.numel() - tensor.isfinite().sum())
        raise ConversionError(
            f"{name} has NaN or infinite values ({count:,} of {tensor.numel():,}): the model's "
            "training diverged or its files are damaged, use another checkpoint"
        )
    return tensor


def _with_tokenizer(
    spec: ModelSpec, source: Path, staging: Path, output: Path, *, required: bool
) -> ModelSpec:
    """Write the tokenizer of `source` to the output and return the spec with it.

    Raises:
        ConfigError: if `required` and `source` contains no tokenizer.
    """
    target = staging / TOKENIZER_DIRECTORY
    target.mkdir()
    tokenizer = adopt_tokenizer(source, target, spec)
    if tokenizer is not None:
        directory = output.absolute() / TOKENIZER_DIRECTORY
        return with_begin(with_special_tokens(spec, tokenizer, directory, source), target)
    if required:
        raise ConfigError(
            f"--tokenizer {source} holds no tokenizer: give a directory with tokenizer.json"
        )
    target.rmdir()
    return spec


def _record(foreign: Foreign, source: Path, spec: ModelSpec, checkpoint: Path) -> dict[str, Any]:
    """Return the content of import.json: the sources of the checkpoint."""
    if not foreign.files:
        raise ConversionError(f"{source} has no files of weights")
    return {
        "megacore": megacore.__version__,
        "source": str(source.absolute()),
        "form": foreign.form,
        "class": foreign.kind,
        "files": {
            str(path.relative_to(source) if path.is_relative_to(source) else path): file_digest(
                path
            )
            for path in foreign.files
        },
        "checkpoint": checkpoint.name,
        "iteration": foreign.iteration,
        "dtype": "float32",
        "moments": sorted(foreign.moments),
        "tokenizer": spec.tokenizer_directory,
        "remarks": list(foreign.remarks),
        "gate": None,
    }
