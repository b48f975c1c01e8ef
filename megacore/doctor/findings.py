"""What the doctor found: a verdict and an advice for each check, for people, for machines and beside the run."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

REPORT_VERSION = 1
"""Of the JSON; raised when a key changes its meaning."""

Verdict = Literal["ok", "warning", "error"]

_ORDER: dict[Verdict, int] = {"error": 0, "warning": 1, "ok": 2}


@dataclass(frozen=True)
class Finding:
    """One check on all hosts."""

    check: str
    """Its name, as in docs/doctor.md."""
    verdict: Verdict
    found: Mapping[str, str]
    """What was found, by host; a check on all of them together has one entry with an empty name."""
    advice: str = ""
    """One sentence: what is wrong and what to do. Empty where all is well."""
    hosts: tuple[str, ...] = ()
    """Where it is wrong."""

    def sentence(self) -> str:
        """The problem with its hosts, for a message."""
        return f"{self.check}{' on ' + ', '.join(self.hosts) if self.hosts else ''}: {self.advice}"


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The most serious one; ok without any."""
    return min(verdicts, key=_ORDER.__getitem__, default="ok")


@dataclass(frozen=True)
class Report:
    """Everything of one examination."""

    hosts: Mapping[str, int]
    """Ranks of each host, in the hostfile's order; 0 where nobody said how many."""
    findings: tuple[Finding, ...]
    mode: Literal["quick", "full"]
    """quick leaves the bandwidths between hosts out."""
    pairs: tuple[Mapping[str, Any], ...] = ()
    """Measurements between two hosts, or between two ranks of one."""
    probes: Mapping[str, Any] = field(default_factory=dict)
    """What each host said, as it said it."""
    started: float = field(default_factory=time.time)
    """Unix seconds."""
    seconds: float = 0.0
    """How long it took."""

    @property
    def verdict(self) -> Verdict:
        """That of the worst finding."""
        return worst(finding.verdict for finding in self.findings)

    def sorted_findings(self) -> list[Finding]:
        """Problems first, else in the order of the checks."""
        return sorted(self.findings, key=lambda finding: _ORDER[finding.verdict])

    def first_error(self) -> Finding | None:
        """The first finding by which a run cannot start."""
        return next((finding for finding in self.findings if finding.verdict == "error"), None)

    def as_json(self) -> dict[str, Any]:
        """The report for machines; keys are described in docs/doctor.md."""
        return {
            "version": REPORT_VERSION,
            "mode": self.mode,
            "verdict": self.verdict,
            "started": self.started,
            "seconds": round(self.seconds, 3),
            "hosts": dict(self.hosts),
            "checks": [asdict(finding) | {"hosts": list(finding.hosts)} for finding in self.sorted_findings()],
            "pairs": [dict(pair) for pair in self.pairs],
            "probes": dict(self.probes),
        }
