"""Facts of the hosts that are compared; this module does not contact any host."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megacore.config.launch import LaunchConfig
from megacore.doctor.protocol import HostProbe


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
    def several(self) -> bool:
        """True if there are several hosts."""
        return len(self.hosts) > 1
