"""What crosses between the doctor and its probe on a host: one JSON object in, one JSON line for each check out."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from megacore.doctor.limited import NO_ANSWER
from megacore.errors import LaunchError


@dataclass(frozen=True)
class Request:
    """What a host is asked."""

    host: str
    """Its name in the hostfile."""
    workspace: str
    """Directory below which everything is written."""
    checks: tuple[str, ...]
    """Names of the probe's checks, in the order in which they are made."""
    seconds: float = 40.0
    """After which no further check is begun."""
    peers: Mapping[str, str] = field(default_factory=dict)
    """Addresses of the other hosts, by name."""
    interface: str = "auto"
    """`launch.interface`."""
    token: str | None = None
    """Directory of the proof that all hosts see one workspace; None where each has one of its own."""
    prefixes: tuple[str, ...] = ()
    """Token files without .bin/.idx."""
    vocab_size: int | None = None
    """Entries of the vocabulary that the tokens are of."""
    share: tuple[int, int] = (0, 1)
    """Which part of the tokens this host reads: every n-th block from the k-th on, (k, n)."""
    index_directory: str | None = None
    """Directory of the index maps."""
    precision: str = "auto"
    """`train.precision`, on which the kernels depend."""
    kernels: str = "auto"
    """`train.kernels`."""
    compile: str = "auto"
    """`train.compile`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the ranks would get."""

    def to_json(self) -> bytes:
        """For the probe's stdin."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Raises LaunchError for what another version of megacore has written."""
        try:
            values = json.loads(text)
            for name in ("checks", "prefixes", "share"):
                values[name] = tuple(values[name])
            return cls(**values)
        except (ValueError, TypeError, KeyError) as error:
            raise LaunchError(
                f"the probe does not understand what it is asked ({error}): install the same version of megacore on "
                "all hosts"
            ) from error


@dataclass(frozen=True)
class HostProbe:
    """What a host has answered."""

    host: str
    values: Mapping[str, Any] = field(default_factory=dict)
    """By check."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Why a check gave nothing, by check."""
    unreachable: str | None = None
    """Why ssh did not get there."""
    failed: str | None = None
    """Why the probe did not start there."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """How long each check took."""

    def get(self, check: str, *keys: str) -> Any:
        """A value, None where there is none."""
        found: Any = self.values.get(check)
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def as_json(self) -> dict[str, Any]:
        """For the report."""
        return asdict(self)


def read_answers(host: str, output: bytes, asked: Iterable[str], failed: str | None) -> HostProbe:
    """What a probe wrote, also when it was cut off: a check without an answer did not end.

    Args:
        host: that answered.
        output: of the probe.
        asked: the checks it was to make.
        failed: why the command did not end well, None where it did.
    """
    values: dict[str, Any] = {}
    problems: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for line in output.splitlines():
        try:
            said = json.loads(line)
            name = str(said["check"])
        except (ValueError, TypeError, KeyError):  # a message of the shell, or a line that was cut off
            continue
        seconds[name] = float(said.get("seconds", 0.0))
        if "problem" in said:
            problems[name] = str(said["problem"])
        else:
            values[name] = said["value"]
    if not values and not problems:
        return HostProbe(host, failed=failed or "the probe said nothing")
    for name in asked:
        if name not in values and name not in problems:
            problems[name] = f"{NO_ANSWER} ({failed or 'the probe ended early'})"
    return HostProbe(host, values, problems, seconds=seconds)
