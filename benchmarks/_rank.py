"""One rank of one variant of `benchmarks.layouts`.

It waits for `run N` on standard input, makes N steps, and prints the measurements as a line of
JSON.
"""

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks._entrants import CASES
from benchmarks._nanogpt import NanoGpt
from benchmarks._variants import ALL, VOCAB_SIZE, Variant
from benchmarks._zero_census import reset_peak, resident_mb
from megacore.config.run import RunConfig
from megacore.config.spec import SpecialTokens
from megacore.engine.build import build_engine
from megacore.kernels.choice import choose_kernels
from megacore.kernels.implementation import DTYPES, Setting
from megacore.models.base import LM_LOSS
from megacore.models.stage import Stage
from megacore.observe.timers import Timers
from megacore.parallel.mesh import ProcessMesh
from megacore.parallel.rank_layout import RankLayout
from megacore.pipeline_parallel.partition import shared_stages

CPU = torch.device("cpu")
Step = Callable[[], object]
TOKENS = SpecialTokens(eod=VOCAB_SIZE - 1)


def tokens(variant: Variant) -> Tensor:
    """Return one global batch of ids, [samples, s + 1]."""
    size = variant.samples, variant.seq_length + 1
    return torch.randint(variant.vocab_size, size, generator=torch.Generator().manual_seed(1))


def own_engine(variant: Variant, config: RunConfig, precision: str, timers: Timers) -> Step:
    """Return a function that makes a step of megacore's engine."""
    parallel = config.parallel
    layout = RankLayout.of_world(
        variant.ranks,
        pipeline=parallel.pipeline_model_parallel_size,
        tensor=parallel.tensor_model_parallel_size,
        context=parallel.context_parallel_size,
    )
    shared = shared_stages(config, variant.vocab_size)
    mesh = (
        ProcessMesh.build(layout, shared_stages=shared, timers=timers)
        if variant.ranks > 1
        else ProcessMesh(timers=timers)
    )
    engine = build_engine(
        config,
        variant.vocab_size,
        mesh,
        special_tokens=SpecialTokens(eod=variant.vocab_size - 1),
        device=CPU,
        precision=precision,
    )
    replicas = mesh.data_parallel
    batches = tokens(variant).split(variant.micro_batch_size)[replicas.rank :: replicas.size]

    def step() -> object:
        engine.forward_backward(iter(batches), list(range(len(batches))))
        return engine.update(1e-4, 0.01)

    return step


def torch_ddp(variant: Variant, config: RunConfig, precision: str) -> Step:
    """Return a function that makes a step with torch's DistributedDataParallel and fused AdamW."""
    from torch.nn.parallel import DistributedDataParallel
    from torch.nn.utils import clip_grad_norm_
    from torch.optim import AdamW

    same, half = variant.ddp == "same model", precision == "bf16"
    model = _same_model(config, DTYPES[precision]) if same else _plain_model(precision)
    wrapped = DistributedDataParallel(model)
    weights = list(wrapped.parameters())
    # As megacore's engine, which keeps fp32 copies of bf16 weights; a plain model has fp32 weights.
    copies = [weight.detach().float() for weight in weights] if same and half else []
    main = copies or weights
    optimizer = AdamW(main, lr=1e-4, weight_decay=0.01, fused=True)
    called = wrapped if same else torch.compile(wrapped)
    batch = tokens(variant).split(variant.micro_batch_size)[dist.get_rank()]

    def step() -> object:
        wrapped.zero_grad(set_to_none=True)
        with torch.autocast("cpu", enabled=half and not same, dtype=torch.bfloat16):
            loss = called(batch)
        loss.backward()
        for copy, weight in zip(copies, weights, strict=False):
            assert weight.grad is not None
            copy.grad = weight.grad.float()
        norm = clip_grad_norm_(main, 1.0)
        optimizer.step()
        if copies:
            torch._foreach_copy_([weight.detach() for weight in weights], copies)
        return float(loss.detach()), float(norm)

    return step


def _same_model(config: RunConfig, dtype: torch.dtype) -> torch.nn.Module:
    """Return megacore's model, with weights in `dtype`, as a module that computes the loss."""

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kernels = choose_kernels(Setting(CPU, dtype), config=config.train.kernels)
            stage = Stage(
                config, VOCAB_SIZE, ProcessMesh.serial(), special_tokens=TOKENS, kernels=kernels
            )
            (self.model,), self.rules = stage.chunks, stage.rules

        def forward(self, batch: Tensor) -> Tensor:
            losses = self.model.run(self.rules.read(batch))
            assert isinstance(losses, dict)
            return losses[LM_LOSS].mean()

    return Loss().to(dtype)


def _plain_model(precision: str) -> torch.nn.Module:
    """Return the model in nanoGPT's style as a module that computes the loss."""

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = NanoGpt(CASES[f"tiny-{precision}"])

        def forward(self, batch: Tensor) -> Tensor:
            loss: Tensor | None
            _, loss = self.model(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
            assert loss is not None
            return loss

    return Loss()


def measure(step: Step, steps: int, timers: Timers, built_mb: float) -> dict[str, Any]:
    """Return the median seconds of a step, milliseconds per phase, and the peak memory in MiB.

    `built_mb` is the memory before the first step, in MiB.
    """
    seconds = []
    timers.take(1)
    for _ in range(steps):
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "seconds": statistics.median(seconds),
        "phases": timers.take(steps),
        "memory_mb": memory,
        "built_mb": built_mb,
    }


def main(name: str, precision: str) -> None:
    """Answer every command with one line, on the first rank, until standard input ends."""
    variant = ALL[name]
    torch.set_num_threads(variant.threads)
    torch.set_flush_denormal(True)
    if variant.ranks > 1:
        dist.init_process_group("gloo")
    timers = Timers(CPU)
    config = variant.config(precision)
    step = (
        torch_ddp(variant, config, precision)
        if variant.ddp
        else own_engine(variant, config, precision, timers)
    )
    built_mb = resident_mb("VmRSS") * 1e6 / 2**20
    reset_peak()
    for line in sys.stdin:
        result = measure(step, int(line.split()[1]), timers, built_mb)
        results: list[Any] = [result]
        if variant.ranks > 1:
            results = [None] * variant.ranks
            dist.all_gather_object(results, result)
        if int(os.environ.get("RANK", "0")) == 0:
            sys.stdout.write(json.dumps(results) + "\n")
            sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
