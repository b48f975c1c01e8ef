"""What `megacore generate` and `megacore evaluate` have in common: a model, the ranks that run it, a place for them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, get_args

import typer

from megacore.config.spec import ModelSpec
from megacore.errors import ConfigError, ParallelLayoutError

CheckpointOption = Annotated[
    Path,
    typer.Option(
        "--checkpoint", help="a checkpoint (iter_*), a directory of them, of which the newest counts, or an export"
    ),
]
TokenizerOption = Annotated[
    Path | None, typer.Option("--tokenizer", help="directory with tokenizer.json; else the model's own")
]
TensorParallelOption = Annotated[
    int, typer.Option("--tensor-model-parallel-size", min=1, help="ranks that share each layer")
]
PrecisionOption = Annotated[str, typer.Option("--precision", help="compute type: fp32, bf16, fp16 or auto")]


def ranks_of(spec: ModelSpec, tensor: int, data: int, precision: str) -> dict[str, Any]:
    """The fields of a job that say how it is run.

    Raises ParallelLayoutError for more ranks than GPUs or than can share the model, and ConfigError for an unknown
    precision.
    """
    from megacore.config.train import Precision
    from megacore.hardware import Hardware

    if precision not in get_args(Precision):
        raise ConfigError(f"--precision is {precision}: give one of {', '.join(get_args(Precision))}")
    _check_divided(spec, tensor)
    hardware, ranks = Hardware.detect(), tensor * data
    if hardware.gpus and ranks > len(hardware.gpus):
        raise ParallelLayoutError(
            f"{ranks} ranks were asked for and this machine has {len(hardware.gpus)} visible "
            f"GPU{'s' if len(hardware.gpus) > 1 else ''}: ask for at most as many"
        )
    return {
        "ranks": ranks,
        "threads_per_rank": max(1, hardware.cores // ranks),
        "tensor_model_parallel_size": tensor,
        "precision": precision,
    }


def _check_divided(spec: ModelSpec, tensor: int) -> None:
    """What the ranks would refuse too, but later."""
    model = spec.model
    for what, length in (
        ("model.num_attention_heads", model.num_attention_heads),
        ("the width of the MLP", model.ffn_size),
        ("the padded vocabulary of", spec.padded_vocab_size),
    ):
        if length % tensor:
            raise ParallelLayoutError(
                f"{what} {length} is not a multiple of --tensor-model-parallel-size {tensor}: give a size that divides "
                "it"
            )


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """A directory for a job file and the ranks' log, removed afterwards."""
    with TemporaryDirectory(prefix="megacore-") as directory:
        yield Path(directory)
