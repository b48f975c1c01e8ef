"""What is known of the hosts when they are compared; nothing here asks a host."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megacore.config.launch import LaunchConfig
from megacore.doctor.protocol import HostProbe


@dataclass(frozen=True)
class Contact:
    """The outcome of the first command on a host."""

    problem: str | None = None
    """Why ssh did not reach it."""
    seconds: float = 0.0
    """Duration of the command, with the start of ssh."""
    offset: float | None = None
    """Seconds by which its clock is ahead of this machine's."""
    uncertainty: float = 0.0
    """By how much the offset may be wrong: half of the round trip."""
    here: bool = False
    """Whether it is this machine, which needs no ssh."""


@dataclass(frozen=True)
class Needs:
    """What a run will need, as the planner estimates it, in bytes."""

    name: str
    """The configuration's name."""
    device: int
    """Memory of a rank's device: its GPU, or its share of main memory."""
    host: int
    """Main memory of a rank beside its GPU."""
    checkpoint: int
    """One checkpoint."""
    checkpoints: int
    """The checkpoints that are kept, and the one that is being written."""
    gradients: int
    """Gradients that the replicas of a model exchange in a step."""
    deepspeed: bool = False
    """Whether the engine is DeepSpeed."""


@dataclass(frozen=True)
class PairMeasurement:
    """A measurement between two hosts, or, if both are the same, between two ranks of one host."""

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
        """Whether both ranks are on one host."""
        return self.first == self.second

    def bandwidth(self, size: str = "mb_64") -> float | None:
        """Return the all-reduce's GB/s of data: of two ranks, each sends and receives so much."""
        seconds = getattr(self, size)
        return None if not seconds else {"mb_1": 1e6, "mb_64": 64e6}[size] / seconds / 1e9

    def as_json(self) -> dict[str, Any]:
        """Return the measurement for the examination's JSON."""
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
    """All that is known of the hosts."""

    hosts: Mapping[str, int]
    """Ranks of each host; 0 if their number is unknown."""
    probes: Mapping[str, HostProbe]
    contacts: Mapping[str, Contact] = field(default_factory=dict)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    workspace: str = ""
    seen: Mapping[str, bool] = field(default_factory=dict)
    """Whether the head sees what each host wrote to the workspace."""
    reach: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The answer of `megacore.doctor.peers ports` on each host."""
    master: str = ""
    """The host at which the ranks meet, if there are several hosts."""
    pairs: tuple[PairMeasurement, ...] = ()
    left_out: int = 0
    """Pairs of hosts that were not measured since there are too many."""
    needs: Needs | None = None

    def answered(self, check: str) -> list[tuple[str, Any]]:
        """Return the hosts that answered a check with their answers, in the hosts' order."""
        answers = (
            (host, self.probes[host].get(check)) for host in self.hosts if host in self.probes
        )
        return [(host, value) for host, value in answers if value is not None]

    @property
    def several(self) -> bool:
        """Whether there are several hosts."""
        return len(self.hosts) > 1
