"""Time of single operations and messages on a machine: products, memory traffic, collectives.

docs/planning.md has the formulas with their sources. What programs do differently is in `Software`.
"""

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache

from megacore.observe.flops import LARGE, newton_schulz_products
from megacore.plan.machine import Link, Machine
from megacore.plan.zero import ELEMENT_BYTES

_TILES = ((256, 128, 1.0), (128, 128, 0.97), (128, 64, 0.80), (64, 64, 0.55))
"""Tiles of a matrix product on one multiprocessor, and their rate relative to the largest."""
_SPLITS = (2, 4, 8)
"""Parts into which a product's inner dimension is divided if its output has few tiles."""
_SPLIT_COST = 0.02
_SHORTEST_SPLIT = 256
_ALIGNED, _UNALIGNED = 64, 1.17
"""Multiple of which the sizes of a half-precision product are fast, and the slowdown otherwise."""
_ACCESS, _NARROW = 16, 4.0
"""Bytes of which the rows of a product's operands must be multiples for tensor cores to read them
(NVIDIA/cutlass, issue 75), and the slowdown otherwise: A100's ordinary cores have 78 of 312
TFLOP/s (data sheet)."""
_SCORES = 4.5
"""Score matrices read or written by unfused attention: scaling, mask and softmax as one kernel read
and write one, dropout too, with a mask of a byte."""
_TRIANGLE = 0.75
"""Share of a large symmetric product's time that a core needs for one triangle (measured)."""
_BACKWARD_BYTES = 1.5
"""Bytes of elementwise operations in a backward pass, relative to the forward pass."""


@dataclass(frozen=True)
class Software:
    """Properties of the program that trains."""

    hidden_passes: float = 17.0
    """Hidden states read or written by norms, dropout and residual additions in the forward pass of
    a layer."""
    fused_attention: bool = True
    """True if scores never leave the multiprocessor (FlashAttention)."""
    loss_bytes: float = 16.7
    """Bytes of memory traffic per logit in each direction of the loss."""
    gradient_bytes: int = 4
    """Bytes of a gradient in the reduction between replicas."""
    overlaps: bool = True
    """True if the reduction of gradients and the gathering of weights overlap computation."""
    optimizer_bytes: float = 34.6
    """Bytes of memory traffic of the optimizer per parameter."""
    optimizer_us: float = 115.0
    """Time of the optimizer per layer, in microseconds."""
    hides_messages: bool = True
    """True if messages between pipeline stages overlap computation."""
    scatters_messages: bool = False
    """True if each tensor-parallel rank sends a part of a message, which the receivers gather
    (Narayanan et al. 2021, section 4.1)."""

    product_share: float = 0.826
    """Share of a generic device's rate of products that the program's products reach."""
    launch_wait: float = 0.0
    """Factor on the host's times if each operation waits for the one before, so that they are added
    to the device's (CUDA_LAUNCH_BLOCKING=1); 0 if the host runs ahead of the device."""
    message_us: float = 0.0
    """Additional time of the host for a message between pipeline stages, in microseconds."""
    unfused_softmax_us: float = 0.0
    """Additional time of the host in a layer's pass if the program's fused softmax cannot be used:
    its kernel needs b n / t to be a multiple of 4."""
    state_bytes: tuple[float, float] | None = None
    """Bytes of memory per parameter, and those that ZeRO divides; None for the estimate of
    `megacore.plan.memory`."""


MEGACORE = Software()
MEGATRON_2021 = Software(
    hidden_passes=6.07,
    fused_attention=False,
    loss_bytes=70.4,
    gradient_bytes=2,
    overlaps=False,
    optimizer_us=92.0,
    hides_messages=False,
    scatters_messages=True,
    product_share=1.0,
    message_us=620.0,
    unfused_softmax_us=483.0,
    state_bytes=(6.0, 12.0),
)
"""Megatron-LM and Megatron-DeepSpeed before FlashAttention, which most published runs on A100
used. Its bytes of a parameter are those of megatron/training/theoretical_memory_usage.py."""
BLOOM_2022 = replace(MEGATRON_2021, launch_wait=2.6, product_share=0.83, state_bytes=(4.56, 20.3))
"""Megatron-DeepSpeed of the preparation of BLOOM, with CUDA_LAUNCH_BLOCKING=1 (bigscience,
chronicles-prequel.md: with asynchronous launches, jobs of 320 GPUs always hung)."""


@lru_cache(maxsize=1 << 16)
def _waves(m: int, n: int, batch: int, processors: int) -> float:
    """Return a product's time relative to one that keeps all multiprocessors busy."""
    best = math.inf
    for rows, columns, rate in _TILES:
        for height, width in {(rows, columns), (columns, rows)}:
            tiles = math.ceil(m / height) * math.ceil(n / width) * batch
            waves = math.ceil(tiles / processors)
            best = min(best, waves * processors * height * width / (m * n * batch * rate))
    return best


@dataclass(frozen=True)
class Rates:
    """Times of operations of one rank."""

    machine: Machine
    precision: str
    cores: float = 1.0
    """Devices of a rank: 1 for a GPU, or the cores that a CPU rank has for itself."""
    product_share: float = 1.0
    """`Software.product_share`."""
    known: dict[tuple[int, int, int, int], float] = field(default_factory=dict, compare=False)
    """Times of products that were asked for before."""

    @property
    def element(self) -> int:
        """Bytes of an activation."""
        return ELEMENT_BYTES[self.precision]

    def product(self, m: int, n: int, k: int, batch: int = 1) -> float:
        """Return the seconds of `batch` products of shape [m, k] x [k, n]."""
        shape = (m, n, k, batch)
        if shape not in self.known:
            self.known[shape] = self._product(*shape)
        return self.known[shape]

    def _product(self, m: int, n: int, k: int, batch: int) -> float:
        machine = self.machine
        waves = 1.0
        if machine.device == "cuda":
            waves = _waves(m, n, batch, machine.processors)
            for parts in _SPLITS:
                if k // parts >= _SHORTEST_SPLIT:
                    split = _waves(m, n, batch * parts, machine.processors)
                    waves = min(waves, split * (1 + _SPLIT_COST * parts))
            if self.element < 4:
                aligned = batch > 1 or not (m % _ALIGNED or n % _ALIGNED or k % _ALIGNED)
                waves *= 1.0 if aligned else _UNALIGNED
                waves *= _NARROW if self.element * math.gcd(m, n, k) % _ACCESS else 1.0
        rate = machine.peak(self.precision) * machine.product_efficiency * self.cores
        rate *= self.product_share
        seconds = 2.0 * m * n * k * batch / rate * waves * (1 + machine.half_depth / k)
        moved = self.element * batch * (m * k + k * n + m * n)
        return seconds + machine.traffic * self.stream(moved) + machine.operation_us * 1e-6

    def newton_schulz(self, rows: int, columns: int) -> float:
        """Return the seconds of Muon's products for a matrix."""
        seconds = 0.0
        for m, k, n, times, symmetric in newton_schulz_products(rows, columns):
            triangle = symmetric and self.machine.core is not None and m >= LARGE
            seconds += times * self.product(m, n, k) * (_TRIANGLE if triangle else 1.0)
        return seconds

    def stream(self, size: float) -> float:
        """Return the seconds in which memory moves `size` bytes."""
        return size / (self.machine.memory_gbs * 1e9 * self.machine.memory_efficiency)

    def elementwise(self, size: float, *, backward: bool = False) -> float:
        """Return the seconds of a layer's elementwise operations.

        Those of the forward pass read and write `size` bytes.
        """
        core = self.machine.core
        if core is not None:
            return size / (core.elementwise_gbs[int(backward)] * 1e9 * self.cores)
        return (_BACKWARD_BYTES if backward else 1.0) * self.stream(size)

    def loss(self, logits: float, size: float, *, backward: bool = False) -> float:
        """Return the seconds of the loss of `logits` logits, each with `size` bytes of traffic."""
        core = self.machine.core
        if core is not None:
            return logits * core.logit_ns[int(backward)] * 1e-9 / self.cores
        return self.stream(size * logits)

    def attention(self, operations: float, scores: float, *, backward: bool = False) -> float:
        """Return the seconds of fused attention with this number of operations and scores."""
        share, core = self.machine.attention_efficiency[int(backward)], self.machine.core
        seconds = operations / (self.machine.peak(self.precision) * share * self.cores)
        if core is not None:
            seconds += scores * core.score_ns[int(backward)] * 1e-9 / self.cores
        return seconds


@dataclass(frozen=True)
class Group:
    """Ranks that communicate with each other."""

    machine: Machine
    size: int
    """Number of ranks."""
    stride: int = 1
    """Distance between the numbers of two neighbours."""
    shared: bool = False
    """True if the ranks of a host communicate through its memory, if they are CPU ranks."""
    piece: int = 0
    """Bytes of gradients that CPU ranks sum at a time in shared memory; 0 for activations."""

    @property
    def on_a_node(self) -> int:
        """Number of the group's ranks on one host."""
        return max(1, min(self.size, self.machine.devices_per_node // self.stride))

    @property
    def nodes(self) -> int:
        """Number of hosts of the group."""
        return math.ceil(self.size / self.on_a_node)

    @property
    def link(self) -> Link:
        """Slowest link of the group's ring.

        The network's rate of a host is shared by all groups that cross it: a group with more ranks
        on the host gets more of it (Thakur et al. 2005; NCCL's rings).
        """
        machine = self.machine
        if self.nodes == 1:
            return machine.node
        rate = min(machine.node.gbs, machine.network.gbs * self.on_a_node)
        return Link(gbs=rate, latency_us=machine.network.latency_us)

    def all_reduce(self, size: float) -> float:
        """Return the seconds of an all-reduce of `size` bytes: 2 (n - 1) / n of them on a ring."""
        return 2 * self.gather(size)

    def gather(self, size: float) -> float:
        """Return the seconds of an all-gather or reduce-scatter of `size` bytes in total."""
        if self.size == 1:
            return 0.0
        if self.machine.core is not None:
            return self._gather_on_cores(size)
        link = self.link
        # inside a host a ring, between hosts a tree
        steps = self.on_a_node - 1 if self.nodes == 1 else math.log2(self.nodes)
        inner = (self.on_a_node - 1) * self.machine.node.latency_us if self.nodes > 1 else 0.0
        latency = (steps * link.latency_us + inner) * 1e-6
        return latency + (self.size - 1) / self.size * size / (link.gbs * 1e9)

    def _gather_on_cores(self, size: float) -> float:
        """Return half the seconds in which cores sum `size` bytes.

        In shared memory each rank writes its part and reads all others. Over sockets it is a ring.
        """
        core = self.machine.core
        assert core is not None
        if self.shared and self.nodes == 1:
            node = self.machine.node
            rounds, rate = 1, node.gbs
            if self.piece:
                rounds, rate = math.ceil(size / self.piece), core.gradients_gbs or node.gbs
            return rounds * node.latency_us * 1e-6 + self.size / 4 * size / (rate * 1e9)
        link = core.sockets if self.nodes == 1 else self.machine.network
        latency = (self.size - 1) * link.latency_us * 1e-6
        return latency + (self.size - 1) / self.size * size / (link.gbs * 1e9)


@dataclass(frozen=True)
class Core:
    """Attention between queries and keys of the given lengths."""

    queries: int
    keys: int
    causal: bool

    def forward(self, rates: Rates, heads: int, size: int, software: Software) -> float:
        """Return the seconds of a forward pass with `heads` heads of all samples."""
        if software.fused_attention:
            return rates.attention(self._operations(heads, size), self._scores_of(heads))
        products = rates.product(self.queries, self.keys, size, heads)
        products += rates.product(self.queries, size, self.keys, heads)
        return products + self._scores(rates, heads)

    def backward(self, rates: Rates, heads: int, size: int, software: Software) -> float:
        """Return the seconds of a backward pass; a fused one repeats the scores."""
        if software.fused_attention:
            operations, scores = 2.5 * self._operations(heads, size), self._scores_of(heads)
            return rates.attention(operations, scores, backward=True)
        products = rates.product(self.queries, self.keys, size, heads)
        products += rates.product(self.queries, size, self.keys, heads)
        products += 2 * rates.product(self.keys, size, self.queries, heads)
        return products + _BACKWARD_BYTES * self._scores(rates, heads)

    def _operations(self, heads: int, size: int) -> float:
        return 4.0 * self._scores_of(heads) * size

    def _scores_of(self, heads: int) -> float:
        return (0.5 if self.causal else 1.0) * heads * self.queries * self.keys

    def _scores(self, rates: Rates, heads: int) -> float:
        return rates.stream(_SCORES * rates.element * heads * self.queries * self.keys)
