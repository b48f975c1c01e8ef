"""Random numbers as a function of where they are used.

What ran before, or how ranks are laid out, never matters.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megacore.parallel.mesh import ParallelGroup

EMBEDDING = -1
"""The number under which the embedding draws its dropout; a layer's is its index in the whole
model."""


def stable_seed(*parts: int | str) -> int:
    """A 63-bit seed from numbers and names, the same on every machine and process."""
    content = json.dumps(parts).encode("ascii")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1


def parameter_generator(seed: int, name: str) -> torch.Generator:
    """The generator of a parameter's initial values, on the CPU wherever the parameter is.

    A parameter is drawn whole and then sliced, so its values depend on `seed` and on its global
    name alone.
    """
    return torch.Generator().manual_seed(stable_seed("parameter", seed, name))


def micro_batch_seed(seed: int, first_sample: int) -> int:
    """The `dropout_seed` of one micro batch: resuming needs no saved generator state.

    It depends on the run's seed and on the number of the micro batch's first sample, not on who
    computes it when.
    """
    return stable_seed("micro batch", seed, first_sample)


def seed_dropout(dropout_seed: int | None, number: int, part: str | None = None) -> None:
    """Seed what a layer draws for one micro batch, just before it draws.

    Recomputation then repeats it.

    Tensor-parallel ranks draw alike; `tensor_parallel_region` sets them apart where they hold
    different parts of an activation.

    Args:
        dropout_seed: of the micro batch, see `micro_batch_seed`; a model that trains with dropout
            must be given one.
        number: the layer's index in the whole model, or `EMBEDDING`.
        part: of the layer, where several draw by themselves.
    """
    assert dropout_seed is not None, (
        "a model that trains with dropout needs the dropout_seed of its micro batch"
    )
    torch.manual_seed(
        stable_seed("dropout", dropout_seed, number, *([] if part is None else [part]))
    )


@contextmanager
def tensor_parallel_region(tp: ParallelGroup, tensor: Tensor) -> Iterator[None]:
    """Random numbers that differ between tensor-parallel ranks, on the device of `tensor`.

    They are for activations.

    Outside, the ranks draw alike, as replicated activations need. The inner seed is drawn from the
    outer generator, so whoever seeds the outer one alike repeats the inner numbers too.
    """
    if tp.size == 1:
        yield
        return
    shared = int(torch.randint(2**62, (), dtype=torch.int64))
    devices = [tensor.device] if tensor.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(stable_seed("tensor parallel region", shared, tp.rank))
        yield
