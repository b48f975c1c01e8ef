"""`megacore evaluate`: zero-shot scores of a model."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from megacore.cli._models import (
    CheckpointOption,
    PrecisionOption,
    TensorParallelOption,
    TokenizerOption,
    ranks_of,
    scratch_directory,
)
from megacore.errors import ConfigError, DataFormatError

_FIRST = ("word_ppl", "token_ppl", "accuracy", "target_ppl")
"""What a reader looks for."""
_LARGE = 1e6


def evaluate(
    checkpoint: CheckpointOption,
    wikitext: Annotated[Path | None, typer.Option(help="WikiText's test split, words divided by spaces")] = None,
    lambada: Annotated[Path | None, typer.Option(help="LAMBADA's test split, JSON Lines with the key text")] = None,
    overlapping_eval: Annotated[
        int | None, typer.Option(help="tokens between the starts of WikiText's windows; else they do not overlap")
    ] = None,
    seq_length: Annotated[
        int | None, typer.Option(min=1, help="tokens of a window; else the model's positions")
    ] = None,
    tokenizer: TokenizerOption = None,
    batch_size: Annotated[int, typer.Option(min=1, help="windows or passages per forward pass")] = 8,
    tensor_model_parallel_size: TensorParallelOption = 1,
    data_parallel_size: Annotated[int, typer.Option(min=1, help="replicas that share the batches")] = 1,
    precision: PrecisionOption = "fp32",
    output: Annotated[Path | None, typer.Option(help="JSON file for the scores")] = None,
) -> None:
    """Score a checkpoint or an export on texts that it was not trained for."""
    from megacore.artifact.files import write_json
    from megacore.generate.source import find_model, find_tokenizer, require_family, tokenizer_directory
    from megacore.jobs.model import ZeroShotJob, places
    from megacore.ranks.stages import run_job
    from megacore.ranks.zeroshot import MODULE
    from megacore.zeroshot.windows import check_windows

    _check_files(wikitext, lambada, overlapping_eval, output)
    source = find_model(checkpoint)
    require_family(source, ("gpt",), "megacore evaluate")
    find_tokenizer(source, tokenizer)
    length = seq_length or source.spec.max_position_embeddings
    check_windows(length, overlapping_eval, source.spec.max_position_embeddings)
    with scratch_directory() as scratch:
        job = ZeroShotJob(
            source=source,
            tokenizer_directory=str(tokenizer_directory(source, tokenizer)),
            wikitext=None if wikitext is None else str(wikitext.absolute()),
            lambada=None if lambada is None else str(lambada.absolute()),
            seq_length=length,
            overlapping_eval=overlapping_eval,
            batch_size=batch_size,
            **ranks_of(source.spec, tensor_model_parallel_size, data_parallel_size, precision),
            **places(scratch),
        )
        scores = run_job(MODULE, job, scratch)
    if output is not None:
        write_json(output, {"model": source.directory, **scores})
    _show(source.directory, scores)


def _check_files(
    wikitext: Path | None, lambada: Path | None, overlapping_eval: int | None, output: Path | None
) -> None:
    """What can be said before anything starts. Raises ConfigError, DataFormatError."""
    if wikitext is None and lambada is None:
        raise ConfigError("there is nothing to score the model on: give --wikitext, --lambada or both")
    if wikitext is None and overlapping_eval is not None:
        raise ConfigError(f"--overlapping-eval is {overlapping_eval} without --wikitext, whose windows it is of")
    for path in (wikitext, lambada):
        if path is not None and not path.is_file():
            raise DataFormatError(f"{path} is no file: check the path")
    if output is not None and output.is_dir():
        raise ConfigError(f"--output is {output}, which is a directory: give a file")
    if output is not None and not output.absolute().parent.is_dir():
        raise ConfigError(f"--output is {output}, but {output.absolute().parent} is no directory: make it first")


def _show(model: str, scores: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=model)
    for column in ("text", "measure", "value"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for text, measures in scores.items():
        for name in sorted(measures, key=lambda name: (name not in _FIRST, name)):
            value = measures[name]
            shown = f"{value:,}" if isinstance(value, int) else f"{value:,.4f}" if value < _LARGE else f"{value:.4e}"
            table.add_row(text, name.replace("_", " "), shown)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
