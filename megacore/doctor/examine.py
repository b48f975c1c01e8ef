"""The examination: asks all hosts at once, then lets them talk to each other, and compares what was found.

Four steps, each on all hosts in parallel: a first word through ssh, the probe, the ports, and, in mode full, the
bandwidths. A host that does not answer a step is left out of the next ones. The whole takes less than a minute: what
is not done by then is reported as such.
"""

import fnmatch
import json
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from megacore.doctor.between import measure_pairs, try_ports
from megacore.doctor.compare import compare
from megacore.doctor.facts import Contact, Facts
from megacore.doctor.findings import Report
from megacore.doctor.probe import QUICK, SLOW
from megacore.doctor.protocol import HostProbe, Request, read_answers
from megacore.doctor.shared import Proof
from megacore.doctor.subject import Subject, needs_of
from megacore.errors import LaunchError
from megacore.launch.hosts.hostfile import is_this_machine
from megacore.launch.hosts.network import local_address
from megacore.launch.hosts.plan import env_file_of, read_env_file
from megacore.launch.hosts.ssh import HostResult, Ssh, check_ssh, python, run_on_hosts

WHOLE_SECONDS = 58.0
"""Of an examination."""
_CONTACT_SECONDS = 15.0
_PROBE_SECONDS = 30.0
_PROGRAMS = 16
"""Of this machine that are started at the same time."""
_GRACE = 4.0
"""Seconds of a probe's start and end beside its checks."""


def examine(subject: Subject, *, full: bool) -> Report:
    """Look at all hosts, each of which is asked at the same time.

    Args:
        subject: hosts and run.
        full: whether bandwidth and latency between the hosts are measured too.

    Raises:
        ConfigError: the configuration does not fit the hosts.
        LaunchError: ssh is not installed.
        WorkspaceError: the workspace of this machine cannot be written.
    """
    started, ends = time.time(), time.monotonic() + WHOLE_SECONDS
    check_ssh(subject.hosts)
    needs_of(subject, "cpu", "fp32")  # a configuration that does not fit is refused before anybody is asked
    launch = subject.launch
    ssh = Ssh(Path(launch.ssh_config).absolute() if launch.ssh_config else None)
    contacts = reach_hosts(ssh, subject)
    there = [host for host, contact in contacts.items() if contact.problem is None]
    environment = environment_of(subject)
    with Proof(subject.workspace) if subject.shared and there else nullcontext() as proof:
        token = str(proof.directory) if proof is not None else None
        requests = _requests(subject, there, token, addresses_of(there, ssh), environment)
        probes = _probe(ssh, requests, ends)
        wrote = [host for host in there if probes[host].get("workspace", "writes")]
        seen = proof.seen(wrote) if proof is not None else {}
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
    return Report(
        hosts=subject.hosts,
        findings=compare(facts),
        mode="full" if full else "quick",
        pairs=tuple(pair.as_json() for pair in facts.pairs),
        probes={host: probe.as_json() for host, probe in facts.probes.items()},
        started=started,
        seconds=time.monotonic() - (ends - WHOLE_SECONDS),
    )


def reach_hosts(ssh: Ssh, subject: Subject) -> dict[str, Contact]:
    """The first word with each host: whether it answers, how long that takes, and what its clock says."""
    with ThreadPoolExecutor(max(1, len(subject.hosts))) as pool:
        return dict(zip(subject.hosts, pool.map(lambda host: _reach(ssh, host), subject.hosts), strict=True))


def _reach(ssh: Ssh, host: str) -> Contact:
    if is_this_machine(host):
        return Contact(here=True, offset=0.0)
    began, clock = time.monotonic(), time.time()
    (result,) = run_on_hosts(ssh, [host], ["date", "+%s.%N"], timeout=_CONTACT_SECONDS, directory=Path("/"))
    seconds = time.monotonic() - began
    return contact_of(result, clock, seconds)


def contact_of(result: HostResult, clock: float, seconds: float) -> Contact:
    """What `date +%s.%N` on a host tells of its clock.

    Args:
        result: of that command.
        clock: this machine's time when it was started.
        seconds: until it had ended. The host looked at its clock at some moment between: the middle is taken, and half
            of the time is what that may be wrong by.
    """
    if result.problem is not None:
        return Contact(problem=result.problem, seconds=seconds)
    try:
        theirs = float(result.output.decode().strip())
    except ValueError:
        return Contact(seconds=seconds)  # a date without nanoseconds
    return Contact(seconds=seconds, offset=theirs - (clock + seconds / 2), uncertainty=seconds / 2)


def addresses_of(hosts: list[str], ssh: Ssh) -> dict[str, str]:
    """Where the others reach each host: as ssh does; this machine by its address on the way to them."""

    def address(host: str) -> str:
        try:
            return ssh.address(host)
        except LaunchError:
            return host

    elsewhere = [host for host in hosts if not is_this_machine(host)]
    with ThreadPoolExecutor(max(1, min(len(elsewhere), _PROGRAMS))) as pool:
        found = dict(zip(elsewhere, pool.map(address, elsewhere), strict=True))
    others = list(found.values())
    for host in hosts:
        if is_this_machine(host) and others:
            try:
                found[host] = local_address(others[0])
            except OSError:
                found[host] = host
    return found


def environment_of(subject: Subject) -> dict[str, str]:
    """The variables that the ranks of other machines get. Raises ConfigError."""
    patterns = subject.launch.forward_env
    passed = {name: value for name, value in os.environ.items() if any(fnmatch.fnmatchcase(name, p) for p in patterns)}
    file = env_file_of(subject.launch.env_file)
    return passed if file is None else passed | read_env_file(Path(file))


def _requests(
    subject: Subject, there: list[str], token: str | None, addresses: Mapping[str, str], environment: dict[str, str]
) -> dict[str, Request]:
    """What each host that answers is asked."""
    config, data = subject.config, subject.data
    # What hosts with a workspace of their own lack is brought there when a run starts.
    own = subject.launch.data_placement == "node_local"
    readers = [host for host in there if is_this_machine(host)] if own else there
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
        kernels=config.train.kernels if config is not None else "auto",
        compile=config.train.compile if config is not None else "auto",
        environment=environment,
    )
    requests = {}
    for host in there:
        index = ["index"] if data.index_directory and host in readers else []
        tokens = ["tokens"] if data.prefixes and host in readers else []
        requests[host] = replace(
            general,
            host=host,
            peers={peer: address for peer, address in addresses.items() if peer != host},
            share=(readers.index(host), len(readers)) if host in readers else (0, 1),
            # What takes long comes last: without time for it the rest is known all the same.
            checks=(*QUICK, "workspace", *network, *index, *SLOW, *tokens),
        )
    return requests


def _probe(ssh: Ssh, requests: Mapping[str, Request], ends: float) -> dict[str, HostProbe]:
    """Run the probe on every host that answers."""
    limit = min(_PROBE_SECONDS + _GRACE, ends - time.monotonic())
    stdin = {host: request.to_json() for host, request in requests.items()}
    results = run_on_hosts(ssh, list(requests), python("megacore.doctor.probe"), stdin=stdin, timeout=limit)
    return {
        result.host: read_answers(result.host, result.output, requests[result.host].checks, result.problem)
        for result in results
    }


def _needs(subject: Subject, probes: Mapping[str, HostProbe]) -> Any:
    """What the run needs on the device and in the precision that the first host tells."""
    told: list[Mapping[str, Any]] = [probe.get("torch") for probe in probes.values() if probe.get("torch")]
    device, precision = (told[0]["device"], told[0]["precision"]) if told else ("cpu", "fp32")
    return needs_of(subject, device, precision)


def as_text(report: Report) -> str:
    """The report as JSON."""
    return json.dumps(report.as_json(), indent=2, ensure_ascii=False) + "\n"
