"""Comparison of the hosts' answers: all findings of an examination.

This module contains the checks of each host: ssh, clock, packages, memory, limits, GPUs, kernels
and speed. `network`, `storage` and `toolchain` contain the others.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megacore.doctor.findings import Facts, Finding, Judgement, most_common
from megacore.doctor.machine import REQUIRED
from megacore.doctor.network import bandwidth, interfaces, names, ports
from megacore.doctor.storage import disks, index_maps, tokens, workspaces
from megacore.doctor.toolchain import is_too_old, operators, toolchains

CLOCK_LIMIT = 1.0
"""Largest allowed difference of clocks in seconds."""
SLOW = 0.7
"""Fraction of the usual rate of a matrix product below which a host is slow."""
SLOW_COPY = 0.5
"""Fraction of the usual rate of a memory copy below which a host is slow; copies vary more."""
_SHOWN_KERNELS = ("attention", "optimizer")
"""Operations whose kernels the table names; the JSON contains all."""
_FREE = 0.9
"""Fraction of a GPU's memory that should be free."""
_MIB = 2**20
_GIB = 2**30
LEAST_SHARED = _GIB
"""Bytes of /dev/shm below which several ranks of a host may exhaust it."""
SHARED_PER_RANK = 32 * _MIB
"""Approximate bytes of /dev/shm that NCCL uses per rank."""
LEAST_FILES = 1024
FILES_PER_RANK = 8
LEAST_PROCESSES = 4096
_NEVER_OVERCOMMIT = 2
SLOW_RANDOM_READS = 250.0
"""Random reads per second below which a workspace is slow for training data: each takes more than
4 ms, and a sample needs about four (index maps, document, tokens). A disk of the host takes about
0.1 ms, a share in the same zone 1 ms, one in another region 20 ms or more."""
SLOW_READ = 50e6
"""Bytes per second below which tokenization, verification and resuming wait for the workspace: half
of what a link of 1 Gbit/s carries."""
SLOW_WRITE = 50e6
"""Bytes per second below which a workspace is slow for checkpoints: 1.5 GB, those of 124 million
parameters, take 30 s."""
SLOW_SAVE = 120.0
"""Seconds beyond which a host takes too long for its part of the run's checkpoint."""
SLOW_FSYNC = 0.1
"""Seconds beyond which an fsync is slow: a stage or a checkpoint makes dozens of them."""


def compare(facts: Facts) -> tuple[Finding, ...]:
    """Return all findings, in the order of docs/doctor.md."""
    checks: Sequence[Callable[[Facts], Finding | None]] = (
        connections,
        clocks,
        packages,
        names,
        interfaces,
        ports,
        workspaces,
        disks,
        storage_rates,
        memories,
        shared_memory,
        limits,
        gpus,
        toolchains,
        operators,
        kernels,
        speeds,
        tokens,
        index_maps,
        bandwidth,
    )
    findings = (check(facts) for check in checks)
    return tuple(finding for finding in findings if finding is not None)


def connections(facts: Facts) -> Finding | None:
    """Check that every host is reached, and that the probe runs there."""
    judgement = Judgement("ssh")
    answering = sum(
        host in facts.probes and facts.probes[host].failed is None for host in facts.hosts
    )
    nodes = facts.launch.node_range
    # An elastic run can start without some of its hosts.
    enough = facts.launch.elastic and nodes is not None and answering >= nodes[0]
    add = judgement.warn if enough else judgement.error
    for host in facts.hosts:
        contact, probe = facts.contacts.get(host), facts.probes.get(host)
        if contact is not None and contact.problem is not None:
            judgement.note(host, contact.problem)
            add(
                host,
                f"{host} is not reached ({contact.problem}): see that `ssh {host} true` works "
                "without a password, or take it out of the hostfile",
            )
        elif probe is None or probe.failed is not None:
            reason = "no message" if probe is None else str(probe.failed)
            judgement.note(host, reason)
            add(
                host,
                f"megacore does not run on {host} ({reason}): install the repository and its "
                "environment there at the same paths as here",
            )
        elif contact is not None:
            judgement.note(
                host, "this machine" if contact.here else f"connected in {contact.seconds:.2f} s"
            )
    return judgement.finding()


def clocks(facts: Facts) -> Finding | None:
    """Check that the hosts' clocks agree with the clock of this host."""
    judgement = Judgement("clocks")
    for host, contact in facts.contacts.items():
        if contact.offset is None or contact.here:
            continue
        judgement.note(host, f"{contact.offset:+.2f} s ± {contact.uncertainty:.2f}")
        if abs(contact.offset) - contact.uncertainty > CLOCK_LIMIT:
            direction = "ahead of" if contact.offset > 0 else "behind"
            judgement.warn(
                host,
                f"the clock of {host} is {abs(contact.offset):.1f} s {direction} this machine's: "
                "synchronise it (chrony, ntp)",
            )
    return judgement.finding()


def packages(facts: Facts) -> Finding | None:
    """Check that the versions of Python and of the ranks' packages are the same on all hosts."""
    judgement = Judgement("packages")
    answered = facts.answered("packages")
    for host, value in answered:
        versions = value["versions"]
        commit = f" at {value['commit']}" if value.get("commit") else ""
        nccl = facts.probes[host].get("torch", "nccl")
        judgement.note(
            host,
            f"Python {versions.get('python')}, megacore {versions.get('megacore')}{commit}, torch "
            f"{versions.get('torch')}" + (f", NCCL {nccl}" if nccl else ""),
        )
        if versions.get("torch") is None:
            judgement.error(host, f"{host} has no torch: install the same environment as here")
    judgement.unanswered(facts, "packages", "error", "its disk may not answer", late="warning")
    needed = (
        (*REQUIRED, "deepspeed") if facts.needs is not None and facts.needs.deepspeed else REQUIRED
    )
    for name in dict.fromkeys(name for _, value in answered for name in value["versions"]):
        _same(
            judgement,
            [(host, value["versions"].get(name)) for host, value in answered],
            name,
            "install the same on all hosts",
            error=name in needed,
        )
    _same(
        judgement,
        [(host, value.get("machine")) for host, value in answered],
        "the processor",
        "take hosts of one kind",
    )
    for key, name in (("cuda_build", "torch's CUDA"), ("nccl", "NCCL")):
        built = [(host, value.get(key)) for host, value in facts.answered("torch")]
        _same(judgement, built, name, "install the same torch on all hosts")
    return judgement.finding()


def memories(facts: Facts) -> Finding | None:
    """Check that each host has enough memory for its ranks."""
    judgement = Judgement("memory")
    for host, value in facts.answered("memory"):
        usable = min(value["total"], value["limit"] or value["total"])
        limited = (
            " (the container's limit)" if value["limit"] and value["limit"] < value["total"] else ""
        )
        judgement.note(
            host,
            f"{usable / _GIB:.1f} GiB{limited}, {value['available'] / _GIB:.1f} available, "
            f"{value['cores']} cores, load {value['load']:g}",
        )
        if facts.needs is not None:
            _enough_memory(judgement, facts, host, usable, min(usable, value["available"]))
    judgement.unanswered(facts, "memory", "warning", "")
    return judgement.finding()


def _enough_memory(
    judgement: Judgement, facts: Facts, host: str, usable: int, available: int
) -> None:
    needs, ranks = facts.needs, max(1, facts.hosts[host])
    assert needs is not None
    devices = facts.probes[host].get("gpus", "visible") or []
    per_host = ranks * (needs.host if devices else needs.device)
    requirement = (
        f"{ranks} rank{'s' if ranks > 1 else ''} of {needs.name} need about {per_host / _GIB:.1f} "
        "GiB of host memory"
    )
    if per_host > usable:
        judgement.error(
            host,
            f"{requirement} and {host} has {usable / _GIB:.1f}: lower train.micro_batch_size or "
            f"the slots of {host}, or take a larger machine",
        )
    elif per_host > available:
        judgement.warn(
            host,
            f"{requirement} and {available / _GIB:.1f} are available on {host}: end other programs "
            "there",
        )
    smallest = min((device["memory"] for device in devices), default=None)
    if smallest is not None and needs.device > smallest:
        judgement.error(
            host,
            f"a rank of {needs.name} needs about {needs.device / _GIB:.1f} GiB of GPU memory and "
            f"{host} has {smallest / _GIB:.1f}: lower train.micro_batch_size, or divide the model "
            "over more GPUs",
        )


def shared_memory(facts: Facts) -> Finding | None:
    """Check that /dev/shm has enough space for the ranks of each host."""
    judgement = Judgement("shared memory")
    for host, value in facts.answered("memory"):
        total, free, slots = value["shared_total"], value["shared_free"], facts.hosts[host]
        if total is None:
            judgement.note(host, "no /dev/shm")
            judgement.warn(
                host, f"{host} has no /dev/shm, through which NCCL's ranks exchange data: mount one"
            )
            continue
        judgement.note(host, f"{free / _GIB:.2f} of {total / _GIB:.2f} GiB free")
        needed = SHARED_PER_RANK * slots
        advice = (
            "start the container with --shm-size=16g, or remount it (mount -o remount,size=16G "
            "/dev/shm)"
        )
        on_gpus = bool(facts.probes[host].get("gpus", "visible"))
        if slots > 1 and free < needed and on_gpus:
            judgement.error(
                host,
                f"/dev/shm of {host} has {free / _MIB:.0f} MiB free, and {slots} ranks need about "
                f"{needed / _MIB:.0f}: {advice}",
            )
        elif slots != 1 and total < LEAST_SHARED:
            judgement.warn(
                host,
                f"/dev/shm of {host} has {total / _MIB:.0f} MiB, which several ranks may use up: "
                f"{advice}",
            )
    return judgement.finding()


def limits(facts: Facts) -> Finding | None:
    """Check the limits of open files, locked memory and processes."""
    judgement = Judgement("limits")
    ranks = sum(facts.hosts.values())
    files = max(LEAST_FILES, 256 + FILES_PER_RANK * ranks)
    for host, value in facts.answered("limits"):
        shown = {
            name: "unlimited" if value[name] is None else f"{value[name]:,}"
            for name in ("nofile", "nproc")
        }
        locked = "unlimited" if value["memlock"] is None else f"{value['memlock'] / _MIB:,.0f} MiB"
        judgement.note(
            host, f"files {shown['nofile']}, processes {shown['nproc']}, locked memory {locked}"
        )
        if value["nofile"] is not None and value["nofile"] < files:
            judgement.warn(
                host,
                f"processes of {host} may open {value['nofile']:,} files and {max(1, ranks)} ranks "
                f"may need {files:,}: raise nofile in /etc/security/limits.conf, or in the "
                "container's ulimits",
            )
        if value["nproc"] is not None and value["nproc"] < LEAST_PROCESSES:
            judgement.warn(
                host,
                f"{host} allows {value['nproc']:,} processes and threads: raise nproc to "
                f"{LEAST_PROCESSES:,} in /etc/security/limits.conf, or in the container's ulimits",
            )
        if value["rdma"] and value["memlock"] is not None:
            judgement.warn(
                host,
                f"{host} has RDMA ({', '.join(value['rdma'][:2])}) and may lock {locked} of "
                "memory: set memlock to unlimited in /etc/security/limits.conf, or in the "
                "container's ulimits",
            )
        if value["overcommit"] == _NEVER_OVERCOMMIT:
            judgement.warn(
                host,
                f"the kernel of {host} never overcommits memory (vm.overcommit_memory=2), so that "
                "large mappings fail early: set it to 0",
            )
    judgement.unanswered(facts, "limits", "warning", "")
    return judgement.finding()


def gpus(facts: Facts) -> Finding | None:
    """Check that all slots have free GPUs of one kind, and that CUDA works."""
    judgement = Judgement("gpus")
    answered = facts.answered("gpus")
    counted = max((len(value["visible"]) for _, value in answered), default=0)
    for host, value in answered:
        visible, slots = value["visible"], facts.hosts[host]
        names = ", ".join(sorted({gpu["name"] for gpu in visible}))
        judgement.note(
            host, f"{len(visible)} x {names}" if visible else "none: ranks compute on the CPU"
        )
        if counted and slots > len(visible):
            judgement.error(
                host,
                f"{host} has {slots} slots and {len(visible)} visible GPUs: correct its slots in "
                "the hostfile, or CUDA_VISIBLE_DEVICES",
            )
        if value.get("problem"):
            judgement.error(host, f"{value['problem']}: look at the driver of {host}")
        _gpu_state(judgement, host, _chosen(value))
        cuda = facts.probes[host].get("torch", "cuda_build")
        driver = facts.probes[host].get("toolchain", "driver")
        # A driver that is too old, or a torch without CUDA, is a problem of the toolchain.
        explained = driver is not None and (cuda is None or is_too_old(driver, cuda))
        works = facts.probes[host].get("torch", "cuda_works")
        if visible and works is False and not explained:
            judgement.error(
                host,
                f"{host} has GPUs and its torch does not run on them: install a torch for CUDA and "
                "its driver",
            )
    judgement.unanswered(facts, "gpus", "error", "the driver may hang; look at dmesg")
    kinds = [(host, sorted({gpu["name"] for gpu in value["visible"]})) for host, value in answered]
    _same(judgement, kinds, "the GPU", "take hosts of one kind: the slowest one decides")
    drivers = [(host, value["smi"][0]["driver"]) for host, value in answered if value.get("smi")]
    _same(judgement, drivers, "the GPU driver", "install the same driver on all hosts")
    return judgement.finding()


def _chosen(gpus: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    """Return nvidia-smi's report on the GPUs that CUDA_VISIBLE_DEVICES numbers, or else on all."""
    reported, chosen = gpus.get("smi") or [], (gpus.get("restricted") or "").split(",")
    if not all(number.strip().isdigit() for number in chosen):
        return reported  # unset, or names of GPUs or of their parts
    numbers = {int(number) for number in chosen}
    return [gpu for gpu in reported if gpu["index"] in numbers]


def _gpu_state(judgement: Judgement, host: str, devices: Sequence[dict[str, Any]]) -> None:
    """Check nvidia-smi's report on each GPU of a host."""
    if devices:
        judgement.note(host, f"driver {devices[0]['driver']}")
    for gpu in devices:
        number, total, free = gpu["index"], gpu["total"], gpu["free"]
        if gpu["uncorrected"]:
            judgement.warn(
                host,
                f"GPU {number} of {host} has {gpu['uncorrected']} uncorrected memory errors since "
                "its last reset: reset it (nvidia-smi --gpu-reset), and replace it if they come "
                "again",
            )
        if total and free is not None and free < _FREE * total:
            users = (
                ", ".join(f"{process['name']} ({process['pid']})" for process in gpu["processes"])
                or "an unknown process"
            )
            judgement.warn(
                host,
                f"GPU {number} of {host} has {free / _GIB:.1f} of {total / _GIB:.1f} GiB free, the "
                f"rest is held by {users}: end it, or choose other GPUs",
            )


def kernels(facts: Facts) -> Finding | None:
    """Check that all hosts would use the same precision and the same kernels."""
    judgement = Judgement("kernels")
    answered = facts.answered("torch")
    for host, value in answered:
        shown = "; ".join(f"{name} {value['kernels'].get(name)}" for name in _SHOWN_KERNELS)
        judgement.note(host, f"{value['precision']} on {value['device']}: {shown}")
    judgement.unanswered(
        facts,
        "torch",
        "error",
        "see that torch can be imported there, and runs what train.kernels names",
        late="warning",
    )
    _same(
        judgement,
        [(host, value["precision"]) for host, value in answered],
        "the precision",
        "set train.precision instead of auto, or take hosts of one kind",
        error=True,
    )
    operations = dict.fromkeys(operation for _, value in answered for operation in value["kernels"])
    differing: dict[str, list[str]] = {}
    for operation in operations:
        usual = most_common(value["kernels"].get(operation) for _, value in answered)
        for host, value in answered:
            if value["kernels"].get(operation) != usual:
                differing.setdefault(host, []).append(operation)
    for host, others in differing.items():
        judgement.warn(
            host,
            f"{host} has other kernels than most hosts for {', '.join(others[:3])}"
            f"{' and more' if len(others) > 3 else ''}: replicas round differently, and the "
            "slowest decides; set train.kernels to plain, or take hosts of one kind",
        )
    return judgement.finding()


def speeds(facts: Facts) -> Finding | None:
    """Check that no host and no GPU computes clearly slower than the others."""
    judgement = Judgement("speed")
    rates: dict[str, float] = {}
    copies: dict[str, float] = {}
    for host, value in facts.answered("speed"):
        measured = [device for device in value["devices"] if "gflops" in device]
        broken = [device["problem"] for device in value["devices"] if "problem" in device]
        if broken:
            judgement.error(
                host, f"a GPU of {host} does not compute ({broken[0]}): reset it, or take it out"
            )
        if not measured:
            continue
        slowest, fastest = (
            choose(device["gflops"] for device in measured) for choose in (min, max)
        )
        rates[host], copies[host] = slowest, min(device["copy_gb_s"] for device in measured)
        judgement.note(
            host, f"matmul {slowest:,.0f} GFLOP/s, copy {copies[host]:.1f} GB/s ({value['device']})"
        )
        if slowest < SLOW * fastest:
            judgement.warn(
                host,
                f"the slowest GPU of {host} reaches {slowest:,.0f} GFLOP/s, its fastest "
                f"{fastest:,.0f}: look at its clocks and temperature "
                "(nvidia-smi -q -d PERFORMANCE)",
            )
    for measure, by_host, limit in (("matmul", rates, SLOW), ("memory copy", copies, SLOW_COPY)):
        for host, part in slow_hosts(by_host, limit).items():
            reference = "the other host's" if len(by_host) == 2 else "the median"
            judgement.warn(
                host,
                f"{host} is slow: its {measure} has {part:.0%} of {reference} rate: look for other "
                "processes, throttled clocks or a power limit there",
            )
    judgement.unanswered(facts, "speed", "warning", "it may be overloaded")
    return judgement.finding()


def storage_rates(facts: Facts) -> Finding | None:
    """Check that the workspace is fast enough for training data and for checkpoints."""
    judgement = Judgement("storage")
    answered = facts.answered("storage")
    # Hosts with one workspace write their shards of a checkpoint at the same time.
    writers = len(answered) if facts.shared else 1
    for host, value in answered:
        if "skipped" in value:
            judgement.note(host, f"not measured: {value['skipped']}")
            continue
        judgement.note(
            host,
            f"write {value['write'] / 1e6:,.0f} MB/s, read {value['read'] / 1e6:,.0f} MB/s, "
            f"{value['random_reads']:,.0f} random reads/s, fsync {value['fsync'] * 1e3:.1f} ms"
            + ("" if value["direct"] else " (through the page cache)"),
        )
        disk = facts.probes[host].get("disk") or {}
        place = (
            f"{facts.workspace} on {host} ({disk.get('kind', 'unknown')}, "
            f"{disk.get('source', 'unknown')})"
        )
        for problem in _slow_uses(value, facts.needs.checkpoint / writers if facts.needs else None):
            judgement.warn(
                host,
                f"{place} {problem}: use a disk of the host or a share in the hosts' own zone "
                "(docs/clouds.md)",
            )
    judgement.unanswered(facts, "storage", "warning", "the file system may be overloaded")
    return judgement.finding()


def _slow_uses(value: dict[str, Any], shard: float | None) -> Iterator[str]:
    """Yield what the workspace is slow for; `shard` is a host's part of a checkpoint in bytes."""
    if value["random_reads"] < SLOW_RANDOM_READS:
        yield (
            f"makes {value['random_reads']:,.0f} random reads/s, and training data needs "
            f"{SLOW_RANDOM_READS:,.0f} or more"
        )
    if value["read"] < SLOW_READ:
        yield (
            f"is read at {value['read'] / 1e6:,.0f} MB/s, and tokenization, verification and "
            f"resuming need {SLOW_READ / 1e6:,.0f} or more"
        )
    seconds = None if shard is None else shard / value["write"]
    if seconds is not None and seconds > SLOW_SAVE:
        yield (
            f"is written at {value['write'] / 1e6:,.0f} MB/s, and a checkpoint takes {seconds:,.0f}"
            f" s, more than {SLOW_SAVE:g}"
        )
    elif value["write"] < SLOW_WRITE:
        yield (
            f"is written at {value['write'] / 1e6:,.0f} MB/s, and checkpoints need "
            f"{SLOW_WRITE / 1e6:,.0f} or more"
        )
    if value["fsync"] > SLOW_FSYNC:
        yield (
            f"takes {value['fsync'] * 1e3:,.0f} ms for an fsync, and stages and checkpoints wait "
            f"for dozens of them: {SLOW_FSYNC * 1e3:g} ms or less is usual"
        )


def slow_hosts(rates: Mapping[str, float], limit: float) -> dict[str, float]:
    """Return the slow hosts with the fraction of the usual rate that they reach.

    A host is slow if its rate is below `limit` times the median of all hosts. With two hosts, the
    rate of the faster host replaces the median.
    """
    if len(rates) < 2:
        return {}
    usual = max(rates.values()) if len(rates) == 2 else statistics.median(rates.values())
    return {host: rate / usual for host, rate in rates.items() if rate < limit * usual}


def _same(
    judgement: Judgement,
    values: Sequence[tuple[str, Any]],
    name: str,
    advice: str,
    *,
    error: bool = False,
) -> None:
    """Add a problem for each host whose value differs from the most common one."""
    if len(values) < 2:
        return
    usual = most_common(value for _, value in values)
    first = next(host for host, value in values if value == usual)
    for host, value in values:
        if value != usual:
            sentence = (
                f"{name} is {_shown(value)} on {host} and {_shown(usual)} on {first}: {advice}"
            )
            (judgement.error if error else judgement.warn)(host, sentence)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "missing"
    return "missing" if value is None else str(value)
