"""Predicted time of a training iteration, from its operations and the rates of a machine.

Matrix products, elementwise operations and messages of every pipeline stage are counted from the
configuration, the schedule is simulated, and the time of gradients and optimizer is added.
docs/planning.md has the formulas with their sources and errors.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from megacore.config.deepspeed import zero_of
from megacore.config.run import RunConfig
from megacore.config.spec import ModelSpec
from megacore.models.parameters import chunk_matrices, chunk_sizes
from megacore.parallel.gradient_memory import GRADIENT_PIECE, sums_in_memory
from megacore.parallel.rank_layout import RankLayout
from megacore.pipeline_parallel.partition import ModelChunk, chunks_of
from megacore.pipeline_parallel.schedules import Timeline, build_schedule, simulate
from megacore.plan.activations import MicroBatch, recomputed
from megacore.plan.machine import MEASURED, Machine
from megacore.plan.memory import muon_elements
from megacore.plan.operations import MEGACORE, Core, Group, Rates, Software
from megacore.plan.prediction import Prediction

_MORE_RANKS = 0.379
"""Exponent with which the host's time of a collective grows with the ranks that wait for each
other."""
_SMOOTH = 20.7
"""Exponent of the smooth maximum of the device's and the host's time."""
_FUSED_SOFTMAX = 4
"""Multiple of the heads of a micro batch on a rank that Megatron's fused softmax needs."""
_TICK = 0.004
"""Seconds between two ticks of Linux's scheduler (250 Hz, as distributions configure it)."""
_OWNERS_ROUNDS = 4
"""Rounds of matrices whose messages overlap (`megacore.optim.muon.ROUNDS`)."""
_MUON_BYTES, _MUON_CACHED_BYTES = 112.0, 56.0
"""Memory traffic of Muon's operations on one element of a matrix besides the products, in bytes:
momentum, conversions, norm, copies, and the update of the weight. A CPU updates momentum and
weights in blocks that remain in its cache."""
_STEADY = 2
"""Micro batches per stage after which a 1F1B schedule repeats."""


@dataclass(frozen=True)
class Pass:
    """Seconds of one micro batch on a chunk."""

    compute: float = 0.0
    tensor: float = 0.0
    context: float = 0.0

    @property
    def exchanged(self) -> float:
        """Seconds of communication."""
        return self.tensor + self.context

    @property
    def total(self) -> float:
        """Sum of all."""
        return self.compute + self.exchanged

    def __add__(self, other: "Pass") -> "Pass":
        return Pass(
            self.compute + other.compute,
            self.tensor + other.tensor,
            self.context + other.context,
        )

    def __mul__(self, times: float) -> "Pass":
        return Pass(self.compute * times, self.tensor * times, self.context * times)


@dataclass(frozen=True)
class Iteration(MicroBatch):
    """One training iteration of a configuration on a machine."""

    vocab_size: int
    """Entries of the vocabulary before padding."""
    machine: Machine
    layout: RankLayout
    precision: str
    """Data type of the computation: fp32, bf16 or fp16."""
    cores: float = 1.0
    """Devices of a rank: 1 for a GPU, or the cores that a CPU rank has for itself."""
    software: Software = MEGACORE

    def predict(self) -> Prediction:
        """Return the predicted time. Raises ParallelLayoutError if the layout is impossible."""
        chunks = chunks_of(self.config, self.vocab_size)
        stages = self.layout.pipeline
        by_stage = [chunks[stage::stages] for stage in range(stages)]
        forward = [self.forward(chunk) for chunk in chunks]
        backward = [self.backward(chunk) for chunk in chunks]
        blocking, latency = self._message_times()
        both = [ahead + back for ahead, back in zip(forward, backward, strict=True)]
        pace = [sum(both[stage::stages], Pass()) for stage in range(stages)]
        slowest = max(pace, key=lambda each: each.total)
        sent = 2 * blocking * (len(chunks) // stages)
        makespan = self._makespan(
            [each.total + blocking for each in forward],
            [each.total + blocking for each in backward],
            [self.weight_gradients(chunk) for chunk in chunks],
            slowest.total + sent,
            latency,
        )
        sizes = [
            sum(sum(chunk_sizes(self.spec, chunk, self.layout.tensor)) for chunk in part)
            for part in by_stage
        ]
        layers = most_layers(chunks, stages)
        others = [
            size - muon_elements(self.config, part)
            for size, part in zip(sizes, by_stage, strict=True)
        ]
        micro, mean = self.micro_batches, sum(pace, Pass()) * (1 / stages)
        parts = Prediction(
            compute=micro * mean.compute,
            tensor=micro * mean.tensor,
            context=micro * mean.context,
            bubble=makespan - micro * (mean.total + sent),
            messages=micro * sent,
            data=self.data(max(sizes), layers, makespan),
            embedding=self._shared_embedding(),
            optimizer=self.optimizer(max(others), layers) + self.muon(chunks),
            other=0.0,
        )
        hosts = -(-self.layout.world_size // self.machine.devices_per_node)
        waiting = self.machine.straggler * math.log2(hosts) * parts.seconds
        if self._ranks_of_a_core > 1:
            waiting += self._waiting_for_cores(parts, makespan)
        return replace(parts, other=waiting)

    def _waiting_for_cores(self, parts: Prediction, makespan: float) -> float:
        """Return the seconds in which ranks that share a core wait for each other's computation.

        A collective of tensor parallelism keeps the core of a rank that waits for another one,
        which has no core, until the scheduler's next tick.
        """
        chunks, parallel = chunks_of(self.config, self.vocab_size), self.config.parallel
        times = 3 if self.config.train.recompute == "full" else 2
        collectives = sum(
            times * (2 * len(chunk.layers) + 3 * len(chunk.decoder_layers)) + 4 * chunk.has_head
            for chunk in chunks
        )
        ticks = 0.0
        if parallel.tensor_model_parallel_size > 1:
            ticks = self.micro_batches * collectives / self.layout.pipeline * _TICK
        ranks = self._ranks_of_a_core
        waited = max(parts.tensor, ticks) + parts.context
        shared = ranks * (parts.compute + parts.messages) + waited
        return max(0.0, shared - makespan) + (ranks - 1) * parts.optimizer

    def timeline(self) -> Timeline:
        """Return all passes of the iteration, in seconds."""
        chunks = chunks_of(self.config, self.vocab_size)
        blocking, latency = self._message_times()
        parallel = self.config.parallel
        schedule = build_schedule(
            parallel.pipeline_schedule,
            self.layout.pipeline,
            self.micro_batches,
            parallel.virtual_pipeline_model_parallel_size,
            delayed=parallel.delay_weight_gradients,
        )
        forward = [self.forward(chunk).total + blocking for chunk in chunks]
        backward = [self.backward(chunk).total + blocking for chunk in chunks]
        weights = [self.weight_gradients(chunk) for chunk in chunks]
        return simulate(schedule, forward, backward, weights, latency=latency)

    def _message_times(self) -> tuple[float, float]:
        """Return the seconds of a message in which its stage waits, and those that it hides."""
        message = self.message()
        return (0.0, message) if self.software.hides_messages else (message, 0.0)

    def with_layout(self, config: RunConfig, layout: RankLayout) -> "Iteration":
        """Return the iteration of another layout, without computing the times of a layer again.

        Model, tensor and context parallelism, micro batch and recomputation are the same.
        """
        other = replace(self, config=config, layout=layout)
        for name in ("spec", "rates", "layer", "decoder_layer", "_widths"):
            if name in self.__dict__:
                other.__dict__[name] = self.__dict__[name]
        return other

    @property
    def _ranks_of_a_core(self) -> float:
        """Ranks that share a core; a core that waits for a message works for another rank."""
        return max(1.0, 1.0 / self.cores) if self.machine.core is not None else 1.0

    @property
    def micro_batches(self) -> int:
        """Micro batches of an iteration on each replica (m)."""
        train = self.config.train
        return train.global_batch_size // (train.micro_batch_size * self.layout.data)

    @cached_property
    def spec(self) -> ModelSpec:
        """Description of the model."""
        return ModelSpec.of(self.config, self.vocab_size)

    @cached_property
    def rates(self) -> Rates:
        """Times of operations of a rank."""
        cores = self.cores if self.machine.core is None else max(1.0, self.cores)
        measured = self.machine.fitted_on == MEASURED  # by products as trainings have them
        share = 1.0 if measured or self.machine.core is not None else self.software.product_share
        return Rates(self.machine, self.precision, cores, share)

    def forward(self, chunk: ModelChunk) -> Pass:
        """Return the time of a micro batch's forward pass through a chunk."""
        layers = self.layer.forward * len(chunk.layers)
        if chunk.decoder_layers:
            layers += self.decoder_layer.forward * len(chunk.decoder_layers)
        return layers + self._ends(chunk, backward=False)

    def backward(self, chunk: ModelChunk) -> Pass:
        """Return the time of a micro batch's backward pass, with its recomputation."""
        encoder, decoder = recomputed(chunk, self.config.train.recompute_num_layers)
        layers = self.layer.recomputing * encoder
        layers += self.layer.backward * (len(chunk.layers) - encoder)
        if chunk.decoder_layers:
            layers += self.decoder_layer.recomputing * decoder
            layers += self.decoder_layer.backward * (len(chunk.decoder_layers) - decoder)
        return layers + self._ends(chunk, backward=True)

    def weight_gradients(self, chunk: ModelChunk) -> float:
        """Return the time of the weight gradients in a chunk's backward pass."""
        head = sum(self.rates.product(n, k, m) for m, n, k in self._head(chunk))
        total = self.layer.weights * len(chunk.layers) + self._started(Pass(head), 0.0).compute
        if chunk.decoder_layers:
            total += self.decoder_layer.weights * len(chunk.decoder_layers)
        return total

    @cached_property
    def layer(self) -> "LayerTimes":
        """Times of a layer; for T5, of the encoder."""
        model, tokens = self.config.model, self.tokens
        length, shares = self.config.data.seq_length, self._widths
        linear = (
            (tokens, shares.query + 2 * shares.key_value, model.hidden_size),
            (tokens, model.hidden_size, shares.query),
            (tokens, shares.inner, model.hidden_size),
            (tokens, model.hidden_size, shares.ffn),
        )
        local = length // self.layout.context
        cores = (Core(local, length, causal=self.config.family == "gpt"),)
        return self._times(linear, cores, tokens, collectives=2)

    @cached_property
    def decoder_layer(self) -> "LayerTimes":
        """Times of a layer of T5's decoder."""
        model, tokens, source = self.config.model, self.decoder_tokens, self.tokens
        length, shares = self.config.data.span_corruption.decoder_seq_length, self._widths
        linear = (
            (tokens, shares.query + 2 * shares.key_value, model.hidden_size),
            (tokens, model.hidden_size, shares.query),
            (tokens, shares.query, model.hidden_size),
            (source, 2 * shares.key_value, model.hidden_size),
            (tokens, model.hidden_size, shares.query),
            (tokens, shares.inner, model.hidden_size),
            (tokens, model.hidden_size, shares.ffn),
        )
        cores = (
            Core(length, length, causal=True),
            Core(length, self.config.data.seq_length, causal=False),
        )
        return self._times(linear, cores, tokens, collectives=3)

    @cached_property
    def _widths(self) -> "Widths":
        model, tensor = self.config.model, self.layout.tensor
        groups = max(1, model.query_groups // tensor)
        ffn = model.ffn_size // tensor
        return Widths(
            model.attention_size // tensor,
            groups * model.head_dim,
            ffn,
            2 * ffn if model.gated else ffn,
        )

    def _times(
        self,
        linear: Sequence[tuple[int, int, int]],
        cores: "Sequence[Core]",
        tokens: int,
        *,
        collectives: int,
    ) -> "LayerTimes":
        """Return the times of a layer from its products [tokens, k] x [k, n] and its attention."""
        rates, host = self.rates, self.machine.host
        train, shares = self.config.train, self._widths
        model, tensor = self.config.model, self.layout.tensor
        parts = tensor if self.config.parallel.sequence_parallel else 1
        hidden = tokens * model.hidden_size
        core = self.machine.core
        passes = self.software.hidden_passes if core is None else core.hidden_passes
        elements = passes * hidden / parts
        elements += tokens * (2 * shares.inner + shares.query + 2 * shares.key_value)
        size = rates.element * elements
        streamed = rates.elementwise(size)
        heads = train.micro_batch_size * max(1, model.num_attention_heads // tensor)
        head = heads, model.head_dim
        attention = sum(core.forward(rates, *head, self.software) for core in cores)
        device = sum(rates.product(*shape) for shape in linear) + attention + streamed
        weights = sum(rates.product(n, k, m) for m, n, k in linear)
        back = sum(rates.product(m, k, n) for m, n, k in linear) + weights
        back += sum(core.backward(rates, *head, self.software) for core in cores)
        back += rates.elementwise(size, backward=True)
        collective = Group(self.machine, tensor, shared=True).all_reduce(rates.element * hidden)
        count = collectives if tensor > 1 else 0
        waits = count * host.collective_us * (tensor / 2) ** _MORE_RANKS
        if heads % _FUSED_SOFTMAX:
            waits += self.software.unfused_softmax_us
        start, start_back = host.layer_forward_us + waits, host.layer_backward_us + waits
        # keys and values are gathered, and their gradients reduce-scattered
        context = Group(self.machine, self.layout.context, tensor, shared=True)
        gathered = context.gather(rates.element * 2 * shares.key_value * tokens * context.size)
        forward = Pass(device, count * collective, gathered + self._copied(1 + context.size))
        backward = Pass(back, count * collective, gathered + self._copied(context.size))
        again = {"none": Pass(), "selective": Pass(attention, 0.0, forward.context)}.get(
            train.recompute, forward
        )
        restart = start if train.recompute == "full" else 0.0
        return LayerTimes(
            forward=self._started(forward, start),
            backward=self._started(backward, start_back),
            recomputing=self._started(backward + again, start_back + restart),
            weights=self._started(Pass(weights), 0.0).compute,
        )

    def _copied(self, parts: int) -> float:
        """Return the seconds of copies of the keys and values of `parts` ranks, in another order.

        Forward, those of the rank become one message, and those of all are put in order; backward,
        the gradients of all are divided.
        """
        if self.layout.context == 1:
            return 0.0
        elements = 2 * self._widths.key_value * self.tokens * parts
        return self.rates.stream(2.0 * self.rates.element * elements)

    def _started(self, work: Pass, host_us: float) -> Pass:
        """Return the time of a device's work that the host starts; a core starts its own."""
        core = self.machine.core
        if core is not None:
            slowed = core.together if self.layout.world_size > 1 else 1.0
            return replace(work, compute=slowed * (work.compute + host_us * 1e-6))
        if self.software.launch_wait:
            host = self.software.launch_wait * host_us * 1e-6
            return replace(work, compute=work.compute + host)
        return _bounded(work, host_us)

    def _ends(self, chunk: ModelChunk, *, backward: bool) -> Pass:
        """Return the time of a chunk's embedding and head in one direction."""
        host, rates, total = self.machine.host, self.rates, Pass()
        if chunk.has_embedding or chunk.has_decoder_embedding:
            total += Pass(host.embedding_us * 1e-6)
        if not chunk.has_head:
            return total
        tensor, linear = self.layout.tensor, self._head(chunk)
        tokens, vocabulary, _ = linear[0]
        if backward:
            device = sum(rates.product(m, k, n) + rates.product(n, k, m) for m, n, k in linear)
        else:
            device = sum(rates.product(*shape) for shape in linear)
        device += rates.loss(tokens * vocabulary, self.software.loss_bytes, backward=backward)
        collective = Group(self.machine, tensor, shared=True).all_reduce(4.0 * tokens)
        exchanged = (1 if backward else 3) * collective if tensor > 1 else 0.0
        return total + self._started(Pass(device, exchanged), host.head_us)

    def _head(self, chunk: ModelChunk) -> list[tuple[int, int, int]]:
        """Return the products [tokens, k] x [k, n] of a chunk's head; none if it has no head."""
        if not chunk.has_head:
            return []
        tokens = self.predictions
        vocabulary = self.spec.padded_vocab_size // self.layout.tensor
        hidden = self.config.model.hidden_size
        dense = [(tokens, hidden, hidden)] if self.config.family == "bert" else []
        return [(tokens, vocabulary, hidden), *dense]

    def message(self) -> float:
        """Return the seconds of a message between two pipeline stages; 0 with one stage."""
        layout, machine = self.layout, self.machine
        if layout.pipeline == 1:
            return 0.0
        divided = self.config.parallel.sequence_parallel
        # the decoder's stages pass the encoder's output on
        tokens = self.tokens + self.decoder_tokens * (self.config.family == "t5")
        size = float(self.rates.element * tokens * self.config.model.hidden_size)
        gathered = 0.0
        if self.software.scatters_messages and not divided:
            gathered = Group(machine, layout.tensor, shared=True).gather(size)
        if self.software.scatters_messages or divided:
            size /= layout.tensor
        stride = layout.tensor * layout.context * layout.data
        devices = machine.devices_per_node
        crossing = min(1.0, stride / devices) if layout.world_size > devices else 0.0
        near = machine.node.latency_us * 1e-6 + size / (machine.pipeline_gbs * 1e9)
        far = machine.network.latency_us * 1e-6 + size / (machine.network.gbs * 1e9)
        seconds = (1 - crossing) * near + crossing * far + gathered
        return seconds + self.software.message_us * 1e-6

    def _makespan(
        self,
        forward: Sequence[float],
        backward: Sequence[float],
        weights: Sequence[float],
        pace: float,
        latency: float,
    ) -> float:
        """Return the seconds of all passes of an iteration.

        After a few micro batches every schedule repeats: the rest is added at the pace of the
        slowest stage (GPipe: of the slowest in each direction).
        """
        parallel, stages, micro = self.config.parallel, self.layout.pipeline, self.micro_batches
        if stages == 1:
            return micro * pace
        kind, delayed = parallel.pipeline_schedule, parallel.delay_weight_gradients
        simulated = min(micro, _STEADY * stages)
        if kind == "gpipe":
            pace = max(forward) + max(backward)
        virtual = parallel.virtual_pipeline_model_parallel_size
        filled = _simulated(
            kind,
            simulated,
            virtual,
            tuple(forward),
            tuple(backward),
            tuple(weights) if delayed else None,
            latency,
        )
        return filled + (micro - simulated) * pace

    def data(self, parameters: int, layers: int, makespan: float) -> float:
        """Return the exposed seconds of gradients and divided weights of the replicas.

        Args:
            parameters: parameters of a rank.
            layers: layers of its stage, the first of which cannot overlap.
            makespan: seconds of all passes.
        """
        layout, parallel = self.layout, self.config.parallel
        group = self._summing(layout.copies, layout.tensor, sharded=zero_of(self.config).stage > 0)
        fetched = self._fetched(parameters)
        if layout.copies == 1:
            return max(fetched - makespan, fetched / max(1, layers))
        zero = zero_of(self.config).stage
        width = min(self.software.gradient_bytes, 2 if parallel.grad_reduce_dtype == "bf16" else 4)
        scatter = group.gather(width * parameters)
        gather = group.gather(self.rates.element * parameters)
        once, micro = self.software.overlaps, self.micro_batches
        # Delayed weight gradients are about a third of a micro batch's time, a backward pass two.
        share = 1 / 3 if parallel.delay_weight_gradients else 2 / 3
        after = gather if zero in (1, 2) else 0.0  # of the updated weights
        if zero == 3:
            total, hidden = micro * (scatter + 2 * gather) + fetched, makespan
        elif zero == 2:
            total, hidden = micro * scatter, makespan * 2 / 3
        else:
            total, hidden = (1 if zero else 2) * scatter, makespan / micro * share
        if not once or self.machine.core is not None:  # a core that communicates does not compute
            return total + after
        rounds = micro if zero >= 2 else 1
        return max(total - hidden, total / rounds / max(1, layers)) + after

    def _fetched(self, parameters: int) -> float:
        """Return the seconds in which offloaded weights are fetched, twice for each micro batch."""
        zero, offload = zero_of(self.config), self.machine.offload
        if zero.offload_param == "none" or self.machine.device == "cpu":
            return 0.0
        slowest = offload.transfer_gbs
        if zero.offload_param == "nvme":
            slowest = min(slowest, offload.nvme_gbs)
        size = self.rates.element * parameters / self.layout.copies
        return 2 * self.micro_batches * size / (slowest * 1e9)

    def optimizer(self, parameters: int, layers: int) -> float:
        """Return the seconds of AdamW's update, of which ZeRO divides the parameters.

        An offloaded update moves gradients to the host and weights back.
        """
        zero, machine = zero_of(self.config), self.machine
        share = parameters / (self.layout.copies if zero.stage else 1)
        if machine.core is not None:
            update = layers * machine.core.layer_update_us + machine.core.iteration_us
            return update * 1e-6 + share * machine.core.parameter_ns * 1e-9
        fixed = layers * self.software.optimizer_us * 1e-6
        size = self.software.optimizer_bytes * share
        if zero.offload_optimizer == "none":
            return fixed + self.rates.stream(size)
        offload = machine.offload
        moved = (self.rates.element + 4) * share / (offload.transfer_gbs * 1e9)
        seconds = fixed + moved + size / (offload.memory_gbs * 1e9)
        if zero.offload_optimizer == "nvme":
            seconds += 24 * share / (offload.nvme_gbs * 1e9)
        return seconds

    def muon(self, chunks: Sequence[ModelChunk]) -> float:
        """Return the seconds of Muon's update of the matrices on the slowest stage; 0 with AdamW.

        Computation and messages are divided over tensor-parallel ranks and, with a distributed
        optimizer, replicas. On a GPU the messages overlap with computation, except those of one
        round.
        """
        if self.config.optim.name != "muon":
            return 0.0
        stages = [chunks[stage :: self.layout.pipeline] for stage in range(self.layout.pipeline)]
        times = [
            (self._newton_schulz(part) + self._passes(part), self._owners(part)) for part in stages
        ]
        if self.machine.core is not None:
            return max(map(sum, times))
        return max(
            products + max(messages - products, messages / _OWNERS_ROUNDS)
            for products, messages in times
        )

    @property
    def _sharing(self) -> int:
        """Replicas that share the matrices of Muon."""
        return self.layout.copies if zero_of(self.config).stage else 1

    def _newton_schulz(self, chunks: Sequence[ModelChunk]) -> float:
        """Return the seconds of a rank's part of the products for the matrices of chunks."""
        shapes = Counter(
            shape for part in chunks for shape in chunk_matrices(self.config.model, part)
        )
        seconds = sum(count * self.rates.newton_schulz(*shape) for shape, count in shapes.items())
        return seconds / (self._sharing * self.layout.tensor)

    def _passes(self, chunks: Sequence[ModelChunk]) -> float:
        """Return the seconds of a rank's other operations on the matrices of chunks."""
        size = _MUON_BYTES if self.machine.core is None else _MUON_CACHED_BYTES
        return self.rates.stream(size * muon_elements(self.config, chunks) / self._sharing)

    def _owners(self, chunks: Sequence[ModelChunk]) -> float:
        """Return the seconds in which matrices travel to their owners and back."""
        tensor = self.layout.tensor
        elements = sum(
            rows * columns
            for part in chunks
            for rows, columns in chunk_matrices(self.config.model, part)
        )
        size = self.rates.element * elements / (tensor * self._sharing)
        groups = Group(self.machine, self._sharing, tensor), Group(self.machine, tensor)
        rounds = [_OWNERS_ROUNDS * group.gather(size / _OWNERS_ROUNDS) for group in groups]
        return 2 * sum(rounds)

    def _shared_embedding(self) -> float:
        """Return the seconds in which the first and last stage sum a tied embedding's gradient."""
        layout, model = self.layout, self.config.model
        if layout.pipeline == 1 or model.untie_embeddings_and_output_weights:
            return 0.0
        size = self.spec.padded_vocab_size // layout.tensor * model.hidden_size
        stride = layout.tensor * layout.copies * (layout.pipeline - 1)
        group = self._summing(2, stride)
        return group.all_reduce(self.software.gradient_bytes * size)

    def _summing(self, size: int, stride: int, *, sharded: bool = False) -> Group:
        """Return the group that sums gradients. DeepSpeed's CPU ranks share no memory."""
        shared = self.config.engine == "native" and sums_in_memory(size, sharded=sharded)
        return Group(self.machine, size, stride, shared, GRADIENT_PIECE)


def most_layers(chunks: Sequence[ModelChunk], stages: int) -> int:
    """Return the number of layers of the pipeline stage with most, of T5 in encoder and decoder."""
    return max(
        sum(len(chunk.layers) + len(chunk.decoder_layers) for chunk in chunks[stage::stages])
        for stage in range(stages)
    )


@lru_cache(maxsize=1024)  # a search for a layout asks for the same one with and without ZeRO
def _simulated(
    kind: Literal["gpipe", "1f1b"],
    micro_batches: int,
    virtual: int,
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    weights: tuple[float, ...] | None,
    latency: float,
) -> float:
    """Return the makespan of a schedule whose chunks have these times.

    `weights` are the times of weight gradients that are delayed, None if they are not.
    """
    stages, delayed = len(forward) // virtual, weights is not None
    schedule = build_schedule(kind, stages, micro_batches, virtual, delayed=delayed)
    return simulate(schedule, forward, backward, weights, latency=latency).makespan


@dataclass(frozen=True)
class Widths:
    """Sizes of a layer on one tensor-parallel rank."""

    query: int
    key_value: int
    ffn: int
    """Input of the second product of the MLP."""
    inner: int
    """Output of its first product: twice as wide if gated."""


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of a micro batch in one layer."""

    forward: Pass
    backward: Pass
    recomputing: Pass
    """Backward pass with the configured recomputation."""
    weights: float
    """Weight gradients in the backward pass."""


def _bounded(work: Pass, host_us: float) -> Pass:
    """Return the time of operations that the host starts while the device computes.

    It is a smooth maximum of both. The communication keeps its share of the device's time.
    """
    total, host = work.total, host_us * 1e-6
    if total <= 0.0:
        return Pass(host)
    longest = max(total, host)
    bounded = longest * ((total / longest) ** _SMOOTH + (host / longest) ** _SMOOTH) ** (
        1 / _SMOOTH
    )
    return replace(work, compute=bounded - work.exchanged)
