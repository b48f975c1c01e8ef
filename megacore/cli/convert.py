"""`megacore import` and `megacore export`: conversion of checkpoints from and to other formats."""

import os
from pathlib import Path
from typing import Annotated, get_args

import typer

from megacore.cli._options import CheckpointOption, named_model, refuse_sealed
from megacore.cli._terminal import write_line
from megacore.errors import ConfigError
from megacore.paths import is_dir

TokenizerOption = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer", help="directory of the tokenizer; else the model's own, if it has one"
    ),
]
OutputOption = Annotated[
    Path, typer.Option("--output", help="directory that does not exist yet, or is empty")
]


def import_(
    output: OutputOption,
    from_hf: Annotated[
        Path | None, typer.Option("--from-hf", help="directory that save_pretrained wrote")
    ] = None,
    from_megatron: Annotated[
        Path | None,
        typer.Option("--from-megatron", help="checkpoint of Megatron-LM: its root, or one iter_*"),
    ] = None,
    from_deepspeed: Annotated[
        Path | None,
        typer.Option(
            "--from-deepspeed",
            help="checkpoint of DeepSpeed: a run's directory, or one global_step*",
        ),
    ] = None,
    from_neox: Annotated[
        Path | None,
        typer.Option(
            "--from-neox", help="checkpoint of GPT-NeoX: a run's directory, or one global_step*"
        ),
    ] = None,
    from_nanotron: Annotated[
        Path | None,
        typer.Option("--from-nanotron", help="checkpoint of nanotron: its root, or one step's"),
    ] = None,
    tokenizer: TokenizerOption = None,
) -> None:
    """Convert a model of another program to a checkpoint.

    Training can continue from it with any layout.
    """
    sources = {
        "hf": from_hf,
        "megatron": from_megatron,
        "deepspeed": from_deepspeed,
        "neox": from_neox,
        "nanotron": from_nanotron,
    }
    named_sources = {form: path for form, path in sources.items() if path is not None}
    if len(named_sources) != 1:
        raise ConfigError(
            "give one of --from-hf, --from-megatron, --from-deepspeed, --from-neox and "
            "--from-nanotron: the directory of the model"
        )
    from megacore.ranks.rank import OFFLINE

    os.environ.update(OFFLINE)
    from megacore.artifact.files import check_output
    from megacore.convert.imported import OPENERS, import_model

    refuse_sealed(output, "--output")
    check_output(output)
    [(form, source)] = named_sources.items()
    foreign = OPENERS[form](source)
    checkpoint = import_model(foreign, source, output, tokenizer)
    directory = foreign.spec.tokenizer_directory
    no_tokenizer = (
        "without a tokenizer"
        if directory is None
        else f"naming the tokenizer that its files name, {directory}"
    )
    note = "with its tokenizer" if is_dir(output / "tokenizer") else no_tokenizer
    write_line(f"wrote {checkpoint}: {foreign.kind}, {note}; it was not compared with its source")
    for remark in foreign.remarks:
        write_line(remark, stderr=True)


def export(
    output: OutputOption,
    model: Annotated[
        Path | None,
        typer.Argument(
            help="checkpoint (iter_*), or a run (key, name or path), whose newest complete one is "
            "taken",
        ),
    ] = None,
    checkpoint: CheckpointOption = None,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="hf (a transformers directory), megatron (files of its models before Megatron "
            "core) or torch_dist (Megatron core's distributed form)",
        ),
    ] = "hf",
    dtype: Annotated[
        str | None, typer.Option(help="of a transformers directory: float32 (default) or bfloat16")
    ] = None,
    tokenizer: TokenizerOption = None,
    tensor_model_parallel_size: Annotated[
        int | None, typer.Option(min=1, help="of Megatron's files")
    ] = None,
    pipeline_model_parallel_size: Annotated[
        int | None, typer.Option(min=1, help="of Megatron's files")
    ] = None,
) -> None:
    """Write a checkpoint in the format of transformers or Megatron-LM.

    The result is not compared with the checkpoint; the flow `export` compares and publishes.
    """
    _check_options(form, dtype, tensor_model_parallel_size, pipeline_model_parallel_size)
    from megacore.ranks.rank import OFFLINE

    os.environ.update(OFFLINE)
    from megacore.artifact.files import check_output
    from megacore.convert.ungated_export import export_core, export_hf, export_megatron, open_source

    path = named_model(model, checkpoint, "export")
    refuse_sealed(output, "--output")
    check_output(output)
    source = open_source(path, tokenizer)
    remark: str | None = None
    if form == "hf":
        remark = export_hf(source, output, dtype="bfloat16" if dtype == "bfloat16" else "float32")
    elif form == "torch_dist":
        export_core(source, output)
    else:
        export_megatron(
            source,
            output,
            tensor=tensor_model_parallel_size or 1,
            pipeline=pipeline_model_parallel_size or 1,
        )
    directory = source.spec.tokenizer_directory
    no_tokenizer = (
        "without a tokenizer"
        if directory is None
        else f"without its tokenizer, which is not in {directory}"
    )
    note = no_tokenizer if source.tokenizer is None else f"with the tokenizer of {source.tokenizer}"
    write_line(
        f"wrote {output} from {source.checkpoint}, {note}; it was not compared with the checkpoint"
    )
    if remark is not None:
        write_line(remark, stderr=True)


def _check_options(form: str, dtype: str | None, tensor: int | None, pipeline: int | None) -> None:
    """Raise ConfigError for an unknown format or dtype, or an option the format does not use."""
    from megacore.convert.counterparts import Dtype

    if form not in ("hf", "megatron", "torch_dist"):
        raise ConfigError(f"--format is {form}: give hf, megatron or torch_dist")
    if dtype is not None and dtype not in get_args(Dtype):
        raise ConfigError(f"--dtype is {dtype}: give {' or '.join(get_args(Dtype))}")
    if form != "hf" and dtype is not None:
        raise ConfigError(
            f"--dtype {dtype} is for --format hf: Megatron's files are written in float32"
        )
    sizes = {"--tensor-model-parallel-size": tensor, "--pipeline-model-parallel-size": pipeline}
    for name, size in sizes.items():
        if form != "megatron" and size is not None:
            kind = "a transformers directory" if form == "hf" else "Megatron core's form"
            raise ConfigError(f"{name} {size} is for --format megatron: {kind} has no layout")
