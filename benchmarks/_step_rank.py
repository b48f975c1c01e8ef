"""One contestant of `benchmarks.step`, driven by commands on standard input.

Each command is answered with a line of JSON, a list of one object.

python -m benchmarks._step_rank WORK
run N       makes N steps: seconds of one, peak memory so far
losses N    makes N steps: the loss of each
matmul      rate of large matrix products in the case's precision, in TFLOP/s
kernels     implementations of megacore's operations
"""

import importlib.util
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks._entrants import BETAS, CLIP, LR, OUT_OF_MEMORY, WEIGHT_DECAY, Work
from benchmarks._steps import (
    Step,
    endless,
    fsdp2_step,
    megacore_step,
    nanogpt_step,
    transformers_model,
    transformers_step,
)
from megacore.kernels.implementation import DTYPES
from megacore.kernels.matmul import multiply
from megacore.ranks.process import set_up_arithmetic

_CPU_SIZES, _GPU_SIZES = (512, 1024, 2048), (4096, 8192)
_PRODUCTS = 20


class Rank:
    """Command loop of a contestant; `Trainer` calls it from within its own loop."""

    def __init__(self, work: Work, device: torch.device) -> None:
        self.work, self.device = work, device
        self.kernels: dict[str, str] = {}
        self._command = ""
        self._left = 0
        self._started = 0.0
        self._steps = 0
        self._losses: list[Any] = []

    def next(self) -> bool:
        """Read commands until one requests steps; return True if there is a step to make."""
        while not self._left:
            line = sys.stdin.readline()
            if not line:
                return False
            self._command, _, count = line.strip().partition(" ")
            if self._command in ("run", "losses"):
                self._left = self._steps = int(count)
                self._losses = []
                self._wait()
                self._started = time.perf_counter()
            else:
                self._tell()
        return True

    def _tell(self) -> None:
        """Answer a command that needs no steps."""
        if self._command == "matmul":
            answer({"tflops": matmul_rate(self.work.precision, self.device)})
        elif self._command == "kernels":
            answer({"kernels": self.kernels})
        else:
            raise SystemExit(f"unknown command {self._command!r}")

    def done(self, loss: Any) -> None:
        """Record a step's loss, and answer the command after its last step."""
        if self._command == "losses":
            self._losses.append(float(loss))
        self._left -= 1
        if self._left:
            return
        self._wait()
        seconds = (time.perf_counter() - self._started) / self._steps
        if self._command == "losses":
            answer({"losses": self._losses})
        else:
            answer({"seconds": seconds, "memory_mb": self._memory()})

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _memory(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 1e6
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def answer(values: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps([values]) + "\n")
    sys.stdout.flush()


def matmul_rate(precision: str, device: torch.device) -> float:
    """Return megacore's best rate of square matrix products of random numbers, in TFLOP/s."""
    cuda = device.type == "cuda"
    dtype = DTYPES[precision]
    best = 0.0
    for size in _GPU_SIZES if cuda else _CPU_SIZES:
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        multiply(left, right)
        for _ in range(3):
            if cuda:
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            for _ in range(_PRODUCTS):
                multiply(left, right)
            if cuda:
                torch.cuda.synchronize(device)
            best = max(best, _PRODUCTS * 2 * size**3 / (time.perf_counter() - start) / 1e12)
    return best


def serve(rank: Rank, step: Step) -> None:
    """Make steps on request."""
    while rank.next():
        rank.done(step())


def serve_trainer(rank: Rank) -> None:
    """Make steps on request within transformers' Trainer, in its own loop."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    work, case = rank.work, rank.work.case
    losses: list[torch.Tensor] = []

    class Turns(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if not rank.next():
                os._exit(0)

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            rank.done(losses[-1])
            losses.clear()

    class Samples(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        """Stream of single samples, which the data loader collates into batches."""

        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            for inputs in endless(case, torch.device("cpu")):
                for index in range(case.micro_batch_size):
                    yield {name: rows[index] for name, rows in inputs.items()}

    class Watched(Trainer):
        def training_step(self, *arguments: Any, **rest: Any) -> torch.Tensor:
            losses.append(super().training_step(*arguments, **rest).detach())
            return losses[-1]

    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            per_device_train_batch_size=case.micro_batch_size,
            max_steps=1_000_000,
            learning_rate=LR,
            lr_scheduler_type="constant",
            weight_decay=WEIGHT_DECAY,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            max_grad_norm=CLIP,
            bf16=work.precision == "bf16",
            fp16=work.precision == "fp16",
            use_cpu=rank.device.type == "cpu",
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            torch_compile=work.entrant.compiled,
        )
        data = Samples()
        Watched(
            transformers_model(case), arguments, train_dataset=data, callbacks=[Turns()]
        ).train()


def is_memory_exhausted(error: RuntimeError) -> bool:
    """Return True for the errors of torch, CUDA, cuBLAS and Triton about a full GPU."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    return "out of memory" in text or "CUBLAS_STATUS_ALLOC_FAILED" in text


def main(work_json: str) -> None:
    """Build the requested contestant, and serve."""
    work = Work.of_json(json.loads(work_json))
    device = torch.device(work.device)
    torch.manual_seed(3)
    rank = Rank(work, device)
    try:
        if work.entrant.kind == "megacore":
            set_up_arithmetic(work.threads)
            step, rank.kernels = megacore_step(work, device)
            serve(rank, step)
            return
        torch.set_num_threads(work.threads)
        torch.set_flush_denormal(True)  # as megacore does
        if work.entrant.kind == "nanogpt":
            serve(rank, nanogpt_step(work, device))
        elif work.entrant.kind == "fsdp2":
            serve(rank, fsdp2_step(work, device))
        elif importlib.util.find_spec("accelerate") is not None:
            rank.kernels = {"loop": "transformers.Trainer"}
            serve_trainer(rank)
        else:
            rank.kernels = {"loop": "as Trainer's, accelerate is not installed"}
            serve(rank, transformers_step(work, device))
    except RuntimeError as error:
        if not is_memory_exhausted(error):
            raise
        sys.stderr.write(f"{work.entrant.kind}: {str(error).splitlines()[0]}\n")
        os._exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    main(sys.argv[1])
    os._exit(0)
