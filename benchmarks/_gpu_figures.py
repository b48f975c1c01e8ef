"""Figures of `benchmarks.gpu`, as stored and as a table."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks._entrants import Case
from benchmarks._turns import progress
from benchmarks._verdict import Check, table
from megacore.artifact.files import read_record


@dataclass(frozen=True)
class Row:
    """One line of the table; None where a figure has no meaning."""

    name: str
    milliseconds: float | None = None
    """Time of a step."""
    tokens: float | None = None
    """Tokens per second."""
    teraflops: float | None = None
    """Model FLOPs per second, in 10¹²."""
    ratio: float | None = None
    """Speed of megacore relative to this contestant's; for a kernel, with it to without it."""
    memory: float | None = None
    """Peak memory in MB."""
    note: str = ""

    @classmethod
    def of(cls, name: str, case: Case, seconds: float, memory: float, **rest: Any) -> "Row":
        """Return the line of a measured step."""
        rates = case.tokens / seconds, case.flops / seconds / 1e12
        return cls(name, 1000 * seconds, *rates, memory=memory, **rest)


@dataclass(frozen=True)
class Part:
    """Figures of one part."""

    rows: list[Row] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> "Part":
        return cls(
            [Row(**row) for row in values["rows"]], [Check(**check) for check in values["checks"]]
        )


@dataclass(frozen=True)
class Results:
    """Figures so far, as stored."""

    setting: str
    """Commit, device and versions, which all figures share."""
    matmul: float
    """Measured rate of matrix products, in TFLOP/s."""
    parts: dict[str, Any] = field(default_factory=dict)
    """Each part as JSON, by its name."""
    rows: dict[str, Any] = field(default_factory=dict)
    """Each row of a contestant on its own as JSON, by its task."""


def load(path: Path, setting: str, matmul: Callable[[], float]) -> Results:
    """Return the stored results of the same setting, or new ones without any part."""
    stored = read_record(path, Results) if path.exists() else None
    if stored is not None and stored.setting == setting:
        progress(f"{path} has {', '.join(stored.parts) or 'no part yet'}")
        return replace(stored, matmul=matmul()) if math.isnan(stored.matmul) else stored
    return Results(setting, matmul())


def report(results: Results, parts: Iterable[str], peak: float | None) -> str:
    """Return the table of all figures, those of `parts` first and in their order.

    `peak` is the device's rate in bf16 by its data sheet, in TFLOP/s; None if it is unknown.
    """
    header = [
        "measurement",
        "ms",
        "tokens/s",
        "MFU (vendor's peak)",
        "MFU (measured products)",
        "ratio",
        "peak memory (MB)",
        "note",
    ]
    rows = [
        _cells(row, results.matmul, peak)
        for name in parts
        if name in results.parts
        for row in Part.of_json(results.parts[name]).rows
    ]
    shown = {row[0] for row in rows}
    unfinished = [Row(**row) for row in results.rows.values()]
    rows += [_cells(row, results.matmul, peak) for row in unfinished if row.name not in shown]
    vendor = f", the vendor's peak {peak:,.0f}" if peak else ""
    return (
        f"{results.setting}; matrix products in bf16 {results.matmul:,.1f} TFLOP/s{vendor}.\n\n"
        f"{table(header, rows)}"
    )


def _cells(row: Row, matmul: float, peak: float | None) -> list[str]:
    return [
        row.name,
        _cell(row.milliseconds, "{:,.2f}"),
        _cell(row.tokens, "{:,.0f}"),
        _cell(row.teraflops and peak and row.teraflops / peak, "{:.1%}"),
        _cell(row.teraflops and row.teraflops / matmul, "{:.1%}"),
        _cell(row.ratio, "{:.3f}"),
        _cell(row.memory, "{:,.0f}"),
        row.note,
    ]


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
