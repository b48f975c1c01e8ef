"""`megacore inspect` and `megacore verify`.

What token files and index maps hold, and whether they are whole.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from megacore.errors import ConfigError

_PREVIEW_TOKENS = 120
"""Of a document that is not shown in full."""


def inspect(
    path: Annotated[
        Path,
        typer.Argument(help="PREFIX of token files, their directory, or a directory of index maps"),
    ],
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
        int | None, typer.Option(min=0, help="of index maps: where this sample comes from")
    ] = None,
    split: Annotated[str, typer.Option(help="of --sample: train, valid or test")] = "train",
    full: Annotated[
        bool, typer.Option("--full", help="whole texts, and all parts of a sample")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for programs")] = False,
) -> None:
    """Show what token files hold, or which documents and source lines a sample comes from."""
    from megacore.cli import _inspect_text as terminal
    from megacore.inspect.index import is_index_directory
    from megacore.inspect.report import report_index, report_sample

    maps = path.is_dir() and is_index_directory(path)
    if sample is not None and not maps:
        raise ConfigError(
            f"--sample is of index maps, and {path} holds none: give the directory of `megacore "
            "index`"
        )
    if maps and histogram is not None:
        raise ConfigError(
            f"--histogram is of token files, and {path} holds index maps: leave it out"
        )
    everything = full or as_json
    if sample is not None:
        found = report_sample(
            path, split, sample, tokenizer, None if everything else terminal.PREVIEW_PARTS
        )
        _show(found, as_json, lambda: terminal.show_sample(found, full=full))
    elif maps:
        found = report_index(path)
        _show(found, as_json, lambda: terminal.show_index(found))
    else:
        found = _tokens(
            path, documents, tokenizer, histogram, None if everything else _PREVIEW_TOKENS
        )
        _show(found, as_json, lambda: terminal.show_tokens(found, full=full))


def verify(
    path: Annotated[
        Path,
        typer.Argument(help="PREFIX of token files, their directory, or any artifact's directory"),
    ],
) -> None:
    """Check that files are whole.

    Looks at structure, pointers, sizes, maps against tokens, and the hashes of manifests.
    """
    from megacore.cli import _inspect_text as terminal
    from megacore.inspect.verify import verify as checks

    for check in checks(path):
        terminal.show_check(check.name, check.result)


def _tokens(
    path: Path, documents: int, tokenizer: Path | None, histogram: Path | None, limit: int | None
) -> dict[str, Any]:
    """Reports of the token files of `path`, and the picture that was asked for."""
    from megacore.inspect.draw import check_drawable, draw_lengths
    from megacore.inspect.report import report_tokens
    from megacore.inspect.tokens import find_prefixes
    from megacore.token_files.indexed_dataset import IndexedDataset

    if histogram is not None:
        check_drawable(histogram)
    prefixes = find_prefixes(path)
    if histogram is not None:
        if len(prefixes) > 1:
            raise ConfigError(
                f"--histogram is of one pair of token files, and {path} names {len(prefixes)}: "
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


def _show(found: dict[str, Any], as_json: bool, in_words: Any) -> None:
    if as_json:
        sys.stdout.write(json.dumps(found, ensure_ascii=False, indent=2) + "\n")
    else:
        in_words()
