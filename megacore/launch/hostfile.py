"""DeepSpeed's hostfiles: which machines take part in a job, and with how many ranks each."""

import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from megacore.errors import ConfigError

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(?:\w[\w.-]*@)?\w[\w.-]*", re.ASCII)
"""A name or an IPv4 address, with or without a user: pdsh gives other characters a meaning of their own, and ssh takes
what begins with a dash for an option."""


def read_hostfile(path: str | Path, nproc_per_node: int | Literal["auto"] = "auto") -> dict[str, int]:
    """Ranks of each machine, in the file's order, which is the order of the ranks.

    A line is `host slots=N`; empty lines and what follows a # are left out. Raises ConfigError, also when
    `nproc_per_node` says another number than the slots.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"hostfile {path} cannot be read: {reason}: correct launch.hostfile") from error
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        said = line.partition("#")[0].split()
        if said:
            host, slots = _entry(said, f"hostfile {path}, line {number}")
            if host in hosts:
                raise ConfigError(f"hostfile {path}, line {number}: {host} is there already: give each host one line")
            hosts[host] = slots
    if not hosts:
        raise ConfigError(f"hostfile {path} names no host: write a line `host slots=N` for each machine")
    _check_names(hosts, path)
    for host, slots in hosts.items():
        if nproc_per_node not in ("auto", slots):
            raise ConfigError(
                f"launch.nproc_per_node is {nproc_per_node} and {host} has {slots} slots in hostfile {path}: "
                f"set launch.nproc_per_node to auto"
            )
    return hosts


def _entry(said: list[str], where: str) -> tuple[str, int]:
    host, *rest = said
    if not _HOST.fullmatch(host):
        raise ConfigError(f"{where}: {host!r} is no host: write a name or an IPv4 address, one host a line")
    if len(rest) != 1 or not rest[0].startswith("slots="):
        raise ConfigError(f"{where}: {' '.join(said)!r} is not of the form `host slots=N`: correct it")
    count = rest[0].removeprefix("slots=")
    if not (count.isascii() and count.isdigit() and int(count) > 0):
        raise ConfigError(f"{where}: slots of {host} is {count!r}: write the number of ranks, at least 1")
    return host, int(count)


def _check_names(hosts: Mapping[str, int], path: str | Path) -> None:
    here = [host for host in hosts if is_this_machine(host)]
    if len(here) > 1:
        raise ConfigError(f"hostfile {path}: {' and '.join(here)} are both this machine: keep one, with all its slots")
    unreachable = [host for host in hosts if host in _LOOPBACK]
    if unreachable and len(hosts) > 1:
        raise ConfigError(
            f"hostfile {path}: the other hosts cannot reach {unreachable[0]}: name this machine as they know it "
            f"({socket.gethostname()}?)"
        )


def is_this_machine(host: str) -> bool:
    """Whether a hostfile's name is certainly this machine; no name is looked up."""
    name = socket.gethostname()
    return host in (*_LOOPBACK, name, name.partition(".")[0])


def local_slots(hosts: Mapping[str, int]) -> int:
    """Ranks of this machine among `hosts`."""
    return sum(slots for host, slots in hosts.items() if is_this_machine(host))


def is_only_here(hosts: Mapping[str, int]) -> bool:
    """Whether the ranks are all on this machine, which needs no other to start them."""
    return all(is_this_machine(host) for host in hosts)
