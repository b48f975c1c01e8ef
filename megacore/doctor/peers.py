"""Tests of a host with its peers: `python -m megacore.doctor.peers ports`, or `… pairs`.

Both commands read the host's input from stdin.

`ports` listens at one port and connects to the ports of other hosts. It listens until all expected
hosts have connected, or the time is up. The port of the first host is that of the ranks'
rendezvous.

`pairs` measures bandwidth and latency between two hosts, one round after the other. Each host has a
store for the rendezvous with the hosts after it in the hostfile. Each pair has a process group
(gloo, or NCCL if both have GPUs), which is destroyed before the next round. Both ranks use the same
number of repetitions, which the duration of the warm-up determines.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any

from megacore.cluster.hosts.network import INTERFACE_VARIABLES
from megacore.doctor.protocol import NOT_BEGUN, PAIR_BYTES, answer, leave, say
from megacore.launch.exit_reason import die_with_parent

CONNECT_SECONDS = 6.0
"""Time limit for reaching a port; the other host may start a little later."""
_TRY_SECONDS = 2.0
_PAUSE = 0.1
_SMALL = 8
"""Bytes of the all-reduce that measures the latency."""
_REPEATS = {"latency": 50, "mb_1": 20, "mb_64": 5}
_BUDGET = 1.0
"""Seconds for the repetitions of one size, without the warm-up."""
_MEET_SECONDS = 12.0
"""Time limit for the rendezvous; the other host may have been delayed in the last round."""
_COLLECTIVE_SECONDS = 10.0
_PAIR_SECONDS = 30.0
_LOCAL = "local"


def main() -> None:
    """Run the command named by the first argument, with this host's input from stdin."""
    command = {"ports": connect_ports, "pairs": measure_rounds}[sys.argv[1]]
    command(json.loads(sys.stdin.buffer.read()))
    leave()


def connect_ports(part: Mapping[str, Any]) -> None:
    """Listen at a port, connect to the targets' ports, and report which were reached.

    Args:
        part: input of this host: `host`, `port`, `expected` (number of hosts that will connect),
            `targets` ({host: [address, port]}) and `seconds`.
    """
    ends = time.monotonic() + float(part["seconds"])
    # launch.rdzv_endpoint may be an IPv6 address; torch's store listens on both protocols, too.
    both = socket.has_dualstack_ipv6()
    server = socket.socket(socket.AF_INET6 if both else socket.AF_INET, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if both:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    problem, heard = None, threading.Semaphore(0)
    try:
        server.bind(("", int(part["port"])))
        server.listen(128)
        threading.Thread(target=_serve, args=(server, heard), daemon=True).start()
    except OSError as error:
        problem = error.strerror or str(error)
    limit = min(CONNECT_SECONDS, float(part["seconds"]))
    reached = connect_to_all(part["host"], part["targets"], limit)
    for _ in range(0 if problem else int(part["expected"])):
        if not heard.acquire(timeout=max(0.0, ends - time.monotonic())):
            break
    say({"check": "reach", "value": {"port": part["port"], "listens": problem, "reached": reached}})


def _serve(server: socket.socket, heard: threading.Semaphore) -> None:
    """Accept connections, and count the hosts that send their name."""
    while True:
        connection, _ = server.accept()
        connection.settimeout(_TRY_SECONDS)
        with connection:
            try:
                name = connection.recv(256)
            except OSError:
                continue
            if name.endswith(b"\n"):
                heard.release()


def connect_to_all(
    host: str, targets: Mapping[str, tuple[str, int]], limit: float
) -> dict[str, dict[str, Any]]:
    """Connect to all targets in parallel; return the duration or the problem for each."""
    reached: dict[str, dict[str, Any]] = {}

    def run(name: str, address: str, port: int) -> None:
        reached[name] = _connect(host, address, port, limit)

    threads = [
        threading.Thread(target=run, args=(name, *target), daemon=True)
        for name, target in targets.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return reached


def _connect(host: str, address: str, port: int, limit: float) -> dict[str, Any]:
    """Retry until the port is reached or the time is up; the last failure is the problem."""
    ends = time.monotonic() + limit
    problem = ""
    while time.monotonic() < ends:
        started = time.monotonic()
        try:
            with socket.create_connection((address, port), timeout=_TRY_SECONDS) as connection:
                seconds = time.monotonic() - started
                connection.sendall(f"{host}\n".encode())
            return {"seconds": round(seconds, 6), "address": address, "port": port, "problem": None}
        except TimeoutError:
            problem = "no answer: perhaps a firewall drops the packets"
        except ConnectionRefusedError:
            problem = "connection refused: nothing listens there, or a firewall rejects it"
        except OSError as error:
            problem = error.strerror or str(error)
        time.sleep(_PAUSE)
    return {"seconds": None, "address": address, "port": port, "problem": problem}


def measure_rounds(part: Mapping[str, Any]) -> None:
    """Measure this host's pair in each round, and write a line for each.

    Args:
        part: input of this host: `host`, `interface` (null if there is no other host), `port` of
            its store, `backend`, `seconds`, `environment`, `local` (true to measure two ranks of
            this host) and `rounds`. A round is null if the host has no peer in it, otherwise an
            object with `peer`, `address` and `port` of the store of the pair, `rank` and `backend`.
    """
    if part.get("rank") == 1:
        die_with_parent()
    os.environ.update(part["environment"])
    user_interfaces = {name: os.environ[name] for name in INTERFACE_VARIABLES if name in os.environ}
    ends = time.monotonic() + float(part["seconds"])
    store = answer("store", lambda: _Stores(part), _COLLECTIVE_SECONDS)
    if "problem" in store:
        say(store)
        leave(1)
    stores: _Stores = store["value"]
    rounds = [_local_round(part, stores.port)] if part["local"] else []
    for number, meeting in enumerate([*rounds, *part["rounds"]]):
        remaining = ends - time.monotonic()
        if meeting is None:
            continue
        line: dict[str, Any] = {"check": str(number), "problem": NOT_BEGUN}
        if remaining > 1.0:
            measure = partial(_measure, stores, meeting, part["interface"], user_interfaces)
            line = answer(str(number), measure, min(remaining, _PAIR_SECONDS))
        say(
            line | {"peer": meeting["peer"], "rank": meeting["rank"], "backend": meeting["backend"]}
        )


def _local_round(part: Mapping[str, Any], port: int) -> dict[str, Any]:
    """Start a process for the second rank of this host's own pair; return this rank's round."""
    meeting = {
        "peer": part["host"],
        "address": "127.0.0.1",
        "port": port,
        "backend": part["backend"],
    }
    if part.get("rank") != 1:
        other = {**part, "port": port, "rank": 1, "rounds": []}
        process = subprocess.Popen(
            [sys.executable, "-m", "megacore.doctor.peers", "pairs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(other).encode())
        process.stdin.close()
    return meeting | {"rank": part.get("rank", 0), _LOCAL: True}


class _Stores:
    """Store of this host, and access to the stores of the others."""

    def __init__(self, part: Mapping[str, Any]) -> None:
        """Import torch and open the port. Raises RuntimeError if the port is in use."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        limit = timedelta(seconds=_MEET_SECONDS)
        self.host = str(part["host"])
        # The second rank of a host uses the store of the first.
        self.own, self.port = None, int(part["port"])
        if part.get("rank") != 1:
            self.own = TCPStore(
                "0.0.0.0", self.port, is_master=True, wait_for_workers=False, timeout=limit
            )
            self.port = self.own.port

    def meet(self, meeting: Mapping[str, Any]) -> Any:
        """Wait for both ranks of a pair, and return its store. Raises RuntimeError."""
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        limit = timedelta(seconds=_MEET_SECONDS)
        rank = int(meeting["rank"])
        first = self.host if rank == 0 else str(meeting["peer"])
        second = str(meeting["peer"]) if rank == 0 else self.host
        if rank == 0 and self.own is not None:
            store = self.own
        else:
            store = TCPStore(
                str(meeting["address"]),
                int(meeting["port"]),
                is_master=False,
                wait_for_workers=False,
                timeout=limit,
            )
        pair = PrefixStore(f"{first}/{second}/{_LOCAL if meeting.get(_LOCAL) else ''}", store)
        pair.set(f"here-{rank}", "1")
        pair.wait([f"here-{1 - rank}"], limit)
        return pair


def _measure(
    stores: _Stores,
    meeting: Mapping[str, Any],
    interface: str | None,
    user_interfaces: Mapping[str, str],
) -> dict[str, float]:
    """Measure the seconds of a pair's all-reduces, by size.

    They go over the user's interfaces, or else `interface`.
    """
    import torch
    import torch.distributed as dist

    used = "lo" if meeting.get(_LOCAL) else interface
    if used is not None:
        os.environ |= {name: user_interfaces.get(name, used) for name in INTERFACE_VARIABLES}
    rank, cuda = int(meeting["rank"]), meeting["backend"] == "nccl"
    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", rank if meeting.get(_LOCAL) else 0)
        torch.cuda.set_device(device)
    store = stores.meet(meeting)
    limit = timedelta(seconds=_COLLECTIVE_SECONDS)
    dist.init_process_group(
        str(meeting["backend"]), store=store, rank=rank, world_size=2, timeout=limit
    )
    try:
        sizes = {"latency": _SMALL, **PAIR_BYTES}
        return {name: _seconds(size, _REPEATS[name], device) for name, size in sizes.items()}
    finally:
        dist.destroy_process_group()


def _seconds(size: int, repeats: int, device: Any) -> float:
    """Return the median time of an all-reduce of `size` bytes in fp32, after a warm-up."""
    import torch
    import torch.distributed as dist

    values = torch.ones(size // 4, device=device)

    def once() -> float:
        started = time.perf_counter()
        dist.all_reduce(values)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    def slower() -> float:
        """Run `once` and return the time of the slower rank, on both ranks."""
        time_of_both = torch.tensor([once()], dtype=torch.float64, device=device)
        dist.all_reduce(time_of_both, dist.ReduceOp.MAX)
        return float(time_of_both)

    # Each all-reduce doubles the values; fp32 overflows only after more than a hundred.
    first = slower()
    expected = first if first > _BUDGET else slower()
    count = max(1, min(repeats, int(_BUDGET / max(expected, 1e-6))))
    return statistics.median(once() for _ in range(count))


if __name__ == "__main__":
    main()
