"""All that the hosts said, for the functions that compare it; nothing here asks anybody."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megacore.config.launch import LaunchConfig
from megacore.doctor.findings import Finding, Verdict, worst
from megacore.doctor.limited import NO_ANSWER
from megacore.doctor.protocol import HostProbe

_SENTENCES = 3
"""Problems of one check that its advice names."""


@dataclass(frozen=True)
class Contact:
    """The first word with a host."""

    problem: str | None = None
    """Why ssh did not get there."""
    seconds: float = 0.0
    """From the start of ssh to its end."""
    offset: float | None = None
    """Seconds by which its clock is ahead of this machine's."""
    uncertainty: float = 0.0
    """The offset may be wrong by so much: half of the round trip."""
    here: bool = False
    """Whether it is this machine, to which no ssh is needed."""


@dataclass(frozen=True)
class Needs:
    """What a run will need, as the planner estimates it; in bytes."""

    name: str
    """Of the configuration."""
    device: int
    """Memory of a rank's device: its GPU, or its share of main memory."""
    host: int
    """Main memory of a rank beside its GPU."""
    checkpoint: int
    """A checkpoint."""
    checkpoints: int
    """Those that are kept, and the one that is being written."""
    gradients: int
    """What replicas exchange in a step, per model."""
    deepspeed: bool = False
    """Whether the engine is DeepSpeed."""


@dataclass(frozen=True)
class Pair:
    """A measurement between two hosts, or, where both are the same, between two ranks of one."""

    first: str
    second: str
    backend: str
    latency: float | None = None
    """Seconds of an all-reduce of 8 bytes."""
    mb_1: float | None = None
    """Seconds of one of 1 MB."""
    mb_64: float | None = None
    """Seconds of one of 64 MB."""
    problem: str | None = None

    @property
    def local(self) -> bool:
        """Whether both ranks are on one host."""
        return self.first == self.second

    def bandwidth(self, size: str = "mb_64") -> float | None:
        """GB/s of the all-reduce's data: with two ranks, what each sends and receives."""
        seconds = getattr(self, size)
        return None if not seconds else {"mb_1": 1e6, "mb_64": 64e6}[size] / seconds / 1e9

    def as_json(self) -> dict[str, Any]:
        """For the report."""
        rates = {f"{size}_gb_s": self.bandwidth(size) for size in ("mb_1", "mb_64")}
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
    """What there is to compare."""

    hosts: Mapping[str, int]
    """Ranks of each; 0 where nobody said how many."""
    probes: Mapping[str, HostProbe]
    contacts: Mapping[str, Contact] = field(default_factory=dict)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    workspace: str = ""
    seen: Mapping[str, bool] = field(default_factory=dict)
    """Whether the head sees what each host wrote to the workspace."""
    reach: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What `megacore.doctor.reach` said on each host."""
    master: str = ""
    """The host at which the ranks meet, if there are several hosts."""
    pairs: tuple[Pair, ...] = ()
    left_out: int = 0
    """Pairs of hosts that were not measured, since there are too many."""
    needs: Needs | None = None

    def answered(self, check: str) -> list[tuple[str, Any]]:
        """Hosts with what they said to a check, in order."""
        found = ((host, self.probes[host].get(check)) for host in self.hosts if host in self.probes)
        return [(host, value) for host, value in found if value is not None]

    @property
    def several(self) -> bool:
        """Whether there is another host to compare with."""
        return len(self.hosts) > 1


class Judgement:
    """A finding in the making."""

    def __init__(self, check: str) -> None:
        self.check = check
        self._found: dict[str, str] = {}
        self._troubles: list[tuple[Verdict, str, str]] = []

    def found(self, host: str, text: str) -> None:
        """What there is on a host; of the same host again it is appended."""
        self._found[host] = f"{self._found[host]}; {text}" if host in self._found else text

    def warn(self, host: str, advice: str) -> None:
        """Something is not right, but a run may start."""
        self._troubles.append(("warning", host, advice))

    def error(self, host: str, advice: str) -> None:
        """A run cannot start, or would be wrong."""
        self._troubles.append(("error", host, advice))

    def unanswered(
        self, facts: Facts, probe_check: str, verdict: Verdict, advice: str, *, late: Verdict | None = None
    ) -> None:
        """Note hosts whose probe could not make a check; `late` is the verdict where only time was wanting."""
        for host, probe in facts.probes.items():
            if probe_check in probe.problems:
                problem = probe.problems[probe_check]
                serious = late if late is not None and problem.startswith(NO_ANSWER) else verdict
                self.found(host, problem)
                self._troubles.append((serious, host, f"{problem}: {advice}" if advice else problem))

    def finding(self) -> Finding | None:
        """The finding; None where nobody said anything."""
        if not self._found and not self._troubles:
            return None
        verdict = worst(each[0] for each in self._troubles)
        ordered = sorted(self._troubles, key=lambda each: each[0] != "error")
        sentences = list(dict.fromkeys(each[2] for each in ordered))
        advice = "; ".join(sentences[:_SENTENCES])
        if len(sentences) > _SENTENCES:
            advice += f"; and {len(sentences) - _SENTENCES} more"
        hosts = tuple(dict.fromkeys(each[1] for each in self._troubles if each[0] == verdict and each[1]))
        return Finding(self.check, verdict, dict(self._found), advice, hosts)


def most_common(values: Iterable[Any]) -> Any:
    """The value that most hosts have; of several the one that comes first."""
    listed = list(values)
    return max(listed, key=listed.count)
