"""Error messages for exhausted memory: the estimate, the memory in use, and settings to change."""

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megacore.config.run import RunConfig
from megacore.errors import MemoryExhaustedError
from megacore.hardware import (
    Hardware,
    memory_info,
    memory_limit,
    resident_memory,
    resolve_precision,
)
from megacore.launch.exit_reason import NO_GPU_MEMORY
from megacore.train.state import TrainState

if TYPE_CHECKING:
    from megacore.plan.advice import Deployment

_CPU_PHRASES = ("can't allocate memory", "not enough memory")


@contextmanager
def memory_errors(
    config: RunConfig, rank: int, state: TrainState, *, vocab_size: int
) -> Iterator[None]:
    """Translate a failing allocation in the body into an error that advises what to change.

    Args:
        config: configuration of the run.
        rank: rank of this process.
        state: current training state, for the iteration number.
        vocab_size: entries of the vocabulary before padding.

    Raises:
        MemoryExhaustedError: an allocation failed; the message has the planner's estimate for this
            rank, the memory in use, and three settings.
    """

    def message(reason: str) -> str:
        from megacore.plan.advice import memory_advice

        advice = memory_advice(config, _deployment(config.train.precision, vocab_size), rank)
        return (
            f"rank {rank} ran out of memory at iteration {state.iteration + 1} ({reason}): "
            f"{in_use()}; {advice}"
        )

    with translate_memory_errors(message):
        yield


@contextmanager
def scoring_memory_errors(
    micro_batch_size: int, rank: int, tensor: int | None = None
) -> Iterator[None]:
    """Translate a failing allocation during evaluation into an error.

    `tensor` is the number of ranks that divide each layer if the advice is to choose more, since
    every rank of the stage `evaluate` has the whole weights of its layers; None in a training.
    """

    def message(reason: str) -> str:
        return (
            f"rank {rank} ran out of memory while it evaluated ({reason}): {in_use()}; lower "
            f"evaluate.micro_batch_size (now {micro_batch_size}; the results stay "
            "the same)"
        ) + (
            ""
            if tensor is None
            else ", or divide the layers over more ranks for this stage (-o "
            f"parallel.tensor_model_parallel_size, now {tensor})"
        )

    with translate_memory_errors(message):
        yield


def in_use() -> str:
    """Describe the GPU memory, or the host memory, in use by this process as one clause."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return (
            f"in use {_gib(torch.cuda.memory_allocated())} allocated and "
            f"{_gib(torch.cuda.memory_reserved())} reserved by this process, {_gib(total - free)} "
            f"by all of {_gib(total)} on {torch.cuda.get_device_name()}"
        )
    info, limit = memory_info(), memory_limit()
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    ulimit = (
        ""
        if address_space == resource.RLIM_INFINITY
        else f", {_gib(address_space)} allowed by ulimit -v"
    )
    return (
        f"in use {_gib(resident_memory() or 0)} by this process, "
        f"{_gib(info['MemAvailable'])} of {_gib(info['MemTotal'])} of the machine available, "
        f"{'no limit' if limit is None else f'a limit of {_gib(limit)}'} by control groups{ulimit}"
    )


def _deployment(precision: str, vocab_size: int) -> "Deployment":
    """Return this job in the form that the planner takes."""
    from megacore.plan.advice import Deployment

    device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    # The first variable is torchrun's, the second that of DeepSpeed's launcher.
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or ranks)
    host_memory = Hardware.detect().memory // local_ranks
    return Deployment(ranks, vocab_size, resolve_precision(precision, device), device, host_memory)


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


@contextmanager
def translate_memory_errors(message: Callable[[str], str]) -> Iterator[None]:
    """Translate a failing allocation in the body into MemoryExhaustedError of `message(reason)`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        lines = str(error).splitlines()
        raise MemoryExhaustedError(message(lines[0] if lines else type(error).__name__)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an exception reports a failed allocation, on a GPU or in host memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return any(phrase in str(error).lower() for phrase in (*_CPU_PHRASES, *NO_GPU_MEMORY))
