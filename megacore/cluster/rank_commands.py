"""The command that starts the ranks of one machine alone, and the environment they get.

DeepSpeed is started as a program and not imported. Of its two programs this is the inner one, which
starts the ranks of one machine (`deepspeed.launcher.launch`). The outer one (`deepspeed`,
`deepspeed.launcher.runner`) passes on few variables and ends a job by killing every DeepSpeed
launcher of the user on all hosts, those of other jobs too: its part is done by `fanout`.
"""

import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from megacore.cluster.hosts.network import free_port
from megacore.cluster.hosts.plan import LOOPBACK, deepspeed_command, visible_devices

_MEETING = ".rendezvous-"
_KEPT_BLOCK = 256 * 2**20
"""Bytes: blocks below this stay with the process when they are freed."""


def torchrun_alone(
    module: str,
    config_path: Path,
    ranks: int,
    *,
    log_directory: Path | None = None,
    shown: bool = False,
) -> list[str]:
    """What starts `python -m module --config config_path` as `ranks` processes of this machine.

    More than one go through torchrun, on ports of the kernel's choice: no name is looked up and no
    port can be in use. They meet through a file beside the config: torchrun unpickles the state of
    a rendezvous, which over TCP anybody could write who reaches this machine. One rank needs no
    rendezvous and starts as a plain process, which saves the launcher's own import of torch.
    torchrun's own small files go to `log_directory` (None: `torchrun` beside the config) instead of
    the machine's temporary directory, where it would leave them. One that is only `shown` touches
    no file.
    """
    program = [module, "--config", str(config_path)]
    if ranks == 1:
        return [sys.executable, "-m", *program]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        f"--nproc-per-node={ranks}",
        "--max-restarts=0",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={_meeting_place(config_path.absolute().parent, shown=shown)}",
        # Of one node nobody asks whether it is alive; each answer would make the file longer.
        "--rdzv-conf=store_type=file,keep_alive_interval=86400",
        "--local-addr=127.0.0.1",
        f"--log-dir={log_directory or config_path.parent / 'torchrun'}",
        "-m",
        *program,
    ]


def _meeting_place(directory: Path, *, shown: bool) -> Path:
    """A file that is not there yet; those of earlier attempts are removed."""
    if shown:
        return directory / f"{_MEETING}<random>"
    for path in directory.glob(f"{_MEETING}*"):
        path.unlink(missing_ok=True)
    return directory / f"{_MEETING}{secrets.token_hex(8)}"


def deepspeed_alone(
    module: str,
    config_path: Path,
    ranks: int,
    *,
    devices: Sequence[int] | None = None,
    shown: bool = False,
) -> list[str]:
    """What starts `python -m module --config config_path` as `ranks` processes of this machine.

    They meet at 127.0.0.1, on a port that is free now, which one that is only `shown` leaves open;
    the GPUs are `devices`, else the first ones that are visible.
    """
    port = "<free port>" if shown else free_port()
    gpus = {"localhost": visible_devices(ranks) if devices is None else [*devices]}
    return deepspeed_command(gpus, 0, module, config_path, master=LOOPBACK, port=port)


def rank_environment(threads: int, *, one_machine: bool = True) -> dict[str, str]:
    """Environment variables for every rank.

    CPU threads, and one machine's traffic kept on the loopback interface.

    glibc is told to keep large blocks: it would give the logits' memory back after each step and
    fault it in again in the next (8 to 10 % of a small model's step). Other C libraries ignore the
    two names.
    """
    count = str(threads)
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if one_machine else {}
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "NUMEXPR_NUM_THREADS": count,
        "TOKENIZERS_PARALLELISM": "false",
        "MALLOC_MMAP_THRESHOLD_": str(_KEPT_BLOCK),
        "MALLOC_TRIM_THRESHOLD_": str(2 * _KEPT_BLOCK),
        "PYTHONUNBUFFERED": "1",
        **loopback,
    }
