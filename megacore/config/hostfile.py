"""Readers of DeepSpeed's hostfiles, which list the hosts of a job and their numbers of ranks."""

import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megacore.artifact.files import read_bytes, reason_of
from megacore.errors import ConfigError
from megacore.foreign.files import shortened

if TYPE_CHECKING:
    from megacore.config.launch import LaunchConfig

MOST_HOSTS = 100_000
"""Most hosts of a job."""
MOST_SLOTS = 4096
"""Most ranks of a host; a host of NVIDIA's has up to 72 GPUs."""
_HOSTFILE_BYTES = 16 << 20
"""Largest hostfile in bytes: a line for each of `MOST_HOSTS` hosts, with a comment."""
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(?:\w[\w.-]*@)?\w[\w.-]*", re.ASCII)
"""Host name or IPv4 address, optionally with a user. It must not begin with a dash, because ssh
would take it as an option."""
_SLOTS = re.compile(r"\d{1,8}", re.ASCII)
_CHOICE = re.compile(r"([^:]+)(?::(\d+(?:,\d+)*))?", re.ASCII)
"""Host, optionally with slot numbers: `host` or `host:0,2`."""


def hosts_of(launch: "LaunchConfig") -> dict[str, int]:
    """Return the number of ranks of each participating host; {} without a hostfile.

    The hosts are in the hostfile's order. They are those that `launch.include` and `launch.exclude`
    leave, limited to the first `launch.nnodes`, or to its maximum for an elastic run. Raises
    ConfigError.
    """
    return {host: len(slots) for host, slots in slots_of(launch).items()}


def slots_of(launch: "LaunchConfig", *, limited: bool = True) -> dict[str, tuple[int, ...]]:
    """Return the slot numbers of each participating host.

    The hosts are selected as in `hosts_of`.

    Args:
        launch: launch options.
        limited: False to include hosts beyond the maximum of `launch.nnodes`.
    """
    path = launch.hostfile
    if path is None:
        return {}
    listed = {host: tuple(range(slots)) for host, slots in read_hostfile(path).items()}
    included, excluded = (
        _chosen(getattr(launch, name), listed, f"launch.{name}", path)
        for name in ("include", "exclude")
    )
    left = {}
    for host, slots in listed.items():
        selected = included.get(host, ()) if launch.include else slots
        remaining = tuple(slot for slot in selected if slot not in excluded.get(host, ()))
        if remaining:
            left[host] = remaining
    if not left:
        raise ConfigError(f"launch.exclude leaves no host of {path}: leave one out of it")
    least, most = launch.node_range or (1, len(left))
    if len(left) < least:
        raise ConfigError(
            f"launch.nnodes is {launch.nnodes} and of {path} only {', '.join(left)} take part: add "
            "hosts, or lower launch.nnodes"
        )
    taking_part = dict(list(left.items())[:most]) if limited else left
    for host, slots in taking_part.items():
        if launch.nproc_per_node not in ("auto", len(slots)):
            raise ConfigError(
                f"launch.nproc_per_node is {launch.nproc_per_node} and {host} has {len(slots)} "
                f"slots in hostfile {path}: leave launch.nproc_per_node out, or set it to auto"
            )
    return taking_part


def devices_of(launch: "LaunchConfig") -> dict[str, tuple[int, ...]]:
    """Return the GPU numbers of the hosts whose slots were selected by number."""
    words = (*launch.include, *launch.exclude)
    named = {word.partition(":")[0] for word in words if ":" in word}
    # Any host may participate in an elastic run.
    slots = slots_of(launch, limited=not launch.elastic)
    return {host: numbers for host, numbers in slots.items() if host in named}


def _chosen(
    words: Sequence[str], listed: Mapping[str, tuple[int, ...]], setting: str, path: str
) -> dict[str, tuple[int, ...]]:
    """Return the slots of each host that `words` name."""
    selected: dict[str, tuple[int, ...]] = {}
    for word in words:
        match = _CHOICE.fullmatch(word)
        if match is None:
            raise ConfigError(
                f"{setting} has {word!r}: write `host`, or `host:0,2` for slots by number"
            )
        host, numbers = match[1], match[2]
        if host not in listed:
            raise ConfigError(
                f"{setting} names {host!r}, which {path} does not: it has {', '.join(listed)}"
            )
        if host in selected:
            raise ConfigError(f"{setting} names {host} twice: keep one, with all its slots")
        slots = (
            listed[host]
            if numbers is None
            else tuple(sorted({int(number) for number in numbers.split(",")}))
        )
        if slots[-1] >= len(listed[host]):
            raise ConfigError(
                f"{setting} names slot {slots[-1]} of {host}, which has {len(listed[host])} slots "
                f"in {path}, counted from 0"
            )
        selected[host] = slots
    return selected


def read_hostfile(path: str | Path) -> dict[str, int]:
    """Return the number of ranks of each host, in the order of the file and of the ranks.

    A line has the form `host slots=N`; empty lines and text after a # are ignored. Raises
    ConfigError.
    """
    try:
        lines = read_bytes(Path(path), _HOSTFILE_BYTES).decode("utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = "it is no text" if isinstance(error, UnicodeDecodeError) else reason_of(error)
        raise ConfigError(
            f"hostfile {path} cannot be read: {reason}: give a file with a line `host slots=N` for "
            "each machine"
        ) from error
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if words:
            host, slots = _entry(words, f"hostfile {path}, line {number}")
            if host in hosts:
                raise ConfigError(
                    f"hostfile {path}, line {number}: {host} is there already: give each host one "
                    "line"
                )
            hosts[host] = slots
    if not hosts:
        raise ConfigError(
            f"hostfile {path} names no host: write a line `host slots=N` for each machine"
        )
    _check_names(hosts, path)
    return hosts


def _entry(words: list[str], where: str) -> tuple[str, int]:
    host, *rest = words
    if not _HOST.fullmatch(host):
        raise ConfigError(
            f"{where}: {host!r} is no host: write a name or an IPv4 address, one host a line"
        )
    if len(rest) != 1 or not rest[0].startswith("slots="):
        raise ConfigError(
            f"{where}: {' '.join(words)!r} is not of the form `host slots=N`: correct it"
        )
    count = rest[0].removeprefix("slots=")
    if not _SLOTS.fullmatch(count) or not 0 < int(count) <= MOST_SLOTS:
        raise ConfigError(
            f"{where}: slots of {host} is {shortened(repr(count))}: write the number of ranks, at "
            f"least 1 and at most {MOST_SLOTS:,}"
        )
    return host, int(count)


def _check_names(hosts: Mapping[str, int], path: str | Path) -> None:
    here = [host for host in hosts if is_this_machine(host)]
    if len(here) > 1:
        raise ConfigError(
            f"hostfile {path}: {' and '.join(here)} are both this machine: keep one, with all its "
            "slots"
        )
    unreachable = [host for host in hosts if host in _LOOPBACK]
    if unreachable and len(hosts) > 1:
        raise ConfigError(
            f"hostfile {path}: the other hosts cannot reach {unreachable[0]}: name this machine as "
            f"they know it ({socket.gethostname()}?)"
        )


def is_this_machine(host: str) -> bool:
    """Return True if `host` certainly names this host; no name is resolved."""
    name = socket.gethostname()
    return host in (*_LOOPBACK, name, name.partition(".")[0])


def local_slots(hosts: Mapping[str, int]) -> int:
    """Return the number of ranks on this host."""
    return sum(slots for host, slots in hosts.items() if is_this_machine(host))


def is_only_here(hosts: Mapping[str, int]) -> bool:
    """Return True if all ranks are on this host, so that no other host is needed to start them."""
    return all(is_this_machine(host) for host in hosts)
