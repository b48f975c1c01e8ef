"""A rank started by torchrun that joins a gloo group and follows the behaviour in its config."""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megacore.errors import DataFormatError
from megacore.launch.exit_reason import die_with_parent, reported_exit


def main() -> None:
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--local_rank", help="passed by DeepSpeed's launcher")
    config = json.loads(parser.parse_args().config.read_text())
    rank = int(os.environ.get("RANK", "0"))
    with reported_exit(Path(config["exit_directory"]), rank):
        if config["behaviour"] == "single":
            assert "RANK" not in os.environ
            return
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        Path(config["directory"], f"rank_{rank}.pid").write_text(str(os.getpid()))
        if rank == 1 and config["behaviour"] == "killed":
            time.sleep(0.5)  # by then the peer waits in its collective
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and config["behaviour"] == "raises":
            raise DataFormatError("tokens.bin is damaged")
        dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    main()
