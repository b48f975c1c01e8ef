"""`megacore generate` and `megacore evaluate`: text generation and zero-shot scores."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from megacore.cli._options import (
    CheckpointOption,
    check_output_file,
    check_seed,
    check_utf8,
    named_model,
)
from megacore.cli._terminal import write_json_text, write_line, write_table
from megacore.errors import (
    ConfigError,
    ConversionError,
    DataFormatError,
    LaunchError,
    MemoryExhaustedError,
    ParallelLayoutError,
    TrainingError,
)
from megacore.observe.logging import short_number
from megacore.paths import glob, is_file

if TYPE_CHECKING:
    from megacore.config.spec import ModelSpec
    from megacore.config.train import PasskeyConfig
    from megacore.tokenizer import Tokenizer

TokenizerOption = Annotated[
    Path | None,
    typer.Option("--tokenizer", help="directory with tokenizer.json; else the model's own"),
]
TensorParallelOption = Annotated[
    int, typer.Option("--tensor-model-parallel-size", min=1, help="ranks that share each layer")
]
PrecisionOption = Annotated[
    str, typer.Option("--precision", help="compute type: fp32, bf16, fp16 or auto")
]
ModelArgument = Annotated[
    Path | None,
    typer.Argument(
        help="a run (key, name or path), an export (key or path), a checkpoint (iter_*), or a "
        "transformers directory of a model that continues or answers texts"
    ),
]
InteractiveOption = Annotated[
    bool, typer.Option("--interactive", help="read lines, and continue or answer each")
]
_FIRST_MEASURES = ("word_ppl", "token_ppl", "accuracy", "ranked_accuracy", "target_ppl")
"""Measures to show first."""


def evaluate(
    model: Annotated[
        Path | None,
        typer.Argument(
            help="a run (key, name or path), an export (key or path), a checkpoint (iter_*), or a "
            "transformers directory"
        ),
    ] = None,
    checkpoint: CheckpointOption = None,
    wikitext: Annotated[
        Path | None, typer.Option(help="WikiText's test split, words divided by spaces")
    ] = None,
    lambada: Annotated[
        Path | None, typer.Option(help="LAMBADA's test split, JSON Lines with the key text")
    ] = None,
    passkey: Annotated[
        list[int] | None,
        typer.Option(help="tokens of prompts that hide a number; several are allowed"),
    ] = None,
    passkey_depth: Annotated[
        list[float] | None,
        typer.Option(help="places of the number, 0 (begin) to 1 (end); else 0, 0.25, 0.5, 0.75, 1"),
    ] = None,
    passkey_prompts: Annotated[
        int | None, typer.Option(help="prompts per length and depth; else 10")
    ] = None,
    passkey_candidates: Annotated[
        int | None, typer.Option(help="numbers whose likelihoods are compared; else 10")
    ] = None,
    passkey_seed: Annotated[int | None, typer.Option(help="seed of the numbers; else 1234")] = None,
    overlapping_eval: Annotated[
        int | None, typer.Option(help="tokens from one WikiText window to the next; else a window")
    ] = None,
    seq_length: Annotated[
        int | None, typer.Option(min=1, help="tokens of a window; else the model's positions")
    ] = None,
    tokenizer: TokenizerOption = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="windows or passages per forward pass")
    ] = 8,
    tensor_model_parallel_size: TensorParallelOption = 1,
    data_parallel_size: Annotated[
        int, typer.Option(min=1, help="replicas that share the batches")
    ] = 1,
    precision: PrecisionOption = "fp32",
    output: Annotated[Path | None, typer.Option(help="JSON file for the scores")] = None,
) -> None:
    """Score a checkpoint or an export on texts that it was not trained on, and on passkeys."""
    from megacore.artifact.files import standard_json, write_json
    from megacore.config.train import ZeroShotConfig
    from megacore.convert import model_source
    from megacore.jobs.model import ZeroShotJob, places
    from megacore.ranks.stages import run_job
    from megacore.zeroshot.texts import check_passkeys, check_windows

    path = named_model(model, checkpoint, "evaluate")
    passkeys = _passkey_config(
        lengths=passkey,
        depths=passkey_depth,
        prompts=passkey_prompts,
        candidates=passkey_candidates,
        seed=passkey_seed,
    )
    _check_score_files(wikitext, lambada, overlapping_eval, output, passkey=bool(passkey))
    source = model_source.find_model(path)
    model_source.require_family(source, ("gpt",), "megacore evaluate")
    model_tokenizer = model_source.find_tokenizer(source, tokenizer)
    check_passkeys(model_tokenizer, passkeys, source.spec.max_position_embeddings)
    length = seq_length or source.spec.max_position_embeddings
    check_windows(length, overlapping_eval, source.spec.max_position_embeddings)
    with _scratch_directory() as scratch:
        job = ZeroShotJob(
            source=source,
            tokenizer_directory=str(model_source.tokenizer_directory(source, tokenizer)),
            settings=ZeroShotConfig(
                wikitext=None if wikitext is None else str(wikitext.absolute()),
                lambada=None if lambada is None else str(lambada.absolute()),
                passkey=passkeys,
                overlapping_eval=overlapping_eval,
            ),
            seq_length=length,
            batch_size=batch_size,
            **ranks_of(source.spec, tensor_model_parallel_size, data_parallel_size, precision),
            **places(scratch),
        )
        scores = run_job("megacore.ranks.zeroshot", job, scratch)
    if output is not None:
        write_json(output, standard_json({"model": source.directory, **scores}))
    _print_scores(source.directory, scores)


def _passkey_config(**options: Any) -> "PasskeyConfig":
    """Return the passkey test of the given options; a missing one has its default.

    Raises ConfigError.
    """
    from megacore.config.train import PasskeyConfig
    from megacore.config.validate import validated

    values = {name: value for name, value in options.items() if value is not None}
    config = validated(PasskeyConfig, values, "the passkey test")
    if values and not config.lengths:
        raise ConfigError(
            f"the {next(iter(values))} of the passkey test are given without --passkey, its "
            "lengths in tokens: give both, or neither"
        )
    return config


def _check_score_files(
    wikitext: Path | None,
    lambada: Path | None,
    overlapping_eval: int | None,
    output: Path | None,
    *,
    passkey: bool,
) -> None:
    """Check the options before anything starts. Raises ConfigError, DataFormatError."""
    if wikitext is None and lambada is None and not passkey:
        raise ConfigError(
            "there is nothing to score the model on: give --wikitext, --lambada or --passkey"
        )
    if wikitext is None and overlapping_eval is not None:
        raise ConfigError(
            f"--overlapping-eval is {overlapping_eval} without --wikitext, whose windows it sets"
        )
    for path in (wikitext, lambada):
        if path is not None and not is_file(path):
            raise DataFormatError(f"{path} is no file: check the path")
    if output is not None:
        check_output_file(output, "--output")


def _print_scores(model: str, scores: dict[str, dict[str, Any]]) -> None:
    from rich.table import Table

    write_line(model)
    table = Table()
    for column in ("text", "measure", "value"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for text, scored in scores.items():
        cells = _cells_of(scored)
        measures = scored | cells
        for name in sorted(measures, key=lambda name: (name not in _FIRST_MEASURES, name)):
            value = measures[name]
            shown = f"{value:,}" if isinstance(value, int) else short_number(value, ",.4f")
            table.add_row(text, name.replace("_", " "), shown)
    write_table(table)


def _cells_of(measures: dict[str, Any]) -> dict[str, float]:
    """Remove the cells of a passkey test from its measures, and return them by name."""
    return {
        f"{name}, {cell['length']:,} tokens, depth {cell['depth']:g}": cell[name]
        for cell in measures.pop("cells", [])
        for name in ("accuracy", "ranked_accuracy")
    }


def generate(
    model: ModelArgument = None,
    checkpoint: CheckpointOption = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", help="text to continue; several are allowed")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="file with a prompt on each line")
    ] = None,
    interactive: InteractiveOption = False,
    tokenizer: TokenizerOption = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="tokens per prompt at most; else 64, or what the positions leave"),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="draw tokens, logits divided by this; 0 takes the most probable one"),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="draw from this many most probable tokens")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="draw from the most probable tokens with this probability together"),
    ] = None,
    seed: Annotated[int, typer.Option(help="seed of the draws")] = 1234,
    batch_size: Annotated[int, typer.Option(min=1, help="prompts at a time")] = 8,
    tensor_model_parallel_size: TensorParallelOption = 1,
    precision: PrecisionOption = "fp32",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for programs")] = False,
) -> None:
    """Continue prompts, or answer them with T5 and other encoder-decoders.

    Take the most probable token each time, or draw tokens. The text of a single prompt appears
    while it is generated.
    """
    from megacore.cli.chat import CheckpointWriter, transformers_writer, write_all
    from megacore.convert.model_source import find_model, find_tokenizer, require_family
    from megacore.jobs.model import GenerateOptions, new_token_limits

    check_seed(seed)
    options = GenerateOptions(max_new_tokens, temperature, top_k, top_p, seed)
    path = named_model(model, checkpoint, "generate")
    _check_interactive(interactive, prompt, prompt_file, as_json, tensor_model_parallel_size)
    texts = _prompts(prompt or [], prompt_file, required=not interactive)
    try:
        source = find_model(path)
    except ConversionError:
        plain = not as_json and tensor_model_parallel_size == 1 and tokenizer is None
        writer = transformers_writer(path, options) if plain and precision == "fp32" else None
        if writer is None:
            raise
        sys.stderr.write(f"{path} holds a model that transformers runs, without megacore\n")
        write_all(writer, texts)
        return
    require_family(source, ("gpt", "t5"), "megacore generate")
    model_tokenizer = find_tokenizer(source, tokenizer)
    answers, ends = source.spec.family == "t5", _end_tokens(source.spec, model_tokenizer)
    ranks = ranks_of(source.spec, tensor_model_parallel_size, 1, precision)
    prompts = _encoded(model_tokenizer, texts, ends[0] if answers else None)
    new_token_limits(prompts, options, source.spec.max_position_embeddings, answers=answers)
    if len(texts) <= 1 and not as_json and ranks["ranks"] == 1:
        threads = ranks["threads_per_rank"]
        writer = CheckpointWriter(
            source, model_tokenizer, options, ends=ends, precision=precision, threads=threads
        )
        write_all(writer, texts)
        return
    fields = {"source": source, "prompts": prompts, "options": options, "ends": ends}
    continuations = _by_ranks(fields | {"batch_size": batch_size} | ranks)
    rows = [
        _continuation_row(model_tokenizer, text, ids, continuation, answers)
        for text, ids, continuation in zip(texts, prompts, continuations, strict=True)
    ]
    _print_continuations(rows, as_json, answers)


def _by_ranks(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Generate with ranks that are started for it; `fields` are those of the job."""
    from megacore.jobs.model import GenerateJob, places
    from megacore.ranks.stages import run_job

    with _scratch_directory() as scratch:
        job = GenerateJob(**fields, **places(scratch))
        report = run_job("megacore.ranks.generate", job, scratch)
    return report["continuations"]  # type: ignore[no-any-return]


@contextmanager
def _scratch_directory() -> Iterator[Path]:
    """Yield a directory that is removed at the end, unless an error refers to the ranks' log."""
    directory, kept = Path(mkdtemp(prefix="megacore-")), False
    try:
        yield directory
    except (LaunchError, TrainingError) as error:
        log = next(iter(glob(directory, "*.log")), None)
        kept = log is not None and not isinstance(error, MemoryExhaustedError)
        if kept and str(directory) not in str(error):
            raise type(error)(f"{error} ({log})") from error
        raise
    finally:
        if not kept:
            shutil.rmtree(directory, ignore_errors=True)


def _check_interactive(
    interactive: bool,
    prompts: list[str] | None,
    file: Path | None,
    as_json: bool,
    tensor: int,
) -> None:
    """Raise ConfigError for options that a loop of lines does not have."""
    others = {
        "--prompt": bool(prompts),
        "--prompt-file": file is not None,
        "--json": as_json,
        "--tensor-model-parallel-size": tensor > 1,
    }
    wrong = next((name for name, present in others.items() if present), None)
    if interactive and wrong is not None:
        raise ConfigError(
            f"--interactive reads lines and writes text with one process: leave out {wrong}, or "
            "--interactive"
        )


def _prompts(options: list[str], file: Path | None, *, required: bool) -> list[str]:
    """Return the prompts of the command line, then those of the file.

    Raises ConfigError, DataFormatError.
    """
    from megacore.artifact.files import reason_of, regular

    texts = list(options)
    check_utf8(texts, "--prompt")
    if file is not None:
        try:
            lines = regular(file).read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise DataFormatError(
                f"{file} cannot be read ({reason_of(error)}): give a text file with a prompt "
                "per line"
            ) from error
        empty = next((number for number, line in enumerate(lines, 1) if not line), None)
        if empty is not None:
            raise DataFormatError(f"{file}:{empty} is empty: give a prompt on each line")
        texts += lines
    if required and not texts:
        raise ConfigError("there is no prompt: give --prompt, --prompt-file or --interactive")
    return texts


def _encoded(
    tokenizer: "Tokenizer", texts: list[str], end: int | None
) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each text, ending with `end` if it is not None."""
    last = [] if end is None else [end]
    encoded = [ids.tolist() for ids in tokenizer.encode_batch(texts)]
    return tuple(tuple(ids + last if ids else ids) for ids in encoded)


def _end_tokens(spec: "ModelSpec", tokenizer: "Tokenizer") -> tuple[int, ...]:
    """Return the ids of the tokens that end a text.

    The first is T5's </s>, else the end of a document; the model's other ends follow.
    """
    roles = spec.special_tokens
    end = roles.sep if spec.family == "t5" and roles.sep is not None else roles.eod
    return tuple(dict.fromkeys((tokenizer.eod_id if end is None else end, *roles.ends)))


def _continuation_row(
    tokenizer: "Tokenizer",
    prompt: str,
    ids: tuple[int, ...],
    continuation: dict[str, Any],
    answers: bool,
) -> dict[str, Any]:
    """Return the report on a prompt; its text ends before the end token, if there is one."""
    new_tokens = continuation["tokens"][:-1] if continuation["ended"] else continuation["tokens"]
    context = () if answers else ids
    start, text = tokenizer.decode(context), tokenizer.decode([*context, *new_tokens])
    added = text.removeprefix(start) if text.startswith(start) else tokenizer.decode(new_tokens)
    return {"prompt": prompt, "continuation": added, "prompt_tokens": len(ids), **continuation}


def _print_continuations(rows: list[dict[str, Any]], as_json: bool, answers: bool) -> None:
    if as_json:
        write_json_text(rows)
        return
    for number, row in enumerate(rows, 1):
        if len(rows) > 1:
            sys.stdout.write(f"== prompt {number} ==\n")
        sys.stdout.write(f"{'' if answers else row['prompt']}{row['continuation']}\n")


def ranks_of(spec: "ModelSpec", tensor: int, data: int, precision: str) -> dict[str, Any]:
    """Return the fields of a job that describe its ranks, threads and precision.

    Raises ParallelLayoutError if there are more ranks than GPUs, or the model is not divisible, and
    ConfigError for an unknown precision.
    """
    from megacore.config.train import Precision
    from megacore.hardware import Hardware

    if precision not in get_args(Precision):
        raise ConfigError(
            f"--precision is {precision}: give one of {', '.join(get_args(Precision))}"
        )
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


def _check_divided(spec: "ModelSpec", tensor: int) -> None:
    """Raise ParallelLayoutError for sizes that the ranks would refuse later."""
    model = spec.model
    for name, length in (
        ("model.num_attention_heads", model.num_attention_heads),
        ("the width of the MLP", model.ffn_size),
        ("the padded vocabulary of", spec.padded_vocab_size),
    ):
        if length % tensor:
            raise ParallelLayoutError(
                f"{name} {length} is not a multiple of --tensor-model-parallel-size {tensor}: give "
                "a size that divides it"
            )
