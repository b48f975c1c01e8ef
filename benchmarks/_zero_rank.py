"""One rank of one variant of keeping a model's state.

It reads commands from standard input and answers with lines of JSON.
"""

import json
import os
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import _zero_census as census
from benchmarks._zero_variants import SIZES, VARIANTS, Variant, Work
from megacore.config.deepspeed import zero_of
from megacore.config.spec import SpecialTokens
from megacore.engine.base import Engine
from megacore.engine.build import build_engine
from megacore.kernels.implementation import DTYPES
from megacore.parallel.mesh import ProcessMesh
from megacore.parallel.rank_layout import RankLayout

OUT_OF_MEMORY = 77
"""Exit code of a rank that ran out of memory."""
_PHRASES = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


class Rank:
    """A rank's model and the function that makes its steps."""

    def __init__(self, work: Work) -> None:
        self.work, self.config = work, work.config()
        number = f":{os.environ['LOCAL_RANK']}" if work.device == "cuda" else ""
        self.device = torch.device(f"{work.device}{number}")
        size = SIZES[work.size]
        shape = (work.micro_batches, work.micro_batch_size, size.seq_length + 1)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.batches = list(
            torch.randint(size.vocab_size, shape, generator=generator).to(self.device)
        )
        self.tokens = SpecialTokens(eod=size.vocab_size - 1)
        self.engine: Engine | None = None
        self.update_began = 0.0
        self.allocated_before = census.allocated_bytes(self.device)
        self.resident_before = census.resident_mb("VmRSS")
        self.step = self._own() if VARIANTS[work.variant].own else self._torch()
        self.resident_built = census.resident_mb("VmHWM")
        census.reset_peak()

    def run(self, steps: int) -> dict[str, Any]:
        """Make steps; return the median seconds of one and of its update, and memory."""
        seconds, updates = [], []
        for _ in range(steps):
            dist.barrier()
            start = time.perf_counter()
            self.step()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            end = time.perf_counter()
            seconds.append(end - start)
            updates.append(end - self.update_began)
        peak = (
            torch.cuda.max_memory_allocated(self.device) / 1e6
            if self.device.type == "cuda"
            else 0.0
        )
        return {
            "seconds": statistics.median(seconds),
            "update": statistics.median(updates),
            "before_mb": self.resident_before,
            "building_mb": self.resident_built,
            "training_mb": census.resident_mb("VmHWM"),
            "device_mb": peak,
        }

    def census(self) -> dict[str, Any]:
        """Return the bytes after the last backward pass, before the step; {} for torch's own."""
        if self.engine is None:
            return {}
        self.engine.forward_backward(iter(self.batches), list(range(len(self.batches))))
        counts = census.take(self.engine, zero_of(self.config), self.allocated_before)
        self.engine.update(1e-4, 0.01)
        return {**vars(counts), "psi": self.engine.parameters}

    def _own(self) -> Callable[[], object]:
        engine = self.engine = build_engine(
            self.config,
            SIZES[self.work.size].vocab_size,
            ProcessMesh.build(RankLayout.of_world(dist.get_world_size())),
            special_tokens=self.tokens,
            device=self.device,
            precision=self.work.precision,
            compiled_adam=VARIANTS[self.work.variant].compiled_adam,
        )

        def step() -> object:
            engine.forward_backward(iter(self.batches), list(range(len(self.batches))))
            self.update_began = time.perf_counter()
            return engine.update(1e-4, 0.01)

        return step

    def _torch(self) -> Callable[[], object]:
        """Return a function that makes a step with DistributedDataParallel or fully_shard.

        The model is transformers' GPT-2 of the same shape. DistributedDataParallel has autocast to
        the compute type, fully_shard weights of this type and fp32 sums of gradients.
        """
        from torch.nn.utils import clip_grad_norm_
        from transformers import GPT2Config, GPT2LMHeadModel

        size = SIZES[self.work.size]
        config = GPT2Config(
            vocab_size=size.vocab_size,
            n_layer=size.layers,
            n_embd=size.hidden,
            n_head=size.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
        model: Any = GPT2LMHeadModel(config)
        model.to(self.device)
        if self.work.recompute == "full":
            model.gradient_checkpointing_enable()
        variant = VARIANTS[self.work.variant]
        divided = variant.engine == "fully_shard"
        dtype = DTYPES[self.work.precision]
        wrapped, synchronize = (
            _fully_sharded(model, variant, dtype) if divided else _replicated(model)
        )
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
        casts = dtype != torch.float32 and not divided
        scaler = torch.amp.GradScaler(self.device.type, enabled=dtype == torch.float16)

        def step() -> object:
            optimizer.zero_grad(set_to_none=True)
            for number, batch in enumerate(self.batches, start=1):
                synchronize(number == len(self.batches))
                with torch.autocast(self.device.type, dtype, enabled=casts):
                    loss = wrapped(batch, labels=batch).loss / len(self.batches)
                scaler.scale(loss).backward()
            self.update_began = time.perf_counter()
            scaler.unscale_(optimizer)
            norm: Any = clip_grad_norm_(wrapped.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return float(loss.detach()), float(norm.full_tensor() if divided else norm)

        return step


def _replicated(model: Any) -> tuple[Any, Callable[[bool], None]]:
    """Return the model in DistributedDataParallel, and what turns its sums of gradients on."""
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model)
    return wrapped, lambda last: setattr(wrapped, "require_backward_grad_sync", last)


def _fully_sharded(
    model: Any, variant: Variant, dtype: torch.dtype
) -> tuple[Any, Callable[[bool], None]]:
    """Return the model divided by fully_shard, which reduces the gradients of every pass."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: Any = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        "reshard_after_forward": variant.frees_weights,
    }
    for layer in model.transformer.h:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    for module in (*model.transformer.h, model):
        module.set_force_sum_reduction_for_comms(True)  # gloo has no averages
    return model, lambda last: None


@contextmanager
def running_out_of_memory() -> Iterator[None]:
    """End this process with a separate exit code when an allocation in the body fails."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or any(phrase in str(error) for phrase in _PHRASES):
            sys.stderr.flush()
            os._exit(OUT_OF_MEMORY)
        raise


def limit_memory(limit_mb: int) -> None:
    """Limit further allocations of this process to `limit_mb` MiB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    data = next(int(line.split()[1]) for line in lines if line.startswith("VmData:")) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (data + limit_mb * 2**20, resource.RLIM_INFINITY))


def main(work: Work) -> None:
    """Answer every command with one line, on the first rank, until standard input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print to stdout
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(work.threads)
    torch.set_flush_denormal(True)
    if work.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if work.device == "cuda" else "gloo")
    variant = VARIANTS[work.variant]
    if variant.engine == "deepspeed":
        from megacore.engine.deepspeed.join import import_deepspeed

        import_deepspeed()
        if variant.compiled_adam:
            from megacore.engine.deepspeed.operators import load_operators

            load_operators(work.config())
    with running_out_of_memory():
        rank = Rank(work)
        if work.limit_mb:
            limit_memory(work.limit_mb)
        for line in sys.stdin:
            name, *arguments = line.split()
            result = rank.census() if name == "census" else rank.run(int(*arguments))
            results: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(results, result)
            if dist.get_rank() == 0:
                answers.write(json.dumps(results) + "\n")
                answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Work(**json.loads(sys.argv[1])))
