"""Terminal output of `megacore inspect` and `megacore verify`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from megacore.cli._terminal import write_line, write_table
from megacore.inspect.verify import Damage, Result, Unchecked
from megacore.observe.logging import counted

_PREVIEW_CHARACTERS = 400
_PREVIEW_IDS = 24
PREVIEW_PARTS = 8
"""Number of documents of a sample to show, unless all are requested."""
_BAR_WIDTH = 40
_NO_TOKENIZER = "\nno tokenizer is named next to the token files: give --tokenizer to see text"
_EIGHTHS = " ▏▎▍▌▋▊▉"


def show_tokens(reports: dict[str, Any], *, full: bool) -> None:
    """Print the reports on token files."""
    for report in reports["files"]:
        _show_files(report, full)
    if reports["histogram"]:
        write_line(f"\nwrote {reports['histogram']}")


def show_index(report: dict[str, Any]) -> None:
    """Print the content of `index.json`."""
    write_line(report["path"], "bold")
    write_line(
        ", ".join(
            f"{name} {_plain(value)}"
            for name, value in report["options"].items()
            if value is not None
        )
    )
    for number, member in enumerate(report["members"]):
        splits = ", ".join(
            name if weight is None else f"{name} (weight {weight:g})"
            for name, weight in member["splits"].items()
        )
        write_line(f"data set {number}: {member['prefix']}: {splits}")
    for split, count in report["samples"].items():
        share = report["padding"].get(split)
        padding = "" if share is None or not count else f", {100 * share:.3g} % padding"
        write_line(f"{split}: {counted(count, 'sample')}{padding}")


def show_mixture(report: dict[str, Any]) -> None:
    """Print the table of a mixture: a row for each source in each step."""
    write_line(report["of"], "bold")
    known = (
        f"{name} {'unknown' if count is None else f'{count:,}'}"
        for name, count in report["source_tokens"].items()
    )
    write_line(f"tokens of the train split: {', '.join(known)}")
    table = Table("from sample", "source", "share", "samples", "tokens", "epochs", "so far")
    for column in table.columns[2:]:
        column.justify = "right"
    for step in report["steps"]:
        for number, source in enumerate(step["sources"]):
            epochs = (
                "-" if source[name] is None else f"{source[name]:.3f}"
                for name in ("epochs", "epochs_so_far")
            )
            table.add_row(
                f"{step['first_sample']:,}" if number == 0 else "",
                source["source"],
                f"{100 * source['weight']:.4g} %",
                f"{source['samples']:,}",
                f"{source['tokens']:,}",
                *epochs,
                end_section=number == len(step["sources"]) - 1,
            )
    write_table(table)


def show_sample(report: dict[str, Any], *, full: bool) -> None:
    """Print the documents and source lines that a sample comes from."""
    write_line(f"{report['split']} sample {report['sample']:,} of {report['path']}", "bold")
    write_line(
        f"sample {report['member_sample']:,} of data set {report['member']}, {report['prefix']} "
        f"(row {report['row']:,} of its {report['map']})"
    )
    padding = f", {report['padding']:,} padding" if report["padding"] > 0 else ""
    write_line(
        f"{counted(report['tokens'], 'token')} from "
        f"{counted(len(report['parts']), 'sequence')}{padding}"
    )
    shown = report["parts"] if full else report["parts"][:PREVIEW_PARTS]
    for number, part in enumerate(shown, 1):
        _show_part(number, part, full)
    if len(shown) < len(report["parts"]):
        write_line(f"\n… {len(report['parts']) - len(shown):,} more: --full shows all")
    if report["made"] is not None:
        _show_made(report["made"], full)
    if report["documents_json"] is None:
        write_line(
            "\nwhere the documents came from is unknown: there is no documents.json next to the "
            "token files"
        )
    if report["tokenizer"] is None:
        write_line(_NO_TOKENIZER)


def show_result(result: Result) -> None:
    """Print a result of `megacore verify`: for damage, also how to delete it and build it again."""
    if isinstance(result, Damage):
        write_line(f"damaged  {result.name}: {result.problem}")
        write_line(f"         delete it: {result.command}")
        write_line(f"         then {result.remedy}")
    elif isinstance(result, Unchecked):
        write_line(f"{result.state}  {result.name}: {result.reason}")
    else:
        write_line(f"ok  {result.name}: {result.result}")


@contextmanager
def reading_bar() -> Iterator[Callable[[int], None]]:
    """Show on a terminal how many bytes were read, and how fast, until the end of the block.

    Yields the callback that receives the number of bytes of each block.
    """
    console = Console()
    columns = SpinnerColumn(), TextColumn("reading"), DownloadColumn(), TransferSpeedColumn()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_interactive
    ) as progress:
        task = progress.add_task("reading", total=None)
        yield lambda count: progress.advance(task, count)


def _show_files(report: dict[str, Any], full: bool) -> None:
    write_line(report["prefix"], "bold")
    write_line(
        f"documents  {report['documents']:,}, {report['empty_documents']:,} of them empty; "
        f"{counted(report['sequences'], 'sequence')}"
    )
    write_line(f"tokens     {report['tokens']:,} of {report['dtype']}")
    write_line(f"files      .bin {report['bin_bytes']:,} bytes, .idx {report['idx_bytes']:,} bytes")
    if report["smallest_id"] is not None:
        write_line(f"token ids  {report['smallest_id']:,} to {report['largest_id']:,}")
    if report["lengths"]:
        _show_lengths(report["lengths"])
    for entry in report["first_documents"]:
        _show_document(entry, full)
    if report["first_documents"] and report["tokenizer"] is None:
        write_line(_NO_TOKENIZER)


def _show_lengths(lengths: dict[str, Any]) -> None:
    write_line(
        f"lengths    min {lengths['shortest']:,}, median {lengths['median']:,}, mean "
        f"{lengths['mean']:,.1f}, 95 % {lengths['p95']:,}, max {lengths['longest']:,} tokens\n"
    )
    bins = lengths["bins"]
    names = [f"{entry['from']:,}-{entry['to']:,}" for entry in bins]
    width, most = max(map(len, names)), max(entry["sequences"] for entry in bins)
    digits = len(f"{most:,}")
    for name, entry in zip(names, bins, strict=True):
        count = entry["sequences"]
        write_line(f"  {name:>{width}}  {count:>{digits},} {_bar(count, most)}".rstrip())


def _bar(count: int, most: int) -> str:
    """Return a bar of up to _BAR_WIDTH characters, at least 1/8 wide unless `count` is 0."""
    eighths = max(round(8 * _BAR_WIDTH * count / most), int(count > 0))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _show_document(entry: dict[str, Any], full: bool) -> None:
    source = entry["source"]
    place = "" if source is None else f", {source['path']}:{source['line']}"
    write_line(
        f"\ndocument {entry['document']:,}: {counted(entry['tokens'], 'token')}{place}", "bold"
    )
    if not entry["tokens"]:
        return
    if "text" in entry:
        _indented(_cut(entry["text"], full, more=entry["cut"]))
    else:
        _indented(_ids(entry["ids"], full, more=entry["cut"]))


def _show_part(number: int, part: dict[str, Any], full: bool) -> None:
    write_line(
        f"\n{number}. document {part['document']:,}, sequence {part['sequence']:,}: "
        f"tokens {part['start']:,} to {part['stop'] - 1:,} of {part['length']:,}",
        "bold",
    )
    _indented(_ids(part["ids"], full) if part["text"] is None else _cut(part["text"], full))
    source = part["source"]
    if source is None:
        return
    write_line(f"  from {source['path']}:{source['line']} ({source['key']})")
    if source["problem"]:
        write_line(f"  which cannot be shown: {source['problem']}")
        return
    if source["named_source"]:
        write_line(f"  which names its source {source['named_source']}")
    if source["characters"]:
        first, last = source["characters"]
        write_line(
            f"  these tokens are the characters {first:,} to {last - 1:,} of "
            f"{len(source['text']):,}; it begins:"
        )
    else:
        write_line(f"  which has {len(source['text']):,} characters and begins:")
    _indented(_cut(source["text"], full))


def _show_made(model_input: dict[str, Any], full: bool) -> None:
    """Print the input and the labels of a sample of a sentence model (BERT, T5)."""
    write_line("\nthe model reads", "bold")
    _indented(_cut(model_input["reads"], full))
    if "writes" in model_input:
        write_line("and writes", "bold")
        _indented(_cut(model_input["writes"], full))
        return
    words = [
        entry["token"] if entry["read"] == "[MASK]" else f"{entry['token']} (reads {entry['read']})"
        for entry in model_input["predicts"]
    ]
    write_line(f"and predicts {counted(len(words), 'token')}", "bold")
    _indented(_cut(", ".join(words), full))
    write_line(f"sentence label {model_input['sentence_label']}")


def _cut(value: str, full: bool, *, more: bool = False) -> str:
    if not full and len(value) > _PREVIEW_CHARACTERS:
        value, more = value[:_PREVIEW_CHARACTERS], True
    return value + (" …" if more else "")


def _ids(ids: list[int], full: bool, *, more: bool = False) -> str:
    shown = ids if full else ids[:_PREVIEW_IDS]
    return " ".join(map(str, shown)) + (" …" if more or len(shown) < len(ids) else "")


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _indented(value: str) -> None:
    """Print a document's text; non-printable characters could act as terminal commands.

    Windows line ends are shown as line ends.
    """
    safe = "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for letter in value.replace("\r\n", "\n")
    )
    for line in safe.split("\n"):
        write_line(f"  | {line}")
