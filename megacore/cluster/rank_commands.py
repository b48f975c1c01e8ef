"""Commands that start the ranks of a job on one host, and the environment of the ranks.

DeepSpeed is started as a program and not imported. megacore uses only its inner program
`deepspeed.launcher.launch`, which starts the ranks of one host. The outer program (`deepspeed`,
`deepspeed.launcher.runner`) passes on few variables, and it ends a job by killing all DeepSpeed
launchers of the user on all hosts, including those of other jobs. `fanout` replaces it.
"""

import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from megacore.cluster.hosts.network import free_port
from megacore.cluster.hosts.plan import LOOPBACK, deepspeed_command, visible_devices

_MEETING = ".rendezvous-"
_KEPT_BLOCK = 256 * 2**20
"""Size in bytes below which the process keeps freed blocks."""


def local_torchrun_command(
    module: str,
    config_path: Path,
    ranks: int,
    *,
    log_directory: Path | None = None,
    shown: bool = False,
) -> list[str]:
    """Return the command for `ranks` processes of `python -m module --config config_path` here.

    Several ranks start through torchrun, on ports that the kernel chooses: no host name is looked
    up and no port can be in use. The rendezvous uses a file next to the config, because torchrun
    unpickles its state, and over TCP anybody who reaches this host could write it. A single rank
    needs no rendezvous and starts as a plain process, which saves the launcher's import of torch.

    Args:
        module: entry point of each rank.
        config_path: path of the job file.
        ranks: number of ranks.
        log_directory: directory of torchrun's own small files, which it would otherwise leave in
            the temporary directory; None means `torchrun` next to the config.
        shown: True for a command that is only shown; no file is touched.
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
        # With one node nobody checks for keep-alives, and each one would make the file longer.
        "--rdzv-conf=store_type=file,keep_alive_interval=86400",
        "--local-addr=127.0.0.1",
        f"--log-dir={log_directory or config_path.parent / 'torchrun'}",
        "-m",
        *program,
    ]


def _meeting_place(directory: Path, *, shown: bool) -> Path:
    """Return a new path for the rendezvous file and remove the files of earlier attempts."""
    if shown:
        return directory / f"{_MEETING}<random>"
    for path in directory.glob(f"{_MEETING}*"):
        path.unlink(missing_ok=True)
    return directory / f"{_MEETING}{secrets.token_hex(8)}"


def local_deepspeed_command(
    module: str,
    config_path: Path,
    ranks: int,
    *,
    devices: Sequence[int] | None = None,
    shown: bool = False,
) -> list[str]:
    """Return DeepSpeed's command for `ranks` processes of `module` on this host.

    The rendezvous is at 127.0.0.1.

    Args:
        module: entry point of each rank.
        config_path: path of the job file.
        ranks: number of ranks.
        devices: GPUs of the ranks; None means the first visible ones.
        shown: True for a command that is only shown; it has a placeholder instead of a free port.
    """
    port = "<free port>" if shown else free_port()
    gpus = {"localhost": visible_devices(ranks) if devices is None else [*devices]}
    return deepspeed_command(gpus, 0, module, config_path, master=LOOPBACK, port=port)


def rank_environment(threads: int, *, one_machine: bool = True) -> dict[str, str]:
    """Return the environment variables of every rank.

    They set the number of CPU threads, and the loopback interface for a job on one host.

    They also tell glibc to keep large blocks. It would otherwise return the logits' memory after
    each step and fault it in again in the next one (8 to 10 % of a small model's step). Other C
    libraries ignore these two variables.
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
