"""Causal language models with Megatron-LM's parameter names: GPT-2 (Radford et al. 2019) and its descendants.

What makes a Llama or a GPT-NeoX of it are values of the configuration: norms, positions, activation, heads, biases.
"""

import torch
from torch import Tensor

from megacore.config.model import ModelConfig
from megacore.config.train import Recompute
from megacore.models.base import Model
from megacore.models.inputs import ModelInput
from megacore.models.layers.attention_bias import alibi_slopes, attention_bias
from megacore.models.layers.cache import KeyValueCache, positions_of
from megacore.models.layers.embedding import Embedding, OutputLayer
from megacore.models.layers.rotary import rotary_tables
from megacore.models.layers.shared import Shared
from megacore.models.layers.transformer import Transformer
from megacore.models.losses import LM_LOSS, Losses, LossTerm
from megacore.parallel.mesh import ALONE, ParallelGroup
from megacore.pipeline_parallel.partition import ModelChunk
from megacore.tensor_parallel import column_parallel, vocab_parallel_cross_entropy
from megacore.tensor_parallel.mappings import gather_from_tensor_parallel_region

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
"""The table of tokens, which is the weight of the output layer too unless that is untied."""


class GPTModel(Model):
    """A causal language model, or a chunk of one.

    Parameters are fp32 and uninitialised; `megacore.models.build_model` builds one with its initial weights. Names
    are those of the whole model, whatever the chunk. A chunk with the head but without the embedding holds a copy of
    the table of tokens, unless the output layer has weights of its own.

    Args:
        model: the architecture.
        padded_vocab_size: rows of the embedding (v); the padding's rows are ordinary rows that no text ever names.
        max_position_embeddings: the longest sequence it takes, in tokens.
        chunk: the part of the model; None is all of it.
        recompute: what the backward pass computes once more, see `TransformerLayer`.
        recompute_num_layers: in how many of the chunk's layers, the first ones; None is all.
        label_smoothing: see `vocab_parallel_cross_entropy`; in training alone.
        z_loss: likewise.
        tp: the ranks that share each layer.
        sequence_parallel: whether activations between layers are divided along the sequence.
        device: where the parameters are; "meta" allocates nothing.

    Raises:
        ParallelLayoutError: heads, widths or vocabulary cannot be divided over the ranks.
    """

    loss_names = (LM_LOSS,)

    def __init__(
        self,
        model: ModelConfig,
        *,
        padded_vocab_size: int,
        max_position_embeddings: int,
        chunk: ModelChunk | None = None,
        recompute: Recompute = "none",
        recompute_num_layers: int | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        tp: ParallelGroup = ALONE,
        sequence_parallel: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.tp = tp
        self.sequence_parallel = sequence_parallel and tp.size > 1
        self.padded_vocab_size = padded_vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.has_embedding = chunk is None or chunk.has_embedding
        self.has_head = chunk is None or chunk.has_head
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.model = model
        untied = model.untie_embeddings_and_output_weights
        if self.has_embedding or (self.has_head and not untied):
            self.embedding = Embedding(
                model,
                padded_vocab_size,
                max_position_embeddings,
                table_only=not self.has_embedding,
                tp=tp,
                sequence_parallel=self.sequence_parallel,
                device=device,
            )
        self.encoder = Transformer(
            model,
            range(model.num_layers) if chunk is None else chunk.layers,
            final_layernorm=self.has_head,
            recompute=recompute,
            recompute_num_layers=recompute_num_layers,
            tp=tp,
            sequence_parallel=self.sequence_parallel,
            device=device,
        )
        self.output_layer = (
            OutputLayer(padded_vocab_size, model.hidden_size, tp=tp, device=device)
            if self.has_head and untied
            else None
        )

    @property
    def shared_parameters(self) -> frozenset[str]:
        """Parameters that another chunk holds too; the gradients of both are summed."""
        tied = not self.model.untie_embeddings_and_output_weights
        return frozenset({WORD_EMBEDDINGS} if tied and self.has_embedding != self.has_head else ())

    def forward(
        self,
        tokens: Tensor,
        *,
        position_ids: Tensor | None = None,
        present: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Logits of the next token, by the whole model, gathered over the ranks.

        Args:
            tokens: [b, s] ids.
            position_ids: [b, s]; None counts on from what the cache holds.
            present: [b, s] bool, with a cache of all its tokens and these: False is padding.
            cache: keys and values of the tokens before; those of `tokens` are added.

        Returns:
            [b, s, v].
        """
        assert self.has_embedding
        assert self.has_head
        if cache is not None and position_ids is None:
            position_ids = positions_of(cache.length, tokens.shape[1], tokens.device)
        hidden = self.embedding(tokens, position_ids=position_ids)
        shared = self._shared(hidden, position_ids, present=present, cache=cache)
        hidden = self.encoder(hidden, shared=shared)
        if cache is not None:
            cache.advance(tokens.shape[1])
        return gather_from_tensor_parallel_region(self._local_logits(hidden), self.tp)

    def loss(self, tokens: Tensor, labels: Tensor, *, dropout_seed: int | None = None) -> Tensor:
        """Loss of each label, by the whole model: [b, s] ids and [b, s] ids -> [b, s] in fp32."""
        assert self.has_embedding
        found = self.run(ModelInput(tokens, labels), dropout_seed=dropout_seed)
        assert isinstance(found, dict)
        return found[LM_LOSS].losses

    def run(
        self, given: ModelInput | None, hidden: Tensor | None = None, *, dropout_seed: int | None = None
    ) -> Tensor | Losses:
        """Activations [b, s, h], with sequence parallelism [b, s/t, h]; from the head the loss of each label, [b, s].

        Losses are fp32; the logits are not gathered for them.
        """
        positions = None if given is None else given.position_ids
        if self.has_embedding:
            assert given is not None
            hidden = self.embedding(given.tokens, dropout_seed, position_ids=positions)
        assert hidden is not None
        shared = self._shared(hidden, positions, documents=None if given is None else given.documents)
        hidden = self.encoder(hidden, dropout_seed, shared=shared)
        if not self.has_head:
            return hidden
        assert given is not None
        losses = vocab_parallel_cross_entropy(
            self._local_logits(hidden),
            given.labels,
            self.tp,
            label_smoothing=self.label_smoothing if self.training else 0.0,
            z_loss=self.z_loss if self.training else 0.0,
        )
        return {LM_LOSS: LossTerm(losses, given.loss_mask)}

    def _shared(
        self,
        hidden: Tensor,
        position_ids: Tensor | None,
        *,
        documents: Tensor | None = None,
        present: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Shared:
        """What the layers have in common for hidden states [b, s(/t), h]."""
        model, device = self.model, hidden.device
        queries = hidden.shape[1] * (self.tp.size if self.sequence_parallel else 1)
        keys = queries + (0 if cache is None else cache.length)
        rotary = slopes = None
        if model.position_embedding_type == "rope":
            if position_ids is None:
                position_ids = positions_of(0, queries, device)
            rotary = rotary_tables(position_ids, model.rotary_dim, model.rotary_base, hidden.dtype)
        elif model.position_embedding_type == "alibi":
            slopes = alibi_slopes(model.num_attention_heads).to(device).chunk(self.tp.size)[self.tp.rank]
        bias = attention_bias(
            queries=queries,
            keys=keys,
            causal=True,
            dtype=hidden.dtype,
            device=device,
            documents=documents,
            present=present,
            window=model.sliding_window if model.sliding_window is not None and model.sliding_window < keys else None,
            slopes=slopes,
        )
        return Shared(bias, rotary, cache=cache)

    def _local_logits(self, hidden: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, v/t]."""
        table = self.embedding.word_embeddings.weight if self.output_layer is None else self.output_layer.weight
        return column_parallel(hidden, [(table, None)], self.tp, self.sequence_parallel)[0]
