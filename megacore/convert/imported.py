"""Models of others as checkpoints of ours.

They come without data and, where there is none, without a tokenizer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

import megacore
from megacore.artifact.files import check_output, staged, write_json
from megacore.artifact.manifest import file_digest
from megacore.checkpoint.format import directory_name
from megacore.checkpoint.save import save_checkpoint
from megacore.checkpoint.spec import MODEL_KEY
from megacore.config.spec import ModelSpec
from megacore.convert.source import PREFIX
from megacore.convert.tokenizers import adopt_tokenizer, with_special_tokens
from megacore.errors import ConfigError, ConversionError

RECORD_NAME = "import.json"
TOKENIZER_DIRECTORY = "tokenizer"
OPTIMIZER_PREFIX = "optimizer."
"""Under which a checkpoint keeps the moments, by kind and name."""


@dataclass(frozen=True)
class Foreign:
    """A model in the form of another program, opened."""

    form: str
    """hf, megatron or deepspeed."""
    kind: str
    """Its class, or what the form calls it."""
    spec: ModelSpec
    tensors: Mapping[str, Tensor]
    """Under our names, in fp32, each read when it is asked for."""
    files: tuple[Path, ...]
    """What it was read from."""
    iteration: int = 0
    """Optimizer steps behind it, where it says."""
    remarks: tuple[str, ...] = ()
    """Sentences about what it leaves open."""
    moments: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """Adam's exp_avg and exp_avg_sq of every parameter, in the same way; empty without."""
    optimizer_steps: int | None = None
    """Steps behind the moments; None without."""


def open_from_hf(directory: Path) -> Foreign:
    """A transformers directory. Raises ConversionError."""
    from megacore.convert.hf.directory import open_hf, weight_files

    found, spec, tensors = open_hf(directory)
    return Foreign("hf", found.architecture, spec, tensors, weight_files(directory))


def open_from_megatron(directory: Path) -> Foreign:
    """A checkpoint of Megatron-LM. Raises CheckpointError, ConversionError."""
    from megacore.convert.megatron.checkpoint import read_megatron
    from megacore.convert.megatron.files import checkpoint_directory, rank_files

    opened = read_megatron(directory)
    found, _ = checkpoint_directory(directory)
    files = tuple(rank_files(found).values())
    kind = f"Megatron-LM {opened.spec.family}"
    return Foreign(
        "megatron", kind, opened.spec, opened.tensors, files, opened.iteration, opened.remarks
    )


def open_from_deepspeed(directory: Path) -> Foreign:
    """A checkpoint of DeepSpeed. Raises CheckpointError, ConversionError, ParallelLayoutError."""
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


OPENERS: Mapping[str, Callable[[Path], Foreign]] = {
    "hf": open_from_hf,
    "megatron": open_from_megatron,
    "deepspeed": open_from_deepspeed,
}
"""What opens a model of each form."""


def import_model(
    foreign: Foreign, source: Path, output: Path, tokenizer: Path | None = None
) -> Path:
    """Write `output/iter_…`, `output/import.json` and the tokenizer; return the checkpoint.

    `output/tokenizer` is written when there is one.

    Args:
        foreign: the model.
        source: the directory that was given.
        output: a directory that does not exist or is empty; it appears whole, or not at all.
        tokenizer: a directory with the model's tokenizer; None looks beside the model.

    Raises:
        ConfigError: `output` holds something, or `tokenizer` nothing.
        ConversionError: weights or tokenizer are of another model than the configuration.
        DataFormatError: the tokenizer is damaged.
        WorkspaceError: the disk refuses.
    """
    check_output(output)
    with staged(output) as staging:
        spec = _with_tokenizer(
            foreign.spec, tokenizer or source, staging, output, given=tokenizer is not None
        )
        tensors = {PREFIX + name: foreign.tensors[name] for name in foreign.tensors}
        state: dict[str, Any] = {MODEL_KEY: spec.model_dump(mode="json")}
        for kind, moments in foreign.moments.items():
            tensors |= {f"{OPTIMIZER_PREFIX}{kind}.{name}": moments[name] for name in moments}
            state["engine"] = {"optimizer_steps": foreign.optimizer_steps, "loss_scaler": None}
        checkpoint = save_checkpoint(staging, foreign.iteration, tensors, state)
        write_json(staging / RECORD_NAME, _record(foreign, source, spec, checkpoint))
    return output / directory_name(foreign.iteration)


def _with_tokenizer(
    spec: ModelSpec, source: Path, staging: Path, output: Path, *, given: bool
) -> ModelSpec:
    """The spec with the tokenizer of `source`, whose files go to the output."""
    target = staging / TOKENIZER_DIRECTORY
    target.mkdir()
    tokenizer = adopt_tokenizer(source, target, spec)
    if tokenizer is not None:
        return with_special_tokens(spec, tokenizer, output.absolute() / TOKENIZER_DIRECTORY, source)
    if given:
        raise ConfigError(
            f"--tokenizer {source} holds no tokenizer: give a directory with tokenizer.json"
        )
    target.rmdir()
    return spec


def _record(foreign: Foreign, source: Path, spec: ModelSpec, checkpoint: Path) -> dict[str, Any]:
    """What the checkpoint was made of."""
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
