"""Terminal output of `megacore compare`."""

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from megacore.compare.report import Finding, Report

_EFFECTS = {
    "all": "explains the difference",
    "part": "explains a part",
    "nothing": "no effect on the probe",
    "not tested": "",
}
_ORDER = {"all": 0, "part": 1, "not tested": 2, "nothing": 3}


def show(report: Report) -> None:
    """Print a report: both sides, the differences with their causes, the numbers, the verdict."""
    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False)
    for name, side in (("A", report.a), ("B", report.b)):
        console.print(f"{name}: {_side(side)}", markup=False)
    if report.differences:
        _differences(console, report)
    if report.kind == "models":
        _model_facts(console, report.facts)
    for remark in report.remarks:
        console.print(f"note: {remark.sentence}", markup=False)
    console.print(report.verdict(), markup=False, style="bold")


def _side(side: dict[str, Any]) -> str:
    facts = [f"{key} {value}" for key, value in side.items() if key != "path" and value is not None]
    return f"{side['path']} ({', '.join(facts)})"


def _differences(console: Console, report: Report) -> None:
    findings = sorted(report.differences, key=lambda finding: _ORDER[finding.explains])
    if not sys.stdout.isatty():
        for finding in findings:
            effect = _EFFECTS[finding.explains]
            more = f" [{effect}]" if effect else ""
            console.print(
                f"{finding.subject}: {_cause(finding)}: {finding.sentence}{more}", markup=False
            )
        return
    table = Table()
    for column in ("of", "cause", "difference", "correction"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(
            finding.subject, _cause(finding), finding.sentence, _EFFECTS[finding.explains]
        )
    console.print(table, markup=False)


def _cause(finding: Finding) -> str:
    return finding.cause.replace("_", " ")


def _model_facts(console: Console, facts: dict[str, Any]) -> None:
    weights, logits = facts.get("weights"), facts.get("logits")
    if weights is not None:
        differing = len(weights["differing"])
        console.print(
            f"weights: {weights['tensors'] - differing:,} of {weights['tensors']:,} common tensors "
            f"are equal, {len(weights['only_in_a'])} are only in A, "
            f"{len(weights['only_in_b'])} only in B",
            markup=False,
        )
    if logits is not None:
        console.print(
            f"logits: largest difference {logits['max_abs_difference']:.3g} (largest logit "
            f"{logits['largest_logit']:.3g}), the same most probable token at "
            f"{logits['same_choice']:.1%} of the positions",
            markup=False,
        )
