"""Bytes of activations that a rank keeps between forward and backward passes.

They follow Korthikanti et al. 2022 (arXiv:2205.05198, section 4), written out per element size: with 2-byte elements,
dropout and fused attention a layer's terms on a GPU add up to the paper's 34 s b h, to s b h (10 + 24 / t) with tensor
parallelism, and to 34 s b h / t with sequence parallelism as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from megacore.config.run import RunConfig
from megacore.pipeline_parallel.partition import ModelChunk
from megacore.pipeline_parallel.schedules import Direction, build_schedule


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
        """Tokens of a micro batch (b s)."""
        return self.config.train.micro_batch_size * self.config.data.seq_length

    @property
    def layer(self) -> int:
        """Bytes that a layer keeps.

        Norms, hidden dropout and the inputs of column-parallel layers are whole on every rank unless the sequence is
        divided; what lies between is divided.
        """
        model, tensor = self.config.model, self.config.parallel.tensor_model_parallel_size
        norms_and_inputs = 4 * self._hidden(self.element)
        masks = 2 * self._hidden(self._mask)
        groups = model.query_groups // tensor or model.query_groups  # fewer than ranks: gathered from all of them
        key_value = 2 * groups * model.head_dim
        divided = (2 * model.hidden_size + 2 * model.ffn_size) // tensor + key_value
        return norms_and_inputs + masks + self.tokens * self.element * divided + self.attention

    @property
    def attention(self) -> int:
        """Bytes of a layer between q, k, v and attention's output: none where it is fused.

        On CPUs torch has no fused attention with dropout: softmax, mask and product are kept in fp32, [b, n/t, s, s]
        each, and the masks of hidden dropout are as wide as activations instead of one byte.
        """
        model = self.config.model
        if self.device_type == "cuda" or not model.attention_dropout:
            return 0
        heads = model.num_attention_heads // self.config.parallel.tensor_model_parallel_size
        return 3 * 4 * self.tokens * heads * self.config.data.seq_length

    @property
    def recomputed_layer(self) -> int:
        """Bytes that a layer keeps when the rest is computed again."""
        match self.config.train.recompute:
            case "none":
                return self.layer
            case "selective":
                return self.layer - self.attention
            case "full":
                return self._hidden(self.element)

    def chunk(self, chunk: ModelChunk) -> int:
        """Bytes that a chunk keeps, its losses and logits left out."""
        layers, limit = len(chunk.layers), self.config.train.recompute_num_layers
        recomputed = layers if limit is None else min(limit, layers)
        total = recomputed * self.recomputed_layer + (layers - recomputed) * self.layer
        if chunk.has_embedding:
            total += self._hidden(self._mask)
        if chunk.has_head:
            total += 2 * self._hidden(self.element)  # the final norm's input and output
        if self.config.data.reset_attention_mask:
            total += self.tokens * self.config.data.seq_length * self.element  # one bias [b, s, s] for all its layers
        return total

    def peak(self, chunks: Sequence[ModelChunk], stage: int, micro_batches: int) -> tuple[int, int]:
        """Most that a stage with these chunks keeps at a time, over the micro batches of its schedule.

        Returns:
            Bytes of activations, and micro batches whose logits are there at a time.
        """
        parallel, sizes = self.config.parallel, [self.chunk(chunk) for chunk in chunks]
        stages, kind = parallel.pipeline_model_parallel_size, parallel.pipeline_schedule
        if kind == "1f1b":
            # What is in flight repeats itself after a few rounds.
            micro_batches = min(micro_batches, 3 * stages)
        passes = build_schedule(kind, stages, micro_batches, len(chunks))[stage]
        steps = [(1 if each.direction is Direction.FORWARD else -1, each.chunk) for each in passes]
        kept = max(accumulate(step * sizes[chunk] for step, chunk in steps))
        losses = max(accumulate(step * chunks[chunk].has_head for step, chunk in steps))
        return kept + (self.layer - self.recomputed_layer), losses

    @property
    def _mask(self) -> int:
        """Bytes of a hidden dropout's mask per activation."""
        if not self.config.model.hidden_dropout:
            return 0
        return 1 if self.device_type == "cuda" else self.element

    def _hidden(self, element: int) -> int:
        """Bytes of one rank's hidden states, [b, s, h], or [b, s/t, h] where the sequence is divided."""
        parallel = self.config.parallel
        parts = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
        return element * self.tokens * self.config.model.hidden_size // parts
