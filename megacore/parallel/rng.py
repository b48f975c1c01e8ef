"""Random numbers as a function of their place of use.

They do not depend on earlier computations or on the layout.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor

from megacore.parallel.mesh import ParallelGroup

EMBEDDING = -1
"""Layer number of the embedding in dropout seeds; a layer's is its index in the complete model."""


def stable_seed(*parts: int | str) -> int:
    """Return a 63-bit seed of numbers and names, the same on every machine and in every process."""
    content = json.dumps(parts).encode("ascii")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1


def parameter_generator(seed: int, name: str) -> torch.Generator:
    """Return the generator of a parameter's initial values, on the CPU for any device.

    A parameter is drawn as a whole and then sliced, so its values depend only on `seed` and on its
    global name.
    """
    return torch.Generator().manual_seed(stable_seed("parameter", seed, name))


def micro_batch_seed(seed: int, first_sample: int) -> int:
    """Return the `dropout_seed` of one micro batch; a resume needs no saved generator state.

    It depends only on the run's seed and on the number of the micro batch's first sample.
    """
    return stable_seed("micro batch", seed, first_sample)


def seed_dropout(dropout_seed: int | None, number: int, part: str | None = None) -> None:
    """Seed the random numbers of a layer for one micro batch, just before they are drawn.

    Recomputation then repeats them. Tensor-parallel ranks draw the same numbers;
    `tensor_parallel_region` makes them differ where the ranks have different parts of an
    activation.

    Args:
        dropout_seed: seed of the micro batch, see `micro_batch_seed`, or a `GraphSeed`; required in
            training with dropout.
        number: the layer's index in the complete model, or `EMBEDDING`.
        part: name of a part of the layer, if several parts draw separately.
    """
    assert dropout_seed is not None, (
        "a model that trains with dropout needs the dropout_seed of its micro batch"
    )
    if isinstance(dropout_seed, GraphSeed):
        dropout_seed.begin((number, part))
    else:
        _seed(_place_seed(dropout_seed, (number, part)))


Place = tuple[int, str | None]
"""Layer and part of it that seed their dropout."""


def _place_seed(dropout_seed: int, place: Place) -> int:
    number, part = place
    return stable_seed("dropout", dropout_seed, number, *([] if part is None else [part]))


class GraphSeed(int):
    """Dropout seed of every micro batch that one CUDA graph computes; an int only by its type.

    A graph stores how many numbers its kernels draw, and at every replay reads the seed of each
    generator that is registered with it. No generator can be seeded during the capture. So each
    call of `seed_dropout` in the graph, also in recomputation, takes a separate generator. A replay
    then draws the same numbers as the passes without a graph.
    """

    value: int
    """Seed of the current micro batch."""
    _places: list[Place]
    _generators: list[torch.Generator]
    _next: int | None

    def __new__(cls) -> Self:
        """Create the seed without a value."""
        seed = super().__new__(cls)
        seed.value, seed._places, seed._generators, seed._next = 0, [], [], None
        return seed

    def record(self, value: int) -> None:
        """Record the places that seed dropout in the next passes, which run without a graph."""
        self.value, self._places = value, []

    def begin(self, place: Place) -> None:
        """Seed the generator in use, or exchange its state while a graph is captured."""
        if self._next is None:
            self._places.append(place)
            _seed(_place_seed(self.value, place))
            return
        assert self._next < len(self._places), "the graph seeds dropout more often than before it"
        assert self._places[self._next] == place, "the graph seeds dropout in another order"
        _generator().graphsafe_set_state(self._generators[self._next])
        self._next += 1

    def register(self, graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
        """Create the generators of a graph, as many as the recorded passes have places."""
        self._generators = [torch.Generator(device) for _ in self._places]
        for generator in self._generators:
            graph.register_generator_state(generator)

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Surround the capture of the graph, after which torch's generator has its own state."""
        state, self._next = _generator().graphsafe_get_state(), 0
        try:
            yield
            assert self._next == len(self._places), "the graph seeds dropout less often than before"
        finally:
            _generator().graphsafe_set_state(state)
            self._next = None

    def replay(self, value: int) -> None:
        """Seed the graph's generators for the micro batch of its next replay."""
        self.value = value
        for generator, place in zip(self._generators, self._places, strict=True):
            generator.manual_seed(_place_seed(value, place))


def _generator() -> torch.Generator:
    """Return the generator from which operations on this process's GPU draw."""
    return torch.cuda.default_generators[torch.cuda.current_device()]


def _seed(seed: int) -> None:
    """Seed the generators in use: the CPU's, and that of this process's GPU if it has one.

    torch.manual_seed seeds the generators of all GPUs, which takes a millisecond of the host.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        _generator().manual_seed(seed)


@contextmanager
def tensor_parallel_region(
    tp: ParallelGroup, tensor: Tensor, rank: int | None = None
) -> Iterator[None]:
    """Make random numbers in the body differ between tensor-parallel ranks.

    This is for activations on the device of `tensor`. Outside, the ranks draw the same numbers, as
    replicated activations require. The inner seed is drawn from the outer generator, so the same
    outer seed also repeats the inner numbers.

    Args:
        tp: tensor-parallel ranks.
        tensor: an activation.
        rank: number of the rank whose numbers this one draws; None means its own.
    """
    if tp.size == 1:
        yield
        return
    with _region("tensor parallel region", tp.rank if rank is None else rank, tensor):
        yield


@contextmanager
def context_parallel_region(cp: ParallelGroup, tensor: Tensor) -> Iterator[None]:
    """Make random numbers in the body differ between ranks that divide the sequences.

    This is for kernels that draw in an order of their own. See `tensor_parallel_region`.
    """
    if cp.size == 1:
        yield
        return
    with _region("context parallel region", cp.rank, tensor):
        yield


@contextmanager
def _region(name: str, rank: int, tensor: Tensor) -> Iterator[None]:
    shared = int(torch.randint(2**62, (), dtype=torch.int64))
    devices = [tensor.device] if tensor.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        _seed(stable_seed(name, shared, rank))
        yield
