"""`megacore tokenize`: conversion of documents to token files.

The format is that of Megatron-LM's tools/preprocess_data.py, whose options it takes as well.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from megacore.cli._options import VariadicCommand, refuse_sealed
from megacore.cli._preprocess_data import translated
from megacore.errors import ConfigError
from megacore.observe.logging import counted
from megacore.paths import exists

if TYPE_CHECKING:
    from megacore.config.data import ExistingTokenizer
    from megacore.tokenizer.tokenize import TokenizeOptions

Kind = Literal["gpt2-bpe", "bert-wordpiece", "sentencepiece", "hf"]
_NEEDS: dict[str, tuple[str, ...]] = {
    "gpt2-bpe": ("--vocab-file", "--merge-file"),
    "bert-wordpiece": ("--vocab-file",),
    "sentencepiece": ("--tokenizer-file",),
    "hf": ("--tokenizer-file",),
}


class TokenizeCommand(VariadicCommand):
    """The command `megacore tokenize`, which also takes the options of preprocess_data.py."""

    variadic = ("--input", "--json-key")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments in megacore's spelling; say which ones have no effect."""
        arguments, notes = translated(args)
        for note in notes:
            sys.stderr.write(f"note: {note}\n")
        return super().parse_args(ctx, arguments)


def tokenize(
    input: Annotated[
        list[str], typer.Option(help="JSON Lines (plain, .gz, .zst) or parquet files, or globs")
    ],
    output_prefix: Annotated[str, typer.Option(help="writes PREFIX_KEY_document.bin and .idx")],
    tokenizer: Annotated[Kind, typer.Option(help="kind of tokenizer")] = "gpt2-bpe",
    vocab_file: Annotated[
        str | None, typer.Option(help="vocab.json of GPT-2, or vocab.txt of BERT")
    ] = None,
    merge_file: Annotated[str | None, typer.Option(help="merges.txt of GPT-2")] = None,
    tokenizer_file: Annotated[
        str | None, typer.Option(help="tokenizer.json (hf), or a SentencePiece .model")
    ] = None,
    eod_token: Annotated[
        str | None, typer.Option(help="hf: token that ends a document (default <|endoftext|>)")
    ] = None,
    lower_case: Annotated[
        bool | None, typer.Option(help="bert-wordpiece: an uncased vocabulary (default yes)")
    ] = None,
    append_eod: Annotated[
        bool, typer.Option("--append-eod", help="end each document with the end-of-document token")
    ] = False,
    json_key: Annotated[
        list[str] | None,
        typer.Option(help="field or column that holds the text; several: files of each"),
    ] = None,
    split_sentences: Annotated[
        bool, typer.Option("--split-sentences", help="write one sequence per sentence")
    ] = False,
    keep_newlines: Annotated[
        bool, typer.Option("--keep-newlines", help="keep newlines between sentences")
    ] = False,
    sentence_splitter: Annotated[
        Literal["punkt", "rules"],
        typer.Option(help="nltk's model, or plain rules without a download"),
    ] = "punkt",
    sentence_data: Annotated[
        Path | None,
        typer.Option(
            help="directory of nltk's data (default: its own, else downloaded into the workspace)"
        ),
    ] = None,
    language: Annotated[
        str, typer.Option("--language", "--lang", help="language of the punkt model")
    ] = "english",
    on_bad_line: Annotated[
        Literal["stop", "skip"],
        typer.Option(help="for a line without a document: end the run, or skip and count it"),
    ] = "stop",
    max_document_mb: Annotated[
        int | None,
        typer.Option(
            min=1, max=2000, help="maximum size of a line or row in MB, 10^6 bytes (default: 100)"
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="threads (default: one per core)")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace token files of that name")
    ] = False,
    partitions: Annotated[
        int,
        typer.Option(
            min=1, max=100_000, help="order documents as this number of Megatron-LM's partitions"
        ),
    ] = 1,
    keep_sequential_samples: Annotated[
        bool, typer.Option("--keep-sequential-samples", help="with --partitions: keep the order")
    ] = False,
    hf_as_megatron: Annotated[bool, typer.Option("--hf-as-megatron", hidden=True)] = False,
    no_hf_special_tokens: Annotated[
        bool, typer.Option("--no-hf-special-tokens", hidden=True)
    ] = False,
) -> None:
    """Convert documents to token files (.bin/.idx), in the order of the input.

    Also takes the options of Megatron-LM's tools/preprocess_data.py, such as --json-keys and
    --tokenizer-type.
    """
    from megacore.config.data import DEFAULT_MAX_DOCUMENT_MB, HfTokenizer
    from megacore.tokenizer.build import as_in_megatron
    from megacore.tokenizer.files import Inputs, check_output, tokenize_files
    from megacore.tokenizer.files import output_prefix as name_of
    from megacore.tokenizer.tokenize import TokenizeOptions

    file_options = {
        "--vocab-file": vocab_file,
        "--merge-file": merge_file,
        "--tokenizer-file": tokenizer_file,
    }
    choice = _choice(tokenizer, file_options, eod_token, lower_case)
    options = TokenizeOptions(
        append_eod=append_eod,
        split_sentences=split_sentences,
        keep_newlines=keep_newlines,
        sentence_splitter=sentence_splitter,
        language=language,
        on_bad_line=on_bad_line,
        sentence_data=sentence_data,
        partitions=1 if keep_sequential_samples else partitions,
    )
    _check_sentences(options)
    refuse_sealed(Path(output_prefix), "--output-prefix")
    targets: dict[str, Inputs] = {}
    for key in dict.fromkeys(json_key or ["text"]):
        _check_names(output_prefix, key)
        target = name_of(output_prefix, key, options)
        check_output(target, overwrite=overwrite)
        targets[target] = Inputs.find(_separate(input), key)
    if hf_as_megatron and isinstance(choice, HfTokenizer):
        choice = as_in_megatron(
            choice,
            Path(output_prefix).parent / ".huggingface",
            eod_token=eod_token,
            special_tokens=not no_hf_special_tokens,
        )
    options = _with_punkt(options)
    for target, inputs in targets.items():
        started = time.monotonic()
        with _progress(inputs.size) as progress:
            counts = tokenize_files(
                inputs,
                choice,
                target,
                options,
                workers=workers,
                progress=progress,
                document_bytes=(max_document_mb or DEFAULT_MAX_DOCUMENT_MB) * 10**6,
            )
        _report(target, counts, progress.done, time.monotonic() - started)


def _separate(patterns: list[str]) -> list[str]:
    """Return the paths and globs; several existing paths may be joined by commas, as in NeoX."""
    separate: list[str] = []
    for pattern in patterns:
        parts = pattern.split(",")
        separate += parts if all(exists(part) for part in parts) else [pattern]
    return separate


def _report(target: str, counts: dict[str, int], size: int, seconds: float) -> None:
    skipped = counts["skipped_lines"]
    lines = f", {counted(skipped, 'line')} skipped" if skipped else ""
    sys.stdout.write(
        f"{target}: {counted(counts['documents'], 'document')}, "
        f"{counted(counts['tokens'], 'token')}{lines}, "
        f"{size / 1e6:,.1f} MB in {seconds:.2f} s ({size / 1e6 / seconds:,.0f} MB/s)\n"
    )


def _choice(
    kind: Kind, file_options: dict[str, str | None], eod_token: str | None, lower_case: bool | None
) -> "ExistingTokenizer":
    """Return the tokenizer that the options describe.

    Raises ConfigError if options are missing or have no effect.
    """
    from megacore.config.data import (
        END_OF_TEXT,
        BertWordPieceTokenizer,
        Gpt2BpeTokenizer,
        HfTokenizer,
        SentencePieceTokenizer,
    )

    missing = [name for name in _NEEDS[kind] if not file_options[name]]
    if missing:
        raise ConfigError(
            f"--tokenizer {kind} needs {' and '.join(missing)}: give the path of the file"
        )
    extra = [
        name
        for name, value in file_options.items()
        if value is not None and name not in _NEEDS[kind]
    ]
    extra += ["--eod-token"] if eod_token is not None and kind != "hf" else []
    extra += ["--lower-case"] if lower_case is not None and kind != "bert-wordpiece" else []
    if extra:
        raise ConfigError(f"--tokenizer {kind} does not use {' and '.join(extra)}: leave it out")
    vocab, merges, file = (
        str(file_options[name]) for name in ("--vocab-file", "--merge-file", "--tokenizer-file")
    )
    match kind:
        case "gpt2-bpe":
            return Gpt2BpeTokenizer(kind=kind, vocab_file=vocab, merge_file=merges)
        case "bert-wordpiece":
            return BertWordPieceTokenizer(
                kind=kind, vocab_file=vocab, lower_case=lower_case is not False
            )
        case "sentencepiece":
            return SentencePieceTokenizer(kind=kind, model_file=file)
        case "hf":
            return HfTokenizer(kind=kind, name=file, eod_token=eod_token or END_OF_TEXT)


def _check_names(output_prefix: str, json_key: str) -> None:
    """Raise ConfigError for values that cannot be part of a file's name."""
    if not Path(output_prefix).name:
        raise ConfigError(
            f"--output-prefix is {output_prefix!r}: give the beginning of a file's name"
        )
    if not json_key or "/" in json_key:
        raise ConfigError(
            f"--json-key is {json_key!r}, which the token files' names cannot have: rename the "
            "field"
        )


def _check_sentences(options: "TokenizeOptions") -> None:
    """Raise ConfigError for options that only apply to sentence splitting or to Punkt."""
    model = {
        "--sentence-data": options.sentence_data is not None,
        "--language": options.language != "english",
    }
    used = {
        "--keep-newlines": options.keep_newlines,
        "--sentence-splitter": options.sentence_splitter != "punkt",
        **model,
    }
    if options.split_sentences:
        used = model if options.sentence_splitter == "rules" else {}
    without_effect = [name for name, is_used in used.items() if is_used]
    if without_effect:
        needed = (
            "with --sentence-splitter rules"
            if options.split_sentences
            else "without --split-sentences"
        )
        raise ConfigError(f"{' and '.join(without_effect)} {needed} has no effect: leave it out")


def _with_punkt(options: "TokenizeOptions") -> "TokenizeOptions":
    """Return the options with the directory of Punkt's model.

    It is the requested one, else the one nltk finds, else one downloaded into the workspace.
    """
    from dataclasses import replace

    if (
        not options.split_sentences
        or options.sentence_splitter != "punkt"
        or options.sentence_data is not None
    ):
        return options
    from megacore.artifact import StageKey, Workspace, build_artifact
    from megacore.tokenizer.sentences import VERSION, download_punkt, find_punkt

    punkt_directory = find_punkt(options.language)
    if punkt_directory is None:
        key = StageKey.of("punkt", VERSION, {"language": options.language})
        artifact, _ = build_artifact(
            Workspace.of().folder("punkt"),
            key,
            lambda directory: download_punkt(directory, options.language),
        )
        punkt_directory = artifact.directory
    return replace(options, sentence_data=punkt_directory)


class _Progress:
    """Counter of processed bytes, shown as a bar if standard error is a terminal."""

    def __init__(self, show: Callable[[int], None]) -> None:
        self.done = 0
        self._show = show

    def __call__(self, size: int) -> None:
        self.done += size
        self._show(size)


@contextmanager
def _progress(total: int | None) -> Iterator[_Progress]:
    if not sys.stderr.isatty():
        yield _Progress(lambda size: None)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("tokenize", total=total)
        yield _Progress(lambda size: bar.update(task, advance=size))
