"""Examination: query all hosts, test the connections between them, and compare the results.

It has four steps, each on all hosts in parallel: a first command through ssh, the probe, the ports,
and, in mode full, the bandwidths. A host that does not answer a step is left out of the next ones.
An examination takes less than a minute; checks that are not finished by then are reported as
unfinished.
"""

import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from megacore.cluster.hosts.network import local_address
from megacore.cluster.hosts.plan import env_file_of, forwarded, read_env_file
from megacore.cluster.hosts.ssh import HostResult, Ssh, check_ssh, python, run_on_hosts
from megacore.config.hostfile import is_this_machine
from megacore.doctor.between import measure_pairs, try_ports
from megacore.doctor.compare import compare
from megacore.doctor.facts import Contact, Facts, Needs
from megacore.doctor.findings import Examination
from megacore.doctor.probe import FULL, QUICK, SLOW
from megacore.doctor.protocol import HostProbe, Request, read_answers
from megacore.doctor.storage import Proof
from megacore.doctor.subject import Subject, needs_of
from megacore.errors import LaunchError

WHOLE_SECONDS = 58.0
"""Time limit of an examination in seconds."""
_CONTACT_SECONDS = 15.0
_PROBE_SECONDS = 30.0
_PROGRAMS = 16
"""Number of programs that this host starts in parallel."""
_GRACE = 4.0
"""Seconds that a probe takes to start and end, in addition to its checks."""


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
    started, ends = time.time(), time.monotonic() + WHOLE_SECONDS
    check_ssh(subject.hosts)
    # Refuse a configuration that does not fit before contacting any host.
    needs_of(subject, "cpu", "fp32")
    launch = subject.launch
    ssh = Ssh(Path(launch.ssh_config).absolute() if launch.ssh_config else None)
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
    facts = Facts(
        hosts=subject.hosts,
        probes={host: probes[host] for host in subject.hosts},
        contacts=contacts,
        launch=launch,
        workspace=str(subject.workspace),
        seen=seen,
        master=next(iter(subject.hosts)) if len(subject.hosts) > 1 else "",
        needs=_needs(subject, probes),
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
        seconds=time.monotonic() - (ends - WHOLE_SECONDS),
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
    passed = forwarded(os.environ, subject.launch.forward_env)
    file = env_file_of(subject.launch.env_file)
    return passed if file is None else passed | read_env_file(Path(file))


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
