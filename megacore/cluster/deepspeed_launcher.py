"""DeepSpeed's launcher on this machine alone; `node_command` has its command for one among several.

DeepSpeed is started as a program and not imported. Of its two programs this is the inner one, which starts the ranks
of one machine (`deepspeed.launcher.launch`). The outer one (`deepspeed`, `deepspeed.launcher.runner`) passes on few
variables and ends a job by killing every DeepSpeed launcher of the user on all hosts, those of other jobs too: its
part is done by `fanout`.
"""

from collections.abc import Sequence
from pathlib import Path

from megacore.cluster.hosts.network import free_port
from megacore.cluster.hosts.node_command import deepspeed_command, visible_devices
from megacore.cluster.hosts.plan import LOOPBACK


def command(
    module: str, config_path: Path, ranks: int, *, devices: Sequence[int] | None = None, shown: bool = False
) -> list[str]:
    """What starts `python -m module --config config_path` as `ranks` processes of this machine.

    They meet at 127.0.0.1, on a port that is free now, which one that is only `shown` leaves open; the GPUs are
    `devices`, else the first ones that are visible.
    """
    port = "<free port>" if shown else free_port()
    gpus = {"localhost": visible_devices(ranks) if devices is None else [*devices]}
    return deepspeed_command(gpus, 0, module, config_path, master=LOOPBACK, port=port)
