"""Token and position embeddings."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.parallel.mesh import ParallelGroup
from megacore.tensor_parallel import VocabParallelEmbedding


class Embedding(nn.Module):
    """The sum of a token's row and its position's learned row, then dropout."""

    def __init__(
        self,
        padded_vocab_size: int,
        max_position_embeddings: int,
        hidden_size: int,
        *,
        hidden_dropout: float,
        tp: ParallelGroup,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.hidden_dropout = hidden_dropout
        self.word_embeddings = VocabParallelEmbedding(padded_vocab_size, hidden_size, tp=tp, device=device)
        self.position_embeddings = VocabParallelEmbedding(max_position_embeddings, hidden_size, device=device)

    def forward(self, tokens: Tensor) -> Tensor:
        """[b, s] ids -> [b, s, h]; positions count from 0."""
        positions = self.position_embeddings.weight[: tokens.shape[1]]
        return F.dropout(self.word_embeddings(tokens) + positions, self.hidden_dropout, self.training)
