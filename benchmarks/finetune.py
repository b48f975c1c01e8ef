"""Fine-tuning compared with a hand-written Accelerate loop, and largest micro batches.

    python -m benchmarks.finetune speed --model deberta [--methods ddp zero2 zero3] [--rounds 3]
    python -m benchmarks.finetune batch --model deberta [--limit-gb 1.5]

`speed` runs both loops in turns, in reverse order in every other round, each time with new
processes of two ranks: the same model, samples, micro batch and DeepSpeed settings, without
evaluation. The first epoch of each run is ignored, and the fastest of the others counts; ratios are
taken within a round, and their median is printed. `batch` is the comparison of
`finetune --find-batch-size` with one rank under a memory limit. zero3-offload is left out unless
requested: without a GPU all state is in host memory anyway.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import _finetune_loop
from benchmarks._finetune_data import MODELS, Prepared, prepare
from benchmarks._turns import progress
from benchmarks._verdict import Check, table, verdict
from megacore.cluster.start import local_torchrun_command, rank_environment
from megacore.config.finetune import DISTRIBUTIONS
from megacore.engine.deepspeed.join import import_deepspeed
from megacore.jobs.finetune import FinetuneJob
from megacore.observe.events import EventReader
from megacore.ranks.batch_size_search import (
    Answer,
    Fits,
    Watch,
    as_markdown,
    compare,
    method_config,
    notes,
    table_rows,
)
from megacore.ranks.stages import finetune

EPOCHS = 5
RANKS = 2
GOAL = 0.9
"""Least ratio of megacore's samples per second to those of the hand-written loop; megacore also
counts tokens, agrees on a stop and checks for NaN."""


@dataclass
class Pair:
    """Samples per second of both loops for one distribution, by round."""

    ours: list[float] = field(default_factory=list)
    by_hand: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Median of the ratios within rounds."""
        return statistics.median(
            ours / by_hand for ours, by_hand in zip(self.ours, self.by_hand, strict=True)
        )


def run_ours(job: FinetuneJob) -> float:
    """Run megacore's fine-tuning; return the seconds of its fastest epoch after the first."""
    finetune(job)
    events = [event for event, _ in EventReader(Path(job.run_directory, "events.jsonl"))]
    return min([float(event["train_seconds"]) for event in events if event["kind"] == "epoch"][1:])


def run_by_hand(job: FinetuneJob) -> float:
    """Run the hand-written loop; return the seconds of its fastest epoch after the first."""
    path = Path(job.run_directory, "run.json")
    job.write(path)
    command = local_torchrun_command("benchmarks._finetune_loop", path, job.ranks)
    environment = {**os.environ, **rank_environment(job.threads_per_rank)}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(f"the loop by hand failed:\n{process.stderr[-3000:]}")
    result = json.loads(Path(job.run_directory, _finetune_loop.RESULT).read_text(encoding="utf-8"))
    seconds: list[float] = result["seconds"][1:]
    return min(seconds)


def take_turns(prepared: Prepared, root: Path, methods: list[str], rounds: int) -> dict[str, Pair]:
    """Run all loops in each round, in reverse order in every other round."""
    pairs = {method: Pair() for method in methods}
    for number in range(rounds):
        turns = [(method, ours) for method in methods for ours in (True, False)]
        for method, ours in turns if number % 2 == 0 else reversed(turns):
            size = prepared.config.train.micro_batch_size
            config: Any = method_config(prepared.config, method, size)  # type: ignore[arg-type]
            config = config.model_copy(
                update={"train": config.train.model_copy(update={"num_epochs": EPOCHS})}
            )
            loop = "ours" if ours else "by-hand"
            job = prepared.job(config, root / f"{number}-{method}-{loop}", RANKS, 1)
            load = os.getloadavg()[0]
            rate = prepared.samples / (run_ours if ours else run_by_hand)(job)
            getattr(pairs[method], loop.replace("-", "_")).append(rate)
            progress(
                f"round {number + 1} {method} {loop}: {rate:.0f} samples/s, load before {load:.1f}"
            )
    return pairs


def speed(options: argparse.Namespace, root: Path) -> int:
    """Compare both loops for each distribution."""
    prepared = prepare(root / "data", options.model)
    pairs = take_turns(prepared, root, options.methods, options.rounds)
    rows = [
        [
            name,
            *(f"{statistics.median(rates):.0f}" for rates in (pair.ours, pair.by_hand)),
            f"{pair.ratio:.2f}",
        ]
        for name, pair in pairs.items()
    ]
    sys.stdout.write(
        (
            f"{prepared.samples} samples of 64 tokens at most, 4 layers of 128, {RANKS} ranks of "
            f"one thread, micro batch {prepared.config.train.micro_batch_size}, fp32; samples per "
            "second:\n\n"
        )
        + table(["distribution", "ours", "by hand", "ours to by hand"], rows)
    )
    checks = [
        Check(f"{name} to the loop by hand", pair.ratio, GOAL) for name, pair in pairs.items()
    ]
    return verdict(f"finetune {options.model}", checks)


def batch(options: argparse.Namespace, root: Path) -> int:
    """Print the table of --find-batch-size."""
    search = {"methods": options.methods, "memory_limit_gb": options.limit_gb, "steps": 2}
    launch, train = {"nproc_per_node": 1, "threads_per_rank": 2}, {"micro_batch_size": 16}
    prepared = prepare(
        root / "data", options.model, find_batch_size=search, launch=launch, train=train
    )
    reports = []
    for method in options.methods:

        def tell(size: int, answer: Answer, method: str = method) -> None:
            progress(f"{method}: {size} {'fits' if isinstance(answer, Fits) else 'is too large'}")

        reports.append(
            compare(
                prepared.config,
                method,
                str(prepared.pretrained),
                str(prepared.examples),
                samples=prepared.samples,
                scratch=root / method,
                watch=Watch(on_answer=tell),
            )
        )
    sys.stdout.write(f"{as_markdown(table_rows(reports))}{notes(reports)}")
    return 0


def main() -> int:
    """Run the requested measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("speed", "batch"))
    parser.add_argument("--model", choices=MODELS, default="deberta")
    parser.add_argument("--methods", nargs="+", choices=DISTRIBUTIONS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--limit-gb", type=float, default=1.0, help="memory of the rank in GB (10^9 bytes)"
    )
    options = parser.parse_args()
    import_deepspeed()  # before transformers imports it and lets it print into the result
    options.methods = options.methods or [name for name in DISTRIBUTIONS if name != "zero3-offload"]
    with tempfile.TemporaryDirectory(prefix="megacore-bench-") as directory:
        return (speed if options.what == "speed" else batch)(options, Path(directory))


if __name__ == "__main__":
    sys.exit(main())
