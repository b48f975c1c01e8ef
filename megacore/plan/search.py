"""Search for the fastest layout of a configuration on a number of devices.

The candidates are all divisions of the devices and of the batch; sequences of a causal model are
divided into parts of at least `_PART` tokens (`_Space.divides`). Each has a lower bound of its
time: the busiest pipeline stage computes all micro batches, and the first and last one pass through
the stages before it. Candidates are simulated in the order of their bounds, until the bound of the
next one exceeds the last reported time: the reported ones are the best of all
(`Iteration.predict`).
"""

import heapq
import math
import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from megacore.config.deepspeed import user_settings_of, zero_of
from megacore.config.layouts import divisors, refused
from megacore.config.parallel import ZERO_STAGES
from megacore.config.run import RunConfig
from megacore.config.train import Recompute
from megacore.errors import ConfigError, ParallelLayoutError
from megacore.models.parameters import chunk_sizes, layer_sizes
from megacore.pipeline_parallel.partition import ModelChunk, chunks_of
from megacore.plan.activations import Activations
from megacore.plan.iteration import Iteration, most_layers
from megacore.plan.layouts import layout_of
from megacore.plan.machine import Machine
from megacore.plan.memory import GIB, muon_elements
from megacore.plan.search_result import (
    FRONT,
    Candidate,
    Choice,
    Partition,
    Refused,
    SearchResult,
)
from megacore.plan.table import memory_of
from megacore.plan.zero import ELEMENT_BYTES, zero_bytes

_Kind = tuple[int, int, bool, bool, bool, bool]
_RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
FILLED = 0.97
"""Largest share of a device's memory that a layout may be predicted to need."""
_PART = 1024
"""Least number of tokens of a sequence that the search gives a context-parallel rank."""
_NAMES = re.compile(r"[a-z_]+\.[a-z_]+|padded vocabulary|chunks|micro batches")
"""Parts of a refusal that tell one reason from another."""


def search(
    config: RunConfig,
    vocab_size: int,
    machine: Machine,
    ranks: int,
    *,
    top: int = 10,
    front: bool = False,
    cores: float = 1.0,
) -> SearchResult:
    """Return the fastest layouts of a configuration that fit in memory.

    Model, global batch, engine and schedule are those of the configuration.

    Args:
        config: configuration of the run.
        vocab_size: entries of the vocabulary before padding.
        machine: hardware of every host.
        ranks: number of devices.
        top: number of layouts to return.
        front: True to simulate slower candidates too if they need less memory, up to half more time
            than the fastest: the Pareto front is complete to there.
        cores: CPU cores of a rank, whose memory is that of the machine's device.

    Raises:
        ConfigError: the hosts are not used completely, or the hardware lacks the precision.
        ParallelLayoutError: no layout works; the message has the reasons.
    """
    if ranks < 1 or (ranks > machine.devices_per_node and ranks % machine.devices_per_node):
        raise ConfigError(
            f"{ranks} devices of {machine.name} are no number of complete hosts of "
            f"{machine.devices_per_node}: use a multiple of {machine.devices_per_node}"
        )
    space = _Space(config, vocab_size, machine, ranks, precision_on(config, machine), cores)
    space.list_groups()
    while space.heap and not (
        len(space.evaluated) >= top and space.heap[0][0] >= space.evaluated[top - 1].seconds
    ):
        _, _, item = heapq.heappop(space.heap)
        if isinstance(item, _Group):
            space.expand(item)
        else:
            space.evaluate(item)
    best = tuple(space.evaluated[:top])
    if front and best:
        space.extend_front(FRONT * best[0].seconds)
    rest = space.beaten + sum(
        len(item.choices) if isinstance(item, _Group) else 1 for _, _, item in space.heap
    )
    if rest:
        space.note(
            f"slower than {best[-1].seconds:.4g} s by their lower bound, not simulated", rest
        )
    if not space.evaluated:
        reasons = "; ".join(f"{each.candidates:,}: {each.reason}" for each in space.reasons())
        raise ParallelLayoutError(
            f"no layout of {config.name} on {ranks} devices of {machine.name} works ({reasons}): "
            "use more devices, or another batch or engine"
        )
    evaluated = tuple(space.evaluated)
    return SearchResult(machine, ranks, space.total, best, evaluated, space.reasons())


def search_around(iteration: Iteration) -> tuple[SearchResult, Candidate]:
    """Return the layouts that a run's own ranks could have, and the layout that it has.

    Raises the errors of `search`.
    """
    config, machine, layout = iteration.config, iteration.machine, iteration.layout
    train = config.train.model_copy(update={"precision": iteration.precision})
    result = search(
        config.model_copy(update={"train": train}),
        iteration.vocab_size,
        machine.model_copy(update={"memory_gib": machine.memory_gib * iteration.cores}),
        layout.world_size,
        front=True,
        cores=iteration.cores,
    )
    memory = memory_of(iteration)
    return result, Candidate(Choice.of(config, layout), iteration, iteration.predict(), memory)


def precision_on(config: RunConfig, machine: Machine) -> str:
    """Return the data type of a run's computation on a machine; auto is bf16 where it is fast."""
    if config.train.precision != "auto":
        return config.train.precision
    preferred = ("bf16", "fp32") if machine.native_bf16 else ("fp32",)
    return next((each for each in preferred if each in machine.tflops), next(iter(machine.tflops)))


class _Group(NamedTuple):
    """Candidates with the same lower bound."""

    choices: tuple[Choice, ...]


class _Single(NamedTuple):
    """Candidate with a bound of its memory."""

    choice: Choice
    iteration: Iteration
    memory: float
    """Bytes of a rank, at least."""


@dataclass
class _Space:
    """Candidates, and what is known of them."""

    config: RunConfig
    vocab_size: int
    machine: Machine
    ranks: int
    precision: str
    cores: float = 1.0
    """CPU cores of a rank."""
    heap: list[tuple[float, int, _Group | _Single]] = field(default_factory=list)
    """Candidates that are not yet simulated, by their lower bound in seconds."""
    evaluated: list[Candidate] = field(default_factory=list)
    """Simulated candidates, the fastest first."""
    pushed: int = 0
    """Number of items that the heap had; it orders those with the same bound."""
    beaten: int = 0
    """Number of candidates that are slower and need more memory than a simulated one."""
    total: int = 0
    """Number of candidates."""
    notes: dict[str, int] = field(default_factory=dict)
    """Number of refused candidates by reason."""
    examples: dict[tuple[str, ...], str] = field(default_factory=dict)
    """First refusal of each kind."""
    least_memory: float = math.inf
    """Least bytes of a candidate that was refused for its memory."""
    too_large: int = 0
    shapes: dict[tuple[int, int, int, bool, Recompute], "_Shape"] = field(default_factory=dict)
    sizes: dict[tuple[int, "_Kind"], int] = field(default_factory=dict)
    """Parameters of a chunk by tensor parallel size."""
    states: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """Least bytes of state by the sizes that divide it and the ZeRO stage."""
    checked: dict[tuple[int, bool, Partition, int, bool], RunConfig] = field(default_factory=dict)

    @cached_property
    def padded(self) -> int:
        """Entries of the padded vocabulary."""
        return self.config.model.padded_vocab_size(self.vocab_size)

    @property
    def limit(self) -> float:
        """Bytes of a device that a run can use."""
        return FILLED * self.machine.memory_gib * GIB

    def note(self, reason: str, count: int = 1) -> None:
        """Count candidates that are refused for a reason."""
        self.notes[reason] = self.notes.get(reason, 0) + count

    def note_refusal(self, problem: str, count: int = 1) -> None:
        """Count candidates that a check refuses, with the first refusal of this kind as reason."""
        kind = tuple(sorted(set(_NAMES.findall(problem))))
        self.note(self.examples.setdefault(kind, problem), count)

    def note_memory(self, needed: float, count: int = 1) -> None:
        """Count candidates that need at least `needed` bytes, which are too many."""
        self.too_large += count
        self.least_memory = min(self.least_memory, needed)

    def reasons(self) -> tuple[Refused, ...]:
        """Return the counted reasons, the most frequent first."""
        rows = [Refused(count, reason) for reason, count in self.notes.items()]
        if self.too_large:
            rows.append(
                Refused(
                    self.too_large,
                    f"need more memory than {self.limit / GIB:.1f} of "
                    f"{self.machine.memory_gib:.0f} GiB (the least at least "
                    f"{self.least_memory / GIB:.1f})",
                )
            )
        return tuple(sorted(rows, reverse=True))

    def list_groups(self) -> None:
        """Put all layouts that the configuration's checks accept into the heap."""
        micro_batches = divisors(self.config.train.global_batch_size)
        for tensor in divisors(self.ranks):
            for pipeline in divisors(self.ranks // tensor):
                for context in divisors(self.ranks // (tensor * pipeline)):
                    for micro in micro_batches:
                        if self.divides(context, micro):
                            self._list_layouts(tensor, pipeline, context, micro)

    def divides(self, context: int, micro: int) -> bool:
        """Return True if layouts with `context` parts of each sequence are candidates.

        If the micro batch and the parts have a common factor, a layout without this factor in both
        and with as many more replicas computes the same and gathers less.
        """
        if context in (1, self.config.parallel.context_parallel_size):
            return True
        config, length = self.config, self.config.data.seq_length
        causal = config.family == "gpt" and config.model.position_embedding_type != "alibi"
        return (
            causal
            and config.engine == "native"
            and length % (2 * context) == 0
            and length >= _PART * context
            and math.gcd(micro, context) == 1
        )

    def _list_layouts(self, tensor: int, pipeline: int, context: int, micro: int) -> None:
        """Put the accepted layouts with these sizes into the heap."""
        data = self.ranks // (tensor * pipeline * context)
        virtual, zero = self._virtual(pipeline), self._zero(data * context)
        partitions, sequence = self._partitions(pipeline), (False, True)[: 1 + (tensor > 1)]
        schedules = [
            (chunks, stage, partition, delayed)
            for chunks, stage, partition in product(virtual, zero, partitions)
            for delayed in self._delays(pipeline, stage)
        ]
        variants = len(schedules) * len(sequence) * len(_RECOMPUTES)
        self.total += variants
        simplest = Choice(
            tensor=tensor,
            pipeline=pipeline,
            virtual=1,
            data=data,
            micro_batch=micro,
            zero=zero[0],
            recompute="none",
            sequence_parallel=False,
            partition="balanced",
            context=context,
        )
        # What refuses the simplest variant refuses the others too.
        if self._refuses(simplest, variants):
            return
        for divided in sequence:
            choices = [
                replace(
                    simplest,
                    virtual=chunks,
                    zero=stage,
                    sequence_parallel=divided,
                    partition=partition,
                    delayed=delayed,
                )
                for chunks, stage, partition, delayed in schedules
            ]
            self._add_groups(
                [each for each in choices if not self._refuses(each, len(_RECOMPUTES))]
            )

    def _refuses(self, choice: Choice, variants: int) -> bool:
        """Return True, and count `variants` candidates, if the checks refuse a layout."""
        key = (
            *(choice.micro_batch, choice.sequence_parallel, choice.partition),
            *(choice.zero, choice.delayed),
        )
        if key not in self.checked:
            self.checked[key] = choice.applied(self.config)
        refusal = refused(self.checked[key], choice.layout, self.padded)
        if refusal is None:
            return False
        self.note_refusal(refusal.problem, variants)
        return True

    def _virtual(self, pipeline: int) -> list[int]:
        """Return the numbers of chunks per stage: those that divide the layers of a stage."""
        if pipeline == 1 or self.config.family == "t5":
            return [1]
        if self.config.engine == "deepspeed" or self.config.parallel.pipeline_schedule == "gpipe":
            return [1]
        return divisors(max(1, self.config.model.num_layers // pipeline))

    def _delays(self, pipeline: int, zero: int) -> tuple[bool, ...]:
        """Return whether weight gradients are delayed: both, where they can be."""
        can = pipeline > 1 and zero < ZERO_STAGES.index("gradients")
        return (False, True) if can and self.config.engine == "native" else (False,)

    def _zero(self, copies: int) -> tuple[int, ...]:
        """Return the ZeRO stages for a number of ranks with the same weights."""
        if self.config.engine == "native":
            return (0, 1, 2, 3) if copies > 1 else (0,)
        if self.config.deepspeed.config is not None:
            return (user_settings_of(self.config).stage,)
        return (0, 1, 2, 3)

    def _partitions(self, pipeline: int) -> tuple[Partition, ...]:
        if pipeline == 1:
            return ("balanced",)
        first = self.config.parallel.pipeline_partition
        return ("uniform", "balanced") if first == "uniform" else ("balanced", "uniform")

    def _add_groups(self, choices: list[Choice]) -> None:
        """Put layouts into the heap whose sizes of layers, batches and groups are the same."""
        small: list[Choice] = []
        for choice in choices:
            needed = self._least_state(choice)
            if needed > self.limit:
                self.note_memory(needed, len(_RECOMPUTES))
            else:
                small.append(choice)
        if not small:
            return
        first = small[0]
        micro_batches = self.config.train.global_batch_size // (first.micro_batch * first.data)
        model, t5 = self.config.model, self.config.family == "t5"
        whole = ModelChunk(
            range(model.num_layers), True, True, range(model.decoder_layers if t5 else 0)
        )
        for recompute in _RECOMPUTES:
            shape = self._shape(first, recompute)
            if recompute == "selective" and not self._frees_attention(shape.iteration.config):
                self.note("recompute selectively what fused attention does not store", len(small))
                continue
            bound = micro_batches * sum(shape.times(whole)) / first.pipeline
            variants = tuple(replace(choice, recompute=recompute) for choice in small)
            self._push(bound * self._waiting, _Group(variants))

    def _frees_attention(self, config: RunConfig) -> bool:
        """Return True if selective recomputation stores less than none."""
        element = ELEMENT_BYTES[self.precision]
        storage = Activations(config, element, self.machine.device)
        return storage.attention + storage.decoder_attention * (config.family == "t5") > 0

    def _push(self, bound: float, item: _Group | _Single) -> None:
        self.pushed += 1
        heapq.heappush(self.heap, (bound, self.pushed, item))

    @property
    def _waiting(self) -> float:
        """Factor of the time for slower hosts."""
        nodes = -(-self.ranks // self.machine.devices_per_node)
        return 1 + self.machine.straggler * math.log2(nodes)

    def _shape(self, choice: Choice, recompute: Recompute) -> "_Shape":
        key = choice.tensor, choice.context, choice.micro_batch, choice.sequence_parallel, recompute
        if key not in self.shapes:
            config = replace(choice, recompute=recompute).applied(self.config)
            layout = choice.layout
            self.shapes[key] = _Shape(
                Iteration(config, self.vocab_size, self.machine, layout, self.precision, self.cores)
            )
        return self.shapes[key]

    def _least_state(self, choice: Choice) -> int:
        """Return bytes of state that the pipeline stage with most layers has at least."""
        key = choice.tensor, choice.pipeline, choice.zero
        if key not in self.states:
            layers = -(-self.config.model.num_layers // choice.pipeline)
            parameters = layers * sum(layer_sizes(self.config.model, choice.tensor))
            copies = choice.layout.copies
            self.states[key] = self._state(choice.applied(self.config), copies, parameters)
        return self.states[key]

    def _state(self, config: RunConfig, copies: int, parameters: int) -> int:
        """Return bytes of state on the device, at least; `copies` ranks have the same weights."""
        zero, native = zero_of(config), config.engine == "native"
        state = zero_bytes(
            parameters,
            zero.stage,
            copies,
            self.precision,
            gradient_bytes=4 if native else None,
            offload_optimizer=zero.offload_optimizer,
            offload_param=zero.offload_param,
            single_moment=parameters if config.optim.name == "muon" else 0,
        )
        return state.device.total

    def expand(self, group: _Group) -> None:
        """Put a group's candidates into the heap, those that may fit in memory."""
        first = group.choices[0]
        shape = self._shape(first, first.recompute)
        divisions: dict[tuple[int, int, bool], list[tuple[ModelChunk, ...]]] = {}
        for choice in group.choices:
            config = choice.applied(self.config)
            chunks = tuple(chunks_of(config, self.vocab_size))
            equal = divisions.setdefault((choice.virtual, choice.zero, choice.delayed), [])
            if chunks in equal:
                self.note("divide the layers as another candidate does (partition)")
                continue
            equal.append(chunks)
            layout = choice.layout
            iteration = shape.iteration.with_layout(config, layout)
            needed = self._least_memory(iteration, chunks)
            if needed > self.limit:
                self.note_memory(needed)
            else:
                bound = self._least_seconds(shape, iteration, chunks)
                self._push(bound, _Single(choice, iteration, needed))

    def extend_front(self, limit: float) -> None:
        """Simulate candidates unless a simulated one beats their bounds of time and memory.

        Args:
            limit: bound of the time in seconds from which on candidates are left out.
        """
        while self.heap and self.heap[0][0] < limit:
            bound, _, item = heapq.heappop(self.heap)
            if isinstance(item, _Group):
                self.expand(item)
            elif any(
                each.seconds <= bound and each.memory <= item.memory for each in self.evaluated
            ):
                self.beaten += 1
            else:
                self.evaluate(item)

    def evaluate(self, single: _Single) -> None:
        """Check, estimate and simulate a candidate."""
        choice, iteration, _ = single
        try:
            layout_of(iteration.config, self.ranks, self.vocab_size)
        except ParallelLayoutError as error:
            self.note_refusal(str(error))
            return
        memory = memory_of(iteration)
        if memory > self.limit:
            self.note_memory(memory)
            return
        self.evaluated.append(Candidate(choice, iteration, iteration.predict(), memory))
        self.evaluated.sort(key=lambda each: (each.seconds, each.memory))

    def _least_memory(self, iteration: Iteration, chunks: tuple[ModelChunk, ...]) -> float:
        """Return bytes that a rank needs at least: the first stage's, or the largest state."""
        config, layout = iteration.config, iteration.layout
        stages, virtual = layout.pipeline, len(chunks) // layout.pipeline
        sizes = self._stage_sizes(iteration, chunks)
        storage = Activations(config, ELEMENT_BYTES[self.precision], self.machine.device)
        passes = iteration.micro_batches * virtual
        if config.parallel.pipeline_schedule == "1f1b":
            warm_up = stages - 1 if virtual == 1 else 2 * (stages - 1) + (virtual - 1) * stages
            passes = min(passes, warm_up + 1)
        unlike = {(len(chunk.layers), chunk.has_embedding): chunk for chunk in chunks[::stages]}
        smallest = min(storage.chunk(chunk) for chunk in unlike.values())
        first = self._state(config, layout.copies, sizes[0]) + passes * smallest
        return max(first, self._state(config, layout.copies, max(sizes)))

    def _stage_sizes(self, iteration: Iteration, chunks: tuple[ModelChunk, ...]) -> list[int]:
        """Return the parameters of a rank of each pipeline stage."""
        tensor, stages = iteration.layout.tensor, iteration.layout.pipeline
        sizes = [0] * stages
        for index, chunk in enumerate(chunks):
            key = tensor, _kind(chunk, self.config.model.num_layers)
            if key not in self.sizes:
                self.sizes[key] = sum(chunk_sizes(iteration.spec, chunk, tensor))
            sizes[index % stages] += self.sizes[key]
        return sizes

    def _least_seconds(
        self, shape: "_Shape", iteration: Iteration, chunks: tuple[ModelChunk, ...]
    ) -> float:
        """Return a lower bound of the seconds that `Iteration.predict` returns.

        Before a stage's first pass, a micro batch passes forward through the stages before it, and
        after its last one a gradient passes back through them. Delayed weight gradients of the
        stage may be computed while this gradient passes back.
        """
        stages, micro = iteration.layout.pipeline, iteration.micro_batches
        message, ahead, back, makespan = iteration.message(), 0.0, 0.0, 0.0
        times = [shape.times(chunk) for chunk in chunks]
        weights = [0.0] * len(chunks)
        if iteration.config.parallel.delay_weight_gradients:
            # The first chunk's are not delayed.
            weights[1:] = [iteration.weight_gradients(chunk) for chunk in chunks[1:]]
        for stage in range(stages):
            work = micro * sum(map(sum, times[stage::stages]))
            late = min(stage + 1, micro * len(times[stage::stages])) * max(weights[stage::stages])
            makespan = max(makespan, ahead + work, ahead + work - late + back)
            forward, backward = times[stage]
            ahead += forward + message
            back += backward - weights[stage] + message
        layers = most_layers(chunks, stages)
        largest = max(self._stage_sizes(iteration, chunks))
        data = iteration.data(largest, layers, makespan)
        # Without Muon's own part, whose sum over all stages is more than the largest stage's.
        others = max(0, largest - muon_elements(iteration.config, chunks))
        return (makespan + data + iteration.optimizer(others, layers)) * self._waiting


def _kind(chunk: ModelChunk, layers: int) -> "_Kind":
    """Return a key; chunks with equal keys take equal time and have equal parameters.

    `layers` is the number of layers of the model.
    """
    return (
        len(chunk.layers),
        len(chunk.decoder_layers),
        chunk.has_embedding,
        chunk.has_decoder_embedding,
        chunk.has_head,
        len(chunk.layers) > 0 and chunk.layers.stop == layers,
    )


@dataclass
class _Shape:
    """Times of chunks by their content, of candidates whose layers take the same time."""

    iteration: Iteration
    known: dict[_Kind, tuple[float, float]] = field(default_factory=dict)

    def times(self, chunk: ModelChunk) -> tuple[float, float]:
        """Return the seconds of a micro batch's forward and backward pass through a chunk."""
        kind = _kind(chunk, self.iteration.config.model.num_layers)
        if kind not in self.known:
            forward, backward = self.iteration.forward(chunk), self.iteration.backward(chunk)
            self.known[kind] = forward.total, backward.total
        return self.known[kind]


def launch_values(config: RunConfig, machine: Machine, ranks: int) -> dict[str, Any]:
    """Return the dotted values with which a run is started on `ranks` devices of a machine.

    The hosts of a run on several ones are those of its hostfile.
    """
    hosts = -(-ranks // machine.devices_per_node)
    if config.launch.has_scheduler:
        return {"launch.nproc_per_node": ranks // hosts, "launch.nnodes": hosts}
    if hosts > 1 or config.launch.hostfile is not None:
        return {"launch.nproc_per_node": "auto"}
    return {"launch.nproc_per_node": ranks}
