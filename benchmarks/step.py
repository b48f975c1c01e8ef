"""One training step of megacore, compared with its alternatives on this host, in turns.

    python -m benchmarks.step [--case tiny-bf16] [--rounds 12] [--steps 3] [--nanogpt CHECKOUT]
    python -m benchmarks.step --losses 50 [--case tiny-bf16]

The contestants are megacore's native engine as its launcher starts it; a plain torch GPT in
nanoGPT's style (eager or compiled, with or without torch's fused AdamW, with glibc's default malloc
or the thresholds that megacore's launcher sets); and transformers' GPT-2 in Trainer's loop. All
have the same weights, batches, learning rate, AdamW and clipping, and their first losses must
agree. They are started first and then take turns of a few steps: ratios are taken within a round,
and their median counts. `--losses` instead compares the losses of megacore in the case's precision
with those of megacore in fp32.
"""

import argparse
import json
import math
import os
import sys
import time
from dataclasses import replace

from benchmarks._entrants import CASES, ENTRANTS, Case, Work
from benchmarks._turns import Contestant, compete, environment, progress
from benchmarks._verdict import Check, table, verdict

OURS, COMPILED, EAGER = "megacore", "nanoGPT compiled", "nanoGPT"
COMPILED_TUNED = "nanoGPT compiled, tuned malloc"
STRONGEST = "nanoGPT compiled, fused AdamW, tuned malloc"
GOALS: dict[str, dict[str, float]] = {
    "tiny-fp32": {STRONGEST: 1.15},
    "tiny-bf16": {STRONGEST: 1.7},
    "124m-fp32": {STRONGEST: 1.15},
    "124m-bf16": {STRONGEST: 1.6},
    "smoke-fp32": {EAGER: 0.001},
    "smoke-bf16": {EAGER: 0.001},
}
"""Minimum ratio of megacore's speed to that of each of these contestants."""
LINE_UP = {
    "tiny-fp32": [OURS, EAGER, "nanoGPT, fused AdamW", COMPILED, STRONGEST, "transformers"],
    "tiny-bf16": [OURS, EAGER, COMPILED, COMPILED_TUNED, STRONGEST, "transformers"],
    "124m-fp32": [OURS, EAGER, COMPILED, STRONGEST, "transformers"],
    "124m-bf16": [OURS, EAGER, COMPILED, STRONGEST, "transformers"],
    "smoke-fp32": [OURS, EAGER, "nanoGPT, fused AdamW", "transformers"],
    "smoke-bf16": [OURS, EAGER, "nanoGPT, fused AdamW", "transformers"],
}
ROUNDS = {"tiny": (15, 4), "124m": (12, 1), "smoke": (3, 2)}
"""Rounds and steps in each round, by size."""
SECONDS = 420.0
"""Seconds after which no round begins, so that a run takes at most 8 minutes."""
FIRST_LOSSES = 3
LOSS_BARS = {"fp32": 2e-4, "bf16": 5e-3}
"""Largest difference of the first losses between contestants, in nats."""
FIRST_BAR = 0.2
"""Largest difference of a first loss to that expected of the initial weights, in nats."""
REFERENCE_BAR = 1e-2
"""Largest difference of a loss to fp32's, in nats, over 50 steps. bf16 has 8 significant bits, so
its numbers of about 9 are 0.06 apart; the mean of 2,048 losses is far more precise than one of
them."""


def start(name: str, work: Work) -> Contestant:
    """Start a process that builds its model and waits."""
    variables = environment(work.threads, tuned_malloc=work.entrant.tuned_malloc)
    return Contestant.start(
        name, ["benchmarks._step_rank", json.dumps(work.as_json())], [variables]
    )


def line_up(options: argparse.Namespace) -> dict[str, Work]:
    """Return the work of each contestant."""
    case = CASES[options.case]
    names = options.contestants or LINE_UP[options.case]
    works = {
        name: Work(case, ENTRANTS[name], threads=options.threads)
        for name in dict.fromkeys([OURS, *names])
    }
    if options.nanogpt:
        twins = [name for name in names if name.startswith(EAGER)]
        works |= {
            f"{name} (checkout)": replace(works[name], checkout=options.nanogpt) for name in twins
        }
    return works


def first_losses(contestants: list[Contestant], case: Case) -> tuple[float, str | None]:
    """Let all contestants make a few steps, at the same time, since most of it is compilation.

    Returns:
        The largest difference to megacore's losses, and which contestant computes something else,
        None if all compute the same.
    """
    for each in contestants:
        each.send(f"losses {FIRST_LOSSES}")
    losses = {each.name: each.answer()[0]["losses"] for each in contestants}
    ours, bar = losses[OURS], LOSS_BARS[case.precision]
    worst, problem = 0.0, None
    for name, theirs in losses.items():
        difference = max(
            abs(our_loss - their_loss) for our_loss, their_loss in zip(ours, theirs, strict=True)
        )
        worst = max(worst, difference)
        if (
            not all(map(math.isfinite, theirs))
            or abs(theirs[0] - case.first_loss) > FIRST_BAR
            or difference > bar
        ):
            problem = (
                f"{name} computes something else: losses {theirs} where megacore has {ours}; the "
                f"first is to be within {FIRST_BAR:g} of {case.first_loss:.4f}, and all within "
                f"{bar:g} of megacore's"
            )
    progress(f"first losses of {len(losses)} contestants agree within {worst:.1e}: {ours}")
    return worst, problem


def check_losses(contestants: list[Contestant], case: Case) -> float:
    """Let all contestants make a few steps; return the largest difference to megacore's losses.

    Ends the benchmark if a contestant computes something else.
    """
    worst, problem = first_losses(contestants, case)
    if problem is not None:
        raise SystemExit(problem)
    return worst


def matmul_rate(contestant: Contestant) -> float:
    """Return the rate of large matrix products on the contestant's threads, in TFLOP/s."""
    return float(contestant.ask("matmul")[0]["tflops"])


def rows_of(
    contestants: list[Contestant], memory: list[float], case: Case, peak: float
) -> list[list[str]]:
    """Return a row of the table for each contestant, with its peak memory in MB."""
    ours = contestants[0]
    rows = []
    for each, peak_mb in zip(contestants, memory, strict=True):
        low, high = each.quartiles
        rows.append(
            [
                each.name,
                f"{case.tokens / each.median:,.0f}",
                f"{case.tokens / high:,.0f}-{case.tokens / low:,.0f}",
                f"{case.flops / each.median / 1e12 / peak:.1%}",
                f"{ours.speedup_over(each):.3f}",
                f"{peak_mb:,.0f}",
            ]
        )
    return rows


def compare(options: argparse.Namespace) -> int:
    """Compare the contestants, print the table and give the verdict."""
    case, works = CASES[options.case], line_up(options)
    rounds, steps = ROUNDS[options.case.partition("-")[0]]
    start_time = time.monotonic()
    contestants = [start(name, work) for name, work in works.items()]
    try:
        worst = check_losses(contestants, case)
        peak = matmul_rate(contestants[0])
        left = options.seconds - (time.monotonic() - start_time)
        rounds_run = compete(
            contestants, options.rounds or rounds, options.steps or steps, warmup=1, seconds=left
        )
        memory = [each.last[0]["memory_mb"] for each in contestants]
        peak = max(peak, matmul_rate(contestants[0]))
        rows = rows_of(contestants, memory, case, peak)
        kernels = contestants[0].ask("kernels")[0]["kernels"]
        loop = {each.name: each.ask("kernels")[0]["kernels"].get("loop") for each in contestants}
    finally:
        for each in contestants:
            each.end()
    header = [
        "contestant",
        "tokens/s",
        "quartiles",
        "MFU",
        "megacore is times as fast",
        "peak memory (MB)",
    ]
    sys.stdout.write(
        f"{options.case}: {case}, {options.threads} threads, {rounds_run} rounds of "
        f"{options.steps or steps} steps, matrix products {peak * 1000:.0f} GFLOP/s, first losses "
        f"within {worst:.1e} nats.\n\n{table(header, rows)}\n"
    )
    sys.stdout.write(
        "".join(
            f"{name}: {implementation}\n" for name, implementation in loop.items() if implementation
        )
    )
    sys.stdout.write(
        "kernels: "
        + ", ".join(f"{name}: {implementation}" for name, implementation in kernels.items())
        + "\n"
    )
    checks = [
        Check(f"megacore to {each.name}", contestants[0].speedup_over(each), goal)
        for each in contestants
        for name, goal in GOALS[options.case].items()
        if each.name.removesuffix(" (checkout)") == name
    ]
    return verdict(f"step {options.case}", checks)


def track_losses(options: argparse.Namespace) -> int:
    """Compare the losses of megacore with its own losses in fp32."""
    case = CASES[options.case]
    work = Work(case, ENTRANTS[OURS], threads=options.threads)
    pair = [start(OURS, work), start(f"{OURS} in fp32", replace(work, reference=True))]
    try:
        ours, exact = (each.ask(f"losses {options.losses}")[0]["losses"] for each in pair)
    finally:
        for each in pair:
            each.end()
    header = ["step", case.precision, "fp32", "difference"]
    shown = sorted({0, *range(9, len(ours), 10), len(ours) - 1})
    rows = [
        [
            str(index + 1),
            f"{ours[index]:.4f}",
            f"{exact[index]:.4f}",
            f"{ours[index] - exact[index]:+.4f}",
        ]
        for index in shown
    ]
    sys.stdout.write(table(header, rows))
    difference = max(
        abs(our_loss - exact_loss) for our_loss, exact_loss in zip(ours, exact, strict=True)
    )
    relative = max(
        abs(our_loss - exact_loss) / exact_loss
        for our_loss, exact_loss in zip(ours, exact, strict=True)
    )
    sys.stdout.write(f"\nlargest relative difference {relative:.2e} over {len(ours)} steps\n")
    name = f"largest difference of a loss in {case.precision} to fp32's"
    return verdict(
        f"losses {options.case}",
        [Check(name, difference, REFERENCE_BAR, at_most=True, unit="nats")],
    )


def main() -> int:
    """Compare the contestants, or track the losses."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=GOALS, default="tiny-bf16")
    parser.add_argument("--contestants", nargs="+", choices=ENTRANTS, help="besides megacore")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int, help="of each contestant in a round")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="after which no round begins"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--nanogpt",
        metavar="CHECKOUT",
        help="also train nanoGPT's own model.py, next to megacore's imitation of it",
    )
    parser.add_argument(
        "--losses", type=int, metavar="N", help="compare N losses with fp32's instead"
    )
    options = parser.parse_args()
    return track_losses(options) if options.losses else compare(options)


if __name__ == "__main__":
    sys.exit(main())
