"""Random numbers as a function of where they are used, never of what ran before or of how ranks are laid out."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megacore.parallel.mesh import ParallelGroup


def stable_seed(*parts: int | str) -> int:
    """A 63-bit seed from a sequence of numbers and names: the same on every machine and in every process."""
    content = json.dumps(parts).encode("ascii")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1


def parameter_generator(seed: int, name: str) -> torch.Generator:
    """The generator of a parameter's initial values, on the CPU whatever device the parameter is on.

    A parameter is drawn whole and then sliced, so its values depend on `seed` and on its global name alone.
    """
    return torch.Generator().manual_seed(stable_seed("parameter", seed, name))


def seed_micro_batch(seed: int, iteration: int, micro_step: int, data_parallel_rank: int) -> None:
    """Seed dropout for one micro-batch: resuming at an iteration needs no saved generator state.

    Tensor-parallel ranks must pass the same arguments; `tensor_parallel_region` sets them apart where they hold
    different parts of an activation.
    """
    torch.manual_seed(stable_seed("dropout", seed, iteration, micro_step, data_parallel_rank))


@contextmanager
def tensor_parallel_region(tp: ParallelGroup, tensor: Tensor) -> Iterator[None]:
    """Random numbers that differ between tensor-parallel ranks, for activations on the device of `tensor`.

    Outside, the ranks draw alike, as replicated activations need. The inner seed is drawn from the outer generator,
    so activation recomputation, which restores the outer state, repeats the inner numbers too.
    """
    if tp.size == 1:
        yield
        return
    shared = int(torch.randint(2**62, (), dtype=torch.int64))
    devices = [tensor.device] if tensor.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(stable_seed("tensor parallel region", shared, tp.rank))
        yield
