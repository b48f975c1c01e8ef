"""One of two ranks started by torchrun: rank 1 hangs in its forward pass.

Rank 0 waits for it in an all-reduce.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megacore.observe.heartbeat import Heartbeat, beat_path
from megacore.observe.timers import Timers
from megacore.parallel.collectives import all_reduce
from megacore.parallel.mesh import ProcessMesh
from megacore.parallel.rank_layout import RankLayout
from megacore.ranks.rank import write_stacks_on_signal
from tests._limits import HANG


def hang_in_forward() -> None:
    time.sleep(2 * HANG)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    directory = Path(json.loads(parser.parse_args().config.read_text())["exit_directory"])
    rank = int(os.environ["RANK"])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    write_stacks_on_signal(directory, rank)
    timers = Timers(torch.device("cpu"))
    dist.init_process_group("gloo")
    mesh = ProcessMesh.build(RankLayout(data=2), timers=timers)
    dist.barrier()  # the ranks are watched from now on, and one may have started later
    timers._heartbeat = Heartbeat(beat_path(directory, rank))
    for iteration in (1, 2):
        mesh.beat("iteration", iteration)
        with timers("forward-compute"):
            if iteration == 2 and rank == 1:
                hang_in_forward()
        all_reduce(torch.ones(4), mesh.data_parallel)


if __name__ == "__main__":
    main()
