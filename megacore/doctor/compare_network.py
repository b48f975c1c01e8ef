"""Verdicts on what lies between the hosts: names, interfaces, ports, bandwidth and latency. Pure functions."""

import statistics
from typing import Any

from megacore.doctor.facts import Facts, Judgement, Pair, most_common
from megacore.doctor.findings import Finding
from megacore.doctor.limited import NO_ANSWER, NOT_BEGUN
from megacore.doctor.network import is_loopback

SLOW_LINK = 0.7
"""A host's link is slow when the median of its pairs is below this part of that of all hosts, of at least three."""
LATE_LINK = 3.0
"""… or when its median latency is this many times that of all hosts."""
LATE_AT_LEAST = 1e-3
"""… and more than this many seconds."""
GIGABIT = 0.1
"""GB/s, which a gigabit Ethernet reaches."""
_GIGABIT_SPEED = 1000


def names(facts: Facts) -> Finding | None:
    """Every host finds the others by the addresses that ssh uses, and none of them leads back to itself."""
    judged = Judgement("names")
    for host, value in facts.answered("network"):
        if not value["peers"]:
            continue
        own = value["own_addresses"]
        judged.found(host, f"{value['hostname']} is {', '.join(own) or 'unknown'} there")
        if own and is_loopback(own[0]):
            judged.warn(
                host,
                f"the host's own name leads to {own[0]}, where nobody else can meet it: megacore does without it, but "
                "other launchers do not; give the name its real address in /etc/hosts",
            )
        for peer, addresses in value["peers"].items():
            needed = peer == facts.master
            problem = _name_problem(host, peer, addresses)
            if problem:
                (judged.error if needed else judged.warn)(host, problem)
    return judged.finding()


def _name_problem(host: str, peer: str, addresses: list[str]) -> str | None:
    if not addresses:
        return (
            f"{host} does not know the address of {peer}: add it to DNS or to /etc/hosts there, or write addresses "
            "into the ssh configuration (HostName)"
        )
    if is_loopback(addresses[0]):
        return (
            f"{peer} is {addresses[0]} on {host}, which is {host} itself: correct /etc/hosts there, or write addresses "
            "into the ssh configuration (HostName)"
        )
    return None


def interfaces(facts: Facts) -> Finding | None:
    """Each host has an interface towards the others, and these are alike."""
    judged = Judgement("interface")
    answered = [(host, value) for host, value in facts.answered("network") if value["peers"]]
    for host, value in answered:
        name = value["interface"]
        if name is None:
            judged.found(host, "no route")
            judged.error(
                host,
                f"{host} has no route to the other hosts: look at its network, or name the interface in "
                f"launch.interface ({', '.join(value['interfaces'])})",
            )
            continue
        if not value["exists"] or value["address"] is None:
            judged.found(host, f"{name} is {'without an address' if value['exists'] else 'missing'}")
            judged.error(
                host,
                f"launch.interface is {name}, which {host} lacks or has no address on: name one of "
                f"{', '.join(value['interfaces'])}, or set it to auto",
            )
            continue
        speed = "" if value["speed"] is None else f", {value['speed'] / 1000:g} Gbit/s"
        judged.found(host, f"{name} {value['address']}{speed}, MTU {value['mtu']}")
        if is_loopback(value["address"]):
            judged.error(
                host, f"{host} reaches the others through {name}, the loopback interface: name another launch.interface"
            )
        if value["speed"] is not None and value["speed"] < _GIGABIT_SPEED:
            judged.warn(host, f"{name} of {host} has {value['speed']} Mbit/s: look at its cable and its switch port")
    judged.unanswered(facts, "network", "error", "its resolver may hang; look at /etc/resolv.conf there")
    for key, what in (("mtu", "MTU"), ("speed", "speed in Mbit/s")):
        known = [(host, value[key]) for host, value in answered if value.get(key) is not None]
        usual = most_common(value for _, value in known) if known else None
        for host, value in known:
            if value != usual:
                judged.warn(
                    host,
                    f"the {what} of the interface is {value} on {host} and {usual} elsewhere: make them equal",
                )
    return judged.finding()


def ports(facts: Facts) -> Finding | None:
    """The port at which ranks meet can be opened, and hosts reach each other's ports."""
    judged = Judgement("ports")
    for host, said in facts.reach.items():
        if "problem" in said:
            judged.found(host, said["problem"])
            late = str(said["problem"]).startswith(NO_ANSWER)
            trouble = judged.warn if late else judged.error
            trouble(host, f"the ports of {host} were not tried ({said['problem']}): start the doctor again")
            continue
        value = said["value"]
        if value["listens"] is not None:
            judged.found(host, f"port {value['port']}: {value['listens']}")
            setting = f" (launch.rdzv_endpoint {facts.launch.rdzv_endpoint})" if host == facts.master else ""
            judged.error(
                host,
                f"port {value['port']} of {host}{setting} cannot be opened: {value['listens']}: end who uses it, or "
                "take another one",
            )
        else:
            judged.found(host, f"port {value['port']} is free")
        _reached(judged, facts, host, value["reached"])
    return judged.finding()


def _reached(judged: Judgement, facts: Facts, host: str, reached: dict[str, Any]) -> None:
    """Which of the others' ports a host reaches; those that could not be opened are the other's problem."""
    closed = {name for name, said in facts.reach.items() if "problem" in said or said["value"]["listens"] is not None}
    seen = [peer for peer in facts.hosts if peer in reached and reached[peer]["problem"] is None]
    if reached:
        judged.found(host, f"reaches {', '.join(seen) if seen else 'nobody'}")
    for peer, result in reached.items():
        if result["problem"] is None or peer in closed:
            continue
        what = "where the ranks meet" if peer == facts.master else "as the ranks' own connections need"
        judged.error(
            host,
            f"{host} does not reach {peer} at {result['address']}:{result['port']}, {what} ({result['problem']}): open "
            "all ports between the hosts in the firewall",
        )


def bandwidth(facts: Facts) -> Finding | None:
    """Every measured pair exchanges data, and no host does so clearly slower than the others."""
    judged = Judgement("bandwidth")
    unmeasured = [pair for pair in facts.pairs if (pair.problem or "").startswith(NOT_BEGUN)]
    if unmeasured:
        count = f"{len(unmeasured)} of {len(facts.pairs)} pairs"
        judged.warn("", f"{count} were not measured in time: examine fewer hosts at a time (launch.include)")
    for pair in facts.pairs:
        if pair.problem is not None and pair not in unmeasured:
            who = f"two ranks of {pair.first}" if pair.local else f"{pair.first} and {pair.second}"
            judged.error(
                pair.first,
                f"{who} do not exchange data over {pair.backend} ({pair.problem}): open all ports between the hosts, "
                "and see that launch.interface is right",
            )
    between = [pair for pair in facts.pairs if not pair.local and pair.problem is None]
    rates = host_medians(between, lambda pair: pair.bandwidth())
    latencies = host_medians(between, lambda pair: pair.latency)
    for host in facts.hosts:
        own = next((pair for pair in facts.pairs if pair.local and pair.first == host and pair.problem is None), None)
        parts = [_shown(rates[host], latencies[host])] if host in rates and host in latencies else []
        parts += [f"within {_shown(own.bandwidth(), own.latency)}"] if own is not None else []
        if parts:
            judged.found(host, ", ".join(parts))
    for host in slow_links(rates):
        judged.warn(
            host,
            f"the link of {host} is slow: {rates[host]:.2f} GB/s in the median of its pairs, "
            f"{statistics.median(rates.values()):.2f} of all: look at its cable, switch port and interface",
        )
    for host in late_links(latencies):
        judged.warn(
            host,
            f"the link of {host} is late: {latencies[host] * 1e3:.1f} ms in the median of its pairs, "
            f"{statistics.median(latencies.values()) * 1e3:.1f} of all: see that it is in the same zone and rack",
        )
    _compared_with_the_model(judged, facts, rates)
    if facts.left_out:
        judged.found(
            "", f"measured: {len(between)} pairs, neighbours of a ring and random ones; {facts.left_out} were left out"
        )
    return judged.finding()


def _compared_with_the_model(judged: Judgement, facts: Facts, rates: dict[str, float]) -> None:
    """What the median rate means for a step, and a warning below gigabit Ethernet."""
    if not rates:
        return
    middle = statistics.median(rates.values())
    exchange = ""
    if facts.needs is not None:
        size, seconds = facts.needs.gradients / 1e9, facts.needs.gradients / 1e9 / middle
        duration = f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
        exchange = f"{facts.needs.name} exchanges {size:.3g} GB of gradients a step, {duration} at this rate"
        judged.found("", exchange)
    if middle < GIGABIT:
        judged.warn(
            "",
            f"the hosts exchange {middle:.3f} GB/s, less than gigabit Ethernet"
            f"{f' ({exchange})' if exchange else ''}: name a faster launch.interface, or train on one host",
        )


def host_medians(pairs: list[Pair], value: Any) -> dict[str, float]:
    """The median of a value over the pairs that a host is in."""
    found: dict[str, list[float]] = {}
    for pair in pairs:
        measured = value(pair)
        if measured is not None:
            for host in (pair.first, pair.second):
                found.setdefault(host, []).append(measured)
    return {host: statistics.median(values) for host, values in found.items()}


def slow_links(rates: dict[str, float]) -> list[str]:
    """Hosts whose median rate is below SLOW_LINK times the median of all; of two hosts nobody can say which it is."""
    if len(rates) < 3:
        return []
    limit = SLOW_LINK * statistics.median(rates.values())
    return [host for host, rate in rates.items() if rate < limit]


def late_links(latencies: dict[str, float]) -> list[str]:
    """Hosts whose median latency is beyond LATE_LINK times the median of all, and beyond LATE_AT_LEAST."""
    if len(latencies) < 3:
        return []
    limit = max(LATE_AT_LEAST, LATE_LINK * statistics.median(latencies.values()))
    return [host for host, latency in latencies.items() if latency > limit]


def _shown(rate: float | None, latency: float | None) -> str:
    return f"{rate or 0.0:.2f} GB/s, {(latency or 0.0) * 1e6:,.0f} µs"
