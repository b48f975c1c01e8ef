"""Verdicts on memory, disks, the workspace and the run's data. Pure functions."""

from typing import Any

from megacore.doctor.facts import Facts, Judgement
from megacore.doctor.findings import Finding

GIB = 2**30
_MIB = 2**20
LEAST_DISK = 5 * GIB
"""Free bytes below which a workspace is nearly full, where nobody knows what will be written."""
LEAST_SHARED = GIB
"""Bytes of /dev/shm below which several ranks of a host may run out of it."""
SHARED_PER_RANK = 32 * _MIB
"""What NCCL takes of it for a rank, about."""
LEAST_INODES = 10_000
LEAST_FILES = 1024
FILES_PER_RANK = 8
LEAST_PROCESSES = 4096
_NEVER_OVERCOMMIT = 2
_IN_MEMORY = ("tmpfs", "ramfs")


def workspaces(facts: Facts) -> Finding | None:
    """The workspace can be written on every host, and with data_placement shared it is the same directory."""
    judged = Judgement("workspace")
    shared = facts.several and facts.launch.data_placement == "shared"
    disks = dict(facts.answered("disk"))
    for host, value in facts.answered("workspace"):
        if shared:
            _shared_workspace(judged, facts, host, value)
        elif value["writes"] is False or (value["writes"] is None and not disks.get(host, {}).get("writable", True)):
            judged.found(host, "cannot be written")
            judged.error(host, f"{facts.workspace} cannot be written on {host}: correct its owner or its mount")
        else:
            judged.found(host, "writable" if value["exists"] else "not there yet, will be made")
    judged.unanswered(facts, "workspace", "error", f"look at what is mounted at {facts.workspace} (a dead file share?)")
    return judged.finding()


def _shared_workspace(judged: Judgement, facts: Facts, host: str, value: dict[str, Any]) -> None:
    path = facts.workspace
    if not value["exists"]:
        judged.found(host, "missing")
        judged.error(
            host,
            f"{path} does not exist on {host}: mount the shared file system there at the same path, or set "
            "launch.data_placement to node_local",
        )
    elif not value["sees_head"]:
        judged.found(host, "another directory")
        judged.error(
            host,
            f"{path} on {host} is not the directory that this machine has there: mount the same file system at the "
            "same path, or set launch.data_placement to node_local",
        )
    elif not value["writes"]:
        judged.found(host, "read only")
        reason = value.get("reason") or "not allowed"
        judged.error(host, f"{path} cannot be written on {host} ({reason}): correct its owner or its mount")
    elif not facts.seen.get(host):
        judged.found(host, "not seen here")
        judged.error(
            host,
            f"what {host} writes to {path} is not seen on this machine within 5 s: look at the file system's caching "
            "(NFS: actimeo, lookupcache)",
        )
    else:
        judged.found(host, "the same directory, read and written")


def disks(facts: Facts) -> Finding | None:
    """There is room for what a run will write."""
    judged = Judgement("disk")
    needs = facts.needs
    writers = facts.answered("disk")
    first = writers[0][0] if writers else ""
    for host, value in writers:
        free = value["free"]
        judged.found(host, f"{free / GIB:,.1f} of {value['total'] / GIB:,.1f} GiB free, {value['kind']}")
        # With workspaces of their own, the others hold their ranks' shards of a checkpoint until these are gathered.
        if needs is not None and free < needs.checkpoint:
            judged.error(
                host,
                f"{value['path']} on {host} has {free / GIB:.1f} GiB free, and one checkpoint of {needs.name} takes "
                f"{needs.checkpoint / GIB:.1f} GiB: make room (megacore clean), or move the workspace "
                "(MEGACORE_WORKSPACE)",
            )
        elif needs is not None and free < needs.checkpoints and (host == first or _is_shared(facts)):
            judged.warn(
                host,
                f"{value['path']} on {host} has {free / GIB:.1f} GiB free, and the checkpoints that {needs.name} keeps "
                f"take {needs.checkpoints / GIB:.1f} GiB: make room, or lower checkpoint.keep_last",
            )
        elif needs is None and free < LEAST_DISK:
            judged.warn(host, f"{value['path']} on {host} has {free / GIB:.1f} GiB free: make room (megacore clean)")
        if value["inodes_free"] is not None and value["inodes_free"] < LEAST_INODES:
            judged.warn(
                host,
                f"{value['path']} on {host} has {value['inodes_free']} inodes free: remove files that nobody needs",
            )
        if value["kind"] in _IN_MEMORY:
            judged.warn(
                host,
                f"{value['path']} on {host} lies in main memory ({value['kind']}), and checkpoints there are lost with "
                "it: set MEGACORE_WORKSPACE to a disk",
            )
    judged.unanswered(facts, "disk", "error", f"look at what is mounted at {facts.workspace} (a dead file share?)")
    return judged.finding()


def _is_shared(facts: Facts) -> bool:
    return facts.launch.data_placement == "shared"


def memories(facts: Facts) -> Finding | None:
    """Each host has the memory that its ranks need."""
    judged = Judgement("memory")
    for host, value in facts.answered("memory"):
        usable = min(value["total"], value["limit"] or value["total"])
        limited = " (the container's limit)" if value["limit"] and value["limit"] < value["total"] else ""
        judged.found(
            host,
            f"{usable / GIB:.1f} GiB{limited}, {value['available'] / GIB:.1f} available, {value['cores']} cores, load "
            f"{value['load']:g}",
        )
        if facts.needs is not None:
            _enough_memory(judged, facts, host, usable, min(usable, value["available"]))
    judged.unanswered(facts, "memory", "warning", "")
    return judged.finding()


def _enough_memory(judged: Judgement, facts: Facts, host: str, usable: int, available: int) -> None:
    needs, ranks = facts.needs, max(1, facts.hosts[host])
    assert needs is not None
    devices = facts.probes[host].get("gpus", "visible") or []
    per_host = ranks * (needs.host if devices else needs.device)
    what = f"{ranks} rank{'s' if ranks > 1 else ''} of {needs.name} need about {per_host / GIB:.1f} GiB of main memory"
    if per_host > usable:
        judged.error(
            host,
            f"{what} and {host} has {usable / GIB:.1f}: lower train.micro_batch_size or the slots of {host}, or take "
            "a larger machine",
        )
    elif per_host > available:
        judged.warn(host, f"{what} and {available / GIB:.1f} are available on {host}: end what else runs there")
    smallest = min((device["memory"] for device in devices), default=None)
    if smallest is not None and needs.device > smallest:
        judged.error(
            host,
            f"a rank of {needs.name} needs about {needs.device / GIB:.1f} GiB of GPU memory and {host} has "
            f"{smallest / GIB:.1f}: lower train.micro_batch_size, or divide the model over more GPUs",
        )


def shared_memory(facts: Facts) -> Finding | None:
    """/dev/shm has room where several ranks of a host use it."""
    judged = Judgement("shared memory")
    for host, value in facts.answered("memory"):
        total, free, slots = value["shared_total"], value["shared_free"], facts.hosts[host]
        if total is None:
            judged.found(host, "no /dev/shm")
            judged.warn(host, f"{host} has no /dev/shm, through which NCCL's ranks exchange data: mount one")
            continue
        judged.found(host, f"{free / GIB:.2f} of {total / GIB:.2f} GiB free")
        needed = SHARED_PER_RANK * slots
        advice = "start the container with --shm-size=16g, or remount it (mount -o remount,size=16G /dev/shm)"
        on_gpus = bool(facts.probes[host].get("gpus", "visible"))
        if slots > 1 and free < needed and on_gpus:
            judged.error(
                host,
                f"/dev/shm of {host} has {free / _MIB:.0f} MiB free, and {slots} ranks need about "
                f"{needed / _MIB:.0f}: {advice}",
            )
        elif slots != 1 and total < LEAST_SHARED:
            judged.warn(
                host, f"/dev/shm of {host} has {total / _MIB:.0f} MiB, which several ranks may use up: {advice}"
            )
    return judged.finding()


def limits(facts: Facts) -> Finding | None:
    """What a process may open, lock and start."""
    judged = Judgement("limits")
    ranks = sum(facts.hosts.values())
    files = max(LEAST_FILES, 256 + FILES_PER_RANK * ranks)
    for host, value in facts.answered("limits"):
        shown = {name: "unlimited" if value[name] is None else f"{value[name]:,}" for name in ("nofile", "nproc")}
        locked = "unlimited" if value["memlock"] is None else f"{value['memlock'] / _MIB:,.0f} MiB"
        judged.found(host, f"files {shown['nofile']}, processes {shown['nproc']}, locked memory {locked}")
        if value["nofile"] is not None and value["nofile"] < files:
            judged.warn(
                host,
                f"processes of {host} may open {value['nofile']:,} files and {max(1, ranks)} ranks may need {files:,}: "
                "raise nofile in /etc/security/limits.conf, or in the container's ulimits",
            )
        if value["nproc"] is not None and value["nproc"] < LEAST_PROCESSES:
            judged.warn(
                host,
                f"{host} allows {value['nproc']:,} processes and threads: raise nproc to {LEAST_PROCESSES:,} in "
                "/etc/security/limits.conf, or in the container's ulimits",
            )
        if value["rdma"] and value["memlock"] is not None:
            judged.warn(
                host,
                f"{host} has RDMA ({', '.join(value['rdma'][:2])}) and may lock {locked} of memory: set memlock to "
                "unlimited in /etc/security/limits.conf, or in the container's ulimits",
            )
        if value["overcommit"] == _NEVER_OVERCOMMIT:
            judged.warn(
                host,
                f"the kernel of {host} never overcommits memory (vm.overcommit_memory=2), by which large mappings fail "
                "early: set it to 0",
            )
    judged.unanswered(facts, "limits", "warning", "")
    return judged.finding()


def tokens(facts: Facts) -> Finding | None:
    """The token files are there and whole, and every id is one of the vocabulary's."""
    judged = Judgement("tokens")
    for host, value in facts.answered("tokens"):
        read = sum(file.get("read", 0) for file in value["files"])
        planned = sum(file.get("planned", 0) for file in value["files"])
        part = f"{read / planned:.0%} of " if planned and read < planned else ""
        judged.found(host, f"{_files(value['files'])}ids of {part}{planned:,} tokens below {value['vocab_size']}")
        for file in value["files"]:
            if "problem" in file:
                judged.error(host, f"on {host}, {file['problem']}")
            elif file.get("outside") is not None:
                judged.error(
                    host,
                    f"{file['prefix']}.bin holds the id {_worst_id(file)} (at token {file['outside']:,}), and the "
                    f"vocabulary has {value['vocab_size']:,} entries: tokenize again with the run's tokenizer",
                )
    judged.unanswered(facts, "tokens", "error", "look at the disk with the token files", late="warning")
    return judged.finding()


def _files(files: list[dict[str, Any]]) -> str:
    return f"{len(files)} files, " if len(files) > 1 else ""


def _worst_id(file: dict[str, Any]) -> int:
    return int(file["smallest"] if file["smallest"] < 0 else file["largest"])


def index_maps(facts: Facts) -> Finding | None:
    """The index maps of the run are there, readable, and of its token files."""
    judged = Judgement("index maps")
    for host, value in facts.answered("index"):
        samples = ", ".join(f"{count:,} {split}" for split, count in value["samples"].items())
        judged.found(host, f"{value['maps']} maps, {samples} samples")
        if value["others"]:
            judged.error(
                host,
                f"the index maps in {value['directory']} are of {value['others'][0]}, which is not among the run's "
                "token files: build them again",
            )
    judged.unanswered(facts, "index", "error", "", late="warning")
    return judged.finding()
