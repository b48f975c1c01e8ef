"""Facts of the hosts, and the doctor's findings: a verdict and advice for each check.

The findings are shown as a table and as JSON. This module does not contact any host.
"""

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from megacore.config.launch import LaunchConfig
from megacore.doctor.protocol import NO_ANSWER, PAIR_BYTES, HostProbe
from megacore.errors import listed

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclass(frozen=True)
class Contact:
    """Result of the first command on a host."""

    problem: str | None = None
    """Reason why ssh did not reach the host."""
    seconds: float = 0.0
    """Duration of the command, including the start of ssh."""
    offset: float | None = None
    """Seconds by which the host's clock is ahead of the head's."""
    uncertainty: float = 0.0
    """Largest error of the offset: half of the round trip."""
    here: bool = False
    """True if this is the host that runs the doctor, which needs no ssh."""


@dataclass(frozen=True)
class Needs:
    """Planner's estimate of the needs of a run, in bytes."""

    name: str
    """Name of the configuration."""
    device: int
    """Memory of a rank's device: its GPU, or its share of host memory."""
    host: int
    """Host memory of a rank, in addition to its GPU memory."""
    checkpoint: int
    """Size of one checkpoint."""
    checkpoints: int
    """Size of all kept checkpoints and of the one being written."""
    gradients: int
    """Size of the gradients that the replicas of a model exchange in a step."""
    deepspeed: bool = False
    """True if the engine is DeepSpeed."""
    operators: tuple[str, ...] = ()
    """DeepSpeed's operators without which the run cannot start."""


@dataclass(frozen=True)
class PairMeasurement:
    """Measurement between two hosts, or between two ranks of one host if both are the same."""

    first: str
    second: str
    backend: str
    latency: float | None = None
    """Seconds of an all-reduce of 8 bytes."""
    mb_1: float | None = None
    """Seconds of an all-reduce of 1 MB."""
    mb_64: float | None = None
    """Seconds of an all-reduce of 64 MB."""
    problem: str | None = None

    @property
    def local(self) -> bool:
        """True if both ranks are on one host."""
        return self.first == self.second

    def bandwidth(self, size: str = "mb_64") -> float | None:
        """Return the bandwidth of an all-reduce in GB/s.

        The data is counted once, since each of the two ranks sends and receives it once.
        """
        seconds = getattr(self, size)
        return None if not seconds else PAIR_BYTES[size] / seconds / 1e9

    def as_json(self) -> dict[str, Any]:
        """Return the measurement for the examination's JSON."""
        rates = {f"{size}_gb_s": self.bandwidth(size) for size in PAIR_BYTES}
        return {
            "hosts": [self.first, self.second],
            "backend": self.backend,
            "latency_us": None if self.latency is None else round(self.latency * 1e6, 1),
            "mb_1_ms": None if self.mb_1 is None else round(self.mb_1 * 1e3, 3),
            "mb_64_ms": None if self.mb_64 is None else round(self.mb_64 * 1e3, 3),
            **{name: None if rate is None else round(rate, 4) for name, rate in rates.items()},
            "problem": self.problem,
        }


@dataclass(frozen=True)
class Facts:
    """Known facts of the hosts."""

    hosts: Mapping[str, int]
    """Ranks of each host; 0 if their number is unknown."""
    probes: Mapping[str, HostProbe]
    contacts: Mapping[str, Contact] = field(default_factory=dict)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    workspace: str = ""
    seen: Mapping[str, bool] = field(default_factory=dict)
    """By host, True if the head sees the file that the host wrote to the workspace."""
    reach: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Answer of `megacore.doctor.peers ports` on each host."""
    master: str = ""
    """Host of the ranks' rendezvous, if there are several hosts."""
    pairs: tuple[PairMeasurement, ...] = ()
    left_out: int = 0
    """Number of pairs of hosts that were not measured because there are too many."""
    needs: Needs | None = None

    def answered(self, check: str) -> list[tuple[str, Any]]:
        """Return the hosts that answered a check with their answers, in the order of `hosts`."""
        answers = (
            (host, self.probes[host].get(check)) for host in self.hosts if host in self.probes
        )
        return [(host, value) for host, value in answers if value is not None]

    @property
    def shared(self) -> bool:
        """True if the hosts, if there are several, must see the same workspace."""
        return self.launch.data_placement == "shared"


REPORT_VERSION = 1
"""Version of the JSON; raised when a key changes its meaning."""
_SENTENCES = 3
"""Number of problems of one check that its advice names."""
_MOST_HOSTS = 8
"""Number of hosts that a line of the table names."""
_PAIRS = 24
"""Number of pairs that the table shows, the slowest ones first."""

Verdict = Literal["ok", "warning", "error"]
_ORDER: dict[Verdict, int] = {"error": 0, "warning": 1, "ok": 2}
_STYLES: dict[Verdict, str] = {"error": "bold red", "warning": "yellow", "ok": "green"}


@dataclass(frozen=True)
class Finding:
    """Result of one check on all hosts."""

    check: str
    """Name of the check, as in docs/doctor.md."""
    verdict: Verdict
    found: Mapping[str, str]
    """Observations by host; the entry with an empty name is for all hosts together."""
    advice: str = ""
    """Problem and remedy, in one sentence; empty if there is no problem."""
    hosts: tuple[str, ...] = ()
    """Hosts that cause the problem."""

    def sentence(self) -> str:
        """Return the problem with its hosts, for a message."""
        where = f" on {', '.join(self.hosts)}" if self.hosts else ""
        return f"{self.check}{where}: {self.advice}"


class Judgement:
    """Finding under construction: observations and problems of each host."""

    def __init__(self, check: str) -> None:
        self.check = check
        self._notes: dict[str, str] = {}
        self._troubles: list[tuple[Verdict, str, str]] = []

    def note(self, host: str, text: str) -> None:
        """Add an observation of a host, after its earlier observations."""
        self._notes[host] = f"{self._notes[host]}; {text}" if host in self._notes else text

    def warn(self, host: str, advice: str) -> None:
        """Add a problem that does not prevent a run."""
        self._troubles.append(("warning", host, advice))

    def error(self, host: str, advice: str) -> None:
        """Add a problem that prevents a run, or would make it wrong."""
        self._troubles.append(("error", host, advice))

    def unanswered(
        self,
        facts: "Facts",
        probe_check: str,
        verdict: Verdict,
        advice: str,
        *,
        late: Verdict | None = None,
    ) -> None:
        """Add the hosts whose probe could not perform a check.

        Args:
            facts: facts of the hosts.
            probe_check: name of the check in the probe.
            verdict: verdict of a host without an answer.
            advice: remedy; may be empty.
            late: verdict of a host that only ran out of time; None means `verdict`.
        """
        for host, probe in facts.probes.items():
            if probe_check in probe.problems:
                problem = probe.problems[probe_check]
                serious = late if late is not None and problem.startswith(NO_ANSWER) else verdict
                self.note(host, problem)
                self._troubles.append(
                    (serious, host, f"{problem}: {advice}" if advice else problem)
                )

    def finding(self) -> Finding | None:
        """Return the finding; None if no host answered."""
        if not self._notes and not self._troubles:
            return None
        verdict = worst(trouble[0] for trouble in self._troubles)
        ordered = sorted(self._troubles, key=lambda trouble: trouble[0] != "error")
        sentences = list(dict.fromkeys(trouble[2] for trouble in ordered))
        advice = "; ".join(sentences[:_SENTENCES])
        if len(sentences) > _SENTENCES:
            advice += f"; and {len(sentences) - _SENTENCES} more"
        hosts = tuple(
            dict.fromkeys(
                trouble[1] for trouble in self._troubles if trouble[0] == verdict and trouble[1]
            )
        )
        return Finding(self.check, verdict, dict(self._notes), advice, hosts)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the most serious verdict; ok if there is none."""
    return min(verdicts, key=_ORDER.__getitem__, default="ok")


def most_common(values: Iterable[Any]) -> Any:
    """Return the most frequent value; of equally frequent ones, the first."""
    listed = list(values)
    return max(listed, key=listed.count)


@dataclass(frozen=True)
class Examination:
    """Result of an examination: all findings, and the measurements behind them."""

    hosts: Mapping[str, int]
    """Ranks of each host, in the hostfile's order; 0 if their number is unknown."""
    findings: tuple[Finding, ...]
    mode: Literal["quick", "full"]
    """`quick` leaves out the bandwidths between hosts."""
    pairs: tuple[Mapping[str, Any], ...] = ()
    """Measurements between two hosts, or between two ranks of one."""
    probes: Mapping[str, Any] = field(default_factory=dict)
    """Answers of each host."""
    started: float = field(default_factory=time.time)
    """Start time in Unix seconds."""
    seconds: float = 0.0
    """Duration in seconds."""

    @property
    def verdict(self) -> Verdict:
        """Verdict of the worst finding."""
        return worst(finding.verdict for finding in self.findings)

    def sorted_findings(self) -> list[Finding]:
        """Return the findings, problems first, otherwise in the order of the checks."""
        return sorted(self.findings, key=lambda finding: _ORDER[finding.verdict])

    def first_error(self) -> Finding | None:
        """Return the first finding that prevents a run, or None."""
        return next((finding for finding in self.findings if finding.verdict == "error"), None)

    def as_json(self) -> dict[str, Any]:
        """Return the examination as a JSON object; docs/doctor.md describes the keys."""
        return {
            "version": REPORT_VERSION,
            "mode": self.mode,
            "verdict": self.verdict,
            "started": self.started,
            "seconds": round(self.seconds, 3),
            "hosts": dict(self.hosts),
            "checks": [
                asdict(finding) | {"hosts": list(finding.hosts)}
                for finding in self.sorted_findings()
            ],
            "pairs": [dict(pair) for pair in self.pairs],
            "probes": dict(self.probes),
        }

    def as_text(self) -> str:
        """Return the JSON as text."""
        return json.dumps(self.as_json(), indent=2, ensure_ascii=False) + "\n"


def show(examination: Examination, console: "Console") -> None:
    """Print the verdicts, then the pairs of hosts."""
    problems = [finding for finding in examination.sorted_findings() if finding.verdict != "ok"]
    console.print(_verdicts(examination))
    if len(_between(examination)) > 1:
        console.print(_pairs(examination))
    hosts, checks = len(examination.hosts), len(examination.findings)
    style = _STYLES[examination.verdict]
    outcome = "all is well" if not problems else _count(problems)
    console.print(
        f"{hosts} host{'s' if hosts > 1 else ''}, {checks} checks in {examination.seconds:.1f} s: "
        f"[{style}]{outcome}[/]",
        highlight=False,
        soft_wrap=True,
    )


def _count(problems: list[Finding]) -> str:
    errors = sum(finding.verdict == "error" for finding in problems)
    warnings = len(problems) - errors
    parts = [
        f"{number} {name}{'s' if number > 1 else ''}"
        for number, name in ((errors, "error"), (warnings, "warning"))
        if number
    ]
    return " and ".join(parts)


def _verdicts(examination: Examination) -> "Table":
    from rich.markup import escape
    from rich.table import Table

    title = f"doctor ({examination.mode})"
    table = Table(title=title, title_justify="left", show_lines=len(examination.hosts) > 1)
    table.add_column("check", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("found, and what to do", overflow="fold")
    for finding in examination.sorted_findings():
        style = _STYLES[finding.verdict]
        lines = [escape(line) for line in _lines(examination, finding)]
        lines += [f"[{style}]→ {escape(finding.advice)}[/]"] if finding.advice else []
        table.add_row(finding.check, f"[{style}]{finding.verdict}[/]", "\n".join(lines))
    return table


def _lines(examination: Examination, finding: Finding) -> list[str]:
    """Return a line for each observation, with the hosts it applies to."""
    if len(examination.hosts) == 1:
        return list(finding.found.values())
    by_text: dict[str, list[str]] = {}
    for host, text in finding.found.items():
        by_text.setdefault(text, []).append(host)
    all_hosts = list(examination.hosts)
    lines = []
    for text, hosts in by_text.items():
        named = "all" if hosts == all_hosts else listed(hosts, _MOST_HOSTS)
        lines.append(text if hosts == [""] else f"{named}: {text}")
    return lines


def _pairs(examination: Examination) -> "Table":
    from rich.table import Table

    measured = _between(examination)
    title = "all-reduce between hosts" + (
        f", the slowest {_PAIRS} pairs" if len(measured) > _PAIRS else ""
    )
    table = Table(title=title, title_justify="left")
    for name in ("hosts", "back end", "latency µs", "1 MB ms", "64 MB ms", "GB/s"):
        table.add_column(name, justify="left" if name in ("hosts", "back end") else "right")
    for pair in measured[:_PAIRS]:
        numbers = [pair["latency_us"], pair["mb_1_ms"], pair["mb_64_ms"], pair["mb_64_gb_s"]]
        shown = ["-" if number is None else f"{number:,.2f}" for number in numbers]
        table.add_row(" - ".join(pair["hosts"]), pair["backend"], *shown)
    return table


def _between(examination: Examination) -> list[Mapping[str, Any]]:
    """Return the measurements between two hosts: failed ones first, then by bandwidth."""
    between = [pair for pair in examination.pairs if pair["hosts"][0] != pair["hosts"][1]]
    return sorted(between, key=lambda pair: (pair["problem"] is None, pair["mb_64_gb_s"] or 0.0))
