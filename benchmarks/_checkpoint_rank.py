"""One rank of `benchmarks.checkpoint`, which runs the rounds together with its peers.

The first rank writes the results.
"""

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacore.checkpoint.background import CheckpointSaver, SaveFinished, Shares, rectangles_of
from megacore.checkpoint.collective import RankGroup, verify_together
from megacore.checkpoint.load import load_checkpoint

KINDS = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
LAYERS = 12
BLOCK = 8 << 20


def model_state(hidden: int, vocabulary: int) -> dict[str, Tensor]:
    """Return fp32 weights and moments of a GPT of 12 layers, with the names of a checkpoint."""
    shapes: dict[str, tuple[int, ...]] = {"word": (vocabulary, hidden), "position": (1024, hidden)}
    for layer in range(LAYERS):
        shapes |= {
            f"layers.{layer}.qkv.weight": (3 * hidden, hidden),
            f"layers.{layer}.qkv.bias": (3 * hidden,),
            f"layers.{layer}.dense.weight": (hidden, hidden),
            f"layers.{layer}.dense.bias": (hidden,),
            f"layers.{layer}.up.weight": (4 * hidden, hidden),
            f"layers.{layer}.up.bias": (4 * hidden,),
            f"layers.{layer}.down.weight": (hidden, 4 * hidden),
            f"layers.{layer}.down.bias": (hidden,),
            **{
                f"layers.{layer}.{norm}.{part}": (hidden,)
                for norm in ("first", "second")
                for part in ("w", "b")
            },
        }
    return {f"{kind}.{name}": torch.rand(shape) for kind in KINDS for name, shape in shapes.items()}


class Rank:
    """Actions of a rank in a round; every method is called by all ranks at the same time."""

    def __init__(self, directory: Path, options: Mapping[str, Any]) -> None:
        self.directory, self.options = directory, options
        self.ranks = RankGroup(None)
        device = torch.device(options["device"])
        state = model_state(options["hidden"], options["vocabulary"])
        self.state = {name: value.to(device) for name, value in state.items()}
        shares = Shares(self.ranks)
        shares.decide(self.state)
        self.own = {
            name: piece.cpu() for name, piece in rectangles_of(shares.own(self.state)).items()
        }
        self.total = shares.total_bytes
        self.savers = {
            kind: CheckpointSaver(
                directory / f"run-{kind}",
                asynchronous=kind == "asynchronous",
                keep_last=1,
                keep_best=False,
            )
            for kind in ("synchronous", "asynchronous")
        }
        self.iteration = 0
        self.net = nn.Sequential(*(nn.Linear(options["width"], options["width"]) for _ in range(6)))
        self.net.to(device)
        self.batch = torch.rand(256, options["width"], device=device)

    def timed(self, action: Callable[[], object]) -> float:
        """Return the seconds until the slowest rank has finished `action`."""
        self.together()
        start = time.perf_counter()
        action()
        return self.slowest(time.perf_counter() - start)

    def together(self) -> None:
        """Wait for the other ranks."""
        if self.ranks.distributed:
            dist.barrier()

    def slowest(self, value: float) -> float:
        """Return the largest of all ranks' values."""
        return max(self.ranks.everywhere(lambda: value))

    def plain_copy(self) -> None:
        """Write this rank's share of the bytes into one file, and sync it."""
        with open(self.directory / f"plain-{self.ranks.rank}", "wb", buffering=0) as file:
            for piece in self.own.values():
                view = memoryview(piece.numpy().reshape(-1).view("u1"))  # type: ignore[arg-type]
                while view:
                    view = view[file.write(view) :]
            os.fsync(file.fileno())

    def save(self, kind: str, passes: int = 0) -> tuple[SaveFinished, float]:
        """Save a checkpoint completely, with passes between its start and the next update.

        Returns the result and the seconds of the passes.
        """
        self.iteration += 1
        saver = self.savers[kind]
        self.together()
        saver.save(self.iteration, self.state, {}, validation_loss=None)
        seconds = sum(self.step() for _ in range(passes))
        saver.finish_copy()
        finished = saver.wait()
        assert finished is not None, "a save ends with a result or raises"
        return finished, seconds

    def step(self) -> float:
        """Return the seconds of one training step of a small model with gradient all-reduce."""
        start = time.perf_counter()
        self.net(self.batch).square().mean().backward()
        if self.ranks.distributed:
            for parameter in self.net.parameters():
                dist.all_reduce(parameter.grad)
        if self.batch.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def step_times(self) -> tuple[float, float]:
        """Return the mean seconds of a step without and during a save."""
        count = self.options["steps"]
        without_save = [self.step() for _ in range(count)]
        self.iteration += 1
        self.savers["asynchronous"].save(self.iteration, self.state, {}, validation_loss=None)
        during_save: list[float] = []
        # Every rank makes the same number of steps; the save ends on all at about the same time.
        while len(during_save) < 4 or any(
            self.ranks.everywhere(lambda: self.savers["asynchronous"].progress() is not None)
        ):
            during_save += [self.step() for _ in range(4)]
        self.savers["asynchronous"].wait()
        return sum(without_save) / len(without_save), sum(during_save) / len(during_save)

    def round(self) -> dict[str, float]:
        """Measure every action once."""
        copy = self.timed(self.plain_copy)
        cold = self.timed(self.plain_read)
        (self.directory / f"plain-{self.ranks.rank}").unlink()
        synchronous, _ = self.save("synchronous")
        passes = math.ceil(self.options["passes"] / self.slowest(self.step()))
        undisturbed = sum(self.step() for _ in range(passes))
        asynchronous, disturbed = self.save("asynchronous", passes)
        drop_caches(asynchronous.path) if self.ranks.rank == 0 else None
        verify = self.timed(lambda: verify_together(asynchronous.path, self.ranks))
        load = self.timed(lambda: load_checkpoint(asynchronous.path, self.state))
        without_save, during_save = self.step_times()
        return {
            "copy": copy,
            "read": cold,
            "synchronous": self.slowest(synchronous.seconds),
            "asynchronous": self.slowest(asynchronous.seconds),
            "stall": self.slowest(asynchronous.stall_seconds),
            "slowed": self.slowest(disturbed - undisturbed),
            "verify": verify,
            "load": load,
            "step": self.slowest(without_save),
            "step beside": self.slowest(during_save),
        }

    def plain_read(self) -> None:
        """Read this rank's file from the disk."""
        path = self.directory / f"plain-{self.ranks.rank}"
        _drop(path)
        block = bytearray(BLOCK)
        with open(path, "rb", buffering=0) as file:
            while file.readinto(block):
                pass

    def close(self) -> None:
        """Close the savers."""
        for saver in self.savers.values():
            saver.close()


def drop_caches(directory: Path) -> None:
    """Drop the files of a directory from the page cache, to read them from the disk again."""
    for path in directory.iterdir():
        _drop(path)


def _drop(path: Path) -> None:
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Run the rounds.

    The first one is not reported: buffers and the system's caches are allocated in it.
    """
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    if options["ranks"] > 1:
        dist.init_process_group("gloo")
    directory = Path(options["directory"])
    rank = Rank(directory, options)
    rounds = [rank.round() for _ in range(options["rounds"] + 1)][1:]
    rank.close()
    if rank.ranks.rank == 0:
        (directory / "results.json").write_text(json.dumps({"bytes": rank.total, "rounds": rounds}))
        for kind in rank.savers:
            shutil.rmtree(directory / f"run-{kind}")
    if rank.ranks.distributed:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
