"""Schedule of the tests between hosts: connecting to ports, and exchanging data in pairs.

`megacore.doctor.peers` performs the tests on each host.
"""

import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megacore.cluster.hosts.ssh import HostResult, Ssh, python, run_on_hosts
from megacore.doctor.facts import Facts, PairMeasurement
from megacore.doctor.protocol import NOT_BEGUN, lines_of

ALL_PAIRS = 16
"""Number of hosts up to which all pairs are measured; beyond it, only a ring and random pairs."""
RANDOM_ROUNDS = 3
"""Number of random pairs of each host beyond `ALL_PAIRS` hosts."""
_SEED = 20
_PORT_SECONDS = 9.0
_PAIR_SECONDS = 34.0
_GRACE = 4.0
"""Seconds that a command takes to start and end, in addition to its work."""
_LEAST_PORT_SECONDS = 3.0
_LEAST_PAIR_SECONDS = 6.0
"""Remaining seconds below which a step does not start."""

Round = list[tuple[str, str]]


def try_ports(facts: Facts, ssh: Ssh, ends: float) -> Facts:
    """Let every host listen at a port and connect to others; with many hosts to a few only.

    If there is not enough time, this is recorded as the problem of every host.

    Args:
        facts: facts known so far.
        ssh: connection to the hosts.
        ends: monotonic time at which the examination ends.

    Returns:
        The facts with `reach` and `master`.
    """
    ready = [
        host for host, value in facts.answered("network") if value["address"] and value["ports"]
    ]
    if len(ready) < 2:
        return facts
    networks = dict(facts.answered("network"))
    master, (address, port) = ready[0], endpoint_of(facts.launch.rdzv_endpoint)
    endpoints = {host: (networks[host]["address"], networks[host]["ports"][0]) for host in ready}
    endpoints[master] = (address or endpoints[master][0], port or endpoints[master][1])
    seconds = min(_PORT_SECONDS, ends - time.monotonic() - _GRACE)
    if seconds < _LEAST_PORT_SECONDS:
        reach: dict[str, Mapping[str, Any]] = {host: {"problem": NOT_BEGUN} for host in ready}
        return replace(facts, reach=reach, master=master)
    targets = {host: _targets(host, ready) for host in ready}
    parts = {
        host: {
            "host": host,
            "port": endpoints[host][1],
            "expected": sum(host in others for others in targets.values()),
            "targets": {other: endpoints[other] for other in targets[host]},
            "seconds": seconds,
        }
        for host in ready
    }
    results = _run(ssh, "ports", parts, seconds + _GRACE)
    reach = {result.host: _only_line(result) for result in results}
    return replace(facts, reach=reach, master=master)


def _targets(host: str, hosts: Sequence[str]) -> list[str]:
    """Return the hosts to connect to: all others, or with many hosts the first and the next."""
    if len(hosts) <= ALL_PAIRS:
        return [other for other in hosts if other != host]
    following = hosts[(hosts.index(host) + 1) % len(hosts)]
    return [other for other in dict.fromkeys((hosts[0], following)) if other != host]


def endpoint_of(endpoint: str | None) -> tuple[str | None, int | None]:
    """Return address and port of `host:port` or `host`; None for a missing part."""
    if endpoint is None:
        return None, None
    host, sign, port = endpoint.rpartition(":")
    return (host, int(port)) if sign and port.isdigit() else (endpoint, None)


def measure_pairs(facts: Facts, ssh: Ssh, ends: float, environment: Mapping[str, str]) -> Facts:
    """Measure bandwidth and latency between pairs of hosts, and between two ranks of one host.

    Args:
        facts: facts known so far, including the ports.
        ssh: connection to the hosts.
        ends: monotonic time at which the examination ends.
        environment: environment variables of the ranks.

    Returns:
        The facts with `pairs` and `left_out`.
    """
    ready = _able(facts)
    rounds = rounds_of(ready)
    local_hosts = [host for host in facts.probes if _several_ranks(facts, host)]
    pairs = [
        *((host, host) for host in local_hosts),
        *(pair for round_pairs in rounds for pair in round_pairs),
    ]
    remaining = ends - time.monotonic() - _GRACE
    if not pairs:
        return facts
    if remaining < _LEAST_PAIR_SECONDS:
        unmeasured = [
            PairMeasurement(first, second, _backend(facts, first, second), problem=NOT_BEGUN)
            for first, second in pairs
        ]
        return replace(facts, pairs=tuple(unmeasured))
    seconds = min(_PAIR_SECONDS, remaining)
    parts = {
        host: _part(facts, host, rounds, host in local_hosts, seconds, environment)
        for host in facts.hosts
        if host in ready or host in local_hosts
    }
    results = {result.host: result for result in _run(ssh, "pairs", parts, seconds + _GRACE)}
    left_out = len(ready) * (len(ready) - 1) // 2 - sum(map(len, rounds))
    return replace(facts, pairs=pairs_of(results, pairs, facts), left_out=left_out)


def rounds_of(hosts: Sequence[str]) -> list[Round]:
    """Return rounds of disjoint pairs, so that each host is in at most one pair at a time.

    With few hosts these are all pairs, with many hosts a ring and random pairs, each pair at most
    once. The first host of a pair is the one that is earlier in `hosts`.
    """
    if len(hosts) < 2:
        return []
    rounds = _all_pairs(hosts) if len(hosts) <= ALL_PAIRS else _ring_and_random(hosts)
    order = {host: number for number, host in enumerate(hosts)}
    return [[(a, b) if order[a] < order[b] else (b, a) for a, b in pairs] for pairs in rounds]


def _all_pairs(hosts: Sequence[str]) -> list[Round]:
    """Return all pairs by the circle method: one host stays, the others rotate by one place."""
    circle: list[str | None] = [*hosts, None] if len(hosts) % 2 else [*hosts]
    count = len(circle)
    rounds = []
    for _ in range(count - 1):
        pairs = zip(circle[: count // 2], reversed(circle[count // 2 :]), strict=True)
        rounds.append([(a, b) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def _ring_and_random(hosts: Sequence[str]) -> list[Round]:
    count = len(hosts)
    ring = [(hosts[number], hosts[(number + 1) % count]) for number in range(count)]
    odd = [ring.pop()] if count % 2 else []
    rounds = [ring[0::2], ring[1::2], odd]
    known = {frozenset(pair) for pairs in rounds for pair in pairs}
    draw = random.Random(_SEED)
    for _ in range(RANDOM_ROUNDS):
        order = list(hosts)
        draw.shuffle(order)
        pairs = [
            pair
            for pair in zip(order[0::2], order[1::2], strict=False)
            if frozenset(pair) not in known
        ]
        known |= {frozenset(pair) for pair in pairs}
        rounds.append(pairs)
    return [pairs for pairs in rounds if pairs]


def _able(facts: Facts) -> list[str]:
    """Return the hosts that can be measured: torch works there, and their ports were tried."""
    return [
        host
        for host, answer in facts.reach.items()
        if "problem" not in answer and facts.probes[host].get("torch")
    ]


def _several_ranks(facts: Facts, host: str) -> bool:
    """Return True if a host can be measured and may have two ranks, with GPUs one on each."""
    probe = facts.probes[host]
    gpus = len(probe.get("gpus", "visible") or [])
    return bool(probe.get("torch")) and facts.hosts[host] != 1 and gpus != 1


def _part(
    facts: Facts,
    host: str,
    rounds: Sequence[Sequence[tuple[str, str]]],
    local: bool,
    seconds: float,
    environment: Mapping[str, str],
) -> dict[str, Any]:
    """Return the input of `megacore.doctor.peers pairs` on a host."""
    network = facts.probes[host].get("network") or {}
    schedule: list[dict[str, Any] | None] = []
    for pairs in rounds:
        pair = next((pair for pair in pairs if host in pair), None)
        if pair is None:
            schedule.append(None)
            continue
        first, second = pair
        meeting = facts.probes[first].get("network")
        schedule.append(
            {
                "peer": second if host == first else first,
                "address": meeting["address"],
                "port": meeting["ports"][1],
                "rank": 0 if host == first else 1,
                "backend": _backend(facts, first, second),
            }
        )
    return {
        "host": host,
        "interface": network.get("interface"),
        # A single host uses any free port.
        "port": network["ports"][1] if network else 0,
        "backend": _backend(facts, host, host),
        "local": local,
        "seconds": seconds,
        "environment": dict(environment),
        "rounds": schedule,
    }


def _backend(facts: Facts, first: str, second: str) -> str:
    """Return the backend of a pair: NCCL if CUDA works on both hosts, otherwise gloo."""
    cuda = [facts.probes[host].get("torch", "cuda_works") for host in (first, second)]
    return "nccl" if all(cuda) else "gloo"


def pairs_of(
    results: Mapping[str, HostResult], pairs: Sequence[tuple[str, str]], facts: Facts
) -> tuple[PairMeasurement, ...]:
    """Return the measurement of each pair from its first host, or the reason why there is none."""
    lines = {host: lines_of(result.output) for host, result in results.items()}
    measurements = []
    for first, second in pairs:
        backend = _backend(facts, first, second)
        answers = [
            next((line for line in lines[host] if line.get("peer") == peer), {})
            for host, peer in ((first, second), (second, first))
        ]
        if "value" in answers[0]:
            measurements.append(PairMeasurement(first, second, backend, **answers[0]["value"]))
            continue
        problems = [line["problem"] for line in answers if "problem" in line]
        general = [line["problem"] for line in lines[first] if line.get("check") == "store"]
        reason = (problems or general or [results[first].problem or "it ended without a message"])[
            0
        ]
        problem = " ".join(str(reason).split())[:300]
        measurements.append(PairMeasurement(first, second, backend, problem=problem))
    return tuple(measurements)


def _run(
    ssh: Ssh, command: str, parts: Mapping[str, dict[str, Any]], timeout: float
) -> list[HostResult]:
    words = python("megacore.doctor.peers", command)
    stdin = {host: json.dumps(part).encode() for host, part in parts.items()}
    return run_on_hosts(ssh, list(parts), words, stdin=stdin, timeout=max(1.0, timeout))


def _only_line(result: HostResult) -> dict[str, Any]:
    lines = lines_of(result.output)
    return lines[0] if lines else {"problem": result.problem or "it gave no answer"}
