"""`megacore generate`: text from a model."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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

if TYPE_CHECKING:
    from megacore.config.spec import ModelSpec
    from megacore.tokenizer import Tokenizer


def generate(
    checkpoint: CheckpointOption,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", help="text to continue; several are allowed")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="file with a prompt on each line")] = None,
    tokenizer: TokenizerOption = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="tokens per prompt at most; else 64, or what the positions leave")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="draw tokens, logits divided by this; 0 takes the most probable one")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="draw from this many most probable tokens")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="draw from the most probable tokens with this probability together")
    ] = None,
    seed: Annotated[int, typer.Option(help="of the draws")] = 1234,
    batch_size: Annotated[int, typer.Option(min=1, help="prompts at a time")] = 8,
    tensor_model_parallel_size: TensorParallelOption = 1,
    precision: PrecisionOption = "fp32",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for programs")] = False,
) -> None:
    """Continue prompts, or answer them with T5: the most probable token each time, or tokens that are drawn."""
    from megacore.generate.options import GenerateOptions, new_token_limits
    from megacore.generate.source import find_model, find_tokenizer, require_family
    from megacore.jobs.model import GenerateJob, places
    from megacore.ranks.generate import MODULE
    from megacore.ranks.stages import run_job

    options = GenerateOptions(max_new_tokens, temperature, top_k, top_p, seed)
    texts = _prompts(prompt or [], prompt_file)
    source = find_model(checkpoint)
    require_family(source, ("gpt", "t5"), "megacore generate")
    own = find_tokenizer(source, tokenizer)
    answers, end = source.spec.family == "t5", _end(source.spec, own)
    prompts = _encoded(own, texts, end if answers else None)
    new_token_limits(prompts, options, source.spec.max_position_embeddings, answers=answers)
    with scratch_directory() as scratch:
        job = GenerateJob(
            source=source,
            prompts=prompts,
            options=options,
            end=end,
            batch_size=batch_size,
            **ranks_of(source.spec, tensor_model_parallel_size, 1, precision),
            **places(scratch),
        )
        found = run_job(MODULE, job, scratch)["continuations"]
    rows = [_row(own, text, ids, one, answers) for text, ids, one in zip(texts, prompts, found, strict=True)]
    _show(rows, as_json, answers)


def _prompts(given: list[str], file: Path | None) -> list[str]:
    """The prompts of the command line, then those of the file. Raises ConfigError, DataFormatError."""
    texts = list(given)
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise DataFormatError(
                f"{file} cannot be read ({error}): give a text file with a prompt per line"
            ) from error
        empty = next((number for number, line in enumerate(lines, 1) if not line), None)
        if empty is not None:
            raise DataFormatError(f"{file}:{empty} is empty: give a prompt on each line")
        texts += lines
    if not texts:
        raise ConfigError("there is no prompt: give --prompt or --prompt-file")
    return texts


def _encoded(tokenizer: "Tokenizer", texts: list[str], end: int | None) -> tuple[tuple[int, ...], ...]:
    """The ids of each text; what T5 reads ends with `end`."""
    last = [] if end is None else [end]
    found = [ids.tolist() for ids in tokenizer.encode_batch(texts)]
    return tuple(tuple(ids + last if ids else ids) for ids in found)


def _end(spec: "ModelSpec", tokenizer: "Tokenizer") -> int:
    """Id of the token that ends a text: T5's </s>, else the end of a document."""
    roles = spec.special_tokens
    own = roles.sep if spec.family == "t5" and roles.sep is not None else roles.eod
    return tokenizer.eod_id if own is None else own


def _row(
    tokenizer: "Tokenizer", prompt: str, ids: tuple[int, ...], found: dict[str, Any], answers: bool
) -> dict[str, Any]:
    """What is reported of a prompt; its text ends where the model has ended it."""
    written = found["tokens"][:-1] if found["ended"] else found["tokens"]
    before = () if answers else ids
    start, text = tokenizer.decode(before), tokenizer.decode([*before, *written])
    added = text.removeprefix(start) if text.startswith(start) else tokenizer.decode(written)
    return {"prompt": prompt, "continuation": added, "prompt_tokens": len(ids), **found}


def _show(rows: list[dict[str, Any]], as_json: bool, answers: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(rows, ensure_ascii=False, indent=2) + "\n")
        return
    for number, row in enumerate(rows, 1):
        if len(rows) > 1:
            sys.stdout.write(f"== prompt {number} ==\n")
        sys.stdout.write(f"{'' if answers else row['prompt']}{row['continuation']}\n")
