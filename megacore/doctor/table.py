"""The report for people: problems first, each with what to do, then what was found on each host."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megacore.doctor.findings import Finding, Report, Verdict

_STYLES: dict[Verdict, str] = {"error": "bold red", "warning": "yellow", "ok": "green"}
_MOST_HOSTS = 8
"""Hosts that a line names."""
_PAIRS = 24
"""Pairs that are shown, the slowest ones first."""


def show(report: Report, console: Console) -> None:
    """Print the verdicts, then the pairs of hosts."""
    troubles = [finding for finding in report.sorted_findings() if finding.verdict != "ok"]
    console.print(_verdicts(report))
    if len(_between(report)) > 1:
        console.print(_pairs(report))
    hosts = len(report.hosts)
    count = f"{hosts} host{'s' if hosts > 1 else ''}, {len(report.findings)} checks in {report.seconds:.1f} s"
    outcome = "all is well" if not troubles else _count(troubles)
    console.print(f"{count}: [{_STYLES[report.verdict]}]{outcome}[/]", highlight=False, soft_wrap=True)


def _count(troubles: list[Finding]) -> str:
    errors = sum(finding.verdict == "error" for finding in troubles)
    warnings = len(troubles) - errors
    parts = [
        f"{number} {name}{'s' if number > 1 else ''}"
        for number, name in ((errors, "error"), (warnings, "warning"))
        if number
    ]
    return " and ".join(parts)


def _verdicts(report: Report) -> Table:
    table = Table(title=f"doctor ({report.mode})", title_justify="left", show_lines=len(report.hosts) > 1)
    table.add_column("check", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("found, and what to do", overflow="fold")
    for finding in report.sorted_findings():
        style = _STYLES[finding.verdict]
        lines = [escape(line) for line in _lines(report, finding)]
        lines += [f"[{style}]→ {escape(finding.advice)}[/]"] if finding.advice else []
        table.add_row(finding.check, f"[{style}]{finding.verdict}[/]", "\n".join(lines))
    return table


def _lines(report: Report, finding: Finding) -> list[str]:
    """A line for each thing that was said, with the hosts that did."""
    if len(report.hosts) == 1:
        return list(finding.found.values())
    said: dict[str, list[str]] = {}
    for host, text in finding.found.items():
        said.setdefault(text, []).append(host)
    everybody = list(report.hosts)
    return [
        text if hosts == [""] else f"{'all' if hosts == everybody else _some(hosts)}: {text}"
        for text, hosts in said.items()
    ]


def _some(hosts: list[str]) -> str:
    shown = ", ".join(hosts[:_MOST_HOSTS])
    return shown if len(hosts) <= _MOST_HOSTS else f"{shown} and {len(hosts) - _MOST_HOSTS} more"


def _between(report: Report) -> list[Mapping[str, Any]]:
    """Measurements between two hosts: failed ones first, then by their bandwidth."""
    found = [pair for pair in report.pairs if pair["hosts"][0] != pair["hosts"][1]]
    return sorted(found, key=lambda pair: (pair["problem"] is None, pair["mb_64_gb_s"] or 0.0))


def _pairs(report: Report) -> Table:
    measured = _between(report)
    title = "all-reduce between hosts" + (f", the slowest {_PAIRS} pairs" if len(measured) > _PAIRS else "")
    table = Table(title=title, title_justify="left")
    for name in ("hosts", "back end", "latency µs", "1 MB ms", "64 MB ms", "GB/s"):
        table.add_column(name, justify="left" if name in ("hosts", "back end") else "right")
    for pair in measured[:_PAIRS]:
        numbers = [pair["latency_us"], pair["mb_1_ms"], pair["mb_64_ms"], pair["mb_64_gb_s"]]
        shown = ["-" if number is None else f"{number:,.2f}" for number in numbers]
        table.add_row(" - ".join(pair["hosts"]), pair["backend"], *shown)
    return table
