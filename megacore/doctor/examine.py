"""Examination: query all hosts, test the connections between them, and compare the results.

It has four steps, each on all hosts in parallel: a first command through ssh, the probe, the ports,
and, in mode full, the bandwidths. A host that does not answer a step is left out of the next ones.
An examination takes less than a minute; checks that are not finished by then are reported as
unfinished.
"""

import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from megacore.cluster.hosts.network import local_address
from megacore.cluster.hosts.plan import endpoint, env_file_of, forwarded
from megacore.cluster.hosts.ssh import HostResult, Ssh, check_ssh, python, run_on_hosts
from megacore.config.hostfile import is_this_machine
from megacore.doctor.compare import compare
from megacore.doctor.findings import Contact, Examination, Facts, Needs, PairMeasurement
from megacore.doctor.probe import FULL, QUICK, SLOW
from megacore.doctor.protocol import NOT_BEGUN, HostProbe, Request, lines_of, read_answers
from megacore.doctor.storage import Proof
from megacore.doctor.subject import Subject, needs_of
from megacore.errors import LaunchError, one_line

WHOLE_SECONDS = 58.0
"""Time limit of an examination in seconds."""
_CONTACT_SECONDS = 15.0
_PROBE_SECONDS = 30.0
_PROGRAMS = 16
"""Number of programs that this host starts in parallel."""
_GRACE = 4.0
"""Seconds that a command on a host takes to start and end, in addition to its work."""


def examine(subject: Subject, *, full: bool) -> Examination:
    """Examine all hosts.

    Args:
        subject: hosts and run.
        full: True to also measure the workspace's rates and the bandwidths between the hosts, and
            to list DeepSpeed's operators.

    Raises:
        ConfigError: the configuration does not fit the hosts.
        LaunchError: ssh is not installed.
        WorkspaceError: the workspace of this host cannot be written.
    """
    started, began = time.time(), time.monotonic()
    ends = began + WHOLE_SECONDS
    check_ssh(subject.hosts)
    # Refuse a configuration that does not fit before contacting any host.
    if all(subject.hosts.values()):
        needs_of(subject, "cpu", "fp32")
    launch = subject.launch
    endpoint(launch.rdzv_endpoint)
    ssh = Ssh.of(launch)
    contacts = reach_hosts(ssh, subject)
    answering = [host for host, contact in contacts.items() if contact.problem is None]
    environment = environment_of(subject)
    with Proof(subject.workspace) if subject.shared and answering else nullcontext() as proof:
        token = str(proof.directory) if proof is not None else None
        addresses = addresses_of(answering, ssh)
        requests = _requests(subject, answering, token, addresses, environment, full=full)
        probes = _probe(ssh, requests, ends)
        writers = [host for host in answering if probes[host].get("workspace", "writes")]
        seen = proof.seen(writers) if proof is not None else {}
    for host, contact in contacts.items():
        if contact.problem is not None:
            probes[host] = HostProbe(host, unreachable=contact.problem, failed=contact.problem)
    known = subject.with_ranks(
        {host: len(probe.get("gpus", "visible") or ()) for host, probe in probes.items()}
    )
    facts = Facts(
        hosts=known.hosts,
        probes={host: probes[host] for host in subject.hosts},
        contacts=contacts,
        launch=launch,
        workspace=str(subject.workspace),
        seen=seen,
        master=next(iter(subject.hosts)) if len(subject.hosts) > 1 else "",
        needs=_needs(known, probes),
    )
    facts = try_ports(facts, ssh, ends)
    if full:
        facts = measure_pairs(facts, ssh, ends, environment)
    return Examination(
        hosts=subject.hosts,
        findings=compare(facts),
        mode="full" if full else "quick",
        pairs=tuple(pair.as_json() for pair in facts.pairs),
        probes={host: probe.as_json() for host, probe in facts.probes.items()},
        started=started,
        seconds=time.monotonic() - began,
    )


def reach_hosts(ssh: Ssh, subject: Subject) -> dict[str, Contact]:
    """Run a first command on each host; return its reachability, response time and clock."""
    with ThreadPoolExecutor(max(1, len(subject.hosts))) as pool:
        contacts = pool.map(lambda host: _reach(ssh, host), subject.hosts)
        return dict(zip(subject.hosts, contacts, strict=True))


def _reach(ssh: Ssh, host: str) -> Contact:
    if is_this_machine(host):
        return Contact(here=True, offset=0.0)
    began, clock = time.monotonic(), time.time()
    (result,) = run_on_hosts(
        ssh, [host], ["date", "+%s.%N"], timeout=_CONTACT_SECONDS, directory=Path("/")
    )
    seconds = time.monotonic() - began
    return contact_of(result, clock, seconds)


def contact_of(result: HostResult, clock: float, seconds: float) -> Contact:
    """Compute a host's clock offset from the output of `date +%s.%N`.

    Args:
        result: result of the command.
        clock: time on this host at the start of the command.
        seconds: duration of the command. The host read its clock at an unknown moment in between;
            the middle is assumed, with an error of at most half of the duration.
    """
    if result.problem is not None:
        return Contact(problem=result.problem, seconds=seconds)
    try:
        host_clock = float(result.output.decode().strip())
    except ValueError:
        return Contact(seconds=seconds)  # `date` does not support nanoseconds
    return Contact(
        seconds=seconds, offset=host_clock - (clock + seconds / 2), uncertainty=seconds / 2
    )


def addresses_of(hosts: list[str], ssh: Ssh) -> dict[str, str]:
    """Return the hosts' addresses: those that ssh uses, and this host's own towards the others."""

    def address(host: str) -> str:
        try:
            return ssh.address(host)
        except LaunchError:
            return host

    remote_hosts = [host for host in hosts if not is_this_machine(host)]
    with ThreadPoolExecutor(max(1, min(len(remote_hosts), _PROGRAMS))) as pool:
        addresses = dict(zip(remote_hosts, pool.map(address, remote_hosts), strict=True))
    others = list(addresses.values())
    for host in hosts:
        if is_this_machine(host) and others:
            try:
                addresses[host] = local_address(others[0])
            except OSError:
                addresses[host] = host
    return addresses


def environment_of(subject: Subject) -> dict[str, str]:
    """Return the variables passed to the ranks on other hosts. Raises ConfigError."""
    launch = subject.launch
    return forwarded(os.environ, launch.forward_env, env_file_of(launch.env_file))


def _requests(
    subject: Subject,
    hosts: list[str],
    token: str | None,
    addresses: Mapping[str, str],
    environment: dict[str, str],
    *,
    full: bool,
) -> dict[str, Request]:
    """Return the requests to `hosts`, all of which were reached."""
    config, data = subject.config, subject.data
    # Hosts with their own workspace receive the data from this host when a run starts.
    node_local = subject.launch.data_placement == "node_local"
    readers = [host for host in hosts if is_this_machine(host)] if node_local else hosts
    network = ["network"] if len(subject.hosts) > 1 else []
    general = Request(
        host="",
        workspace=str(subject.workspace),
        checks=(),
        seconds=_PROBE_SECONDS,
        interface=subject.launch.interface,
        token=token,
        prefixes=data.prefixes,
        vocab_size=data.vocab_size,
        index_directory=data.index_directory,
        precision=config.train.precision if config is not None else "auto",
        kernels=config.train.kernels.written if config is not None else "auto",
        compile=config.train.compile if config is not None else "auto",
        environment=environment,
    )
    requests = {}
    for host in hosts:
        index = ["index"] if data.index_directory and host in readers else []
        tokens = ["tokens"] if data.prefixes and host in readers else []
        requests[host] = replace(
            general,
            host=host,
            peers={peer: address for peer, address in addresses.items() if peer != host},
            share=(readers.index(host), len(readers)) if host in readers else (0, 1),
            # Slow checks come last, so that a lack of time loses only their answers.
            checks=(*QUICK, "workspace", *network, *index, *SLOW, *(FULL if full else ()), *tokens),
        )
    return requests


def _probe(ssh: Ssh, requests: Mapping[str, Request], ends: float) -> dict[str, HostProbe]:
    """Run the probe on every host with a request."""
    limit = min(_PROBE_SECONDS + _GRACE, ends - time.monotonic())
    stdin = {host: request.to_json() for host, request in requests.items()}
    words = python("megacore.doctor.probe")
    results = run_on_hosts(ssh, list(requests), words, stdin=stdin, timeout=limit)
    return {
        result.host: read_answers(
            result.host, result.output, requests[result.host].checks, result.problem
        )
        for result in results
    }


def _needs(subject: Subject, probes: Mapping[str, HostProbe]) -> Needs | None:
    """Return the run's needs with the device and precision of the first host with torch."""
    answers = (probe.get("torch") for probe in probes.values())
    first = next(filter(None, answers), {"device": "cpu", "precision": "fp32"})
    return needs_of(subject, first["device"], first["precision"])


ALL_PAIRS = 16
"""Number of hosts up to which all pairs are measured; beyond it, only a ring and random pairs."""
RANDOM_ROUNDS = 3
"""Number of random pairs of each host beyond `ALL_PAIRS` hosts."""
_SEED = 20
_PORT_SECONDS = 9.0
_PAIR_SECONDS = 34.0
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
    master, (address, port) = ready[0], endpoint(facts.launch.rdzv_endpoint)
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
        problem = one_line(reason, 300)
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
