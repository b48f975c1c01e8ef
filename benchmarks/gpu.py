"""Training of GPT-2 345M and a Llama of 1.1 B parameters on one CUDA device.

    python -m benchmarks.gpu [--results workspace/benchmarks/gpu.json] [--nanogpt CHECKOUT]
        [--parts contest sweep ...] [--micro-batches 8 16 32 64] [--contest-micro-batch 8]
    python -m benchmarks.gpu --smoke

contest     megacore, compiled nanoGPT, torch's FSDP2 and transformers' Trainer in turns, 345M
sweep       micro batches of megacore, doubled until one does not fit, and the largest that does
graphs      345M at the recipe's micro batch and the tiny GPT with and without CUDA graphs
llama       megacore and FSDP2 over transformers' Llama in turns, 1.1 B
masks       attention of 8,192 tokens in documents of 1,024: spans, dense mask, plain causal
fp16        dynamic loss scaling
compile     layers compiled and not, also in a tiny GPT, which the time of kernel launches limits
recompute   peak memory and rate with recompute none, selective and full
checkpoint  how long a save in the background stops a training, and a save that waits
kernels     what each kernel brings in layers that are not compiled

The command takes at most 9 minutes. Each figure is written to the results when it is measured: the
same command, at the same commit and on the same device, measures only what is missing. A part that
fails, or takes more than 4 minutes, has its error in the log, and the others are measured. The
command ends with one table of all figures. Except in turns, only one process at a time uses the
device. MFU counts a model's FLOPs, without recomputation. `--smoke` runs everything with tiny
models on the CPU, except CUDA graphs.
"""

import argparse
import json
import math
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import checkpoint as checkpoint_benchmark
from benchmarks import kernels as kernels_benchmark
from benchmarks._entrants import CASES, ENTRANTS, OUT_OF_MEMORY, Case, Work
from benchmarks._entries import commit
from benchmarks._gpu_figures import Part, Results, Row, load, report
from benchmarks._turns import Contestant, compete, progress
from benchmarks._verdict import Check, verdict
from benchmarks.step import LOSS_BARS, first_losses, matmul_rate, start
from megacore.artifact.files import write_json
from megacore.engine.cuda_graph import WARM_UP
from megacore.observe.flops import peak_by_name

OURS, COMPILED, FSDP2, TRAINER = "megacore", "nanoGPT compiled", "FSDP2 compiled", "transformers"
MFU_GOAL = 0.55
"""Least MFU at the vendor's peak of 345M's best micro batch."""
GOALS = {COMPILED: 1.1, FSDP2: 1.1, TRAINER: 1.4}
"""Least ratio of megacore's speed to that of each."""
RECIPE = 4
"""Micro batch of conf/gpt2-345m.yaml, whose layers are recomputed."""
GRAPHS_GOAL = 1.0
"""Least ratio of the speed with CUDA graphs to that without."""
STALL_GOAL = 0.05
"""Most time that a save in the background stops a training, as a share of a save that waits."""
MASKS_GOALS = {"dense mask": 1.5, "plain causal": 1.0}
"""Least ratio of the speed of attention with spans to that of each."""
MICRO_BATCHES = (8, 16, 32, 64)
LIMIT, PART, LONGEST = 540.0, 90.0, 240.0
"""Seconds of a command, those that must be left for a further part to begin, and most of a part."""
LARGE = 120e9
"""Least bytes of a GPU on which contestants in turns have micro batches twice as large."""
FP16_STEPS, FP16_LAST = 60, 10
"""Steps with loss scaling, and the number of last ones whose losses are averaged. The loss scale
starts at 2**32, so the first steps overflow until it is low enough."""


class DeviceFullError(Exception):
    """A process ran out of device memory."""


class PartTimeoutError(Exception):
    """A part took too long."""


class ProcessEndedError(Exception):
    """A process ended without a result."""


class Bench:
    """Device, models and options."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.smoke: bool = options.smoke
        self.device = "cpu" if options.smoke else "cuda"
        self.case = CASES["smoke-bf16" if options.smoke else "345m-bf16"]
        self.llama = CASES["smoke-llama-bf16" if options.smoke else "llama-1b-bf16"]
        self.tiny = CASES["smoke-bf16" if options.smoke else "tiny-bf16"]
        self.micro_batches = [1, 2] if options.smoke else options.micro_batches
        self.steps, self.rounds = (2, 3) if options.smoke else (5, 8)
        self.contest_batch = (
            2 if options.smoke else options.contest_micro_batch or _contest_micro_batch()
        )
        self.nanogpt: str | None = options.nanogpt
        self.rows: dict[str, Any] = {}
        """Rows measured so far; parts share those of the same task."""
        self.store: Callable[[], None] = lambda: None
        """Function that writes the results."""

    def work(self, case: Case | None = None, name: str = OURS, **train: Any) -> Work:
        """Return the task of a measuring process."""
        return Work(
            case or self.case, ENTRANTS[name], device=self.device, threads=_threads(), train=train
        )

    def goal(self, value: float) -> float:
        """Return a goal, which a smoke run always reaches."""
        return 0.0 if self.smoke else value

    @contextmanager
    def running(self, work: Work, name: str = OURS) -> Iterator[Contestant]:
        """Run one contestant, which has the device to itself.

        Raises DeviceFullError from within the body.
        """
        contestant = start(name, work)
        try:
            yield contestant
        except SystemExit:
            if _ended_full(contestant):
                raise DeviceFullError from None
            raise
        finally:
            contestant.end()

    def measured(self, name: str, work: Work, *, warmup: int = 3) -> Row:
        """Return the line of a contestant on its own; without figures if it does not fit."""
        task = json.dumps(work.as_json())
        if task not in self.rows:
            try:
                with self.running(work) as each:
                    each.run(warmup)
                    seconds = statistics.median(each.run(self.steps) for _ in range(3))
                    row = Row.of(name, work.case, seconds, float(each.last[0]["memory_mb"]))
            except DeviceFullError:
                row = Row(name, note="does not fit")
            self.rows[task] = asdict(row)
            self.store()
            progress(f"{name}: {row.milliseconds or math.nan:.2f} ms {row.note}")
        return replace(Row(**self.rows[task]), name=name)


def in_turns(bench: Bench, works: dict[str, Work], title: str, seconds: float) -> Part:
    """Compare contestants of one case, of which megacore is the first."""
    case = works[OURS].case
    contestants = [start(name, work) for name, work in works.items()]
    try:
        difference, problem = first_losses(contestants, case)
        progress(problem or f"{title}: all contestants compute the same")
        compete(contestants, bench.rounds, bench.steps, warmup=5, seconds=seconds)
        memory = [float(each.last[0]["memory_mb"]) for each in contestants]
        notes = [each.ask("kernels")[0]["kernels"].get("loop", "") for each in contestants]
    except SystemExit:
        if any(_ended_full(each) for each in contestants):
            raise DeviceFullError(
                "the contestants do not fit together: give a smaller --contest-micro-batch"
            ) from None
        raise
    finally:
        for each in contestants:
            each.end()
    ours = contestants[0]
    rows = [
        Row.of(
            f"{title}, micro batch {case.micro_batch_size}: {each.name}",
            case,
            each.median,
            peak,
            ratio=ours.speedup_over(each),
            note=note,
        )
        for each, peak, note in zip(contestants, memory, notes, strict=True)
    ]
    same = difference if problem is None else math.nan
    bar = LOSS_BARS[case.precision]
    checks = [Check(f"{title}: first losses", same, bar, at_most=True, unit="nats")]
    checks += [
        Check(f"{title}: megacore to {each.name}", ours.speedup_over(each), bench.goal(goal))
        for each in contestants[1:]
        for name, goal in GOALS.items()
        if each.name.startswith(name)
    ]
    return Part(rows, checks)


def contest(bench: Bench) -> Part:
    """Compare the ways to train GPT-2 345M."""
    case = replace(bench.case, micro_batch_size=bench.contest_batch)
    works = {name: bench.work(case, name) for name in (OURS, COMPILED, FSDP2, TRAINER)}
    if bench.nanogpt is not None:
        works[f"{COMPILED} (checkout)"] = replace(works[COMPILED], checkout=bench.nanogpt)
    return in_turns(bench, works, "345M", 80.0)


def llama(bench: Bench) -> Part:
    """Compare the ways to train a Llama of 1.1 B parameters."""
    case = replace(bench.llama, micro_batch_size=max(1, bench.contest_batch // 2))
    works = {name: bench.work(case, name) for name in (OURS, FSDP2)}
    return in_turns(bench, works, "Llama 1.1 B", 50.0)


def sweep(bench: Bench) -> Part:
    """Find the best and the largest micro batch."""
    rows, checks, fitting, too_large = [], [], 0, 0
    for size in bench.micro_batches:
        case = replace(bench.case, micro_batch_size=size)
        rows.append(bench.measured(f"345M, micro batch {size}", bench.work(case)))
        if rows[-1].tokens is None:
            too_large = size
            break
        fitting = size
    step = max(1, fitting // 8)
    while too_large - fitting > step:
        middle = (fitting + too_large) // 2
        case = replace(bench.case, micro_batch_size=middle)
        rows.append(bench.measured(f"345M, micro batch {middle}", bench.work(case)))
        if rows[-1].tokens is None:
            too_large = middle
        else:
            fitting = middle
    best = max((row.teraflops or 0.0 for row in rows), default=0.0)
    if not bench.smoke and (peak := _vendor_peak()):
        checks.append(Check("345M: MFU at the vendor's peak", best / peak, MFU_GOAL, unit=""))
    return Part(rows, checks)


def compilation(bench: Bench) -> Part:
    """Measure models with and without compiled layers."""
    # The default compiles on a GPU, as measured in other parts.
    compiled = {"compile": "on"} if bench.smoke else {}
    return Part(
        [
            bench.measured(f"{name}, compile {value}", bench.work(case, **train))
            for name, case in (("345M", bench.case), ("tiny", bench.tiny))
            for value, train in (("off", {"compile": "off"}), ("on", compiled))
        ]
    )


def graphs(bench: Bench) -> Part:
    """Measure launch-bound models with and without CUDA graphs."""
    recipe = replace(bench.case, micro_batch_size=2 if bench.smoke else RECIPE)
    works: dict[str, tuple[Case, dict[str, Any]]] = {
        f"345M, micro batch {recipe.micro_batch_size}": (recipe, {}),
        f"345M, micro batch {recipe.micro_batch_size}, recomputed": (recipe, {"recompute": "full"}),
        "tiny": (bench.tiny, {}),
    }
    rows, checks = [], []
    for name, (case, train) in works.items():
        without = bench.measured(f"{name}, no graph", bench.work(case, **train))
        rows.append(without)
        if bench.smoke:
            rows.append(Row(f"{name}, graph", note="needs a GPU"))
            continue
        # The graph is captured after its warm-up.
        work = bench.work(case, cuda_graphs=True, **train)
        row = bench.measured(f"{name}, graph", work, warmup=WARM_UP + 2)
        if without.milliseconds is not None and row.milliseconds is not None:
            row = replace(row, ratio=without.milliseconds / row.milliseconds)
        rows.append(row)
        checks.append(Check(f"{name}: with a graph to without", row.ratio or 0.0, GRAPHS_GOAL))
    return Part(rows, checks)


def recompute(bench: Bench) -> Part:
    """Measure memory and time of each kind of recomputation."""
    kinds: dict[str, dict[str, Any]] = {
        "none": {},  # the default
        "selective": {"recompute": "selective"},
        "full": {"recompute": "full"},
    }
    return Part(
        [
            bench.measured(f"345M, recompute {kind}", bench.work(**train))
            for kind, train in kinds.items()
        ]
    )


def kernels(bench: Bench) -> Part:
    """Measure what each kernel brings."""
    # The fp32 of a smoke run is fast on any CPU.
    precision, rounds, steps = ("fp32", 1, 1) if bench.smoke else ("bf16", 8, 2)
    options = argparse.Namespace(
        device=bench.device, precision=precision, rounds=rounds, steps=steps, threads=_threads()
    )
    rows = []
    for model in kernels_benchmark.MODELS:
        lines, _ = _isolated(kernels_benchmark.compete, model, options)
        rows += [
            Row(f"kernel, {name}", float(with_it), ratio=float(ratio), note=implementation)
            for name, implementation, _, with_it, ratio in lines
        ]
    return Part(rows)


def masks(bench: Bench) -> Part:
    """Measure attention with documents as spans, with a dense mask, and without documents."""
    tokens = 512 if bench.smoke else 8192
    figures, name = _isolated(_attend, bench.device, tokens, bench.rounds)
    spans = figures["spans"][0]
    rows = [
        Row(
            f"attention, {tokens} tokens: {kind}",
            milliseconds,
            ratio=milliseconds / spans,
            memory=memory,
            note=name if kind == "spans" else "",
        )
        for kind, (milliseconds, memory) in figures.items()
    ]
    checks = [
        Check(f"spans to {kind}", figures[kind][0] / spans, bench.goal(goal))
        for kind, goal in MASKS_GOALS.items()
    ]
    return Part(rows, checks)


def _isolated(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return a function's result from a process of its own, after which the device is free.

    Raises ProcessEndedError if the process ends without one.
    """
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_send_result, args=(sender, function, *arguments))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise ProcessEndedError(f"{function.__name__} ended: its error is above") from None
    finally:
        process.kill()
        process.join()


def _send_result(sender: Any, function: Callable[..., Any], *arguments: Any) -> None:
    sender.send(function(*arguments))


def _attend(
    device_type: str, tokens: int, rounds: int
) -> tuple[dict[str, tuple[float, float | None]], str]:
    """Return milliseconds and memory (MB) of attention by kind of mask, and the kernel of spans.

    Forward and backward of one sample with 16 heads of 64 features in bf16 (fp32 on a CPU), and 8
    documents of equal length.
    """
    import torch

    from megacore.kernels.choice import choose_kernels, plain_kernels
    from megacore.kernels.implementation import Setting
    from megacore.kernels.spans import Spans

    device, cuda = torch.device(device_type), device_type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    kernels = choose_kernels(Setting(device, dtype, compiled=cuda, masked=True))
    chosen: Any = kernels.attention
    if cuda:
        chosen = torch.compile(chosen, dynamic=False)
    plain: Any = plain_kernels().attention
    documents = (torch.arange(tokens, device=device) // (tokens // 8))[None]
    spans = Spans.of(tokens, tokens, causal=True, device=device, documents=documents)
    dense = spans.bias(tokens, dtype)
    if kernels.masks == "blocks":
        spans = spans.blocked(tokens, tokens)
    leaves = [
        torch.randn(1, 16, tokens, 64, dtype=dtype, device=device, requires_grad=True)
        for _ in range(3)
    ]
    shared: dict[str, Any] = {"dropout": 0.0, "scale": None}
    works: dict[str, Callable[[], Any]] = {
        "spans": lambda: chosen(*leaves, bias=None, causal=False, spans=spans, **shared),
        "plain causal": lambda: plain(*leaves, bias=None, causal=True, **shared),
        "dense mask": lambda: plain(*leaves, bias=dense, causal=False, **shared),
    }
    figures: dict[str, tuple[float, float | None]] = {}
    for kind, work in works.items():
        times = []
        for number in range(rounds + 3):  # the first ones compile and warm up
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
            output = work()
            torch.autograd.grad(output, leaves, output)
            if cuda:
                torch.cuda.synchronize()
            if number >= 3:
                times.append(time.perf_counter() - begin)
        memory = torch.cuda.max_memory_allocated() / 2**20 if cuda else None
        figures[kind] = 1000 * statistics.median(times), memory
    return figures, kernels.names["attention"]


def checkpoint(bench: Bench) -> Part:
    """Measure how long a save stops a training."""
    options = argparse.Namespace(smoke=bench.smoke, rounds=3, hidden=1024, device=bench.device)
    with tempfile.TemporaryDirectory(prefix="megacore-checkpoint-") as directory:
        results = checkpoint_benchmark.measure(1, options, Path(directory))
    stalls = {
        name: statistics.median(each[name] for each in results["rounds"])
        for name in ("stall", "synchronous")
    }
    share = checkpoint_benchmark.ratios(1, results["rounds"])["stall"]
    size = f"{results['bytes'] / 1e9:.2f} GB"
    rows = [
        Row("save in the background", 1000 * stalls["stall"], note=f"stall; {size}"),
        Row("save that waits", 1000 * stalls["synchronous"], note=size),
    ]
    goal = math.inf if bench.smoke else STALL_GOAL
    return Part(rows, [Check("stall to a save", share, goal, at_most=True, unit="")])


def fp16(bench: Bench) -> Part:
    """Check steps with dynamic loss scaling: it starts too high, decreases, and the loss falls."""
    case = replace(bench.case, precision="fp16")
    steps = 4 if bench.smoke else FP16_STEPS
    with bench.running(bench.work(case)) as ours:
        losses = ours.ask(f"losses {steps}")[0]["losses"]
        seconds = ours.run(bench.steps)
        memory = float(ours.last[0]["memory_mb"])
    end = statistics.fmean(losses[-FP16_LAST:]) if all(map(math.isfinite, losses)) else math.nan
    note = f"loss {losses[0]:.3f}, {end:.3f} at the end of {steps} steps"
    goal = math.inf if bench.smoke else losses[0] - 1.0
    return Part(
        [Row.of("345M, fp16", case, seconds, memory, note=note)],
        [Check("fp16 loss at the end", end, goal, at_most=True, unit="nats")],
    )


PARTS: dict[str, Callable[[Bench], Part]] = {
    "contest": contest,
    "sweep": sweep,
    "graphs": graphs,
    "llama": llama,
    "masks": masks,
    "fp16": fp16,
    "compile": compilation,
    "recompute": recompute,
    "checkpoint": checkpoint,
    "kernels": kernels,
}
"""Parts by name, the most important ones first."""


def _ended_full(contestant: Contestant) -> bool:
    """Return True if a contestant ended because its device memory was exhausted."""
    try:
        return contestant.processes[0].wait(timeout=5) == OUT_OF_MEMORY
    except subprocess.TimeoutExpired:
        return False


def _contest_micro_batch() -> int:
    """Return a micro batch of 345M of which all contestants fit into the device at once."""
    import torch

    return 8 if torch.cuda.get_device_properties(0).total_memory >= LARGE else 4


def _threads() -> int:
    return len(os.sched_getaffinity(0))


def _vendor_peak() -> float | None:
    """Return the device's peak rate in bf16 by its data sheet, in TFLOP/s; None if unknown."""
    import torch

    if not torch.cuda.is_available():
        return None
    return peak_by_name(torch.cuda.get_device_name(), "bf16")


def _setting(smoke: bool) -> str:
    """Return commit, device and versions. Raises SystemExit if there is no device."""
    import torch

    revision = commit(Path(__file__).parents[1])
    if smoke:
        return f"the CPU, tiny models, {revision}: these figures mean nothing"
    if not torch.cuda.is_available():
        raise SystemExit(
            "no CUDA device is visible here: run this on a machine with one, or give --smoke"
        )
    return (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"{revision}"
    )


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise PartTimeoutError in the body after some seconds, also where it waits."""

    def expire(*_: object) -> None:
        raise PartTimeoutError(f"it was ended after {seconds:.3g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(
    bench: Bench, results: Results, names: Sequence[str], path: Path, passed: float = 0.0
) -> dict[str, str]:
    """Run the parts without figures, and store each one's.

    Args:
        bench: device and options.
        results: figures so far, which are extended.
        names: parts by name.
        path: file of the results.
        passed: seconds of the command before.

    Returns:
        Why parts have no figures, by name.
    """
    begin = time.monotonic() - passed
    bench.rows, bench.store = results.rows, lambda: write_json(path, asdict(results))
    missing: dict[str, str] = {}
    for name in names:
        if name in results.parts:
            continue
        passed = time.monotonic() - begin
        if passed >= LIMIT - PART:
            missing[name] = "the time did not suffice"
            continue
        progress(f"{name} after {passed:.0f} s")
        try:
            with limited(min(LIMIT - passed, LONGEST)):
                part = PARTS[name](bench)
        except (Exception, SystemExit) as error:  # a contestant that ends raises SystemExit
            traceback.print_exc()
            missing[name] = str(error) or type(error).__name__
            continue
        results.parts[name] = asdict(part)
        bench.store()
    return missing


def main() -> int:
    """Run the requested parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, help="file of the figures so far")
    parser.add_argument("--micro-batches", nargs="+", type=int, default=list(MICRO_BATCHES))
    parser.add_argument(
        "--contest-micro-batch",
        type=int,
        help="of 345M in turns, and half of it of the Llama; default: 8 on a GPU of at least "
        "120 GB, else 4",
    )
    parser.add_argument("--nanogpt", metavar="CHECKOUT", help="also train nanoGPT's own model.py")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--smoke", action="store_true", help="tiny models on the CPU")
    options = parser.parse_args()
    begin = time.monotonic()
    name = "gpu-smoke.json" if options.smoke else "gpu.json"
    path = options.results or Path("workspace", "benchmarks", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    setting = _setting(options.smoke)
    bench = Bench(options)

    def measured_matmul() -> float:
        # The fp32 of a smoke run is fast on any CPU.
        case = replace(bench.tiny, precision="fp32") if options.smoke else bench.tiny
        try:
            with limited(120.0), bench.running(bench.work(case, "nanoGPT"), "nanoGPT") as plain:
                return matmul_rate(plain)
        except (Exception, SystemExit):
            traceback.print_exc()
            return math.nan

    results = load(path, setting, measured_matmul)
    missing = run(bench, results, options.parts, path, time.monotonic() - begin)
    sys.stdout.write(report(results, PARTS, _vendor_peak()))
    checks = [
        check
        for part in options.parts
        if part in results.parts
        for check in Part.of_json(results.parts[part]).checks
    ]
    if missing:
        sys.stdout.write("\nNot measured, run the command again:\n\n")
        sys.stdout.writelines(f"- {name}: {reason}\n" for name, reason in missing.items())
        checks += [Check(name, math.nan, 0.0, unit="") for name in missing]
    return verdict(f"gpu {'smoke' if options.smoke else bench.device}", checks)


if __name__ == "__main__":
    sys.exit(main())
