"""Token and position embeddings."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.parallel.mesh import ParallelGroup
from megacore.parallel.rng import EMBEDDING, seed_dropout, tensor_parallel_region
from megacore.tensor_parallel import VocabParallelEmbedding


class Embedding(nn.Module):
    """The sum of a token's row and its position's learned row, then dropout.

    With `table_only` it holds the table of tokens alone, for a head that is tied to it.
    """

    def __init__(
        self,
        padded_vocab_size: int,
        max_position_embeddings: int,
        hidden_size: int,
        *,
        hidden_dropout: float,
        table_only: bool,
        tp: ParallelGroup,
        sequence_parallel: bool,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        self.hidden_dropout = hidden_dropout
        self.word_embeddings = VocabParallelEmbedding(
            padded_vocab_size, hidden_size, tp=tp, sequence_parallel=sequence_parallel, device=device
        )
        if not table_only:
            self.position_embeddings = VocabParallelEmbedding(max_position_embeddings, hidden_size, device=device)

    def forward(self, tokens: Tensor, dropout_seed: int | None = None, *, position_ids: Tensor | None = None) -> Tensor:
        """[b, s] ids and positions (None: counted from 0) -> [b, s, h], with sequence parallelism [b, s/t, h]."""
        x: Tensor = self.word_embeddings(tokens)
        first = self.tp.rank * x.shape[1] if self.sequence_parallel else 0
        own = slice(first, first + x.shape[1])
        if position_ids is None:
            x.add_(self.position_embeddings.weight[own])
        else:
            x.add_(self.position_embeddings(position_ids[:, own]))
        if not (self.training and self.hidden_dropout):
            return x
        seed_dropout(dropout_seed, EMBEDDING)
        with tensor_parallel_region(self.tp, x) if self.sequence_parallel else nullcontext():
            return F.dropout(x, self.hidden_dropout)

    def partial_gradients(self) -> frozenset[str]:
        """With sequence parallelism each rank uses its own positions."""
        return frozenset({"position_embeddings.weight"} if self.sequence_parallel else ())
