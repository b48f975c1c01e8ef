"""Network between the hosts: names, interfaces, ports, bandwidth and latency.

`look_at_network` inspects the host it runs on. The functions that return a `Finding` evaluate the
hosts' answers.
"""

import ipaddress
import socket
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megacore.cluster.hosts.network import (
    free_ports,
    interface_address,
    interface_to,
    local_address,
)
from megacore.doctor.findings import Facts, Finding, Judgement, PairMeasurement, most_common
from megacore.doctor.protocol import NO_ANSWER, NOT_BEGUN
from megacore.paths import exists, is_dir

_INTERFACES = Path("/sys/class/net")
SLOW_LINK = 0.7
"""A host's link is slow if the median bandwidth of its pairs is below this fraction of the
median of all hosts.

With two hosts it is unknown which link is slow."""
LATE_LINK = 3.0
"""A host's link is late if the median latency of its pairs exceeds this multiple of the median
of all hosts, and `LATE_AT_LEAST`."""
LATE_AT_LEAST = 1e-3
"""Latency in seconds up to which no link is late."""
GIGABIT = 0.1
"""Bandwidth in GB/s that gigabit Ethernet reaches."""
_GIGABIT_SPEED = 1000
"""Speed of gigabit Ethernet in Mbit/s."""


def look_at_network(peers: Mapping[str, str], interface: str) -> dict[str, Any]:
    """Return this host's resolution of peer names, its interface to them, and two free ports.

    Args:
        peers: addresses of the other hosts, by name.
        interface: `launch.interface`.
    """
    name = socket.gethostname()
    resolved = {peer: resolve(address) for peer, address in peers.items()}
    usable = [
        addresses[0]
        for addresses in resolved.values()
        if addresses and not is_loopback(addresses[0])
    ]
    device = interface_to(usable[0]) if usable and interface == "auto" else None
    address = _route_from(usable[0]) if device is not None else None
    if peers and interface != "auto":
        device = interface.partition(",")[0]
        address = interface_address(device)
    interface_paths = _INTERFACES.iterdir() if is_dir(_INTERFACES) else ()
    return {
        "hostname": name,
        "own_addresses": resolve(name) if peers else [],
        "peers": resolved,
        "interface": device,
        "address": address,
        **(describe_interface(device) if device else {"exists": False}),
        "interfaces": sorted(path.name for path in interface_paths),
        "ports": free_ports(2),
    }


def resolve(name: str) -> list[str]:
    """Return the IPv4 addresses of a name by this host's resolver; empty if it is unknown."""
    try:
        answers = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(answer[4][0]) for answer in answers))


def is_loopback(address: str) -> bool:
    """Return True if an address is a loopback address."""
    return ipaddress.ip_address(address).is_loopback


def _route_from(peer: str) -> str | None:
    try:
        return local_address(peer)
    except OSError:
        return None


def describe_interface(name: str) -> dict[str, Any]:
    """Return speed (Mbit/s, None if not reported), MTU and state of an interface."""
    folder = _INTERFACES / name
    speed = _number(folder / "speed")
    return {
        "exists": exists(folder),
        "speed": speed if speed is not None and speed > 0 else None,
        "mtu": _number(folder / "mtu"),
        "state": _text(folder / "operstate"),
    }


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):  # reading the speed fails if the interface is down
        return None


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and text.lstrip("-").isdigit() else None


def names(facts: Facts) -> Finding | None:
    """Check that hosts resolve the addresses that ssh uses, and none to a loopback address."""
    judgement = Judgement("names")
    for host, value in facts.answered("network"):
        if not value["peers"]:
            continue
        addresses = value["own_addresses"]
        judgement.note(host, f"{value['hostname']} is {', '.join(addresses) or 'unknown'} there")
        if addresses and is_loopback(addresses[0]):
            judgement.warn(
                host,
                f"the host's own name leads to {addresses[0]}, where no other host reaches it: "
                "megacore does not need it, but other launchers do; give the name its real "
                "address in /etc/hosts",
            )
        for peer, resolved in value["peers"].items():
            problem = _name_problem(host, peer, resolved)
            if problem:
                (judgement.error if peer == facts.master else judgement.warn)(host, problem)
    return judgement.finding()


def _name_problem(host: str, peer: str, addresses: list[str]) -> str | None:
    if not addresses:
        return (
            f"{host} does not know the address of {peer}: add it to DNS or to /etc/hosts there, or "
            "write addresses into the ssh configuration (HostName)"
        )
    if is_loopback(addresses[0]):
        return (
            f"{peer} is {addresses[0]} on {host}, which is {host} itself: correct /etc/hosts "
            "there, or write addresses into the ssh configuration (HostName)"
        )
    return None


def interfaces(facts: Facts) -> Finding | None:
    """Check that each host has an interface to the others, and that their MTU and speed agree."""
    judgement = Judgement("interface")
    answered = [(host, value) for host, value in facts.answered("network") if value["peers"]]
    for host, value in answered:
        name = value["interface"]
        if name is None:
            judgement.note(host, "no route")
            judgement.error(
                host,
                f"{host} has no route to the other hosts: look at its network, or name the "
                f"interface in launch.interface ({', '.join(value['interfaces'])})",
            )
            continue
        if not value["exists"] or value["address"] is None:
            judgement.note(
                host, f"{name} is {'without an address' if value['exists'] else 'missing'}"
            )
            judgement.error(
                host,
                f"launch.interface is {name}, which {host} lacks or has no address on: name one of "
                f"{', '.join(value['interfaces'])}, or set it to auto",
            )
            continue
        speed = "" if value["speed"] is None else f", {value['speed'] / 1000:g} Gbit/s"
        judgement.note(host, f"{name} {value['address']}{speed}, MTU {value['mtu']}")
        if is_loopback(value["address"]):
            judgement.error(
                host,
                f"{host} reaches the others through {name}, the loopback interface: name another "
                "launch.interface",
            )
        if value["speed"] is not None and value["speed"] < _GIGABIT_SPEED:
            judgement.warn(
                host,
                f"{name} of {host} has {value['speed']} Mbit/s: look at its cable and its switch "
                "port",
            )
    judgement.unanswered(
        facts, "network", "error", "its resolver may hang; look at /etc/resolv.conf there"
    )
    for key, label in (("mtu", "MTU"), ("speed", "speed in Mbit/s")):
        known = [(host, value[key]) for host, value in answered if value.get(key) is not None]
        usual = most_common(value for _, value in known) if known else None
        for host, value in known:
            if value != usual:
                judgement.warn(
                    host,
                    f"the {label} of the interface is {value} on {host} and {usual} elsewhere: "
                    "make them equal",
                )
    return judgement.finding()


def ports(facts: Facts) -> Finding | None:
    """Check that the port of the rendezvous can be opened, and that hosts reach each other."""
    judgement = Judgement("ports")
    for host, answer in facts.reach.items():
        if "problem" in answer:
            problem = str(answer["problem"])
            judgement.note(host, problem)
            add = judgement.warn if problem.startswith(NO_ANSWER) else judgement.error
            add(host, f"the ports of {host} were not tried ({problem}): start the doctor again")
            continue
        value = answer["value"]
        if value["listens"] is not None:
            judgement.note(host, f"port {value['port']}: {value['listens']}")
            setting = (
                f" (launch.rdzv_endpoint {facts.launch.rdzv_endpoint})"
                if host == facts.master
                else ""
            )
            judgement.error(
                host,
                f"port {value['port']} of {host}{setting} cannot be opened: {value['listens']}: "
                "end the process that uses it, or take another port",
            )
        else:
            judgement.note(host, f"port {value['port']} is free")
        _reached(judgement, facts, host, value["reached"])
    return judgement.finding()


def _reached(judgement: Judgement, facts: Facts, host: str, reached: dict[str, Any]) -> None:
    """Note the peers that a host reaches, and add an error for each that it does not reach.

    Peers that could not open their port are left out, because that is reported for them already.
    """
    closed = {
        name
        for name, answer in facts.reach.items()
        if "problem" in answer or answer["value"]["listens"] is not None
    }
    reachable = [
        peer for peer in facts.hosts if peer in reached and reached[peer]["problem"] is None
    ]
    if reached:
        judgement.note(host, f"reaches {', '.join(reachable) if reachable else 'nobody'}")
    for peer, result in reached.items():
        if result["problem"] is None or peer in closed:
            continue
        purpose = (
            "where the ranks meet" if peer == facts.master else "as the ranks' own connections need"
        )
        judgement.error(
            host,
            f"{host} does not reach {peer} at {result['address']}:{result['port']}, {purpose} "
            f"({result['problem']}): open all ports between the hosts in the firewall",
        )


def bandwidth(facts: Facts) -> Finding | None:
    """Check that every measured pair exchanges data, and that no host's link is slow."""
    judgement = Judgement("bandwidth")
    unmeasured = [pair for pair in facts.pairs if (pair.problem or "").startswith(NOT_BEGUN)]
    if unmeasured:
        count = f"{len(unmeasured)} of {len(facts.pairs)} pairs"
        judgement.warn(
            "", f"{count} were not measured in time: examine fewer hosts at a time (launch.include)"
        )
    for candidate in facts.pairs:
        if candidate.problem is not None and candidate not in unmeasured:
            ranks = (
                f"two ranks of {candidate.first}"
                if candidate.local
                else f"{candidate.first} and {candidate.second}"
            )
            judgement.error(
                candidate.first,
                f"{ranks} do not exchange data over {candidate.backend} ({candidate.problem}): "
                "open all ports between the hosts, and see that launch.interface is right",
            )
    between = [pair for pair in facts.pairs if not pair.local and pair.problem is None]
    rates = host_medians(between, lambda pair: pair.bandwidth())
    latencies = host_medians(between, lambda pair: pair.latency)
    for host in facts.hosts:
        local = [
            pair
            for pair in facts.pairs
            if pair.local and pair.first == host and pair.problem is None
        ]
        parts = (
            [_shown(rates[host], latencies[host])] if host in rates and host in latencies else []
        )
        parts += [f"within {_shown(pair.bandwidth(), pair.latency)}" for pair in local]
        if parts:
            judgement.note(host, ", ".join(parts))
    for host in slow_links(rates):
        judgement.warn(
            host,
            f"the link of {host} is slow: {rates[host]:.2f} GB/s in the median of its pairs, "
            f"{statistics.median(rates.values()):.2f} of all: look at its cable, switch port and "
            "interface",
        )
    for host in late_links(latencies):
        judgement.warn(
            host,
            f"the link of {host} is late: {latencies[host] * 1e3:.1f} ms in the median of its "
            f"pairs, {statistics.median(latencies.values()) * 1e3:.1f} of all: see that it is in "
            "the same zone and rack",
        )
    _compared_with_the_model(judgement, facts, rates)
    if facts.left_out:
        judgement.note(
            "",
            f"measured: {len(between)} pairs, neighbours of a ring and random ones; "
            f"{facts.left_out} were left out",
        )
    return judgement.finding()


def _compared_with_the_model(judgement: Judgement, facts: Facts, rates: dict[str, float]) -> None:
    """Add the time that a step's exchange takes; warn below gigabit Ethernet."""
    if not rates:
        return
    median = statistics.median(rates.values())
    exchange = ""
    if facts.needs is not None:
        size, seconds = facts.needs.gradients / 1e9, facts.needs.gradients / 1e9 / median
        duration = f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
        exchange = (
            f"{facts.needs.name} exchanges {size:.3g} GB of gradients a step, {duration} at this "
            "rate"
        )
        judgement.note("", exchange)
    if median < GIGABIT:
        judgement.warn(
            "",
            f"the hosts exchange {median:.3f} GB/s, less than gigabit Ethernet"
            f"{f' ({exchange})' if exchange else ''}: name a faster launch.interface, or train on "
            "one host",
        )


def host_medians(
    pairs: list[PairMeasurement], value: Callable[[PairMeasurement], float | None]
) -> dict[str, float]:
    """Return the median of a value over the pairs of each host."""
    by_host: dict[str, list[float]] = {}
    for pair in pairs:
        measured = value(pair)
        if measured is not None:
            for host in (pair.first, pair.second):
                by_host.setdefault(host, []).append(measured)
    return {host: statistics.median(values) for host, values in by_host.items()}


def slow_links(rates: dict[str, float]) -> list[str]:
    """Return the hosts below SLOW_LINK times the median rate; none with fewer than three hosts."""
    if len(rates) < 3:
        return []
    limit = SLOW_LINK * statistics.median(rates.values())
    return [host for host, rate in rates.items() if rate < limit]


def late_links(latencies: dict[str, float]) -> list[str]:
    """Return the hosts with a late link; none with fewer than three hosts."""
    if len(latencies) < 3:
        return []
    limit = max(LATE_AT_LEAST, LATE_LINK * statistics.median(latencies.values()))
    return [host for host, latency in latencies.items() if latency > limit]


def _shown(rate: float | None, latency: float | None) -> str:
    return f"{rate or 0.0:.2f} GB/s, {(latency or 0.0) * 1e6:,.0f} µs"
