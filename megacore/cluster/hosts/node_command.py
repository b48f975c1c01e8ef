"""The command that starts the ranks of one machine among several; each finds its own GPUs and reads the job there."""

import base64
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_JOIN_LIMIT = 300
"""Seconds in which the launchers of all machines must have met: some load torch from a slow file system."""


def torchrun_command(
    hosts: Mapping[str, int], number: int, module: str, job_file: Path, *, master: str, port: int | str
) -> list[str]:
    """Torchrun on the machine with this number. All ranks are known beforehand: its rendezvous has nothing to find out.

    Its dynamic one unpickles what whoever reaches the port wrote.
    """
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(f"--nnodes={len(hosts)}", f"--node-rank={number}", f"--nproc-per-node={[*hosts.values()][number]}"),
        *("--max-restarts=0", "--rdzv-backend=static", f"--rdzv-conf=timeout={_JOIN_LIMIT}"),
        *(f"--master-addr={master}", f"--master-port={port}"),
        *(f"--log-dir={job_file.absolute().parent / 'torchrun'}", "-m", module, "--config", str(job_file.absolute())),
    ]


def deepspeed_command(
    devices: Mapping[str, Sequence[int | str]],
    number: int,
    module: str,
    job_file: Path,
    *,
    master: str,
    port: int | str,
) -> list[str]:
    """DeepSpeed's launcher on the machine with this number; `devices` are the GPUs of each machine's ranks."""
    world = base64.urlsafe_b64encode(json.dumps(devices).encode()).decode()
    return [
        *(sys.executable, "-m", "deepspeed.launcher.launch", "--log_level=warning", f"--world_info={world}"),
        *(f"--master_addr={master}", f"--master_port={port}", f"--node_rank={number}"),
        *("--module", module, "--config", str(job_file.absolute())),
    ]


def visible_devices(ranks: int) -> list[int | str]:
    """The GPUs of this machine's ranks: DeepSpeed's launcher sets CUDA_VISIBLE_DEVICES without looking at it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [*range(ranks)]
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return [*names[:ranks]] if len(names) >= ranks else ["-1"] * ranks  # hidden GPUs stay hidden
