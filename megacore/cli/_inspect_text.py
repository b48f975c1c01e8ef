"""How `megacore inspect` and `megacore verify` look in a terminal."""

from typing import Any

from rich.console import Console
from rich.text import Text

from megacore.inspect.tokens import counted

_PREVIEW_CHARACTERS = 400
_PREVIEW_IDS = 24
PREVIEW_PARTS = 8
"""Documents of a sample that are not all shown."""
_BAR_WIDTH = 40
_NO_TOKENIZER = "\nno tokenizer is named beside the token files: give --tokenizer to see text"
_EIGHTHS = " ▏▎▍▌▋▊▉"


def show_tokens(found: dict[str, Any], *, full: bool) -> None:
    """Print what token files hold."""
    for report in found["files"]:
        _show_files(report, full)
    if found["histogram"]:
        _line(f"\nwrote {found['histogram']}")


def show_index(found: dict[str, Any]) -> None:
    """Print what `index.json` says."""
    _heading(found["path"])
    _line(
        ", ".join(
            f"{name} {_plain(value)}"
            for name, value in found["options"].items()
            if value is not None
        )
    )
    for number, member in enumerate(found["members"]):
        splits = ", ".join(
            name if weight is None else f"{name} (weight {weight:g})"
            for name, weight in member["splits"].items()
        )
        _line(f"data set {number}: {member['prefix']}: {splits}")
    for split, count in found["samples"].items():
        _line(f"{split}: {counted(count, 'sample')}")


def show_sample(found: dict[str, Any], *, full: bool) -> None:
    """Print which documents and source lines a sample comes from."""
    _heading(f"{found['split']} sample {found['sample']:,} of {found['path']}")
    _line(
        f"sample {found['member_sample']:,} of data set {found['member']}, {found['prefix']} "
        f"(row {found['row']:,} of its {found['map']})"
    )
    padding = f", {found['padding']:,} padding" if found["padding"] > 0 else ""
    _line(
        f"{counted(found['tokens'], 'token')} from "
        f"{counted(len(found['parts']), 'sequence')}{padding}"
    )
    shown = found["parts"] if full else found["parts"][:PREVIEW_PARTS]
    for number, part in enumerate(shown, 1):
        _show_part(number, part, full)
    if len(shown) < len(found["parts"]):
        _line(f"\n… {len(found['parts']) - len(shown):,} more: --full shows all")
    if found["made"] is not None:
        _show_made(found["made"], full)
    if found["documents_json"] is None:
        _line(
            "\nwhere the documents came from is unknown: there is no documents.json beside the "
            "token files"
        )
    if found["tokenizer"] is None:
        _line(_NO_TOKENIZER)


def show_check(name: str, result: str) -> None:
    """Print a check that passed."""
    _line(f"ok  {name}: {result}")


def _show_files(report: dict[str, Any], full: bool) -> None:
    _heading(report["prefix"])
    _line(
        f"documents  {report['documents']:,}, {report['empty_documents']:,} of them empty; "
        f"{counted(report['sequences'], 'sequence')}"
    )
    _line(f"tokens     {report['tokens']:,} of {report['dtype']}")
    _line(f"files      .bin {report['bin_bytes']:,} bytes, .idx {report['idx_bytes']:,} bytes")
    if report["smallest_id"] is not None:
        _line(f"token ids  {report['smallest_id']:,} to {report['largest_id']:,}")
    if report["lengths"]:
        _show_lengths(report["lengths"])
    for entry in report["first_documents"]:
        _show_document(entry, full)
    if report["first_documents"] and report["tokenizer"] is None:
        _line(_NO_TOKENIZER)


def _show_lengths(lengths: dict[str, Any]) -> None:
    _line(
        f"lengths    min {lengths['shortest']:,}, median {lengths['median']:,}, mean "
        f"{lengths['mean']:,.1f}, 95 % {lengths['p95']:,}, max {lengths['longest']:,} tokens\n"
    )
    bins = lengths["bins"]
    names = [f"{entry['from']:,}-{entry['to']:,}" for entry in bins]
    width, most = max(map(len, names)), max(entry["sequences"] for entry in bins)
    digits = len(f"{most:,}")
    for name, entry in zip(names, bins, strict=True):
        count = entry["sequences"]
        _line(f"  {name:>{width}}  {count:>{digits},} {_bar(count, most)}".rstrip())


def _bar(count: int, most: int) -> str:
    """A bar of up to _BAR_WIDTH characters; a count that is not 0 has at least an eighth of one."""
    eighths = max(round(8 * _BAR_WIDTH * count / most), int(count > 0))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _show_document(entry: dict[str, Any], full: bool) -> None:
    source = entry["source"]
    place = "" if source is None else f", {source['path']}:{source['line']}"
    _heading(f"\ndocument {entry['document']:,}: {counted(entry['tokens'], 'token')}{place}")
    if not entry["tokens"]:
        return
    if "text" in entry:
        _indented(_cut(entry["text"], full, more=entry["cut"]))
    else:
        _indented(_ids(entry["ids"], full, more=entry["cut"]))


def _show_part(number: int, part: dict[str, Any], full: bool) -> None:
    _heading(
        f"\n{number}. document {part['document']:,}, sequence {part['sequence']:,}: "
        f"tokens {part['start']:,} to {part['stop'] - 1:,} of {part['length']:,}"
    )
    _indented(_ids(part["ids"], full) if part["text"] is None else _cut(part["text"], full))
    source = part["source"]
    if source is None:
        return
    _line(f"  from {source['path']}:{source['line']} ({source['key']})")
    if source["problem"]:
        _line(f"  which cannot be shown: {source['problem']}")
        return
    if source["named_source"]:
        _line(f"  which names its source {source['named_source']}")
    if source["characters"]:
        first, last = source["characters"]
        _line(
            f"  these tokens are the characters {first:,} to {last - 1:,} of "
            f"{len(source['text']):,}; it begins:"
        )
    else:
        _line(f"  which has {len(source['text']):,} characters and begins:")
    _indented(_cut(source["text"], full))


def _show_made(made: dict[str, Any], full: bool) -> None:
    """Print what a model of sentences reads of a sample, and what it is to predict."""
    _heading("\nthe model reads")
    _indented(_cut(made["reads"], full))
    if "writes" in made:
        _heading("and writes")
        _indented(_cut(made["writes"], full))
        return
    words = [
        entry["token"] if entry["read"] == "[MASK]" else f"{entry['token']} (reads {entry['read']})"
        for entry in made["predicts"]
    ]
    _heading(f"and predicts {counted(len(words), 'token')}")
    _indented(_cut(", ".join(words), full))
    _line(f"sentence label {made['sentence_label']}")


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
    """Text of a document: what is no printable character would be a command to the terminal."""
    safe = "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for letter in value
    )
    for line in safe.split("\n"):
        _line(f"  | {line}")


def _heading(value: str) -> None:
    Console().print(Text(value, style="bold"), soft_wrap=True)


def _line(value: str) -> None:
    Console().print(Text(value), soft_wrap=True)
