"""Verdict of a benchmark: one last line, and an exit status."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One figure and its goal."""

    name: str
    value: float
    goal: float
    at_most: bool = False
    """True if less is better."""
    unit: str = "x"

    @property
    def met(self) -> bool:
        """True if the goal is reached; NaN never reaches it."""
        if math.isnan(self.value):
            return False
        return self.value <= self.goal if self.at_most else self.value >= self.goal

    def __str__(self) -> str:
        sign = "<=" if self.at_most else ">="
        missed = "" if self.met else " MISSED"
        unit = f" {self.unit}" if self.unit else ""
        return f"{self.name} {self.value:.4g}{unit} (goal {sign} {self.goal:g}){missed}"


def verdict(subject: str, checks: Sequence[Check]) -> int:
    """Print the last line and return the exit status: 0 when every goal is met."""
    met = all(check.met for check in checks)
    figures = "; ".join(map(str, checks)) or "no goals"
    sys.stdout.write(f"\n{'PASS' if met else 'MISS'} {subject}: {figures}\n")
    sys.stdout.flush()
    return 0 if met else 1


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; all columns but the first are figures."""
    lines = [f"| {' | '.join(header)} |", "| --- |" + " ---: |" * (len(header) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), ""])
