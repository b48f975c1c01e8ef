"""How the machines of a batch job find each other before any rank starts.

They use small files on the shared workspace.

Each writes a greeting, again and again with a higher number: what an earlier start of the same job
has left behind stands still. The first machine waits until it has seen a greeting of every other
change, which also proves that all see the workspace, then says where the ranks meet.
"""

import contextlib
import json
import platform
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from megacore.artifact.files import read_json, replace_file, workspace_errors
from megacore.cluster.hosts.network import free_port
from megacore.cluster.hosts.plan import endpoint
from megacore.errors import HostLostError, LaunchError

LIMIT = 180.0
"""Seconds in which every machine must have begun: a scheduler starts them together, a container may
load its image."""

_INTERVAL = 0.2
_PACKAGES = ("megacore", "torch", "deepspeed")


@dataclass(frozen=True)
class Meeting:
    """What the machines agreed on."""

    address: str
    """Of the first machine."""
    port: int
    peer: str
    """Address of another machine, for the way to it; of the first one, for all others."""


def meeting_place(
    rdzv_endpoint: str | None, address: str, port: int | None = None
) -> tuple[str, int]:
    """Address and port at which the ranks meet, on the job's first machine.

    Args:
        rdzv_endpoint: of the configuration, which goes before the others.
        address: under which the other machines reach this one.
        port: None: one that is free here now.

    Raises:
        ConfigError: the endpoint cannot be used.
    """
    host, wanted = endpoint(rdzv_endpoint)
    return host or address, wanted or port or free_port()


class CalledOffError(Exception):
    """The scheduler asked to stop before all machines were there."""


def meet(
    folder: Path,
    rank: int,
    names: list[str],
    mine: Meeting,
    *,
    called_off: Callable[[], bool] = lambda: False,
    limit: float = LIMIT,
) -> Meeting:
    """Wait for all machines; the first one's address and port, the same on each.

    Args:
        folder: where the greetings go, at the same place on all machines.
        rank: this machine's number.
        names: of all machines, by number.
        mine: where the ranks would meet here: the first machine's counts.
        called_off: whether to give up.
        limit: seconds.

    Raises:
        CalledOffError: as it says.
        HostLostError: a machine did not greet within the limit; names it.
        LaunchError: a machine has other versions of the packages; names it.
        WorkspaceError: the folder cannot be written.
    """
    with workspace_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        nonce, started, count, versions = secrets.token_hex(8), time.monotonic(), 0, _versions()
        seen: dict[int, tuple[Any, Any]] = {}
        alive: dict[int, dict[str, Any]] = {}
        while True:
            count += 1
            greeting = {"nonce": nonce, "count": count, "versions": versions, **asdict(mine)}
            _write(_greeting_path(folder, rank), greeting)
            if rank == 0:
                _listen(folder, len(names), seen, alive)
                if len(alive) == len(names) - 1:
                    _compare(names, versions, alive)
                    nonces = {str(other): said["nonce"] for other, said in alive.items()}
                    said = {"address": mine.address, "port": mine.port, "nonces": nonces}
                    _write(folder / "meeting.json", said)
                    return Meeting(mine.address, mine.port, str(alive[1]["address"]))
            elif (found := _read(folder / "meeting.json")) and found.get("nonces", {}).get(
                str(rank)
            ) == nonce:
                return Meeting(str(found["address"]), int(found["port"]), str(found["address"]))
            if time.monotonic() - started > limit:
                absent = [names[other] for other in range(1, len(names)) if other not in alive]
                raise HostLostError(
                    f"{', '.join(absent) if rank == 0 else names[0]} did not begin within "
                    f"{limit:g} s, or does not see {folder} as {names[rank]} does: look at it, and "
                    "at whether the workspace is mounted there"
                )
            if called_off():
                raise CalledOffError
            time.sleep(_INTERVAL)


def _listen(
    folder: Path, nodes: int, seen: dict[int, tuple[Any, Any]], alive: dict[int, dict[str, Any]]
) -> None:
    """Note the greetings of the other machines that have changed since they were first seen."""
    for other in range(1, nodes):
        said = _read(_greeting_path(folder, other))
        if said is None:
            continue
        what = (said.get("nonce"), said.get("count"))
        if seen.setdefault(other, what) != what:
            alive[other] = said


def _compare(
    names: list[str], own: dict[str, str | None], alive: dict[int, dict[str, Any]]
) -> None:
    for other, said in sorted(alive.items()):
        for package, version in own.items():
            there = said["versions"].get(package)
            if there != version:
                raise LaunchError(
                    f"{names[other]} has {package} {there} and {names[0]} has {version}: install "
                    "the same on both"
                )


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"Python": platform.python_version()}
    for package in _PACKAGES:
        found[package] = None
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _greeting_path(folder: Path, rank: int) -> Path:
    return folder / f"greeting_{rank:05d}.json"


def _write(path: Path, content: dict[str, Any]) -> None:
    replace_file(path, json.dumps(content).encode(), durable=False)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        said = read_json(path)
    except (OSError, ValueError):
        return None
    return said if isinstance(said, dict) else None
