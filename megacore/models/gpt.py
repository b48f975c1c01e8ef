"""GPT-2 (Radford et al. 2019) with Megatron-LM's parameter names."""

import torch
from torch import Tensor, nn

from megacore.config.model import ModelConfig
from megacore.config.train import Recompute
from megacore.models.layers.embedding import Embedding
from megacore.models.layers.transformer import Transformer
from megacore.parallel.mesh import ALONE, ParallelGroup
from megacore.tensor_parallel import column_parallel, vocab_parallel_cross_entropy
from megacore.tensor_parallel.mappings import gather_from_tensor_parallel_region

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
"""The table of tokens, which is the weight of the output layer too."""


class GPTModel(nn.Module):
    """A causal language model whose output weights are its token embeddings (Press and Wolf 2017), or a chunk of one.

    Parameters are fp32 and uninitialised; `megacore.models.build_model` builds one with its initial weights. Names
    are those of the whole model, whatever the chunk. A chunk with the head but without the embedding holds a copy of
    the table of tokens.

    Args:
        model: the architecture.
        padded_vocab_size: rows of the embedding (v); the padding's rows are ordinary rows that no text ever names.
        max_position_embeddings: the longest sequence it takes, in tokens.
        layers: indices of the chunk's layers; None is all.
        has_embedding: whether the chunk takes tokens.
        has_head: whether it computes losses.
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

    def __init__(
        self,
        model: ModelConfig,
        *,
        padded_vocab_size: int,
        max_position_embeddings: int,
        layers: range | None = None,
        has_embedding: bool = True,
        has_head: bool = True,
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
        self.has_embedding = has_embedding
        self.has_head = has_head
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        if has_embedding or has_head:
            self.embedding = Embedding(
                padded_vocab_size,
                max_position_embeddings,
                model.hidden_size,
                hidden_dropout=model.hidden_dropout,
                table_only=not has_embedding,
                tp=tp,
                sequence_parallel=self.sequence_parallel,
                device=device,
            )
        self.encoder = Transformer(
            model,
            range(model.num_layers) if layers is None else layers,
            final_layernorm=has_head,
            recompute=recompute,
            recompute_num_layers=recompute_num_layers,
            tp=tp,
            sequence_parallel=self.sequence_parallel,
            device=device,
        )

    @property
    def shared_parameters(self) -> frozenset[str]:
        """Parameters that another chunk holds too; the gradients of both are summed."""
        return frozenset({WORD_EMBEDDINGS} if self.has_embedding != self.has_head else ())

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token, by the whole model: [b, s] ids -> [b, s, v], gathered over the ranks."""
        assert self.has_embedding
        assert self.has_head
        hidden = self.encoder(self.embedding(tokens))
        return gather_from_tensor_parallel_region(self._local_logits(hidden), self.tp)

    def loss(self, tokens: Tensor, labels: Tensor, *, dropout_seed: int | None = None) -> Tensor:
        """Loss of each label, by the whole model: [b, s] ids and [b, s] ids -> [b, s] in fp32."""
        assert self.has_embedding
        return self.run(tokens, labels=labels, dropout_seed=dropout_seed)

    def run(
        self,
        x: Tensor,
        *,
        labels: Tensor | None = None,
        dropout_seed: int | None = None,
        position_ids: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """What this chunk makes of one micro batch.

        Args:
            x: token ids [b, s] for a chunk with the embedding, else what the chunk before returned.
            labels: ids [b, s], for a chunk with the head.
            dropout_seed: of the micro batch (`megacore.parallel.rng.micro_batch_seed`), for training with dropout.
            position_ids: [b, s], for a chunk with the embedding; None counts from 0.
            documents: [b, s], numbers of the documents that tokens must not look beyond; None makes one of them all.

        Returns:
            Activations [b, s, h], with sequence parallelism [b, s/t, h]; from a chunk with the head the loss of
            each label, [b, s] in fp32, for which the logits are not gathered.
        """
        hidden = self.embedding(x, dropout_seed, position_ids=position_ids) if self.has_embedding else x
        hidden = self.encoder(hidden, dropout_seed, documents=documents)
        if not self.has_head:
            return hidden  # type: ignore[no-any-return]
        assert labels is not None
        return vocab_parallel_cross_entropy(
            self._local_logits(hidden),
            labels,
            self.tp,
            label_smoothing=self.label_smoothing if self.training else 0.0,
            z_loss=self.z_loss if self.training else 0.0,
        )

    def _local_logits(self, hidden: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, v/t]."""
        table = self.embedding.word_embeddings.weight
        return column_parallel(hidden, [(table, None)], self.tp, self.sequence_parallel)[0]
