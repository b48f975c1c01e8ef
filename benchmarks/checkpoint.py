"""Saving and loading of a checkpoint, compared with a plain copy of the same bytes.

    python -m benchmarks.checkpoint [--directory DIR] [--ranks 1 2] [--rounds 5] [--hidden 768]
        [--device cpu|cuda]

Ranks are data-parallel replicas: together they write each byte once, and each of them loads the
whole state. Every round has these steps, one after another: write the bytes to a plain file and
sync it; read them from the disk; save synchronously, while training waits; save in the background,
with passes of a second before the next update, as those of 1,024 tokens of GPT-2 small take on two
cores; verify and load, again from the disk; make steps of a small model without and during a save.
Ratios are taken within a round, and medians over the rounds are printed. The last line is the
verdict; a missed goal ends the command with status 1. `--smoke` runs everything with a few
megabytes and without a verdict.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._verdict import Check, verdict
from megacore.cluster.start import rank_environment

STALL_GOAL = 0.05
"""Most time that an asynchronous save may block training, as a share of a synchronous save."""
PASSES = 1.0
"""Seconds of the passes between a save and the next update."""
BANDWIDTH_GOAL = 0.7
"""Least bandwidth of a save, and of a load with verification, as a share of a plain copy's."""


def measure(ranks: int, options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Run the ranks in `directory`; return the results that the first rank wrote."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    threads = max(1, (os.cpu_count() or 1) // ranks)
    values = {
        "directory": str(directory),
        "ranks": ranks,
        "threads": threads,
        "rounds": 1 if options.smoke else options.rounds,
        "hidden": 32 if options.smoke else options.hidden,
        "vocabulary": 1024 if options.smoke else 50304,
        "width": 64 if options.smoke else 1024,
        "steps": 20,
        "passes": 0.05 if options.smoke else PASSES,
        "device": options.device,
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks._checkpoint_rank", json.dumps(values)],
            env={
                **os.environ,
                **rank_environment(threads),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
        )
        for rank in range(ranks)
    ]
    try:
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise SystemExit(f"{ranks} ranks ended with {codes}: their errors are above")
    results: dict[str, Any] = json.loads((directory / "results.json").read_text(encoding="utf-8"))
    return results


def ratios(ranks: int, rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the medians over the rounds of each ratio.

    The bytes of a load are those that all ranks read, because each one loads the whole state.
    """
    values_by_name = {
        "save": [each["copy"] / each["synchronous"] for each in rounds],
        "asynchronous": [each["copy"] / each["asynchronous"] for each in rounds],
        "load": [ranks * each["copy"] / (each["verify"] + each["load"]) for each in rounds],
        "load to read": [ranks * each["read"] / (each["verify"] + each["load"]) for each in rounds],
        "stall": [each["stall"] / each["synchronous"] for each in rounds],
        "step": [each["step beside"] / each["step"] for each in rounds],
    }
    return {name: statistics.median(values) for name, values in values_by_name.items()}


def table(results: dict[int, dict[str, Any]]) -> list[str]:
    """Return the rows of a Markdown table."""
    rows = [
        (
            "| ranks | GiB | plain copy (s) | plain read (s) | save (s) | to the copy | "
            "asynchronous save (s) | stall (s) | of the save | passes slowed by (s) | step during "
            "a save | verify + load (s) | to the copy | to the read |"
        ),
        "| ---: |" + " ---: |" * 13,
    ]
    for ranks, result in results.items():
        rounds, medians = result["rounds"], ratios(ranks, result["rounds"])
        seconds = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
        cells = [
            str(ranks),
            f"{result['bytes'] / 2**30:.2f}",
            f"{seconds['copy']:.2f}",
            f"{seconds['read']:.2f}",
            f"{seconds['synchronous']:.2f}",
            f"{medians['save']:.2f}",
            f"{seconds['asynchronous']:.2f}",
            f"{seconds['stall']:.3f}",
            f"{medians['stall']:.1%}",
            f"{seconds['slowed']:.3f}",
            f"{medians['step']:.2f} x",
            f"{seconds['verify']:.2f} + {seconds['load']:.2f}",
            f"{medians['load']:.2f}",
            f"{medians['load to read']:.2f}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def checks(results: dict[int, dict[str, Any]]) -> list[Check]:
    """Return the figures and their goals."""
    medians = {ranks: ratios(ranks, result["rounds"]) for ranks, result in results.items()}
    stalls = [
        Check(f"{ranks} ranks: stall to a save", each["stall"], STALL_GOAL, at_most=True)
        for ranks, each in medians.items()
    ]
    bandwidth = [
        Check(f"{ranks} ranks: {name} to the copy's bandwidth", each[name], BANDWIDTH_GOAL)
        for ranks, each in medians.items()
        for name in ("save", "load")
    ]
    return stalls + bandwidth


def main() -> None:
    """Measure, print the table and give the verdict."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--directory",
        type=Path,
        help="on the disk to measure; default: the system's for temporaries",
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5, help="after one that is not reported")
    parser.add_argument(
        "--hidden", type=int, default=768, help="of 12 layers; 768 are 1.4 GiB with Adam's moments"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the state")
    parser.add_argument(
        "--smoke", action="store_true", help="a few megabytes, one round, no verdict"
    )
    options = parser.parse_args()
    results = {}
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory(
            prefix="megacore-checkpoint-", dir=options.directory
        ) as directory:
            results[ranks] = measure(ranks, options, Path(directory))
    sys.stdout.write("\n".join([*table(results), ""]))
    if options.smoke:
        sys.stdout.write("smoke: nothing is judged\n")
        return
    sys.exit(verdict("checkpoint", checks(results)))


if __name__ == "__main__":
    main()
