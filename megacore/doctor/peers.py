"""Bandwidth and latency between two hosts: `python -m megacore.doctor.peers` plays one host's part in all rounds.

Each host has a store of its own at which it meets those that come after it in the hostfile, and each pair a process
group of its own (gloo, or NCCL where both have GPUs), which is gone before the next round. Both sides take the same
number of repetitions, decided by what the warm-up took.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from megacore.doctor.limited import NOT_BEGUN, answer, leave, say
from megacore.launch.exit_reason import die_with_parent

SIZES = {"mb_1": 10**6, "mb_64": 64 * 10**6}
"""Bytes of the all-reduces."""
_SMALL = 8
"""Bytes of that by which the latency is taken."""
_REPEATS = {"latency": 50, "mb_1": 20, "mb_64": 5}
_BUDGET = 1.0
"""Seconds of the repetitions of one size, the first one apart."""
_MEET_SECONDS = 12.0
"""In which the other host must come; it may have waited for another one in the round before."""
_COLLECTIVE_SECONDS = 10.0
_PAIR_SECONDS = 30.0
_LOCAL = "local"
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def main() -> None:
    """Read the part of a host; write a line for each round.

    The part: `host`, `interface` (null for this machine alone), `port` of its store, `backend`, `seconds`,
    `environment`, `local` (whether two of its own ranks are measured), and `rounds`: null where it has a break, else
    `peer`, `address` and `port` of the store where they meet, `rank` and `backend`.
    """
    part = json.loads(sys.stdin.buffer.read())
    if part.get("rank") == 1:
        die_with_parent()
    os.environ.update(part["environment"])
    named = {name: os.environ[name] for name in _INTERFACE_VARIABLES if name in os.environ}
    ends = time.monotonic() + float(part["seconds"])
    store = answer("store", lambda: _Stores(part), _COLLECTIVE_SECONDS)
    if "problem" in store:
        say(store)
        leave(1)
    stores: _Stores = store["value"]
    rounds = [_local_round(part, stores.port)] if part["local"] else []
    for number, against in enumerate([*rounds, *part["rounds"]]):
        left = ends - time.monotonic()
        if against is None:
            continue
        line: dict[str, Any] = {"check": str(number), "problem": NOT_BEGUN}
        if left > 1.0:
            line = answer(str(number), _measuring(stores, against, part["interface"], named), min(left, _PAIR_SECONDS))
        say(line | {"peer": against["peer"], "rank": against["rank"], "backend": against["backend"]})
    leave()


def _local_round(part: Mapping[str, Any], port: int) -> dict[str, Any]:
    """The other rank of this host's own pair is a process of its own; returns this one's round."""
    against = {"peer": part["host"], "address": "127.0.0.1", "port": port, "backend": part["backend"]}
    if part.get("rank") != 1:
        other = {**part, "port": port, "rank": 1, "rounds": []}
        process = subprocess.Popen(
            [sys.executable, "-m", "megacore.doctor.peers"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(other).encode())
        process.stdin.close()
    return against | {"rank": part.get("rank", 0), _LOCAL: True}


class _Stores:
    """This host's store, and its way to those of the others."""

    def __init__(self, part: Mapping[str, Any]) -> None:
        """Imports torch and opens the port. Raises RuntimeError where it is taken."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        limit = timedelta(seconds=_MEET_SECONDS)
        self.host = str(part["host"])
        # The second rank of a host has no store of its own.
        self.own, self.port = None, int(part["port"])
        if part.get("rank") != 1:
            self.own = TCPStore("0.0.0.0", self.port, is_master=True, wait_for_workers=False, timeout=limit)
            self.port = self.own.port

    def meet(self, against: Mapping[str, Any]) -> Any:
        """The store of a pair, once both have come. Raises RuntimeError."""
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        limit = timedelta(seconds=_MEET_SECONDS)
        rank = int(against["rank"])
        first = self.host if rank == 0 else str(against["peer"])
        second = str(against["peer"]) if rank == 0 else self.host
        if rank == 0 and self.own is not None:
            store = self.own
        else:
            store = TCPStore(
                str(against["address"]), int(against["port"]), is_master=False, wait_for_workers=False, timeout=limit
            )
        pair = PrefixStore(f"{first}/{second}/{_LOCAL if against.get(_LOCAL) else ''}", store)
        pair.set(f"here-{rank}", "1")
        pair.wait([f"here-{1 - rank}"], limit)
        return pair


def _measuring(
    stores: _Stores, against: Mapping[str, Any], interface: str | None, named: Mapping[str, str]
) -> Callable[[], dict[str, float]]:
    """What measures a pair, over the interfaces that the user's own variables name, if they do."""

    def measure() -> dict[str, float]:
        device = "lo" if against.get(_LOCAL) else interface
        for name in _INTERFACE_VARIABLES:
            if device is not None:
                os.environ[name] = named.get(name, device)
        return _measure(stores, against)

    return measure


def _measure(stores: _Stores, against: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of the all-reduces of a pair."""
    import torch
    import torch.distributed as dist

    rank, cuda = int(against["rank"]), against["backend"] == "nccl"
    place = torch.device("cuda", rank if against.get(_LOCAL) else 0) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(place)
    store = stores.meet(against)
    limit = timedelta(seconds=_COLLECTIVE_SECONDS)
    dist.init_process_group(str(against["backend"]), store=store, rank=rank, world_size=2, timeout=limit)
    try:
        found = {"latency": _seconds(_SMALL, _REPEATS["latency"], place)}
        return found | {name: _seconds(size, _REPEATS[name], place) for name, size in SIZES.items()}
    finally:
        dist.destroy_process_group()


def _seconds(size: int, repeats: int, place: Any) -> float:
    """The median time of an all-reduce of `size` bytes in fp32, after one or two that warm up."""
    import torch
    import torch.distributed as dist

    values = torch.ones(size // 4, device=place)

    def once() -> float:
        started = time.perf_counter()
        dist.all_reduce(values)
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        return time.perf_counter() - started

    def slower() -> float:
        """The time of one that took longer, as both ranks know it."""
        time_of_both = torch.tensor([once()], dtype=torch.float64, device=place)
        dist.all_reduce(time_of_both, dist.ReduceOp.MAX)
        return float(time_of_both)

    # The sums double with each, which fp32 holds a hundred times.
    first = slower()
    expected = first if first > _BUDGET else slower()
    count = max(1, min(repeats, int(_BUDGET / max(expected, 1e-6))))
    return statistics.median(once() for _ in range(count))


if __name__ == "__main__":
    main()
