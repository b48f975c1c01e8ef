"""What hosts are told to try with each other: their ports, and the exchange of data in pairs."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megacore.doctor.facts import Facts, Pair
from megacore.doctor.limited import NOT_BEGUN
from megacore.doctor.tournament import ALL_PAIRS, rounds_of
from megacore.launch.hosts.ssh import HostResult, Ssh, python, run_on_hosts

_PORT_SECONDS = 9.0
_PAIR_SECONDS = 34.0
_GRACE = 4.0
"""Seconds of a command's start and end beside its work."""
_LEAST_PORTS = 3.0
_LEAST = 6.0
"""Seconds that a step needs to be worth its beginning."""


def try_ports(facts: Facts, ssh: Ssh, ends: float) -> Facts:
    """Let every host listen at a port, and the others connect to it; of many hosts only some do.

    Without time for it, that is what is said.

    Args:
        facts: so far.
        ssh: how hosts are reached.
        ends: monotonic time at which all must be over.
    """
    there = [host for host, value in facts.answered("network") if value["address"] and value["ports"]]
    if len(there) < 2:
        return facts
    networks = dict(facts.answered("network"))
    master, (address, port) = there[0], endpoint_of(facts.launch.rdzv_endpoint)
    places = {host: (networks[host]["address"], networks[host]["ports"][0]) for host in there}
    places[master] = (address or places[master][0], port or places[master][1])
    seconds = min(_PORT_SECONDS, ends - time.monotonic() - _GRACE)
    if seconds < _LEAST_PORTS:
        return replace(facts, reach={host: {"problem": NOT_BEGUN} for host in there}, master=master)
    targets = {host: _targets(host, there) for host in there}
    parts = {
        host: {
            "host": host,
            "port": places[host][1],
            "expected": sum(host in others for others in targets.values()),
            "targets": {other: places[other] for other in targets[host]},
            "seconds": seconds,
        }
        for host in there
    }
    results = _run(ssh, "megacore.doctor.reach", parts, seconds + _GRACE)
    reach = {result.host: _only_line(result) for result in results}
    return replace(facts, reach=reach, master=master)


def _targets(host: str, hosts: Sequence[str]) -> list[str]:
    """Whom a host connects to: everybody, or of many the first host and the next one."""
    if len(hosts) <= ALL_PAIRS:
        return [other for other in hosts if other != host]
    following = hosts[(hosts.index(host) + 1) % len(hosts)]
    return [other for other in dict.fromkeys((hosts[0], following)) if other != host]


def endpoint_of(endpoint: str | None) -> tuple[str | None, int | None]:
    """Address and port of `host:port` or `host`; None for what it does not say."""
    if endpoint is None:
        return None, None
    host, sign, port = endpoint.rpartition(":")
    return (host, int(port)) if sign and port.isdigit() else (endpoint, None)


def measure_pairs(facts: Facts, ssh: Ssh, ends: float, environment: Mapping[str, str]) -> Facts:
    """Bandwidth and latency of pairs of hosts, and of two ranks of each host with several; others are as above."""
    there = _able(facts)
    rounds = rounds_of(there) if len(there) > 1 else []
    within = [host for host, probe in facts.probes.items() if probe.get("torch") and _several_ranks(facts, host)]
    wanted = [*((host, host) for host in within), *(pair for pairs in rounds for pair in pairs)]
    left = ends - time.monotonic() - _GRACE
    if not wanted:
        return facts
    if left < _LEAST:
        late = (Pair(first, second, _backend(facts, first, second), problem=NOT_BEGUN) for first, second in wanted)
        return replace(facts, pairs=tuple(late))
    seconds = min(_PAIR_SECONDS, left)
    parts = {
        host: _part(facts, host, rounds, host in within, seconds, environment)
        for host in facts.hosts
        if host in there or host in within
    }
    results = _run(ssh, "megacore.doctor.peers", parts, seconds + _GRACE)
    pairs = pairs_of({result.host: result for result in results}, wanted, facts)
    count = len(there)
    left_out = count * (count - 1) // 2 - sum(len(each) for each in rounds)
    return replace(facts, pairs=pairs, left_out=left_out)


def _able(facts: Facts) -> list[str]:
    """Hosts that can be measured: torch runs there, and others reach them."""
    broken = {host for host, said in facts.reach.items() if "problem" in said}
    return [host for host in facts.reach if host not in broken and facts.probes[host].get("torch")]


def _several_ranks(facts: Facts, host: str) -> bool:
    """Whether two ranks of a host may meet; with GPUs that takes two."""
    gpus = len(facts.probes[host].get("gpus", "visible") or [])
    return facts.hosts[host] != 1 and (gpus != 1)


def _part(
    facts: Facts,
    host: str,
    rounds: Sequence[Sequence[tuple[str, str]]],
    local: bool,
    seconds: float,
    environment: Mapping[str, str],
) -> dict[str, Any]:
    """What a host does in each round."""
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
        # A machine by itself takes any port that is free.
        "port": network["ports"][1] if network else 0,
        "backend": _backend(facts, host, host),
        "local": local,
        "seconds": seconds,
        "environment": dict(environment),
        "rounds": schedule,
    }


def _backend(facts: Facts, first: str, second: str) -> str:
    """NCCL where both have GPUs that work."""
    return "nccl" if all(facts.probes[host].get("torch", "cuda_works") for host in (first, second)) else "gloo"


def pairs_of(results: Mapping[str, HostResult], wanted: Sequence[tuple[str, str]], facts: Facts) -> tuple[Pair, ...]:
    """The measurements: what the first host of a pair says, or, where it says nothing, why."""
    lines = {host: _lines(result) for host, result in results.items()}
    found = []
    for first, second in wanted:
        backend = _backend(facts, first, second)
        said = next((line for line in lines[first] if line.get("peer") == second), None)
        other = next((line for line in lines[second] if line.get("peer") == first), None)
        if said is not None and "value" in said:
            found.append(Pair(first, second, backend, **said["value"]))
            continue
        problems = [line["problem"] for line in (said, other) if line is not None and "problem" in line]
        general = [line["problem"] for line in lines[first] if line.get("check") == "store"]
        reason = (problems or general or [results[first].problem or "it ended without a word"])[0]
        found.append(Pair(first, second, backend, problem=" ".join(str(reason).split())[:300]))
    return tuple(found)


def _run(ssh: Ssh, module: str, parts: Mapping[str, dict[str, Any]], timeout: float) -> list[HostResult]:
    stdin = {host: json.dumps(part).encode() for host, part in parts.items()}
    return run_on_hosts(ssh, list(parts), python(module), stdin=stdin, timeout=max(1.0, timeout))


def _lines(result: HostResult) -> list[dict[str, Any]]:
    found = []
    for line in result.output.splitlines():
        try:
            said = json.loads(line)
        except ValueError:  # a warning of a library
            continue
        if isinstance(said, dict) and "check" in said:
            found.append(said)
    return found


def _only_line(result: HostResult) -> dict[str, Any]:
    lines = _lines(result)
    return lines[0] if lines else {"problem": result.problem or "it said nothing"}
