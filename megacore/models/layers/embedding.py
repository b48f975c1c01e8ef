"""Embeddings of tokens, positions and segments, and the output layer."""

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from megacore.config.model import ModelConfig
from megacore.models.layers.norm import make_norm, parameters_of
from megacore.models.layers.shared import LayerSetup
from megacore.parallel.context import dropout_part
from megacore.parallel.mesh import SINGLE_RANK, ParallelGroup
from megacore.parallel.rng import EMBEDDING, seed_dropout, tensor_parallel_region
from megacore.tensor_parallel import Partition, VocabParallelEmbedding
from megacore.tensor_parallel.partition import divide


class Embedding(nn.Module):
    """Sum of the rows of a token, its position and its segment, followed by dropout.

    Positions have rows only if they are learned.

    Args:
        model: model configuration; with norms after sums (BERT) the embedding has a norm too.
        setup: kernels, ranks that share the token table, and device; with sequence parallelism the
            output is this rank's part of the sequence.
        padded_vocab_size: rows of the token table (v).
        max_position_embeddings: rows of the position table.
        tokentypes: rows of the segment table; 0 means no table.
        table_only: create only the token table, for a tied head.

    Raises:
        ParallelLayoutError: the vocabulary cannot be divided over the ranks.
    """

    def __init__(
        self,
        model: ModelConfig,
        setup: LayerSetup,
        padded_vocab_size: int,
        max_position_embeddings: int,
        *,
        tokentypes: int = 0,
        table_only: bool,
    ) -> None:
        super().__init__()
        self.kernels, self.tp = setup.kernels, setup.tp
        self.sequence_parallel = setup.sequence_parallel
        self.hidden_dropout = model.hidden_dropout
        hidden, device = model.hidden_size, setup.device
        self.scale = hidden**0.5 if model.scale_embeddings else None
        self.word_embeddings = VocabParallelEmbedding(
            padded_vocab_size,
            hidden,
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
            device=device,
        )
        complete = not table_only
        learned = complete and model.position_embedding_type == "learned_absolute"
        self.position_embeddings = (
            VocabParallelEmbedding(max_position_embeddings, hidden, device=device)
            if learned
            else None
        )
        self.tokentype_embeddings = (
            VocabParallelEmbedding(tokentypes, hidden, device=device)
            if complete and tokentypes
            else None
        )
        self.layernorm = (
            make_norm(model, hidden, setup) if complete and model.norm_position == "post" else None
        )

    def forward(
        self,
        tokens: Tensor,
        dropout_seed: int | None = None,
        *,
        position_ids: Tensor | None = None,
        tokentypes: Tensor | None = None,
        part: str | None = None,
        cp: ParallelGroup = SINGLE_RANK,
    ) -> Tensor:
        """Map ids [b, s] to [b, s, h], with sequence parallelism to [b, s/t, h].

        Args:
            tokens: ids [b, s].
            dropout_seed: seed of the micro batch, for training with dropout.
            position_ids: positions [b or 1, s]; None counts from 0.
            tokentypes: segments [b, s], if there is a segment table.
            part: name of the dropout stream, for a model that embeds twice.
            cp: ranks that have the other tokens of the sequences.
        """
        x: Tensor = self.word_embeddings(tokens)
        if self.scale is not None:
            x = x * torch.tensor(self.scale, dtype=x.dtype).item()
        first = self.tp.rank * x.shape[1] if self.sequence_parallel else 0
        local = slice(first, first + x.shape[1])
        if self.position_embeddings is not None:
            if position_ids is None:
                x.add_(self.position_embeddings.weight[local])
            else:
                x.add_(self.position_embeddings(position_ids[:, local]))
        if self.tokentype_embeddings is not None:
            assert tokentypes is not None
            x.add_(self.tokentype_embeddings(tokentypes[:, local]))
        if self.layernorm is not None:
            x = self.layernorm(x)
        if not (self.training and self.hidden_dropout):
            return x
        seed_dropout(dropout_seed, EMBEDDING, part)
        divided = self.tp if self.sequence_parallel else SINGLE_RANK
        rank, places = dropout_part(x.shape[1], cp, divided)
        with tensor_parallel_region(self.tp, x, rank) if self.sequence_parallel else nullcontext():
            return self.kernels.dropout(x, self.hidden_dropout, places)

    def partial_gradients(self) -> frozenset[str]:
        """Return the parameters whose gradients are partial with sequence parallelism."""
        if not self.sequence_parallel:
            return frozenset()
        return parameters_of(self, "position_embeddings", "tokentype_embeddings", "layernorm")


class OutputLayer(nn.Module):
    """Weights [v, h] of an untied output layer; left uninitialized.

    Each rank has v / t of the rows.

    Raises:
        ParallelLayoutError: the vocabulary cannot be divided over the ranks.
    """

    def __init__(self, padded_vocab_size: int, hidden_size: int, setup: LayerSetup) -> None:
        super().__init__()
        self.tp = setup.tp
        local = divide(padded_vocab_size, self.tp, "the padded vocabulary of")
        self.weight = nn.Parameter(torch.empty(local, hidden_size, device=setup.device))

    def partitions(self) -> dict[str, Partition]:
        """Return the weights' partition: they are divided by rows."""
        return {"weight": Partition(0, self.tp.rank, self.tp.size)}
