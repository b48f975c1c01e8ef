"""Disk, memory, shared memory and the limits of a process on this machine."""

import os
import resource
import shutil
from pathlib import Path
from typing import Any

from megacore.plan.hardware import memory_info, memory_limit

_LIMITS = {"memlock": resource.RLIMIT_MEMLOCK, "nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


def look_at_limits() -> dict[str, Any]:
    """Soft limits (None: unlimited), the kernel's rule of overcommitment, and whether there is an RDMA device."""
    found: dict[str, Any] = {}
    for name, number in _LIMITS.items():
        soft, _ = resource.getrlimit(number)
        found[name] = None if soft == resource.RLIM_INFINITY else soft
    try:
        found["overcommit"] = int(_OVERCOMMIT.read_text(encoding="ascii"))
    except (OSError, ValueError):
        found["overcommit"] = None
    devices = Path("/sys/class/infiniband")
    found["rdma"] = sorted(path.name for path in devices.iterdir()) if devices.is_dir() else []
    return found


def look_at_memory() -> dict[str, Any]:
    """Main memory and its limit, shared memory and cores, in bytes."""
    info = memory_info()
    shared = Path("/dev/shm")
    usage = shutil.disk_usage(shared) if shared.is_dir() else None
    return {
        "total": info["MemTotal"],
        "available": info.get("MemAvailable", info["MemTotal"]),
        "limit": memory_limit(),
        "shared_total": usage.total if usage else None,
        "shared_free": usage.free if usage else None,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
    }


def look_at_disk(workspace: Path) -> dict[str, Any]:
    """Room and file system of the workspace, or of the nearest directory above it that is there."""
    place = workspace
    while not place.exists() and place != place.parent:
        place = place.parent
    usage = shutil.disk_usage(place)
    kind, source = file_system(place)
    return {
        "path": str(workspace),
        "exists": workspace.is_dir(),
        "writable": os.access(place, os.W_OK | os.X_OK) and place.is_dir(),
        "free": usage.free,
        "total": usage.total,
        "inodes_free": _inodes(place),
        "kind": kind,
        "source": source,
    }


def _inodes(place: Path) -> int | None:
    """Free ones; None for a file system that does not count them."""
    status = os.statvfs(place)
    return status.f_favail if status.f_files else None


def file_system(place: Path, table: Path = Path("/proc/self/mountinfo")) -> tuple[str, str]:
    """Type and source of the mount that holds a path: that with the longest mount point, the last of several."""
    best, found = -1, ("unknown", "unknown")
    target = os.path.realpath(place)
    for line in table.read_text(encoding="utf-8", errors="replace").splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4].encode().decode("unicode_escape")
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            kind, source = right.split()[:2]
            best, found = len(point), (kind, source)
    return found
