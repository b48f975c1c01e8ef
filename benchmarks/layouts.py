"""One optimizer step of a tiny GPT in several layouts on this CPU.

The model has 4 layers, hidden size 256, 8 heads, s 256 and v 8192; a step has 8 samples.

    python -m benchmarks.layouts [--variants tp2 pp2] [--rounds 12] [--steps 3] [--precision fp32]

All variants are started first and then take turns of a few steps, so that a host whose speed
changes affects all of them: the ratio to the serial run is taken within each round, and the median
over the rounds is printed. Goals are checked for the selected variants.
"""

import argparse
import socket
import sys

from benchmarks._turns import Contestant, compete, environment
from benchmarks._variants import ALL, REFERENCE, SAMPLES, SEQ_LENGTH, VARIANTS, VOCAB_SIZE
from benchmarks._verdict import Check, table, verdict
from megacore.observe.flops import TransformerShape, step_flops
from megacore.observe.timers import exposed_communication

PHASES = ("forward-compute", "backward-compute", "optimizer", "batch-generator")
GOALS = (
    ("tp2", REFERENCE, 0.95),
    ("pp2 interleaved", REFERENCE, 0.85),
    ("pp2", REFERENCE, 0.80),
    ("pp2 delayed", "pp2", 1.03),
    ("pp2 interleaved, delayed", "pp2 interleaved", 1.02),
    ("dp2", "torch ddp", 1.0),
    ("dp2", "torch ddp, plain model", 1.0),
)
"""Layout, the variant it is compared with, and the least ratio."""


def start(name: str, precision: str) -> Contestant:
    """Start the ranks of a variant, which build their model and wait."""
    variant = ALL[name]
    meeting = {
        "WORLD_SIZE": str(variant.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ranks = [
        environment(variant.threads) | meeting | {"RANK": str(rank)}
        for rank in range(variant.ranks)
    ]
    return Contestant.start(name, ["benchmarks._rank", name, precision], ranks)


def row_of(each: Contestant, reference: Contestant, precision: str) -> list[str]:
    """Return a variant's row of the table."""
    variant = VARIANTS[each.name]
    flops = step_flops(TransformerShape.of(variant.config(precision), VOCAB_SIZE), SAMPLES, "none")
    phases = [
        "-" if variant.ddp else f"{max(rank['phases'].get(phase, 0.0) for rank in each.last):.1f}"
        for phase in PHASES
    ]
    exposed = max(exposed_communication(rank["phases"]) for rank in each.last)
    return [
        each.name,
        f"{variant.ranks} x {variant.threads}",
        f"{SAMPLES * SEQ_LENGTH / each.median:,.0f}",
        f"{each.speedup_over(reference):.3f}",
        f"{flops / each.median / 1e12:.3f}",
        f"{max(rank['memory_mb'] for rank in each.last):.0f}",
        "-" if variant.ddp else f"{exposed:.1f}",
        *phases,
    ]


def main() -> int:
    """Start the variants, take turns and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="of each variant in a round")
    parser.add_argument("--seconds", type=float, default=480.0, help="after which no round begins")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    options = parser.parse_args()
    names = [REFERENCE, *(name for name in options.variants if name != REFERENCE)]
    contestants = {name: start(name, options.precision) for name in names}
    try:
        compete(
            list(contestants.values()),
            options.rounds,
            options.steps,
            warmup=options.steps,
            seconds=options.seconds,
        )
    finally:
        for each in contestants.values():
            each.end()
    header = [
        "layout",
        "ranks x threads",
        "tokens/s",
        "to serial",
        "TFLOPs",
        "memory per rank (MB)",
    ]
    header += ["exposed communication (ms)", *(f"{phase} (ms)" for phase in PHASES)]
    reference = contestants[REFERENCE]
    sys.stdout.write(
        table(header, [row_of(each, reference, options.precision) for each in contestants.values()])
    )
    checks = [
        Check(f"{name} to {other}", contestants[name].speedup_over(contestants[other]), goal)
        for name, other, goal in GOALS
        if {name, other} <= contestants.keys()
    ]
    return verdict(f"layouts {options.precision}", checks)


def free_port() -> int:
    """Return a free port, on which the ranks of a variant connect."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
