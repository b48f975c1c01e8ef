"""Cost of separate documents: attention and a training step with masks, and without them.

    python -m benchmarks.masks [--precision bf16|fp32] [--rounds 5] [--tokens 8192]
        [--document 1024] [--threads 2]

Attention forward and backward (4 heads of 64) takes turns with three masks in one process: the
spans of documents, plain causal attention, and torch's dense mask of the same documents. The ratio
is taken within each round, and the median counts. The memory of a training step (4 layers of 256)
is that of a process of its own: its peak resident memory above that before the step.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks._turns import environment, progress
from benchmarks._variants import MODEL
from benchmarks._verdict import Check, table, verdict
from benchmarks._zero_census import reset_peak, resident_mb
from megacore.config.load import parse_config
from megacore.config.spec import SpecialTokens
from megacore.engine.native import NativeEngine
from megacore.kernels.choice import Kernels, choose_kernels, plain_kernels
from megacore.kernels.implementation import DTYPES, Setting
from megacore.kernels.spans import Spans
from megacore.models.stage import Stage
from megacore.parallel.mesh import ProcessMesh
from megacore.ranks.process import set_up_arithmetic

HEADS, HEAD_SIZE = 4, 64
VOCAB_SIZE = 256
MASKS = ("spans", "causal", "dense")
LENGTHS = (2048, 4096, 8192)
"""Tokens of the training steps whose memory is measured."""
GAIN = 1.5
"""Least speed of spans relative to the dense mask."""
EXTRA = 1.15
"""Most peak memory of a step with spans relative to plain causal attention: the allocator of each
process differs by up to a tenth."""
GROWTH = 4.4
"""Most growth of the memory with spans over LENGTHS, whose last is four times the first."""
_CPU = torch.device("cpu")


def passes(masks: str, options: argparse.Namespace) -> Callable[[], object]:
    """Return a function that runs attention forward and backward with one of MASKS."""
    dtype, tokens = DTYPES[options.precision], options.tokens
    kernels = plain_kernels() if masks == "dense" else choose_kernels(Setting(_CPU, dtype))
    random = torch.Generator().manual_seed(1)
    query, key, value, upstream = (
        torch.randn(1, HEADS, tokens, HEAD_SIZE, generator=random).to(dtype) for _ in range(4)
    )
    leaves = [part.requires_grad_() for part in (query, key, value)]
    documents = (torch.arange(tokens) // options.document)[None]
    spans = Spans.of(tokens, tokens, causal=True, device=_CPU, documents=documents)
    bias = spans.bias(tokens, dtype) if masks == "dense" else None

    def run() -> object:
        output = kernels.attention(
            *leaves,
            bias=bias,
            dropout=0.0,
            causal=masks == "causal",
            scale=None,
            spans=spans if masks == "spans" else None,
        )
        return torch.autograd.grad(output, leaves, upstream)

    return run


def compete(options: argparse.Namespace) -> tuple[list[list[str]], list[Check]]:
    """Return the rows and checks of attention with each mask."""
    entrants = {masks: passes(masks, options) for masks in MASKS}
    seconds: dict[str, list[float]] = {masks: [] for masks in MASKS}
    for number in range(options.rounds + 1):
        progress(f"attention, round {number}")
        for masks in MASKS if number % 2 == 0 else reversed(MASKS):
            start = time.perf_counter()
            entrants[masks]()
            seconds[masks].append(time.perf_counter() - start)

    def ratio(masks: str) -> float:
        return statistics.median(
            other / spans
            for other, spans in zip(seconds[masks][1:], seconds["spans"][1:], strict=True)
        )

    rows = [
        [masks, f"{1000 * statistics.median(seconds[masks][1:]):.1f}", f"{ratio(masks):.2f}"]
        for masks in MASKS
    ]
    return rows, [
        Check("spans against the dense mask", ratio("dense"), GAIN),
        Check("spans against plain causal attention", ratio("causal"), 1.0),
    ]


def step_memory(masks: str, tokens: int, options: argparse.Namespace) -> float:
    """Run training steps here; return their peak memory above what was there, in 10^6 bytes."""
    documents = {"reset_attention_mask": masks != "causal"}
    config = parse_config(
        {
            "name": "benchmark",
            "data": {
                "source": {"kind": "source_tree"},
                "tokenizer": {"kind": "train-bpe", "vocab_size": 512},
                "seq_length": tokens,
                **documents,
            },
            "model": MODEL | {"num_attention_heads": HEADS, "position_embedding_type": "rope"},
            "optim": {"lr": 1e-4},
            "train": {
                "micro_batch_size": 1,
                "global_batch_size": 1,
                "train_iters": 10,
                "precision": options.precision,
            },
            "checkpoint": {"save_interval": 10},
            "launch": {"nproc_per_node": 1, "threads_per_rank": options.threads},
        },
        origin="benchmarks/masks.py",
    )
    kernels: Kernels = choose_kernels(Setting(_CPU, DTYPES[options.precision]))
    if masks == "dense":
        kernels = replace(kernels, masks="dense")
    special, end = SpecialTokens(eod=VOCAB_SIZE - 1), VOCAB_SIZE - 1
    stage = Stage(config, VOCAB_SIZE, ProcessMesh.serial(), special_tokens=special, kernels=kernels)
    engine = NativeEngine(stage, config, options.precision)
    ids = torch.randint(end, (1, tokens + 1), generator=torch.Generator().manual_seed(1))
    ids[:, options.document - 1 :: options.document] = end
    reset_peak()  # the record of a process includes that of its parent
    before = resident_mb("VmRSS")
    for _ in range(2):
        engine.forward_backward(iter([ids]), [0])
        engine.update(1e-4, 0.01)
    return resident_mb("VmHWM") - before


def measure_memory(options: argparse.Namespace) -> tuple[list[list[str]], list[Check]]:
    """Return the rows and checks of the memory of training steps, each in its own process."""
    peaks: dict[int, dict[str, float]] = {}
    for tokens in LENGTHS:
        peaks[tokens] = {}
        for masks in MASKS:
            progress(f"memory with {masks}, {tokens:,} tokens")
            command = [sys.executable, "-m", "benchmarks.masks", *sys.argv[1:]]
            child = [*command, "--step", masks, "--tokens", str(tokens)]
            result = subprocess.run(child, check=True, capture_output=True, text=True)
            peaks[tokens][masks] = float(result.stdout)
    rows = [
        [f"{tokens:,}", *(f"{each[masks]:,.0f}" for masks in MASKS)]
        for tokens, each in peaks.items()
    ]
    shortest, longest = peaks[LENGTHS[0]], peaks[LENGTHS[-1]]
    extra, growth = longest["spans"] / longest["causal"], longest["spans"] / shortest["spans"]
    return rows, [
        Check("memory relative to plain causal attention", extra, EXTRA, at_most=True),
        Check("memory of four times the tokens", growth, GROWTH, at_most=True),
    ]


def main() -> int:
    """Measure speed and memory, print the tables and give the verdict."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--document", type=int, default=1024, help="tokens of a document")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--step", choices=MASKS, help="print the memory of a step, and end")
    options = parser.parse_args()
    launched = environment(options.threads)
    # restart with the environment of a rank of megacore's launcher
    if any(os.environ.get(name) != value for name, value in launched.items()):
        os.execve(
            sys.executable, [sys.executable, "-m", "benchmarks.masks", *sys.argv[1:]], launched
        )
    set_up_arithmetic(options.threads)
    if options.step is not None:
        sys.stdout.write(f"{step_memory(options.step, options.tokens, options)}\n")
        return 0
    speed, speed_checks = compete(options)
    memory, memory_checks = measure_memory(options)
    sys.stdout.write(table(["mask", "ms", "relative to spans"], speed) + "\n")
    sys.stdout.write(table(["tokens", *(f"{masks} (MB)" for masks in MASKS)], memory))
    return verdict(f"masks {options.precision}", [*speed_checks, *memory_checks])


if __name__ == "__main__":
    sys.exit(main())
