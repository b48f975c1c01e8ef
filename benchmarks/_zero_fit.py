"""Search of the largest micro batch that fits into GPU memory, and its time per epoch."""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks._zero_ranks import OutOfMemoryError, started
from benchmarks._zero_variants import FITS, VARIANTS, Work
from megacore.engine.deepspeed.operators import build_operator

_STEPS = 3
"""Measured steps after one warm-up step; they also show whether the micro batch fits."""
_SMOKE_MB = 64
"""Limit in MiB of allocations after the tiny model, so that it also runs out of memory."""


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number from 1 to `most` that fits, or 0 if 1 does not.

    If a number fits, all smaller ones must fit too.
    """
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def try_steps(work: Work) -> list[dict[str, Any]] | None:
    """Return the ranks' measurements, or None if they ran out of memory."""
    results: list[dict[str, Any]] | None
    try:
        with started(work) as ranks:
            ranks.ask("run 1")
            results = ranks.ask(f"run {_STEPS}")
    except OutOfMemoryError:
        results = None
    sys.stderr.write(
        f"{work.size} {work.variant}: {work.micro_batch_size} "
        f"{'fits' if results else 'does not fit'}\n"
    )
    return results


def fit_table(options: argparse.Namespace, precision: str) -> None:
    """Search, measure and print the table."""
    if any(VARIANTS[name].compiled_adam for name in FITS):
        build_operator("cpu_adam")
    sys.stdout.write(
        f"\n{precision}, {options.ranks} ranks, full recomputation, epochs of {options.samples:,} "
        "samples\n\n"
        "| model | variant | largest micro batch | time of an epoch (s) | peak on the device (MB) "
        "| peak of a rank in host memory (MB) |\n| --- | --- | ---: | ---: | ---: | ---: |\n"
    )
    for size in ["tiny"] if options.smoke else options.sizes:
        for name in FITS:
            work = Work(name, size, precision, options.device, options.ranks, recompute="full")
            if options.smoke and options.device == "cpu":
                work = replace(work, limit_mb=_SMOKE_MB)
            sys.stdout.write(f"| {size} | {name} | {_cells(work, options)} |\n")
            sys.stdout.flush()


def _cells(work: Work, options: argparse.Namespace) -> str:
    results_by_size: dict[int, list[dict[str, Any]]] = {}

    def fits(micro_batch_size: int) -> bool:
        results = try_steps(replace(work, micro_batch_size=micro_batch_size))
        if results is not None:
            results_by_size[micro_batch_size] = results
        return results is not None

    size = largest(fits, options.most)
    if not size:
        return "out of memory at 1 | - | - | -"
    results = results_by_size[size]
    seconds = max(rank["seconds"] for rank in results) * math.ceil(
        options.samples / (size * work.ranks)
    )
    peaks = (max(rank[kind] for rank in results) for kind in ("device_mb", "training_mb"))
    return f"{size} | {seconds:,.0f} | {' | '.join(f'{peak:,.0f}' for peak in peaks)}"
