"""Probes of fictional hosts: the answers of healthy hosts, with changes by a test."""

import copy
from pathlib import Path
from typing import Any

import numpy as np

from megacore.doctor.findings import Contact, Facts, Finding, Needs
from megacore.doctor.protocol import HostProbe
from megacore.token_files.indexed_dataset_writer import IndexedDatasetWriter

GIB = 2**30
MIB = 2**20

GPU = {
    "index": 0,
    "name": "H100",
    "total": 80 * GIB,
    "free": 79 * GIB,
    "driver": "570.1",
    "uncorrected": 0,
    "temperature": 40,
    "utilization": 0,
    "processes": [],
}
HEALTHY: dict[str, Any] = {
    "packages": {
        "versions": {
            "python": "3.11.7",
            "megacore": "0.1.0 (abc)",
            "torch": "2.13.0",
            "numpy": "2.4.6",
            "deepspeed": "0.19",
        },
        "commit": "1234",
        "machine": "x86_64",
    },
    "limits": {"memlock": None, "nofile": 65536, "nproc": None, "overcommit": 0, "rdma": []},
    "memory": {
        "total": 64 * GIB,
        "available": 60 * GIB,
        "limit": None,
        "shared_total": 16 * GIB,
        "shared_free": 16 * GIB,
        "cores": 8,
        "load": 0.1,
    },
    "disk": {
        "path": "/w",
        "exists": True,
        "writable": True,
        "free": 500 * GIB,
        "total": 900 * GIB,
        "inodes_free": 10**7,
        "kind": "nfs4",
        "source": "server:/w",
    },
    "workspace": {"exists": True, "sees_head": True, "writes": True},
    "network": {
        "hostname": "x",
        "own_addresses": ["10.0.0.9"],
        "peers": {"other": ["10.0.0.8"]},
        "interface": "eth0",
        "address": "10.0.0.9",
        "exists": True,
        "speed": 100_000,
        "mtu": 9000,
        "state": "up",
        "interfaces": ["eth0", "lo"],
        "ports": [4001, 4002],
    },
    "gpus": {"visible": [], "smi": None, "problem": None},
    "torch": {
        "cuda_build": None,
        "cuda_works": False,
        "nccl": None,
        "device": "cpu",
        "precision": "bf16",
        "kernels": {"attention": "C++", "optimizer": "C++"},
        "apex": [],
    },
    "toolchain": {
        "compiler": "/usr/bin/c++",
        "compiler_version": "12.2.0",
        "ninja": "1.13",
        "cuda_home": "/usr/local/cuda",
        "nvcc": "13.0",
        "toolkits": ["/usr/local/cuda-12.8", "/usr/local/cuda-13.0"],
        "driver": None,
        "libaio": True,
        "apex": [],
        "other_apex": None,
        "accelerator": None,
    },
    "storage": {
        "direct": True,
        "write": 900e6,
        "read": 2e9,
        "random_reads": 8000.0,
        "fsync": 0.001,
    },
    "operators": {
        "cpu_adam": {"problem": None, "built": "workspace"},
        "async_io": {"problem": "requires libaio's headers", "built": None},
    },
    "speed": {"device": "cpu", "devices": [{"gflops": 100.0, "copy_gb_s": 20.0}]},
    "tokens": {
        "vocab_size": 100,
        "files": [
            {
                "prefix": "/w/t",
                "tokens": 50,
                "read": 50,
                "planned": 50,
                "smallest": 0,
                "largest": 99,
                "outside": None,
            }
        ],
    },
    "index": {"directory": "/w/i", "maps": 9, "samples": {"train": 10}, "others": []},
}
NEEDS = Needs("tiny", device=GIB, host=0, checkpoint=2 * GIB, checkpoints=8 * GIB, gradients=GIB)


def probe(host: str, **changes: dict[str, Any] | str | None) -> HostProbe:
    """Return the answers of a host; `changes` has values to merge, problems, or None per check."""
    values, problems = copy.deepcopy(HEALTHY), {}
    for check, change in changes.items():
        if isinstance(change, dict):
            values[check] |= change
        else:
            del values[check]
            if change is not None:
                problems[check] = change
    return HostProbe(host, values, problems)


def gpu_host(
    host: str, *, count: int = 8, smi: dict[str, Any] | None = None, **changes: dict[str, Any]
) -> HostProbe:
    """Return the answers of a host with GPUs."""
    visible = [{"name": "H100", "memory": 80 * GIB}] * count
    changes.setdefault("torch", {"cuda_works": True, "device": "cuda"})
    healthy = probe(host, **changes)
    gpus = {
        "visible": visible,
        "smi": [GPU | {"index": number} | (smi or {}) for number in range(count)],
        "problem": None,
    }
    return HostProbe(host, {**healthy.values, "gpus": gpus}, healthy.problems)


def facts(*probes: HostProbe, slots: int = 1, **more: Any) -> Facts:
    """Return the facts of these hosts; the first one is the head."""
    names = [host_probe.host for host_probe in probes]
    contacts = {
        name: Contact(seconds=0.3, offset=0.0, uncertainty=0.15, here=name == names[0])
        for name in names
    }
    defaults: dict[str, Any] = {
        "contacts": contacts,
        "workspace": "/w",
        "seen": dict.fromkeys(names, True),
        "master": names[0] if len(names) > 1 else "",
    }
    return Facts(
        dict.fromkeys(names, slots),
        {host_probe.host: host_probe for host_probe in probes},
        **{**defaults, **more},
    )


def expect(finding: Finding | None, verdict: str, hosts: tuple[str, ...], *words: str) -> None:
    """Check verdict and hosts of a finding, and that its advice contains these words."""
    assert finding is not None
    assert (finding.verdict, finding.hosts) == (verdict, hosts), finding
    assert (finding.advice == "") == (verdict == "ok"), finding
    for word in words:
        assert word in finding.advice, finding.advice


def write_tokens(prefix: Path, ids: "list[int] | np.ndarray[Any, Any]") -> str:
    """Write token files of three documents and return their prefix."""
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        for part in np.array_split(np.asarray(ids, np.int32), 3):
            writer.add_document(part)
    return str(prefix)
