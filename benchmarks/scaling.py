"""Cost of more ranks: weak scaling, exposed communication, bubble, data wait, divided sequences.

    python -m benchmarks.scaling [--parts weak bubble data context long] [--rounds 8] [--steps 3]

weak    1, 2 and 4 data-parallel ranks of one thread, with the same samples on each: the time of a
        step should stay the same. With more ranks than cores, the ranks share the cores, and the
        best possible efficiency is cores / ranks.
bubble  two pipeline stages with m micro batches: the share of the time in which stages idle,
        compared with (p - 1) / (m v + p - 1) and with a simulation of the schedule with the
        measured times of the passes
data    iterations of the training loop over an indexed data set: the share of the time spent
        waiting for samples
context 1, 2 and 4 ranks of one thread that divide one sequence of 16,384 tokens: the memory that
        a step adds to that of a rank with its model, and the time of a step
long    two such ranks with 131,072 tokens, which takes minutes and is not a default
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

from benchmarks._turns import Contestant, compete, environment
from benchmarks._variants import CONTEXT, LONG, PIPELINES, SEQ_LENGTH, WEAK, Variant
from benchmarks._verdict import Check, table, verdict
from benchmarks.layouts import start
from megacore.observe.timers import exposed_communication
from megacore.pipeline_parallel.schedules import build_schedule, simulate

PARTS = ("weak", "bubble", "data", "context")
WEAK_GOAL = 0.8
"""Least rate on two ranks, relative to the rate that the cores allow."""
BUBBLE_GOAL = 0.05
"""Largest share of the time by which the bubble may exceed the simulated one, median over the
pipelines."""
DATA_GOAL = 0.01
"""Largest share of an iteration."""
CONTEXT_GOAL = 0.75
"""Most memory that a step adds on each of two ranks that divide a sequence, relative to one."""


def weak(options: argparse.Namespace) -> list[Check]:
    """Measure the time of a step on more ranks, with the same work on each."""
    contestants = {name: start(name, "fp32") for name in WEAK}
    _compete(list(contestants.values()), options)
    cores = len(os.sched_getaffinity(0))
    single = contestants["dp1"]
    rows, checks = [], []
    for name, each in contestants.items():
        ranks = WEAK[name].ranks
        best = min(1.0, cores / ranks)
        efficiency = each.speedup_over(single)
        exposed = max(exposed_communication(rank["phases"]) for rank in each.last)
        rows.append(
            [
                f"{name}{' (more ranks than cores)' if best < 1 else ''}",
                f"{WEAK[name].samples * SEQ_LENGTH / each.median:,.0f}",
                f"{1000 * each.median:.0f}",
                f"{efficiency:.3f}",
                f"{best:.2f}",
                f"{efficiency / best:.3f}",
                f"{exposed:.1f} ({exposed / 1000 / each.median:.1%})",
            ]
        )
        if ranks == 2:
            checks.append(
                Check(
                    "weak scaling on 2 ranks",
                    efficiency / best,
                    WEAK_GOAL,
                    unit="of what the cores allow",
                )
            )
    header = [
        "ranks of 1 thread",
        "tokens/s",
        "ms per step",
        "efficiency",
        "at best",
        "of it",
        "exposed (ms)",
    ]
    _show(f"Weak scaling, {cores} cores, 4 samples on each rank, fp32", header, rows)
    return checks


def bubble(options: argparse.Namespace) -> list[Check]:
    """Measure the idle share of two pipeline stages."""
    contestants = {name: start(name, "fp32") for name in PIPELINES}
    _compete(list(contestants.values()), options)
    rows, beyond = [], []
    for name, each in contestants.items():
        theory, simulated = expected_idle(PIPELINES[name], each)
        measured = idle_share(each)
        beyond.append(measured - simulated)
        exposed = max(exposed_communication(rank["phases"]) for rank in each.last)
        rows.append(
            [name, f"{theory:.1%}", f"{simulated:.1%}", f"{measured:.1%}", f"{exposed:.1f}"]
        )
    header = ["pipeline", "(p - 1) / (m v + p - 1)", "simulated", "measured", "exposed (ms)"]
    _show("Bubble, as a share of the time between first and last pass", header, rows)
    largest = statistics.median(beyond)
    return [
        Check(
            "bubble beyond the simulated one",
            largest,
            BUBBLE_GOAL,
            at_most=True,
            unit="of the time",
        )
    ]


def idle_share(each: Contestant) -> float:
    """Return the share of the passes' time, summed over all ranks, in which a rank was idle."""
    idle = total = 0.0
    for rank in each.last:
        phases = rank["phases"]
        passes = 1000 * rank["seconds"] - phases.get("optimizer", 0.0)
        total += passes
        idle += passes - phases["forward-compute"] - phases["backward-compute"]
    return idle / total


def expected_idle(variant: Variant, each: Contestant) -> tuple[float, float]:
    """Return the idle share of equal stages, and that of a simulation with measured times."""
    parallel = variant.config("fp32").parallel
    stages, chunks = (
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size or 1,
    )
    count = variant.samples
    schedule = build_schedule(parallel.pipeline_schedule, stages, count, chunks)
    times = [
        # a stage's time is divided equally among its chunks
        [rank["phases"][phase] / count / chunks for rank in each.last] * chunks
        for phase in ("forward-compute", "backward-compute")
    ]
    extra = simulate(schedule, *times).bubble_fraction
    return (stages - 1) / (count * chunks + stages - 1), extra / (1 + extra)


def data(options: argparse.Namespace) -> list[Check]:
    """Measure the share of the training loop's iterations that is spent in `batch-generator`."""
    threads = len(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "benchmarks._data_wait"]
    process = subprocess.run(
        command, env=environment(threads), stdout=subprocess.PIPE, text=True, check=True
    )
    times = json.loads(process.stdout.splitlines()[-1])
    share = times["batch_generator_ms"] / times["ms_per_iteration"]
    row = [f"{times['ms_per_iteration']:.1f}", f"{times['batch_generator_ms']:.3f}", f"{share:.3%}"]
    _show("Waiting for data", ["ms per iteration", "batch-generator (ms)", "share"], [row])
    return [Check("data wait", share, DATA_GOAL, at_most=True, unit="of an iteration")]


def context(options: argparse.Namespace) -> list[Check]:
    """Measure memory and time of ranks that divide a sequence."""
    growth = _divided(CONTEXT, options)
    relative = growth["cp2"] / growth["cp1"]
    return [Check("memory of a step on 2 ranks", relative, CONTEXT_GOAL, at_most=True)]


def long(options: argparse.Namespace) -> list[Check]:
    """Measure two ranks that divide a very long sequence."""
    _divided(LONG, options)
    return []


def _divided(variants: dict[str, Variant], options: argparse.Namespace) -> dict[str, float]:
    """Show memory and time of variants that divide a sequence; return the MiB that a step adds."""
    contestants = {name: start(name, "fp32") for name in variants}
    _compete(list(contestants.values()), options)
    rows, growth = [], {}
    for name, each in contestants.items():
        built, peak = (
            max(rank[memory] for rank in each.last) for memory in ("built_mb", "memory_mb")
        )
        growth[name] = peak - built
        sizes = f"{built:.0f}", f"{peak:.0f}", f"{peak - built:.0f}"
        rows.append([name, f"{variants[name].seq_length:,}", *sizes, f"{each.median:.2f}"])
    header = ["ranks", "tokens", "built (MiB)", "peak (MiB)", "of a step (MiB)", "s per step"]
    _show("Divided sequences, largest memory of a rank, fp32", header, rows)
    return growth


def _compete(contestants: list[Contestant], options: argparse.Namespace) -> None:
    try:
        compete(
            contestants,
            options.rounds,
            options.steps,
            warmup=options.steps,
            seconds=options.seconds,
        )
    finally:
        for each in contestants:
            each.end()


def _show(title: str, header: list[str], rows: list[list[str]]) -> None:
    sys.stdout.write(f"{title}:\n\n{table(header, rows)}\n")
    sys.stdout.flush()


def main() -> int:
    """Run the requested parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=[*PARTS, "long"], default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="of each in a round")
    parser.add_argument(
        "--seconds", type=float, default=200.0, help="after which no round of a part begins"
    )
    options = parser.parse_args()
    checks: list[Check] = []
    measures = {"weak": weak, "bubble": bubble, "data": data, "context": context, "long": long}
    for part, measure in measures.items():
        if part in options.parts:
            checks += measure(options)
    return verdict("scaling", checks)


if __name__ == "__main__":
    sys.exit(main())
