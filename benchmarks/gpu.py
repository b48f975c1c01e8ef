"""Training of GPT-2 345M on one CUDA device.

One run of at most 10 minutes measures all GPU figures of docs/benchmarks.md.

    python -m benchmarks.gpu [--micro-batches 8 16 32 64]
        [--parts sweep contest recompute fp16 small]
    python -m benchmarks.gpu --smoke

sweep       micro batches of megacore until one does not fit; at the best one, MFU relative to
            measured matrix products
contest     megacore, compiled nanoGPT and transformers' Trainer in turns, at the same micro batch
recompute   peak memory and rate with recompute none, selective and full
fp16        dynamic loss scaling
small       a tiny GPT with and without compilation, limited by the time of kernel launches

Except in the contest, only one process at a time uses the device. `--smoke` runs every part with a
tiny model on the CPU.
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from benchmarks._entrants import CASES, ENTRANTS, OUT_OF_MEMORY, Case, Work
from benchmarks._turns import Contestant, compete, progress
from benchmarks._verdict import Check, table, verdict
from benchmarks.step import check_losses, matmul_rate, rows_of, start
from megacore.config.train import TrainConfig

PARTS = ("sweep", "contest", "recompute", "fp16", "small")
OURS, COMPILED, TRAINER = "megacore", "nanoGPT compiled", "transformers"
MFU_GOAL, COMPILED_GOAL, TRAINER_GOAL = 0.55, 1.1, 1.4
MICRO_BATCHES = (8, 16, 32, 64)
LIMIT = 540.0
"""Seconds after which no further part begins."""
FP16_STEPS, FP16_LAST = 60, 10
"""Steps with loss scaling, and the number of last ones whose losses are averaged. The loss scale
starts at 2**32, so the first steps overflow until it is low enough."""
HEADER = [
    "contestant",
    "tokens/s",
    "quartiles",
    "MFU",
    "megacore is times as fast",
    "peak memory (MB)",
]


class DeviceFullError(Exception):
    """A process ran out of device memory."""


class Bench:
    """Device, model and results so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.smoke: bool = options.smoke
        self.device = "cpu" if options.smoke else "cuda"
        self.case = CASES["smoke-bf16" if options.smoke else "345m-bf16"]
        self.micro_batches = [1, 2] if options.smoke else options.micro_batches
        self.steps, self.rounds = (2, 3) if options.smoke else (5, 8)
        self.contest_batch = (
            self.micro_batches[-1] if options.smoke else options.contest_micro_batch
        )
        self.peak = 0.0
        self.checks: list[Check] = []

    def work(self, case: Case | None = None, name: str = OURS, **train: Any) -> Work:
        """Return the task of a measuring process."""
        return Work(
            case or self.case, ENTRANTS[name], device=self.device, threads=_threads(), train=train
        )

    @contextmanager
    def running(self, work: Work, name: str = OURS) -> Iterator[Contestant]:
        """Run one contestant, which has the device to itself.

        Raises DeviceFullError from within the body.
        """
        contestant = start(name, work)
        try:
            yield contestant
        except SystemExit:
            if contestant.processes[0].wait(timeout=30) == OUT_OF_MEMORY:
                raise DeviceFullError from None
            raise
        finally:
            contestant.end()

    def measured(self, work: Work) -> tuple[float, float] | None:
        """Return megacore's seconds per step and peak memory in MB, or None if it does not fit."""
        try:
            with self.running(work) as ours:
                ours.run(3)
                seconds = statistics.median(ours.run(self.steps) for _ in range(3))
                return seconds, float(ours.last[0]["memory_mb"])
        except DeviceFullError:
            return None

    def mfu(self, case: Case, seconds: float) -> float:
        """Return the MFU relative to the measured rate of matrix products."""
        return case.flops / seconds / 1e12 / self.peak


def sweep(bench: Bench) -> None:
    """Find the best micro batch, and compare its MFU with the goal."""
    rows, best = [], 0.0
    for size in bench.micro_batches:
        case = replace(bench.case, micro_batch_size=size)
        result = bench.measured(bench.work(case))
        if result is None:
            rows.append([str(size), "does not fit", "-", "-"])
            break
        seconds, memory = result
        best = max(best, bench.mfu(case, seconds))
        rows.append(
            [
                str(size),
                f"{case.tokens / seconds:,.0f}",
                f"{bench.mfu(case, seconds):.1%}",
                f"{memory:,.0f}",
            ]
        )
    _show("Micro batches", ["micro batch", "tokens/s", "MFU", "peak memory (MB)"], rows)
    bench.checks.append(
        Check("MFU at the best micro batch", best, 0.0 if bench.smoke else MFU_GOAL, unit="")
    )


def contest(bench: Bench) -> None:
    """Compare the three contestants in turns."""
    case = replace(bench.case, micro_batch_size=bench.contest_batch)
    contestants = [start(name, bench.work(case, name)) for name in (OURS, COMPILED, TRAINER)]
    try:
        check_losses(contestants, case)
        compete(contestants, bench.rounds, bench.steps, warmup=5, seconds=150.0)
        memory = [each.last[0]["memory_mb"] for each in contestants]
        rows = rows_of(contestants, memory, case, bench.peak)
        kernels = {each.name: each.ask("kernels")[0]["kernels"] for each in contestants}
    finally:
        for each in contestants:
            each.end()
    _show(f"In turns, micro batch {case.micro_batch_size}", HEADER, rows)
    sys.stdout.write(
        "".join(
            f"{name}: {implementation}\n"
            for name, implementation in kernels.items()
            if implementation
        )
    )
    for name, goal in ((COMPILED, COMPILED_GOAL), (TRAINER, TRAINER_GOAL)):
        other = next(each for each in contestants if each.name == name)
        ratio = contestants[0].speedup_over(other)
        bench.checks.append(Check(f"megacore to {name}", ratio, 0.0 if bench.smoke else goal))


def recompute(bench: Bench) -> None:
    """Measure memory and time of each kind of recomputation."""
    case = replace(bench.case, micro_batch_size=bench.contest_batch)
    rows = []
    for kind in ("none", "selective", "full"):
        result = bench.measured(bench.work(case, recompute=kind))
        cells = (
            ["does not fit", "-"]
            if result is None
            else [f"{case.tokens / result[0]:,.0f}", f"{result[1]:,.0f}"]
        )
        rows.append([kind, *cells])
    _show(
        f"Recomputation, micro batch {case.micro_batch_size}",
        ["recompute", "tokens/s", "peak memory (MB)"],
        rows,
    )


def fp16(bench: Bench) -> None:
    """Check steps with dynamic loss scaling: it starts too high, decreases, and the loss falls."""
    case = replace(bench.case, micro_batch_size=bench.contest_batch, precision="fp16")
    steps = 4 if bench.smoke else FP16_STEPS
    with bench.running(bench.work(case)) as ours:
        losses = ours.ask(f"losses {steps}")[0]["losses"]
        seconds = ours.run(bench.steps)
        memory = float(ours.last[0]["memory_mb"])
    end = statistics.fmean(losses[-FP16_LAST:]) if all(map(math.isfinite, losses)) else math.nan
    row = [
        "fp16",
        f"{case.tokens / seconds:,.0f}",
        f"{losses[0]:.3f}",
        f"{end:.3f}",
        f"{memory:,.0f}",
    ]
    header = [
        "precision",
        "tokens/s",
        "first loss",
        f"mean of the last of {steps}",
        "peak memory (MB)",
    ]
    _show("Dynamic loss scaling", header, [row])
    goal = math.inf if bench.smoke else losses[0] - 1.0
    bench.checks.append(Check("fp16 loss at the end", end, goal, at_most=True, unit="nats"))


def small(bench: Bench) -> None:
    """Measure a model so small that launching its kernels takes longer than running them."""
    case = CASES["smoke-bf16" if bench.smoke else "tiny-bf16"]
    works = {"megacore": bench.work(case)}
    if "compile" in TrainConfig.model_fields:
        works = {
            f"megacore, compile {value}": bench.work(case, compile=value) for value in ("off", "on")
        }
    works |= {name: bench.work(case, name) for name in ("nanoGPT", COMPILED)}
    rows = []
    for name, work in works.items():
        with bench.running(work, name) as each:
            each.run(5)
            seconds = statistics.median(each.run(4 * bench.steps) for _ in range(3))
            rows.append([name, f"{case.tokens / seconds:,.0f}", f"{1000 * seconds:.2f}"])
    _show("Tiny model", ["contestant", "tokens/s", "ms per step"], rows)


def _show(title: str, header: list[str], rows: list[list[str]]) -> None:
    sys.stdout.write(f"{title}:\n\n{table(header, rows)}\n")
    sys.stdout.flush()


def _threads() -> int:
    return len(os.sched_getaffinity(0))


def _device_name(smoke: bool) -> str:
    """Return the name of the device. Raises SystemExit if there is none."""
    import torch

    if smoke:
        return "the CPU, a tiny model: these figures mean nothing"
    if not torch.cuda.is_available():
        raise SystemExit(
            "no CUDA device is visible here: run this on a machine with one, or give --smoke"
        )
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"


def main() -> int:
    """Run the requested parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--micro-batches", nargs="+", type=int, default=list(MICRO_BATCHES))
    parser.add_argument("--contest-micro-batch", type=int, default=16)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    options = parser.parse_args()
    start_time = time.monotonic()
    name = _device_name(options.smoke)
    bench = Bench(options)
    with bench.running(bench.work(CASES["smoke-bf16"])) as ours:
        bench.peak = matmul_rate(ours)
    sys.stdout.write(f"{name}; matrix products in bf16 {bench.peak:,.1f} TFLOP/s; {bench.case}\n\n")
    for part in PARTS:
        if part not in options.parts:
            continue
        if time.monotonic() - start_time > LIMIT:
            bench.checks.append(Check(f"{part} within the time", math.nan, 0.0, unit=""))
            continue
        progress(f"{part} after {time.monotonic() - start_time:.0f} s")
        {"sweep": sweep, "contest": contest, "recompute": recompute, "fp16": fp16, "small": small}[
            part
        ](bench)
    return verdict(f"gpu {'smoke' if options.smoke else bench.device}", bench.checks)


if __name__ == "__main__":
    sys.exit(main())
