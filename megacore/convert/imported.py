"""Import of other programs' models as megacore checkpoints.

The checkpoints have no data. They have a tokenizer if the model comes with one.
"""

from collections.abc import Callable, Iterator, Mapping
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
from megacore.convert.deepspeed.read import open_deepspeed
from megacore.convert.hf.directory import open_hf
from megacore.convert.key_map import name_mismatch
from megacore.convert.megatron.checkpoint import open_megatron
from megacore.convert.model_source import TOKENIZER_DIRECTORY
from megacore.convert.nanotron import open_nanotron
from megacore.convert.neox import open_neox
from megacore.convert.source import Foreign, parameter_shapes
from megacore.convert.tokenizers import adopt_tokenizer, with_begin, with_special_tokens
from megacore.errors import ConfigError, ConversionError

RECORD_NAME = "import.json"
OPTIMIZER_PREFIX = "optimizer."
"""Prefix of the moments' names in a checkpoint, followed by kind and parameter."""


OPENERS: Mapping[str, Callable[[Path], Foreign]] = {
    "hf": open_hf,
    "megatron": open_megatron,
    "deepspeed": open_deepspeed,
    "neox": open_neox,
    "nanotron": open_nanotron,
}
"""Functions that open a model, by format; `megacore import` has an option `--from-…` for each."""


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
    shapes = parameter_shapes(spec)
    mismatch = name_mismatch(tensors, shapes)
    if mismatch is not None:
        raise ConversionError(
            f"the model has other tensors than its description says: {mismatch}: give the files of "
            "one model"
        )
    for name, shape in shapes.items():
        yield (
            name,
            DeferredTensor(torch.Size(shape), torch.float32, partial(_finite, tensors, name)),
        )


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
