"""`megacore inspect` and `megacore verify`: reports on and checks of data files and artifacts."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from megacore.cli._options import check_output_file
from megacore.cli._terminal import write_json_text, write_line
from megacore.errors import ConfigError
from megacore.paths import exists, is_dir

_PREVIEW_TOKENS = 120
"""Number of tokens to show of a document, unless it is shown in full."""


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            help="PREFIX of token files, their directory, a directory of index maps, the key of "
            "one in the workspace, or `mixture`"
        ),
    ],
    mixture: Annotated[
        str | None,
        typer.Argument(
            metavar="CONF|INDEX",
            help="after `mixture`: configuration or directory of index maps whose blend to show",
        ),
    ] = None,
    documents: Annotated[
        int, typer.Option("--documents", min=0, help="how many of the first documents to show")
    ] = 3,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help=(
                "directory, tokenizer.json, vocab.json, vocab.txt or .model; else the one that the "
                "files name"
            )
        ),
    ] = None,
    histogram: Annotated[
        Path | None,
        typer.Option(help="write the distribution of lengths as a picture: FILE.png or FILE.svg"),
    ] = None,
    sample: Annotated[
        int | None, typer.Option(min=0, help="for index maps: show where this sample comes from")
    ] = None,
    split: Annotated[str, typer.Option(help="for --sample: train, valid or test")] = "train",
    full: Annotated[
        bool, typer.Option("--full", help="show whole texts and all parts of a sample")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for programs")] = False,
) -> None:
    """Show the content of token files, or the documents and source lines of a sample.

    `megacore inspect mixture CONF` (or a directory of index maps) shows the tokens and epochs of
    each source of a blend, by step of data.blend_schedule.
    """
    from megacore.cli import _inspect_text as terminal
    from megacore.inspect.index import is_index_directory
    from megacore.inspect.report import report_index, report_sample
    from megacore.observe.runs import named_directory

    if mixture is not None or _is_word(path):
        others = {
            "--histogram": histogram,
            "--sample": sample,
            "--tokenizer": tokenizer,
            "--full": full or None,
        }
        unread = next((name for name, value in others.items() if value is not None), None)
        if unread is not None:
            raise ConfigError(f"{unread} shows nothing of a mixture: leave it out")
        report = _mixture(path, mixture)
        _show(report, as_json, lambda: terminal.show_mixture(report))
        return
    path = named_directory(path)
    maps = is_dir(path) and is_index_directory(path)
    if sample is not None and not maps:
        raise ConfigError(
            f"--sample is for index maps, and {path} holds none: give the directory of `megacore "
            "index`"
        )
    if maps and histogram is not None:
        raise ConfigError(
            f"--histogram is for token files, and {path} holds index maps: leave it out"
        )
    unlimited = full or as_json
    if sample is not None:
        report = report_sample(
            path, split, sample, tokenizer, None if unlimited else terminal.PREVIEW_PARTS
        )
        _show(report, as_json, lambda: terminal.show_sample(report, full=full))
    elif maps:
        report = report_index(path)
        _show(report, as_json, lambda: terminal.show_index(report))
    else:
        report = _tokens(
            path, documents, tokenizer, histogram, None if unlimited else _PREVIEW_TOKENS
        )
        _show(report, as_json, lambda: terminal.show_tokens(report, full=full))


def verify(
    path: Annotated[
        Path,
        typer.Argument(
            help=(
                "PREFIX of token files, their directory, any artifact's directory, a checkpoint, "
                "the directory of an import or a run, the key of an artifact or a run, or a "
                "workspace"
            )
        ),
    ],
) -> None:
    """Check that files are complete and consistent.

    The checks cover structure, pointers, sizes, index maps against token files, and the digests of
    manifests and checkpoints. For a checkpoint, a run and a workspace, everything damaged is listed
    with the command that deletes it and what builds it again; the exit code is then 1. So it is if
    something cannot be read.
    """
    from megacore.cli import _inspect_text as terminal
    from megacore.inspect.verify import Damage, Unchecked, examine
    from megacore.observe.runs import named_directory

    damaged = unread = count = 0
    with terminal.reading_bar() as on_read:
        for count, result in enumerate(examine(named_directory(path), on_read), 1):  # noqa: B007
            damaged += isinstance(result, Damage)
            unread += isinstance(result, Unchecked) and result.state == "not readable"
            terminal.show_result(result)
    if not count:
        sys.stdout.write(f"{path} has nothing to check yet: no stage or checkpoint is complete\n")
    if damaged:
        write_line(f"damaged: {damaged} of {count}")
    if damaged or unread:
        raise typer.Exit(1)


def _is_word(path: Path) -> bool:
    """Return True if a path is the word `mixture`, and no directory or pair of token files."""
    from megacore.token_files.indexed_dataset import idx_path

    return str(path) == "mixture" and not exists(path) and not exists(idx_path(path))


def _mixture(word: Path, of: str | None) -> dict[str, Any]:
    """Return the report on the blend of a configuration or of index maps."""
    from megacore.config import load_config
    from megacore.inspect.index import is_index_directory
    from megacore.inspect.mixture import mixture_of_config, mixture_of_index

    if of is None:
        raise ConfigError(
            "mixture is given without a blend: name a configuration or a directory of index maps "
            "after it, as in `megacore inspect mixture CONF`"
        )
    if str(word) != "mixture":
        raise ConfigError(
            f"{word} and {of} are given: give one path, or `mixture` and a configuration or index "
            "maps"
        )
    if is_dir(of) and is_index_directory(Path(of)):
        return mixture_of_index(Path(of))
    return mixture_of_config(load_config(of))


def _tokens(
    path: Path, documents: int, tokenizer: Path | None, histogram: Path | None, limit: int | None
) -> dict[str, Any]:
    """Return reports on the token files of `path`, and draw the histogram if requested."""
    from megacore.inspect.report import report_tokens
    from megacore.inspect.tokens import draw_lengths, find_prefixes
    from megacore.plan.draw import check_drawable
    from megacore.token_files.indexed_dataset import IndexedDataset

    if histogram is not None:
        check_drawable(histogram, "--histogram")
        check_output_file(histogram, "--histogram")
    prefixes = find_prefixes(
        path,
        "the path of token files without .bin/.idx, or the directory of token files or index maps",
    )
    if histogram is not None:
        if len(prefixes) > 1:
            raise ConfigError(
                f"--histogram is for one pair of token files, and {path} names {len(prefixes)}: "
                "give one"
            )
        draw_lengths(
            IndexedDataset(prefixes[0]).lengths,
            histogram,
            f"{Path(prefixes[0]).name}: tokens per sequence",
        )
    return {
        "files": [report_tokens(prefix, documents, tokenizer, limit) for prefix in prefixes],
        "histogram": None if histogram is None else str(histogram),
    }


def _show(report: dict[str, Any], as_json: bool, in_words: Any) -> None:
    if as_json:
        write_json_text(report)
    else:
        in_words()
