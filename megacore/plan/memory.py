"""Bytes that a rank needs for training.

Activations that are kept between forward and backward passes follow Korthikanti et al. 2022
(arXiv:2205.05198, section 4), written out per element size: with 2-byte elements, dropout and
fused attention a layer's terms on a GPU add up to the paper's 34 s b h, to s b h (10 + 24 / t) with
tensor parallelism, and to 34 s b h / t with sequence parallelism as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from megacore.config.deepspeed import ZeroSettings, asked_of, zero_of
from megacore.config.run import RunConfig
from megacore.config.spec import ModelSpec
from megacore.models.parameters import chunk_sizes
from megacore.pipeline_parallel.partition import ModelChunk, chunks_of
from megacore.pipeline_parallel.schedules import Direction, build_schedule
from megacore.plan.zero import ELEMENT_BYTES, Buffers, DeepSpeedMemory, ZeroBytes, zero_bytes

GIB = 2**30
_PROCESS_BYTES = {"cpu": 350 * 2**20, "cuda": 600 * 2**20}
"""The interpreter with torch (resident, measured), or a CUDA context with its libraries."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank, by what they hold: on the device that computes, but for the last two."""

    parameters: int
    """Number of parameters on the rank that ZeRO divides over the replicas, from which the next
    three follow."""
    weights: int
    """The weights that the model computes with, and under bf16 or fp16 the fp32 main weights."""
    gradients: int
    """The gradients that accumulate over micro batches."""
    optimizer: int
    """Adam's two fp32 moments."""
    activations: int
    """What forward passes keep for their backward passes, of all micro batches in flight."""
    logits: int
    """The output layer's logits and their gradient, where the rank has one."""
    process: int
    """Interpreter and libraries, or CUDA context."""
    buffers: int = 0
    """DeepSpeed's buckets of gradients, and the weights that ZeRO stage 3 gathers or does not
    divide."""
    step: int = 0
    """What DeepSpeed makes for the optimizer's step, when the activations are gone."""
    host: int = 0
    """In main memory, beside a GPU: what is offloaded there, with its buffers."""
    nvme: int = 0
    """On disk: what is offloaded there."""

    @property
    def total(self) -> int:
        """Bytes of the device at the peak."""
        state = self.weights + self.gradients + self.optimizer + self.buffers + self.process
        return state + max(self.activations + self.logits, self.step)


def estimate_memory(
    config: RunConfig,
    vocab_size: int,
    precision: str,
    device_type: str,
    data_parallel_size: int = 1,
) -> MemoryEstimate:
    """Peak memory of a rank of the pipeline stage that needs most.

    The arguments are those of `estimate_stages`.
    """
    stages = estimate_stages(config, vocab_size, precision, device_type, data_parallel_size)
    return max(stages, key=lambda stage: stage.total)


def estimate_stages(
    config: RunConfig,
    vocab_size: int,
    precision: str,
    device_type: str,
    data_parallel_size: int = 1,
) -> tuple[MemoryEstimate, ...]:
    """Peak memory of one rank of each pipeline stage.

    On a CPU there is one memory alone, and what is offloaded stays where it is.

    Args:
        config: the run.
        vocab_size: entries of the vocabulary before padding.
        precision: fp32, bf16 or fp16.
        device_type: cpu or cuda.
        data_parallel_size: replicas; they share the batch, and what ZeRO divides.

    Raises:
        ParallelLayoutError: layers or micro batches cannot be divided over the stages.
    """
    parallel, train = config.parallel, config.train
    stages, tensor = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    chunks, element = chunks_of(config, vocab_size), ELEMENT_BYTES[precision]
    spec, zero = ModelSpec.of(config, vocab_size), zero_of(config)
    deepspeed = None
    if config.engine == "deepspeed":
        from megacore.engine.deepspeed.settings import deepspeed_settings

        settings = deepspeed_settings(  # sizes do not depend on the device
            config, precision=precision, device_type="cuda", data_parallel_size=data_parallel_size
        )
        deepspeed = DeepSpeedMemory(settings, precision)
    kept = Activations(config, element, device_type)
    micro_batches = train.global_batch_size // (train.micro_batch_size * data_parallel_size)
    estimates = []
    for stage in range(stages):
        own = chunks[stage::stages]
        sizes = [size for chunk in own for size in chunk_sizes(spec, chunk, tensor)]
        state = _model_state(zero, deepspeed, sum(sizes), precision, data_parallel_size)
        extra = deepspeed.buffers(sizes, data_parallel_size) if deepspeed else Buffers()
        activations, losses = kept.peak(own, stage, micro_batches)
        offloaded = kept.offloaded(own, stage, micro_batches)
        here, there = state.device, state.cpu
        alone = device_type == "cpu"
        bytes_per_logit = element * losses  # their gradient takes their place
        estimates.append(
            MemoryEstimate(
                parameters=sum(sizes),
                weights=here.parameters
                + here.main_weights
                + alone * (there.parameters + there.main_weights),
                gradients=here.gradients + alone * there.gradients,
                optimizer=here.moments + alone * there.moments,
                activations=activations + alone * offloaded,
                logits=kept.predictions * spec.padded_vocab_size // tensor * bytes_per_logit,
                process=_PROCESS_BYTES[device_type],
                buffers=extra.device + alone * extra.cpu,
                step=extra.step,
                host=0 if alone else there.total + extra.cpu + offloaded,
                nvme=state.nvme.total,
            )
        )
    return tuple(estimates)


def _model_state(
    zero: ZeroSettings,
    deepspeed: DeepSpeedMemory | None,
    parameters: int,
    precision: str,
    data_parallel_size: int,
) -> ZeroBytes:
    """Return the weights, gradients and optimizer state of a rank, as its engine keeps them.

    Args:
        zero: what is divided and offloaded.
        deepspeed: what DeepSpeed is told; None is the native engine.
        parameters: on the rank, before ZeRO divides them.
        precision: fp32, bf16 or fp16.
        data_parallel_size: replicas.
    """
    if deepspeed is None:
        return zero_bytes(parameters, zero.stage, data_parallel_size, precision, gradient_bytes=4)
    return zero_bytes(
        parameters,
        zero.stage,
        data_parallel_size,
        precision,
        gradient_bytes=deepspeed.gradient_bytes,
        main_weights=deepspeed.main_weights,
        offload_optimizer=zero.offload_optimizer,
        offload_param=zero.offload_param,
    )


def engine_name(engine: str, zero: ZeroSettings) -> str:
    """Return a name as in `deepspeed ZeRO-3, optimizer on cpu, weights on nvme`."""
    if engine == "native":
        return engine
    places = {"optimizer": zero.offload_optimizer, "weights": zero.offload_param}
    moved = "".join(f", {what} on {where}" for what, where in places.items() if where != "none")
    return f"{engine} ZeRO-{zero.stage}{moved}"


@dataclass(frozen=True)
class Activations:
    """What one tensor-parallel rank keeps of a micro batch of b samples."""

    config: RunConfig
    element: int
    """Bytes of an activation."""
    device_type: str
    """cpu or cuda."""

    @property
    def tokens(self) -> int:
        """Tokens of a micro batch (b s); of T5, the encoder's."""
        return self.config.train.micro_batch_size * self.config.data.seq_length

    @property
    def predictions(self) -> int:
        """Rows of logits of a micro batch."""
        return self._decoder_tokens if self.config.family == "t5" else self.tokens

    @property
    def layer(self) -> int:
        """Bytes that a layer keeps; of T5, one of the encoder.

        Norms, hidden dropout and the inputs of column-parallel layers are whole on every rank
        unless the sequence is divided; what lies between is divided.
        """
        return self._layer(self.tokens) + self.attention

    @property
    def decoder_layer(self) -> int:
        """Bytes that a layer of T5's decoder keeps."""
        model, tokens = self.config.model, self._decoder_tokens
        inner = model.attention_size // self._tensor
        cross = 2 * self._hidden(self.element, tokens) + self._hidden(self._mask, tokens)
        cross += self.element * inner * (2 * tokens + 2 * self.tokens)
        return self._layer(tokens) + cross + self.decoder_attention

    @property
    def attention(self) -> int:
        """Bytes of a layer between q, k, v and attention's output: none where it is fused."""
        return self._scores(self.tokens, self.config.data.seq_length)

    @property
    def decoder_attention(self) -> int:
        """The same of a decoder's layer, for both of its attentions."""
        lengths = self.config.data.span_corruption.decoder_seq_length, self.config.data.seq_length
        return sum(self._scores(self._decoder_tokens, length) for length in lengths)

    @property
    def recomputed_layer(self) -> int:
        """Bytes that a layer keeps when the rest is computed again."""
        return self._recomputed(self.layer, self.attention, self.tokens)

    def offloaded(self, chunks: Sequence[ModelChunk], stage: int, micro_batches: int) -> int:
        """Most that a stage with these chunks keeps in main memory at a time.

        DeepSpeed puts there what full recomputation keeps of a layer, when it is told to.
        """
        if not self._told("cpu_checkpointing") or self.config.train.recompute != "full":
            return 0
        limit, sizes = self.config.train.recompute_num_layers, []
        for chunk in chunks:
            encoder = self._layers(len(chunk.layers), limit, self._layer_input(self.tokens), 0)
            left = None if limit is None else max(0, limit - len(chunk.layers))
            sizes.append(
                encoder
                + self._layers(
                    len(chunk.decoder_layers), left, self._layer_input(self._decoder_tokens), 0
                )
            )
        return self._most(sizes, stage, micro_batches)

    def chunk(self, chunk: ModelChunk) -> int:
        """Bytes that a chunk keeps, its losses and logits left out."""
        limit = self.config.train.recompute_num_layers
        total = self._layers(len(chunk.layers), limit, self.recomputed_layer, self.layer)
        if chunk.decoder_layers:
            kept = self._recomputed(
                self.decoder_layer, self.decoder_attention, self._decoder_tokens
            )
            left = None if limit is None else max(0, limit - len(chunk.layers))
            total += self._layers(len(chunk.decoder_layers), left, kept, self.decoder_layer)
        return total + self._ends(chunk) + self._biases(chunk)

    def _ends(self, chunk: ModelChunk) -> int:
        """What embeddings, final norms and BERT's head keep, logits left out."""
        model, t5 = self.config.model, self.config.family == "t5"
        total = 0
        if chunk.has_embedding:
            total += self._hidden(self._mask, self.tokens)
        if chunk.has_decoder_embedding:
            total += self._hidden(self._mask, self._decoder_tokens)
        # A final norm's input and output; T5 drops elements of it.
        norm = (2 + self._norm_copies) * self.element + (self._mask if t5 else 0)
        if t5 and chunk.layers and chunk.layers.stop == model.num_layers:
            total += self._hidden(norm, self.tokens)
        if chunk.has_head:
            total += self._hidden(norm, self.predictions)
        if chunk.has_head and self.config.family == "bert":
            # The inputs of the activation, of the norm and of the decoder.
            total += 3 * self._hidden(self.element, self.tokens)
        return total

    def peak(self, chunks: Sequence[ModelChunk], stage: int, micro_batches: int) -> tuple[int, int]:
        """Most that a stage with these chunks keeps at a time over its schedule's micro batches.

        Returns:
            Bytes of activations, and micro batches whose logits are there at a time.
        """
        kept = self._most([self.chunk(chunk) for chunk in chunks], stage, micro_batches)
        losses = self._most([int(chunk.has_head) for chunk in chunks], stage, micro_batches)
        return kept + self._working_set(chunks), losses

    def _most(self, sizes: Sequence[int], stage: int, micro_batches: int) -> int:
        """Most that is there at a time of what a micro batch has on each chunk of a stage."""
        parallel = self.config.parallel
        stages, kind = parallel.pipeline_model_parallel_size, parallel.pipeline_schedule
        if kind == "1f1b":
            # What is in flight repeats itself after a few rounds.
            micro_batches = min(micro_batches, 3 * stages)
        passes = build_schedule(kind, stages, micro_batches, len(sizes))[stage]
        return max(
            accumulate(
                sizes[each.chunk] * (1 if each.direction is Direction.FORWARD else -1)
                for each in passes
            )
        )

    def _working_set(self, chunks: Sequence[ModelChunk]) -> int:
        """What the layer that is computed again needs beside what it kept."""
        encoder, decoder = (
            any(chunk.layers for chunk in chunks),
            any(chunk.decoder_layers for chunk in chunks),
        )
        again = self._recomputed(self.decoder_layer, self.decoder_attention, self._decoder_tokens)
        return max(
            (self.layer - self.recomputed_layer) * encoder, (self.decoder_layer - again) * decoder
        )

    @property
    def _tensor(self) -> int:
        return self.config.parallel.tensor_model_parallel_size

    @property
    def _decoder_tokens(self) -> int:
        """Tokens of a micro batch in T5's decoder."""
        return (
            self.config.train.micro_batch_size * self.config.data.span_corruption.decoder_seq_length
        )

    @property
    def _mask(self) -> int:
        """Bytes of a hidden dropout's mask per activation."""
        if not self.config.model.hidden_dropout:
            return 0
        return 1 if self.device_type == "cuda" else self.element

    @property
    def _norm_copies(self) -> int:
        """Hidden states that a norm keeps besides its input.

        On CPUs torch's RMSNorm is made of several operations.
        """
        return int(self.config.model.normalization == "rmsnorm" and self.device_type == "cpu")

    def _layer(self, tokens: int) -> int:
        """What a layer with self-attention keeps beside its scores."""
        model, tensor = self.config.model, self._tensor
        norms_and_inputs = (4 + 2 * self._norm_copies) * self._hidden(self.element, tokens)
        masks = 2 * self._hidden(self._mask, tokens)
        # fewer than ranks: gathered from all of them
        groups = model.query_groups // tensor or model.query_groups
        key_value = 2 * groups * model.head_dim
        # Of a gated unit: the gate before and after its activation, the other half, and their
        # product.
        inner = 4 if model.gated else 1 if model.activation == "relu" else 2
        divided = (2 * model.attention_size + inner * model.ffn_size) // tensor + key_value
        if model.qk_layernorm:
            divided += (1 + self._norm_copies) * (model.attention_size // tensor + key_value // 2)
        if self.config.family == "t5" and model.hidden_dropout:  # within the MLP as well
            copy = self.element if model.activation == "relu" else 0
            masks += tokens * (self._mask + copy) * model.ffn_size // tensor
        return norms_and_inputs + masks + tokens * self.element * divided

    def _scores(self, tokens: int, keys: int) -> int:
        """On CPUs torch has no fused attention with dropout or with a bias that is trained.

        Softmax, mask and product are then kept in fp32, [b, n/t, s, keys] each, and the masks of
        hidden dropout are as wide as activations instead of one byte.
        """
        model = self.config.model
        trained = model.position_embedding_type == "relative"
        if self.device_type == "cuda" or not (model.attention_dropout or trained):
            return 0
        kept = 3 if model.attention_dropout else 1
        return kept * 4 * tokens * model.num_attention_heads // self._tensor * keys

    def _recomputed(self, whole: int, attention: int, tokens: int) -> int:
        match self.config.train.recompute:
            case "none":
                return whole
            case "selective":
                return whole - attention
            case "full":
                return 0 if self._told("cpu_checkpointing") else self._layer_input(tokens)

    def _layer_input(self, tokens: int) -> int:
        """What full recomputation keeps of a layer.

        DeepSpeed's tensor-parallel ranks may divide it.
        """
        whole = self._hidden(self.element, tokens)
        return whole // self._tensor if self._told("partition_activations") else whole

    def _told(self, name: str) -> bool:
        """Whether DeepSpeed is told to do this with what recomputation keeps."""
        return self.config.engine == "deepspeed" and bool(
            asked_of(self.config).values.get(f"activation_checkpointing.{name}")
        )

    def _layers(self, layers: int, limit: int | None, recomputed_layer: int, layer: int) -> int:
        """Of some layers, of which the first `limit` (None: all) recompute."""
        recomputed = layers if limit is None else min(limit, layers)
        return recomputed * recomputed_layer + (layers - recomputed) * layer

    def _biases(self, chunk: ModelChunk) -> int:
        """What is added to the scores, once for all layers of a chunk."""
        config, length = self.config, self.config.data.seq_length
        heads = config.model.num_attention_heads // self._tensor
        match config.model.position_embedding_type:
            case "relative":
                decoder = config.data.span_corruption.decoder_seq_length
                whole = (len(chunk.layers) > 0) * self.tokens * length
                whole += (
                    len(chunk.decoder_layers) > 0
                ) * decoder**2  # without padding's mask, the same for all samples
                return whole * heads * self.element
            case "alibi":
                samples = config.train.micro_batch_size if config.data.reset_attention_mask else 1
                return samples * heads * length**2 * self.element
        if config.data.reset_attention_mask:
            return self.tokens * length * self.element  # one bias [b, s, s]
        window = config.model.sliding_window
        return length**2 * self.element if window is not None and window < length else 0

    def _hidden(self, element: int, tokens: int) -> int:
        """Bytes of one rank's hidden states, [b, s, h], or [b, s/t, h] of a divided sequence."""
        parts = self._tensor if self.config.parallel.sequence_parallel else 1
        return element * tokens * self.config.model.hidden_size // parts
