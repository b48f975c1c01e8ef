"""One optimizer step of a tiny GPT (4 layers, 256, 8 heads, s 256, v 8192, 8 samples) in several layouts on this CPU.

    python -m benchmarks.step [--variants tp2 pp2] [--rounds 12] [--steps 3] [--precision fp32]

All variants are started first and then take turns, a few steps each, so that a machine whose speed changes changes
it for all: the ratio to the serial run is taken within each round, and the median over the rounds is printed.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

from benchmarks._variants import REFERENCE, SAMPLES, SEQ_LENGTH, VARIANTS, VOCAB_SIZE
from megacore.launch.torchrun import rank_environment
from megacore.observe.flops import TransformerShape, step_flops
from megacore.observe.timers import exposed_communication

PHASES = ("forward-compute", "backward-compute", "optimizer", "batch-generator")


@dataclass
class Contestant:
    """The processes of one variant and what they measured."""

    name: str
    processes: "list[subprocess.Popen[str]]"
    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    last: list[dict[str, Any]] = field(default_factory=list)

    def run(self, steps: int) -> float:
        """Make steps; median seconds of one on the slowest rank."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"run {steps}\n")
            process.stdin.flush()
        assert self.processes[0].stdout is not None
        line = self.processes[0].stdout.readline()
        if not line:
            raise SystemExit(f"variant {self.name!r} ended: its error is above")
        self.last = json.loads(line)
        return max(rank["seconds"] for rank in self.last)


def start(name: str, precision: str) -> Contestant:
    """Start the ranks of a variant; they build their model and wait."""
    variant = VARIANTS[name]
    port = _free_port()
    processes = []
    for rank in range(variant.ranks):
        environment = {
            **os.environ,
            **rank_environment(variant.threads),
            "RANK": str(rank),
            "WORLD_SIZE": str(variant.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks._rank", name, precision],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    return Contestant(name, processes)


def compete(contestants: list[Contestant], rounds: int, steps: int) -> None:
    """Take turns; the first round only warms up."""
    for number in range(rounds + 1):
        reference = 0.0
        for each in contestants:
            seconds = each.run(steps)
            reference = seconds if each.name == REFERENCE else reference
            if number:
                each.seconds.append(seconds)
                each.ratios.append(reference / seconds)


def table(contestants: list[Contestant], precision: str) -> list[str]:
    """Rows of Markdown."""
    rows = [
        "| layout | ranks x threads | tokens/s | to serial | TFLOPs | memory per rank (MB) "
        "| exposed communication (ms) | " + " | ".join(f"{phase} (ms)" for phase in PHASES) + " |",
        "| --- |" + " ---: |" * (6 + len(PHASES)),
    ]
    for each in contestants:
        variant = VARIANTS[each.name]
        seconds = statistics.median(each.seconds)
        config = variant.config(precision)
        flops = step_flops(TransformerShape.of(config, VOCAB_SIZE), SAMPLES, "none")
        phases = [
            "-" if variant.torch_ddp else f"{max(rank['phases'].get(phase, 0.0) for rank in each.last):.1f}"
            for phase in PHASES
        ]
        exposed = max(exposed_communication(rank["phases"]) for rank in each.last)
        rows.append(
            f"| {each.name} | {variant.ranks} x {variant.threads} | {SAMPLES * SEQ_LENGTH / seconds:,.0f} "
            f"| {statistics.median(each.ratios):.3f} | {flops / seconds / 1e12:.3f} "
            f"| {max(rank['memory_mb'] for rank in each.last):.0f} "
            f"| {'-' if variant.torch_ddp else f'{exposed:.1f}'} | {' | '.join(phases)} |"
        )
    return rows


def main() -> None:
    """Start, compete, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="of each variant in a round")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    options = parser.parse_args()
    names = [REFERENCE, *(name for name in options.variants if name != REFERENCE)]
    if options.precision != "fp32":
        names = [name for name in names if not VARIANTS[name].torch_ddp]
    contestants = [start(name, options.precision) for name in names]
    try:
        compete(contestants, options.rounds, options.steps)
        sys.stdout.write("\n".join(table(contestants, options.precision)) + "\n")
    finally:
        for each in contestants:
            for process in each.processes:
                process.kill()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    main()
