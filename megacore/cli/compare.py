"""`megacore compare`: the differences of two models or two runs, and their causes."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megacore.cli._options import check_output_file, check_seed, check_utf8
from megacore.cli.workspace import WorkspaceOption
from megacore.errors import ConfigError, MegacoreError

if TYPE_CHECKING:
    from rich.console import Console

    from megacore.compare.report import Finding, Report

_OF_LOGITS = ("--length", "--samples", "--seed", "--tokens", "--text", "--tolerance")
NOT_COMPARABLE = 2
"""Exit code if one of the two cannot be read, or they cannot be compared."""


def compare(
    a: Annotated[
        str,
        typer.Argument(
            help="a checkpoint, an export (key or path), a directory of transformers, Megatron-LM "
            "or DeepSpeed; or a run: its directory, key or name"
        ),
    ],
    b: Annotated[str, typer.Argument(help="the one to compare with it")],
    kind: Annotated[
        str | None,
        typer.Option("--as", help="models or runs; else runs if both are runs, and models if not"),
    ] = None,
    tokens: Annotated[
        list[str] | None,
        typer.Option(help='ids of one sample of the probe, as in "15 7 300"; may be repeated'),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="text of one sample of the probe, for A's tokenizer; may be repeated"),
    ] = None,
    length: Annotated[int, typer.Option(min=1, help="tokens of a random sample")] = 64,
    samples: Annotated[int, typer.Option(min=1, help="random samples of the probe")] = 2,
    seed: Annotated[int, typer.Option(help="seed of the random samples")] = 1234,
    tolerance: Annotated[
        float, typer.Option(min=0, help="largest difference of equal logits")
    ] = 1e-4,
    weights_only: Annotated[
        bool,
        typer.Option("--weights-only", help="leave the logits out: one tensor in memory at a time"),
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--output", "--json", help="JSON file for the report")
    ] = None,
    workspace: WorkspaceOption = None,
) -> None:
    """Compare two models or two runs, and name the cause of the difference.

    The exit code is 0 if they are equal, 1 if they differ, 2 if they cannot be compared.
    """
    from megacore.ranks.rank import OFFLINE

    os.environ.update(OFFLINE)
    from megacore.artifact.files import write_json
    from megacore.compare import compare_paths
    from megacore.compare.models import Options

    try:
        if tokens and text:
            raise ConfigError("both --tokens and --text are given: give one of them")
        if any(not each for each in text or ()):
            raise ConfigError("--text is empty: give a text")
        check_utf8(text or (), "--text")
        check_seed(seed)
        if json_file is not None:
            check_output_file(json_file, "--output")
        options = Options(
            length=length,
            samples=samples,
            seed=seed,
            tokens=tuple(map(_ids, tokens)) if tokens else None,
            texts=tuple(text or ()),
            tolerance=tolerance,
            logits=not weights_only,
        )
        if weights_only and (unread := [each for each in options.given() if each in _OF_LOGITS]):
            raise ConfigError(f"--weights-only leaves the logits out: leave out {unread[0]}")
        report = compare_paths(a, b, kind=kind, options=options, workspace=workspace)
    except MegacoreError as error:
        sys.stderr.write(f"error: {error}\n")
        raise typer.Exit(NOT_COMPARABLE) from None
    if json_file is not None:
        write_json(json_file, report.to_json())
    _show(report)
    if not report.equal:
        raise typer.Exit(1)


def _ids(sample: str) -> tuple[int, ...]:
    """Return the ids in one value of --tokens. Raises ConfigError."""
    try:
        return tuple(int(part) for part in sample.replace(",", " ").split())
    except ValueError:
        raise ConfigError(f"--tokens is {sample!r}: give ids, as in --tokens '15 7 300'") from None


_EFFECTS = {
    "all": "explains the difference",
    "part": "explains a part",
    "nothing": "no effect on the probe",
    "not tested": "",
}


def _show(report: "Report") -> None:
    """Print a report: both sides, the differences with their causes, the numbers, the verdict."""
    from rich.console import Console

    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False, markup=False, emoji=False)
    for name, side in (("A", report.a), ("B", report.b)):
        console.print(f"{name}: {_side(side)}")
    if report.differences:
        _differences(console, report)
    if report.kind == "models":
        _model_facts(console, report.facts)
    for remark in report.remarks:
        console.print(f"note: {remark.sentence}")
    console.print(report.verdict(), style="bold")


def _side(side: dict[str, Any]) -> str:
    facts = [f"{key} {value}" for key, value in side.items() if key != "path" and value is not None]
    return f"{side['path']} ({', '.join(facts)})"


def _differences(console: "Console", report: "Report") -> None:
    if not sys.stdout.isatty():
        for finding in report.differences:
            effect = _EFFECTS[finding.explains]
            more = f" [{effect}]" if effect else ""
            console.print(f"{finding.subject}: {_cause(finding)}: {finding.sentence}{more}")
        return
    from rich.table import Table

    table = Table()
    for column in ("of", "cause", "difference", "correction"):
        table.add_column(column, overflow="fold")
    for finding in report.differences:
        table.add_row(
            finding.subject, _cause(finding), finding.sentence, _EFFECTS[finding.explains]
        )
    console.print(table)


def _cause(finding: "Finding") -> str:
    return finding.cause.replace("_", " ")


def _model_facts(console: "Console", facts: dict[str, Any]) -> None:
    weights, logits = facts.get("weights"), facts.get("logits")
    if weights is not None:
        differing = len(weights["differing"])
        console.print(
            f"weights: {weights['tensors'] - differing:,} of {weights['tensors']:,} common tensors "
            f"are equal, {len(weights['only_in_a'])} are only in A, "
            f"{len(weights['only_in_b'])} only in B"
        )
    if logits is not None:
        console.print(
            f"logits: largest difference {logits['max_abs_difference']:.3g} (largest logit "
            f"{logits['largest_logit']:.3g}), the same most probable token at "
            f"{logits['same_choice']:.1%} of the positions"
        )
