"""Estimates of the activations that a rank stores between forward and backward passes.

They follow Korthikanti et al. 2022 (arXiv:2205.05198, section 4), generalized to any element size:
with 2-byte elements, dropout and fused attention, the terms of a layer on a GPU add up to the
paper's 34 s b h, to s b h (10 + 24 / t) with tensor parallelism, and to 34 s b h / t with sequence
parallelism too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from megacore.config.deepspeed import user_settings_of
from megacore.config.run import RunConfig
from megacore.pipeline_parallel.partition import ModelChunk
from megacore.pipeline_parallel.schedules import Direction, Pass, Pipeline, build_schedule

_LOSS_BLOCK = 1 << 25
"""Number of logits of a block that `megacore.kernels.cross_entropy` copies to fp32 on a GPU."""
_SPAN = 8
"""Bytes of a query's first and last visible key."""
_BLOCK, _LISTS = 128, 16
"""Tokens of a block of FlexAttention, and bytes of a block in all lists of blocks."""
_AHEAD = 2
"""Number of messages that `megacore.pipeline_parallel.executor` receives in advance."""
_schedule = lru_cache(maxsize=16)(build_schedule)
"""`build_schedule`, of which every stage takes its part."""


@dataclass(frozen=True)
class MicroBatch:
    """Micro batch of b samples on a rank."""

    config: RunConfig

    @property
    def tokens(self) -> int:
        """Tokens of a micro batch on a rank (b s/cp); for T5, of the encoder."""
        whole = self.config.train.micro_batch_size * self.config.data.seq_length
        return whole // self.config.parallel.context_parallel_size

    @property
    def decoder_tokens(self) -> int:
        """Tokens of a micro batch in T5's decoder."""
        span = self.config.data.span_corruption
        return self.config.train.micro_batch_size * span.decoder_seq_length

    @property
    def predictions(self) -> int:
        """Number of rows of logits of a micro batch."""
        return self.decoder_tokens if self.config.family == "t5" else self.tokens


@dataclass(frozen=True)
class Activations(MicroBatch):
    """Activations that a tensor-parallel rank stores for a micro batch of b samples."""

    element: int
    """Bytes per element of an activation."""
    device_type: str
    """Type of the device: cpu or cuda."""

    @property
    def layer(self) -> int:
        """Bytes that a layer stores; for T5, a layer of the encoder.

        Norms, hidden dropout and the inputs of column-parallel layers have their full size on every
        rank unless the sequence is divided; tensors between them are divided.
        """
        return self._layer(self.tokens) + self._gathered + self.attention

    @property
    def decoder_layer(self) -> int:
        """Bytes that a layer of T5's decoder stores."""
        model, tokens = self.config.model, self.decoder_tokens
        inner = model.attention_size // self._tensor
        cross = 2 * self._hidden(self.element, tokens) + self._hidden(self._mask, tokens)
        cross += self.element * inner * (2 * tokens + 2 * self.tokens)
        return self._layer(tokens) + cross + self.decoder_attention

    @property
    def attention(self) -> int:
        """Bytes of a layer between q, k, v and attention's output; 0 for fused attention."""
        return self._scores(self.tokens, self.config.data.seq_length)

    @property
    def _gathered(self) -> int:
        """Bytes of a layer's gathered keys and values [2, b, g/t, s, d] with divided sequences.

        Attention keeps them, so that this rank's are not kept.
        """
        parts = self.config.parallel.context_parallel_size
        return (parts - 1) * self.tokens * self.element * self._key_value

    @property
    def decoder_attention(self) -> int:
        """Bytes of a decoder layer between q, k, v and the outputs of both its attentions."""
        lengths = self.config.data.span_corruption.decoder_seq_length, self.config.data.seq_length
        return sum(self._scores(self.decoder_tokens, length) for length in lengths)

    @property
    def recomputed_layer(self) -> int:
        """Bytes that a layer stores with the configured recomputation."""
        return self._recomputed(self.layer, self._gathered + self.attention, self.tokens)

    def offloaded(self, chunks: Sequence[ModelChunk], stage: int, micro_batches: int) -> int:
        """Return the peak bytes of activations in host memory on a stage with these chunks.

        With `cpu_checkpointing`, DeepSpeed stores the activations of full recomputation there.
        """
        if not self._has_option("cpu_checkpointing") or self.config.train.recompute != "full":
            return 0
        sizes = []
        for chunk in chunks:
            encoder, decoder = recomputed(chunk, self.config.train.recompute_num_layers)
            inputs = self._layer_input(self.tokens), self._layer_input(self.decoder_tokens)
            sizes.append(encoder * inputs[0] + decoder * inputs[1])
        return self._most(sizes, [0] * len(sizes), stage, micro_batches)

    def chunk(self, chunk: ModelChunk) -> int:
        """Return the bytes that a chunk stores, without losses and logits."""
        layers = sum(stored for _, stored, _ in self._stacks(chunk))
        return layers + self._ends(chunk) + self._biases(chunk)

    def _ends(self, chunk: ModelChunk) -> int:
        """Return the bytes stored by embeddings, final norms and BERT's head, without logits."""
        model, t5 = self.config.model, self.config.family == "t5"
        total = 0
        if chunk.has_embedding:
            total += self._hidden(self._mask, self.tokens)
        if chunk.has_decoder_embedding:
            total += self._hidden(self._mask, self.decoder_tokens)
        # Input and output of a final norm; T5 also applies dropout to the output.
        norm = (2 + self._norm_copies) * self.element + (self._mask if t5 else 0)
        if t5 and chunk.layers and chunk.layers.stop == model.num_layers:
            total += self._hidden(norm, self.tokens)
        if chunk.has_head:
            total += self._hidden(norm, self.predictions)
        if chunk.has_head and self.config.family == "bert":
            # Inputs of the activation, the norm and the decoder.
            total += 3 * self._hidden(self.element, self.tokens)
        return total

    def stored(
        self, chunks: Sequence[ModelChunk], stage: int, micro_batches: int
    ) -> tuple[int, int]:
        """Return the most activations that a stage with these chunks stores over its schedule.

        They are the bytes of activations with those of a recomputed layer, and the largest number
        of micro batches whose logits exist at a time.
        """
        sizes = [self.chunk(chunk) for chunk in chunks]
        heads = [int(chunk.has_head) for chunk in chunks]
        kept = [self._kept(chunk) for chunk in chunks]
        activations = self._most(sizes, kept, stage, micro_batches)
        losses = self._most(heads, heads, stage, micro_batches)
        again = max((more for chunk in chunks for _, _, more in self._stacks(chunk)), default=0)
        return activations + again, losses

    def peak(
        self,
        chunks: Sequence[ModelChunk],
        stage: int,
        micro_batches: int,
        logits: int,
        buffers: tuple[int, int] = (0, 0),
    ) -> int:
        """Return the peak bytes of forward and backward passes of a stage on a GPU.

        Each pass needs what passes before it stored, the messages between stages (`_messages`), and
        temporary tensors: in the forward pass of the head those of the loss (`loss_blocks`), in
        its backward pass those of `loss_gradient`, and in that of a layer those of
        `layer_gradient`. The layers of a chunk run backward when its logits do not exist any more,
        those of an encoder when the decoder's activations do not.

        Args:
            chunks: chunks of the stage.
            stage: number of the pipeline stage.
            micro_batches: number of micro batches of a step.
            logits: bytes of a micro batch's logits.
            buffers: bytes of gathered weights and of gradients before their reduction, in forward
                and in backward passes.
        """
        passes = self._passes(stage, micro_batches, len(chunks))
        sizes = [self.chunk(chunk) + logits * chunk.has_head for chunk in chunks]
        delayed = _delayed_chunks(passes)
        kept = [
            self._kept(chunk) + logits * chunk.has_head if number in delayed else 0
            for number, chunk in enumerate(chunks)
        ]
        losses = [chunk.has_head * self.loss_blocks(logits) for chunk in chunks]
        # Delayed weight gradients keep the logits while the layers run backward.
        gradients = [
            self._backward(chunk, 0 if number in delayed else logits)
            for number, chunk in enumerate(chunks)
        ]
        messages = [self._messages(chunks, posted) for posted in range(_AHEAD + 1)]
        pipeline = Pipeline(self.config.parallel.pipeline_model_parallel_size, len(chunks))
        receives = [pipeline.receive(stage, each) is not None for each in passes]
        stored, left, peak = 0, sum(receives), 0
        for each, receive in zip(passes, receives, strict=True):
            left -= receive
            change = _change(each, sizes, kept)
            match each.direction:
                case Direction.FORWARD:
                    temporary = losses[each.chunk] + buffers[0]
                case Direction.BACKWARD:
                    temporary = gradients[each.chunk] + buffers[1]
                case Direction.WEIGHTS:
                    temporary = buffers[1]
            most = max(stored, stored + change)
            peak = max(peak, most + messages[min(_AHEAD, left)] + temporary)
            stored += change
        return peak

    def _backward(self, chunk: ModelChunk, logits: int) -> int:
        """Return the bytes of a chunk's backward pass beyond what its forward pass stored."""
        stored, most = 0, []
        if chunk.has_head:
            most.append(self.loss_gradient)
            stored -= logits
        for tokens, activations, again in self._stacks(chunk):
            gradient = self._hidden(self.element, tokens)
            most.append(stored + again + gradient + self.layer_gradient(tokens))
            stored -= activations
        return max(most, default=0)

    def _stacks(self, chunk: ModelChunk) -> Iterator[tuple[int, int, int]]:
        """Yield the stacks of layers of a chunk in the order of their backward passes.

        Yields:
            The tokens of a stack, the bytes that it stores, and those that the recomputation of a
            layer adds.
        """
        encoder, decoder = recomputed(chunk, self.config.train.recompute_num_layers)
        if chunk.decoder_layers:
            layer, tokens = self.decoder_layer, self.decoder_tokens
            saved = layer - self._recomputed(layer, self.decoder_attention, tokens)
            yield tokens, len(chunk.decoder_layers) * layer - decoder * saved, saved
        if chunk.layers:
            layer, saved = self.layer, self.layer - self.recomputed_layer
            yield self.tokens, len(chunk.layers) * layer - encoder * saved, saved

    def _messages(self, chunks: Sequence[ModelChunk], posted: int) -> int:
        """Return the bytes of messages between pipeline stages.

        A pass has the gradient or output that it received or computes, the last message that was
        sent, and buffers for `posted` further messages.
        """
        if self.config.parallel.pipeline_model_parallel_size == 1:
            return 0
        decoder = any(chunk.decoder_layers for chunk in chunks)
        tokens = self.tokens + self.decoder_tokens * decoder
        return (1 + posted) * self._hidden(self.element, tokens)

    def _passes(self, stage: int, micro_batches: int, chunks: int) -> tuple[Pass, ...]:
        """Return the passes of a stage; 1F1B's for fewer micro batches with the same peak."""
        parallel = self.config.parallel
        stages, kind = parallel.pipeline_model_parallel_size, parallel.pipeline_schedule
        if kind == "1f1b":
            # The number of micro batches in flight repeats after a few rounds.
            micro_batches = min(micro_batches, 3 * stages)
        delayed = parallel.delay_weight_gradients
        return _schedule(kind, stages, micro_batches, chunks, delayed=delayed)[stage]

    def _most(
        self, sizes: Sequence[int], kept: Sequence[int], stage: int, micro_batches: int
    ) -> int:
        """Return the peak over a stage's schedule, of micro batches with `sizes` on its chunks.

        Delayed weight gradients need `kept` of it after the backward pass.
        """
        passes = self._passes(stage, micro_batches, len(sizes))
        delayed = _delayed_chunks(passes)
        kept = [size if chunk in delayed else 0 for chunk, size in enumerate(kept)]
        return max(accumulate(_change(each, sizes, kept) for each in passes))

    def _kept(self, chunk: ModelChunk) -> int:
        """Return the bytes of a chunk, without logits, that delayed weight gradients need.

        They are inputs and gradients of the outputs of all linear layers, whole sequences where
        tensor-parallel ranks divide them.
        """
        model, tensor, hidden = self.config.model, self._tensor, self.config.model.hidden_size
        query = model.attention_size // tensor
        ffn = model.ffn_size // tensor
        attention = 2 * hidden + 2 * query + self._key_value
        layer = attention + 2 * hidden + (3 if model.gated else 2) * ffn
        tokens = len(chunk.layers) * self.tokens * layer
        decoder = self.decoder_tokens * (layer + 2 * hidden + 2 * query)
        decoder += self.tokens * (hidden + self._key_value)
        tokens += len(chunk.decoder_layers) * decoder
        head = hidden + (2 * hidden if self.config.family == "bert" else 0)
        return self.element * (tokens + self.predictions * head * chunk.has_head)

    def loss_blocks(self, logits: int) -> int:
        """Return the additional bytes of the loss of a micro batch on a GPU.

        It is computed in fp32 blocks of its logits, of `logits` bytes: one exists at a time, two
        with a divided vocabulary.
        """
        copies = (1 if self._tensor == 1 else 2) - (self.element == 4)
        if self.config.model.final_logit_softcapping is not None:
            copies += 2  # the capped logits and the cap's derivative
        return copies * 4 * min(_LOSS_BLOCK, logits // self.element)

    def evaluation(self, logits: int) -> int:
        """Return the bytes of a micro batch's forward pass without gradients on a GPU.

        It is less than a layer stores, and the loss, with `logits` bytes of logits.
        """
        return max(self.layer, logits + self.loss_blocks(logits))

    @property
    def loss_gradient(self) -> int:
        """Additional bytes of the output layer's backward pass on a GPU.

        They are the gradient of its input, the input times the losses' gradients in fp32, and this
        product in the type of the activations: [b, s, h] each. With sequence parallelism, the
        gathered input exists twice, and the gradient also as this rank's part of the sequence.
        """
        whole = self.predictions * self.config.model.hidden_size
        elements = self.element + 4 + (self.element if self.element < 4 else 0)
        gathered = 0
        if self.config.parallel.sequence_parallel:
            gathered = 2 * whole * self.element + self._hidden(self.element, self.predictions)
        return whole * elements + gathered

    def layer_gradient(self, tokens: int) -> int:
        """Return the most additional bytes inside the backward pass of a layer on a GPU.

        The MLP needs most, because all its activations are stored when it begins. In its order:
        with sequence parallelism the output's gradient is gathered, which takes two copies
        [b, s, h]; then one copy and the gradient of the second matrix product's input
        [b, s, f/t]; the gradients of the activation's inputs, when that input is freed; last the
        gradient of the MLP's input, when all activations inside the MLP are freed. With sequence
        parallelism the last needs the gathered input, twice, and the copy that is
        reduce-scattered.

        Args:
            tokens: tokens of a micro batch (b s).
        """
        model, parallel = self.config.model, self.config.parallel
        whole = self.element * tokens * model.hidden_size
        inner = self.element * tokens * model.ffn_size // self._tensor
        dropout = self._hidden(self.element, tokens) if model.hidden_dropout else 0
        inner_dropout = self.config.family == "t5" and model.hidden_dropout
        shared = model.activation == "relu" and not inner_dropout  # with the product's input
        gradients = 2 if model.gated else 1
        stored = 4 if model.gated else 1 if shared else 2
        gather = whole if parallel.sequence_parallel else 0
        scatter = self._hidden(self.element, tokens) if parallel.sequence_parallel else 0
        return dropout + max(
            2 * gather,
            gather + inner,
            (gradients + shared) * inner,
            (gradients - stored) * inner + whole + 3 * gather + scatter,
        )

    @property
    def _tensor(self) -> int:
        return self.config.parallel.tensor_model_parallel_size

    @property
    def _mask(self) -> int:
        """Bytes per element of hidden dropout's mask; on CPUs it is as wide as an activation."""
        if not self.config.model.hidden_dropout:
            return 0
        return 1 if self.device_type == "cuda" else self.element

    @property
    def _key_value(self) -> int:
        """Elements of a token's keys and values on a rank.

        With fewer groups than tensor-parallel ranks, they are gathered from all ranks.
        """
        model = self.config.model
        return 2 * (model.query_groups // self._tensor or model.query_groups) * model.head_dim

    @property
    def _norm_copies(self) -> int:
        """Number of hidden states that a norm stores besides its input.

        On CPUs, torch's RMSNorm consists of several operations.
        """
        return int(self.config.model.normalization == "rmsnorm" and self.device_type == "cpu")

    def _layer(self, tokens: int) -> int:
        """Return the bytes that a layer with self-attention stores, without its scores."""
        model, tensor = self.config.model, self._tensor
        norms = 4 if model.norm_position == "sandwich" else 2
        norms_and_inputs = (2 + norms + norms * self._norm_copies) * self._hidden(
            self.element, tokens
        )
        masks = 2 * self._hidden(self._mask, tokens)
        key_value = self._key_value
        # A gated unit stores the gate before and after its activation, the other half, and their
        # product.
        inner = 4 if model.gated else 1 if model.activation == "relu" else 2
        divided = (2 * model.attention_size + inner * model.ffn_size) // tensor + key_value
        if model.qk_layernorm:
            divided += (1 + self._norm_copies) * (model.attention_size // tensor + key_value // 2)
            if model.qk_layernorm_scope == "projection":  # the norms' inputs are made contiguous
                divided += key_value // 2
                if model.query_groups == model.num_attention_heads:
                    divided += model.attention_size // tensor
        if self.config.family == "t5" and model.hidden_dropout:  # dropout inside the MLP
            copy = self.element if model.activation == "relu" else 0
            masks += tokens * (self._mask + copy) * model.ffn_size // tensor
        return norms_and_inputs + masks + tokens * self.element * divided

    def _scores(self, tokens: int, keys: int) -> int:
        """Return the bytes of attention scores that unfused attention stores.

        On CPUs, torch has no fused attention with dropout or with a trained bias. It then stores
        the softmax and, with dropout, the mask and the product: fp32 [b, n/t, s, keys] each. With a
        soft cap, only FlexAttention on GPUs is fused.
        """
        model = self.config.model
        trained = model.position_embedding_type == "relative"
        scores = tokens * model.num_attention_heads // self._tensor * keys
        if self._blocked:
            return 0
        if model.attn_logit_softcapping is not None:
            return self._softcapped_bytes * scores
        if self.device_type == "cuda" or not (model.attention_dropout or trained):
            return 0
        copies = 3 if model.attention_dropout else 1
        return copies * 4 * scores

    @property
    def _softcapped_bytes(self) -> int:
        """Bytes per score that attention with a soft cap stores.

        They are tanh and softmax in fp32, the weights in the type of the activations, and with
        dropout its mask and the dropped weights.
        """
        mask = 1 if self.device_type == "cuda" else self.element
        dropped = mask + self.element if self.config.model.attention_dropout else 0
        return 8 + (self.element if self.element < 4 else 0) + dropped

    def _recomputed(self, full: int, attention: int, tokens: int) -> int:
        match self.config.train.recompute:
            case "none":
                return full
            case "selective":
                return full - attention
            case "full":
                return 0 if self._has_option("cpu_checkpointing") else self._layer_input(tokens)

    def _layer_input(self, tokens: int) -> int:
        """Return the bytes that full recomputation stores for a layer.

        DeepSpeed's tensor-parallel ranks may divide them.
        """
        full = self._hidden(self.element, tokens)
        return full // self._tensor if self._has_option("partition_activations") else full

    def _has_option(self, name: str) -> bool:
        """Return True if DeepSpeed is used with this option of its activation checkpointing."""
        return self.config.engine == "deepspeed" and bool(
            user_settings_of(self.config).values.get(f"activation_checkpointing.{name}")
        )

    def _biases(self, chunk: ModelChunk) -> int:
        """Return the bytes of the attention biases, which all layers of a chunk share."""
        config, length = self.config, self.config.data.seq_length
        heads = config.model.num_attention_heads // self._tensor
        match config.model.position_embedding_type:
            case "relative":
                decoder = config.data.span_corruption.decoder_seq_length
                elements = (len(chunk.layers) > 0) * self.tokens * length
                elements += (
                    len(chunk.decoder_layers) > 0
                ) * decoder**2  # without the padding mask: the same for all samples
                return elements * heads * self.element
            case "alibi" if not self._blocked:
                samples = config.train.micro_batch_size if config.data.reset_attention_mask else 1
                return samples * heads * length**2 * self.element
        window = config.model.sliding_window
        windowed = window is not None and window < length
        # First and last visible key of each query, or a number for each query and key.
        mask = length * self.element
        if self._spanned:
            mask = _SPAN
        elif self._blocked:
            mask = _SPAN + _LISTS * length // _BLOCK**2
        if config.data.reset_attention_mask:
            alternates = config.model.window_attn_skip_freq and windowed
            return (2 if alternates else 1) * self.tokens * mask
        parts = self.config.parallel.context_parallel_size
        if parts > 1:
            return length // parts * mask
        alibi = config.model.position_embedding_type == "alibi"
        return length * mask if windowed or alibi else 0

    @property
    def _blocked(self) -> bool:
        """True if FlexAttention takes masks as spans in blocks: in compiled layers on GPUs."""
        config = self.config
        return (
            self.device_type == "cuda"
            and config.engine == "native"
            and config.train.compile != "off"
            and config.train.kernels.attention != "plain"
            and not config.model.attention_dropout
            and config.model.head_dim >= 16
        )

    @property
    def _spanned(self) -> bool:
        """True if the attention kernel takes masks as spans: on CPUs."""
        return (
            self.device_type == "cpu"
            and self.config.model.attn_logit_softcapping is None
            and not self.config.model.attention_dropout
        )

    def _hidden(self, element: int, tokens: int) -> int:
        """Return the bytes of a rank's hidden states.

        Their shape is [b, s, h], or [b, s/t, h] for a divided sequence.
        """
        parts = self._tensor if self.config.parallel.sequence_parallel else 1
        return element * tokens * self.config.model.hidden_size // parts


def recomputed(chunk: ModelChunk, limit: int | None) -> tuple[int, int]:
    """Return the number of a chunk's recomputed layers, in the encoder and in T5's decoder.

    The first `limit` layers of the chunk recompute, those of the encoder before those of the
    decoder; None means all.
    """
    encoder, decoder = len(chunk.layers), len(chunk.decoder_layers)
    if limit is None:
        return encoder, decoder
    return min(limit, encoder), min(max(0, limit - encoder), decoder)


def _delayed_chunks(passes: Sequence[Pass]) -> frozenset[int]:
    """Return the chunks of a stage whose weight gradients are separate passes."""
    return frozenset(each.chunk for each in passes if each.direction is Direction.WEIGHTS)


def _change(each: Pass, sizes: Sequence[int], kept: Sequence[int]) -> int:
    """Return by how much a pass changes what is stored.

    A forward pass stores `sizes` of its chunk; of it, or in its place, delayed weight gradients
    need `kept` after the backward pass.
    """
    match each.direction:
        case Direction.FORWARD:
            return sizes[each.chunk]
        case Direction.BACKWARD:
            return kept[each.chunk] - sizes[each.chunk]
        case Direction.WEIGHTS:
            return -kept[each.chunk]
