"""Predicted against measured time of short trainings on the cores of this machine.

    python -m benchmarks.calibrated [--hardware FILE] [--seconds 5] [--only tiny 124m] [--with dp]

Without --hardware the machine is calibrated first. The ranks of 1, 2 and 4 processes train models
from tiny to 124M in several layouts, each rank on one thread. A measured time is the shortest of a
run's iterations, on its slowest rank, because other programs only ever make an iteration longer.
The processor time is that of the slowest rank, or of all ranks divided by the cores if that
is more. It is compared with the prediction without a bubble: on a busy machine it is the fairer
comparison, on an idle one it is close to the time. The rate of a product
of 512 x 512 x 512 shows how the machine's speed changed.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._turns import Contestant, environment, progress
from benchmarks._verdict import Check, table, verdict
from benchmarks.layouts import free_port
from megacore.config.load import parse_config
from megacore.config.run import RunConfig
from megacore.config.spec import SpecialTokens
from megacore.doctor.calibrate import calibrate
from megacore.engine.build import build_engine
from megacore.parallel.mesh import ProcessMesh
from megacore.parallel.rank_layout import RankLayout
from megacore.pipeline_parallel.partition import shared_stages
from megacore.plan.iteration import Iteration
from megacore.plan.machine import Machine, load_machine

ERROR_GOAL, ORDER_GOAL = 0.08, 0.95
"""Largest median error, and least rank correlation."""
MODELS = {
    "tiny": (4, 128, 4, 128, 8192),
    "13m": (4, 256, 8, 256, 8192),
    "wide": (6, 512, 8, 256, 8192),
    "124m": (12, 768, 12, 128, 50257),
}
"""Layers, hidden size, heads, sequence length and vocabulary."""
TP, PP, VP, CP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
)
SP, ZERO = {"sequence_parallel": True}, {"data_parallel_sharding": "optimizer"}
DELAYED = {"delay_weight_gradients": True}


@dataclass(frozen=True)
class Run:
    """One short training."""

    model: str
    ranks: int
    micro: int
    """Samples of a micro batch."""
    samples: int
    """Samples of an iteration."""
    parallel: dict[str, Any] = field(default_factory=dict)
    recompute: str = "none"
    optimizer: str = "adam"

    @property
    def name(self) -> str:
        """Model and layout."""
        short = {TP: "tp", PP: "pp", VP: "v", CP: "cp", "sequence_parallel": "sp"}
        short |= {"data_parallel_sharding": "sharded ", "delay_weight_gradients": "delayed"}
        parts = [
            f"{short[key]}{'' if value is True else value}" for key, value in self.parallel.items()
        ]
        parts += [f"dp{self.layout.data}"] * (self.layout.data > 1)
        parts += [f"recompute {self.recompute}"] * (self.recompute != "none")
        parts += [self.optimizer] * (self.optimizer != "adam")
        return f"{self.model} {' '.join(parts)} b{self.micro} B{self.samples}".replace("  ", " ")

    @property
    def layout(self) -> RankLayout:
        """Layout of the ranks."""
        return RankLayout.of_world(
            self.ranks,
            pipeline=self.parallel.get(PP, 1),
            tensor=self.parallel.get(TP, 1),
            context=self.parallel.get(CP, 1),
        )

    @property
    def vocabulary(self) -> int:
        """Entries of the vocabulary."""
        return MODELS[self.model][4]

    def config(self) -> RunConfig:
        """Return the configuration of the run."""
        layers, hidden, heads, length, vocabulary = MODELS[self.model]
        values = {
            "name": "calibrated",
            "data": {
                "source": {"kind": "source_tree"},
                "tokenizer": {"kind": "train-bpe", "vocab_size": vocabulary},
                "seq_length": length,
            },
            "model": {
                "num_layers": layers,
                "hidden_size": hidden,
                "num_attention_heads": heads,
                "hidden_dropout": 0.0,
                "attention_dropout": 0.0,
            },
            "optim": {"name": self.optimizer, "lr": 1e-4, "clip_grad": 1.0},
            "train": {
                "micro_batch_size": self.micro,
                "global_batch_size": self.samples,
                "train_iters": 1_000_000,
                "precision": "fp32",
                "recompute": self.recompute,
            },
            "checkpoint": {"save_interval": 1_000_000},
            "parallel": self.parallel,
            "launch": {"nproc_per_node": self.ranks, "threads_per_rank": 1},
        }
        return parse_config(values, origin="benchmarks/calibrated.py")

    def predict(self, machine: Machine, cores: int) -> tuple[float, float]:
        """Return the predicted seconds of an iteration, and those without its bubble."""
        share = min(1.0, cores / self.ranks)
        host = machine.model_copy(update={"devices_per_node": max(self.ranks, cores)})
        run = Iteration(self.config(), self.vocabulary, host, self.layout, "fp32", cores=share)
        prediction = run.predict()
        # Ranks that share a core fill each other's bubbles.
        idle = prediction.bubble if share == 1 else 0.0
        return prediction.seconds, prediction.seconds - idle


RUNS = (
    Run("tiny", 1, 8, 16),
    Run("tiny", 1, 2, 8),
    Run("tiny", 1, 8, 8, recompute="full"),
    Run("13m", 1, 4, 8),
    Run("13m", 1, 1, 4),
    Run("13m", 1, 4, 4, recompute="full"),
    Run("13m", 1, 4, 4, recompute="selective"),
    Run("wide", 1, 2, 4),
    Run("wide", 1, 2, 4, recompute="full"),
    Run("124m", 1, 1, 2),
    Run("124m", 1, 2, 2, recompute="full"),
    Run("13m", 1, 4, 8, optimizer="muon"),
    Run("wide", 1, 2, 4, optimizer="muon"),
    Run("tiny", 2, 8, 16, {TP: 2}),
    Run("tiny", 2, 8, 16),
    Run("tiny", 2, 2, 16, {PP: 2}),
    Run("13m", 2, 4, 8, {TP: 2}),
    Run("13m", 2, 4, 8, {TP: 2} | SP),
    Run("13m", 2, 4, 8, {TP: 2}, recompute="full"),
    Run("13m", 2, 1, 8, {PP: 2}),
    Run("13m", 2, 1, 8, {PP: 2, VP: 2}),
    Run("13m", 2, 2, 4, {PP: 2}),
    Run("13m", 2, 1, 8, {PP: 2} | DELAYED),
    Run("13m", 2, 1, 8, {PP: 2, VP: 2} | DELAYED),
    Run("13m", 2, 2, 4, {PP: 2} | DELAYED),
    Run("13m", 2, 4, 8),
    Run("13m", 2, 4, 8, ZERO),
    Run("13m", 2, 1, 8, ZERO),
    Run("wide", 2, 2, 4, {TP: 2}),
    Run("wide", 2, 1, 4, {PP: 2}),
    Run("wide", 2, 1, 4, {PP: 2} | DELAYED),
    Run("wide", 2, 2, 4),
    Run("wide", 2, 2, 4, ZERO),
    Run("13m", 2, 4, 8, {CP: 2}),
    Run("wide", 2, 2, 4, {CP: 2}),
    Run("124m", 2, 2, 4),
    Run("124m", 2, 2, 4, {TP: 2}),
    Run("124m", 2, 1, 4, {PP: 2}),
    Run("124m", 2, 2, 4, ZERO),
    Run("13m", 2, 4, 8, optimizer="muon"),
    Run("13m", 2, 4, 8, ZERO, optimizer="muon"),
    Run("wide", 2, 2, 4, ZERO, optimizer="muon"),
    Run("wide", 2, 2, 4, {TP: 2}, optimizer="muon"),
    Run("124m", 2, 2, 4, ZERO, optimizer="muon"),
    Run("13m", 4, 4, 8, {TP: 4}),
    Run("13m", 4, 2, 8),
    Run("13m", 4, 1, 8, {PP: 4}),
    Run("13m", 4, 2, 8, {TP: 2, PP: 2}),
    Run("13m", 4, 2, 8, {TP: 2}),
    Run("13m", 4, 1, 8, {PP: 2}),
    Run("wide", 4, 1, 4, ZERO),
    Run("wide", 4, 1, 4, {TP: 2, PP: 2}),
)


def measure(run: Run, seconds: float) -> dict[str, float]:
    """Return the shortest iteration of a run on its slowest rank. Collective."""
    config = run.config()
    shared = shared_stages(config, run.vocabulary)
    mesh = ProcessMesh.build(run.layout, shared_stages=shared) if run.ranks > 1 else ProcessMesh()
    engine = build_engine(
        config,
        run.vocabulary,
        mesh,
        special_tokens=SpecialTokens(eod=run.vocabulary - 1),
        device=torch.device("cpu"),
        precision="fp32",
    )
    ids = torch.randint(run.vocabulary, (run.samples, config.data.seq_length + 1))
    replicas = mesh.data_parallel
    batches = ids.split(run.micro)[replicas.rank :: replicas.size]
    times: list[float] = []
    processor: list[float] = []
    ends = time.perf_counter() + seconds
    going = torch.ones(1)
    while going.item():
        if run.ranks > 1:
            dist.barrier()
        start, used = time.perf_counter(), time.process_time()
        engine.forward_backward(iter(batches), list(range(len(batches))))
        engine.update(1e-4, 0.01)
        times.append(time.perf_counter() - start)
        processor.append(time.process_time() - used)
        going = torch.tensor([float(len(times) < 5 or time.perf_counter() < ends)])
        if run.ranks > 1:
            dist.broadcast(going, 0)
    slowest = torch.tensor([times[2:], processor[2:]], dtype=torch.float64)
    together = slowest[1] / min(run.ranks, len(os.sched_getaffinity(0)))
    if run.ranks > 1:
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        dist.all_reduce(together)
    return {
        "seconds": float(slowest[0].min()),
        "processor": float(torch.maximum(slowest[1], together).min()),
        "gflops": speed(),
        "load": os.getloadavg()[0],
    }


def speed() -> float:
    """Return the rate of a product on this rank's thread while it runs, in GFLOP/s."""
    left, right = torch.randn(512, 512), torch.randn(512, 512)
    best = 0.0
    for _ in range(20):
        start = time.process_time()
        torch.mm(left, right)
        best = max(best, 2 * 512**3 / (time.process_time() - start) / 1e9)
    return best


def serve(ranks: int, seconds: float) -> None:
    """Measure the runs whose numbers are read from standard input."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    if ranks > 1:
        dist.init_process_group("gloo")
    for line in sys.stdin:
        result = measure(RUNS[int(line)], seconds)
        gc.collect()
        if int(os.environ["RANK"]) == 0:
            sys.stdout.write(json.dumps([result]) + "\n")
            sys.stdout.flush()
    os._exit(0)


def order(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return Spearman's rank correlation of values without ties."""
    first, second = (
        {value: place for place, value in enumerate(sorted(values))}
        for values in (predicted, measured)
    )
    count = len(predicted)
    squares = sum((first[p] - second[m]) ** 2 for p, m in zip(predicted, measured, strict=True))
    return 1 - 6 * squares / (count * (count**2 - 1))


def start(ranks: int, seconds: float) -> Contestant:
    """Start the processes of the runs with this number of ranks."""
    meeting = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    environments = [environment(1) | meeting | {"RANK": str(rank)} for rank in range(ranks)]
    arguments = ["benchmarks.calibrated", "--rank", str(ranks), "--seconds", str(seconds)]
    return Contestant.start(f"{ranks} ranks", arguments, environments)


def main() -> int:
    """Calibrate, measure all runs and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hardware", help="hardware file; else the machine is calibrated")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run, after its build")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--with", dest="part", default="", help="only runs with this in the name")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        serve(options.rank, options.seconds)
    if options.hardware:
        machine = load_machine(options.hardware)
    else:
        with tempfile.TemporaryDirectory() as folder:
            machine = calibrate(Path(folder) / "local.yaml", Path(folder))
    cores = len(os.sched_getaffinity(0))
    rows: list[list[str]] = []
    pairs: list[tuple[float, float]] = []
    busy: list[tuple[float, float]] = []
    for ranks in (1, 2, 4):
        numbers = [
            number
            for number, run in enumerate(RUNS)
            if run.ranks == ranks and run.model in options.only and options.part in run.name
        ]
        contestant = start(ranks, options.seconds) if numbers else None
        for number in numbers:
            assert contestant is not None
            run, (result,) = RUNS[number], contestant.ask(str(number))
            whole, working = run.predict(machine, cores)
            pairs.append((whole, result["seconds"]))
            busy.append((working, result["processor"]))
            row = [run.name, str(ranks)]
            for predicted, measured in (pairs[-1], busy[-1]):
                row += [f"{1e3 * predicted:.1f}", f"{1e3 * measured:.1f}"]
                row.append(f"{predicted / measured - 1:+.1%}")
            rows.append([*row, f"{result['gflops']:.0f}", f"{result['load']:.1f}"])
            progress(" | ".join(rows[-1]))
        if contestant is not None:
            contestant.end()
    header = ["run", "ranks", "predicted (ms)", "measured (ms)", "error"]
    header += ["without bubble (ms)", "processor (ms)", "error", "GFLOP/s", "load"]
    sys.stdout.write(table(header, rows))
    sys.stdout.write(
        f"\nProcessor time: median error {median_error(busy):.1%}, rank correlation "
        f"{order(*zip(*busy, strict=True)):.3f}\n"
    )
    checks = [
        Check("median error", median_error(pairs), ERROR_GOAL, at_most=True, unit=""),
        Check("rank correlation", order(*zip(*pairs, strict=True)), ORDER_GOAL, unit=""),
    ]
    return verdict(f"calibrated, {len(rows)} runs", checks)


def median_error(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the median relative error of pairs of predicted and measured times."""
    return statistics.median(abs(predicted / measured - 1) for predicted, measured in pairs)


if __name__ == "__main__":
    sys.exit(main())
