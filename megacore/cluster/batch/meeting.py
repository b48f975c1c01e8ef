"""Rendezvous of a batch job's nodes before any rank starts, through files on the shared workspace.

Each node writes a greeting again and again, with an increasing number. A greeting left by an
earlier start of the same job does not change. The first node waits until the greetings of all other
nodes have changed, which also proves that all of them see the workspace. Then it writes the address
at which the ranks meet.
"""

import json
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megacore.artifact.files import read_json, replace_file, workspace_errors
from megacore.cluster.hosts.network import free_port
from megacore.cluster.hosts.plan import endpoint
from megacore.errors import FileAccessError, HostLostError
from megacore.hardware import SHARED_PACKAGES, check_versions, shared_versions

LIMIT = 180.0
"""Seconds for every node to start. A scheduler starts them together, but a container may have to
load its image."""

_INTERVAL = 0.2
_LOOKS = 3
"""Looks at the other nodes within the limit, after the first one."""


@dataclass(frozen=True)
class Meeting:
    """Address of the ranks' rendezvous, on which all nodes agree."""

    address: str
    """Address of the first node."""
    port: int
    peer: str
    """Address of another node, to find the network interface; the first node's on all others."""


def meeting_place(
    rdzv_endpoint: str | None, address: str, port: int | None = None
) -> tuple[str, int]:
    """Return address and port of the ranks' rendezvous, on the job's first node.

    The endpoint of the configuration takes precedence over this node's address and port; a port of
    None means one that is currently free. Raises ConfigError.
    """
    host, requested_port = endpoint(rdzv_endpoint)
    return host or address, requested_port or port or free_port()


class CalledOffError(Exception):
    """Request of the scheduler to stop before all nodes have met."""


def meet(
    folder: Path,
    rank: int,
    names: list[str],
    mine: Meeting,
    *,
    packages: Iterable[str] = SHARED_PACKAGES,
    called_off: Callable[[], bool] = lambda: False,
    limit: float = LIMIT,
) -> Meeting:
    """Wait for all nodes and return the first node's address and port.

    Args:
        folder: directory of the greetings, the same on all nodes.
        rank: number of this node.
        names: names of all nodes, by number.
        mine: rendezvous on this node; only the first node's is used.
        packages: packages whose versions must be the same on all nodes.
        called_off: returns True to give up.
        limit: time limit in seconds.

    Raises:
        CalledOffError: `called_off` returned True.
        HostLostError: a node did not greet within the limit; the message names it.
        LaunchError: a node has other versions of the packages; the message names it.
        WorkspaceError: the folder cannot be written.
    """
    with workspace_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        nonce, started, count, versions = (
            secrets.token_hex(8),
            time.monotonic(),
            0,
            shared_versions(),
        )
        seen: dict[int, tuple[Any, Any]] = {}
        alive: dict[int, dict[str, Any]] = {}
        next_look = started
        while True:
            count += 1
            greeting = {"nonce": nonce, "count": count, "versions": versions, **asdict(mine)}
            _write(_greeting_path(folder, rank), greeting)
            late = time.monotonic() - started > limit
            # The others only look a few times, to name the absent nodes.
            if rank == 0 or late or time.monotonic() >= next_look:
                next_look += limit / _LOOKS
                _listen(folder, rank, len(names), seen, alive)
            if rank == 0:
                if len(alive) == len(names) - 1:
                    for other, answer in sorted(alive.items()):
                        check_versions(
                            packages, names[other], answer["versions"], names[0], versions
                        )
                    nonces = {str(other): answer["nonce"] for other, answer in alive.items()}
                    meeting = {"address": mine.address, "port": mine.port, "nonces": nonces}
                    _write(folder / "meeting.json", meeting)
                    return Meeting(mine.address, mine.port, str(alive[1]["address"]))
            elif (reply := _read(folder / "meeting.json")) and reply.get("nonces", {}).get(
                str(rank)
            ) == nonce:
                return Meeting(str(reply["address"]), int(reply["port"]), str(reply["address"]))
            if late:
                here = {*alive, rank}
                absent = [name for other, name in enumerate(names) if other not in here]
                raise HostLostError(
                    f"{', '.join(absent) or names[0]} did not begin within "
                    f"{limit:g} s, or does not see {folder} as {names[rank]} does: look at it, and "
                    "at whether the workspace is mounted there"
                )
            if called_off():
                raise CalledOffError
            time.sleep(_INTERVAL)


def _listen(
    folder: Path,
    rank: int,
    nodes: int,
    seen: dict[int, tuple[Any, Any]],
    alive: dict[int, dict[str, Any]],
) -> None:
    """Add the greetings of other nodes to `alive` that have changed since they were first seen."""
    for other in set(range(nodes)) - {rank}:
        greeting = _read(_greeting_path(folder, other))
        if greeting is None:
            continue
        state = (greeting.get("nonce"), greeting.get("count"))
        if seen.setdefault(other, state) != state:
            alive[other] = greeting


def _greeting_path(folder: Path, rank: int) -> Path:
    return folder / f"greeting_{rank:05d}.json"


def _write(path: Path, content: dict[str, Any]) -> None:
    replace_file(path, json.dumps(content).encode(), durable=False)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = read_json(path)
    except (OSError, ValueError, FileAccessError):
        return None
    return content if isinstance(content, dict) else None
