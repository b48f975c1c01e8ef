"""Embeddings of tokens, positions and segments, the output layer, and rotary tables.

Rotary position embedding (Su et al. 2021, arXiv:2104.09864) is on halves of a head, as in GPT-NeoX
and Llama.
"""

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from megacore.config.model import ModelConfig
from megacore.kernels.choice import Kernels
from megacore.models.layers.norm import make_norm, parameters_of
from megacore.parallel.mesh import ParallelGroup
from megacore.parallel.rng import EMBEDDING, seed_dropout, tensor_parallel_region
from megacore.tensor_parallel import Partition, VocabParallelEmbedding
from megacore.tensor_parallel.partition import divide


class Embedding(nn.Module):
    """The sum of a token's row, its position's and its segment's; then dropout.

    The position's is there where positions are learned.

    Args:
        model: the architecture; with norms after sums (BERT's) the embeddings have one too.
        padded_vocab_size: rows of the table of tokens (v).
        max_position_embeddings: rows of the table of positions.
        tokentypes: rows of the table of segments; 0 is none.
        table_only: hold the table of tokens alone, for a head that is tied to it.
        kernels: what computes.
        tp: the ranks that share the table of tokens.
        sequence_parallel: the output is this rank's part of the sequence.
        device: where the parameters are.

    Raises:
        ParallelLayoutError: the vocabulary cannot be divided over the ranks.
    """

    def __init__(
        self,
        model: ModelConfig,
        padded_vocab_size: int,
        max_position_embeddings: int,
        *,
        tokentypes: int = 0,
        table_only: bool,
        kernels: Kernels,
        tp: ParallelGroup,
        sequence_parallel: bool,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        self.hidden_dropout = model.hidden_dropout
        self.kernels = kernels
        hidden = model.hidden_size
        self.word_embeddings = VocabParallelEmbedding(
            padded_vocab_size, hidden, tp=tp, sequence_parallel=sequence_parallel, device=device
        )
        whole = not table_only
        learned = whole and model.position_embedding_type == "learned_absolute"
        self.position_embeddings = (
            VocabParallelEmbedding(max_position_embeddings, hidden, device=device)
            if learned
            else None
        )
        self.tokentype_embeddings = (
            VocabParallelEmbedding(tokentypes, hidden, device=device)
            if whole and tokentypes
            else None
        )
        self.layernorm = (
            make_norm(model, hidden, kernels, device)
            if whole and model.norm_position == "post"
            else None
        )

    def forward(
        self,
        tokens: Tensor,
        dropout_seed: int | None = None,
        *,
        position_ids: Tensor | None = None,
        tokentypes: Tensor | None = None,
        part: str | None = None,
    ) -> Tensor:
        """[b, s] ids -> [b, s, h], with sequence parallelism [b, s/t, h].

        Args:
            tokens: ids [b, s].
            dropout_seed: of the micro batch, for training with dropout.
            position_ids: [b or 1, s]; None counts from 0.
            tokentypes: [b, s], where there is a table of them.
            part: under which name dropout is drawn, where a model embeds twice.
        """
        x: Tensor = self.word_embeddings(tokens)
        first = self.tp.rank * x.shape[1] if self.sequence_parallel else 0
        own = slice(first, first + x.shape[1])
        if self.position_embeddings is not None:
            if position_ids is None:
                x.add_(self.position_embeddings.weight[own])
            else:
                x.add_(self.position_embeddings(position_ids[:, own]))
        if self.tokentype_embeddings is not None:
            assert tokentypes is not None
            x.add_(self.tokentype_embeddings(tokentypes[:, own]))
        if self.layernorm is not None:
            x = self.layernorm(x)
        if not (self.training and self.hidden_dropout):
            return x
        seed_dropout(dropout_seed, EMBEDDING, part)
        with tensor_parallel_region(self.tp, x) if self.sequence_parallel else nullcontext():
            return self.kernels.dropout(x, self.hidden_dropout)

    def partial_gradients(self) -> frozenset[str]:
        """With sequence parallelism each rank uses its own positions."""
        if not self.sequence_parallel:
            return frozenset()
        return parameters_of(self, "position_embeddings", "tokentype_embeddings", "layernorm")


class OutputLayer(nn.Module):
    """The weights [v, h] of an output layer of its own; left uninitialised.

    Each rank holds v / t rows of them.

    Raises ParallelLayoutError when the vocabulary cannot be divided over the ranks.
    """

    def __init__(
        self,
        padded_vocab_size: int,
        hidden_size: int,
        *,
        tp: ParallelGroup,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.tp = tp
        local = divide(padded_vocab_size, tp, "the padded vocabulary of")
        self.weight = nn.Parameter(torch.empty(local, hidden_size, device=device))

    def partitions(self) -> dict[str, Partition]:
        """The weights are divided along their rows."""
        return {"weight": Partition(0, self.tp.rank, self.tp.size)}


def rotary_tables(
    position_ids: Tensor, size: int, base: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles of each position.

    Args:
        position_ids: [b or 1, s].
        size: elements of a head that are rotated, even.
        base: of the frequencies.
        dtype: of the result; the angles are fp32.

    Returns:
        Two tensors [b or 1, 1, s, size], whose second half of the last dimension repeats the first.
    """
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=position_ids.device) / size
    frequencies = 1.0 / torch.pow(
        torch.tensor(base, dtype=torch.float32, device=position_ids.device), exponents
    )
    angles = position_ids[:, None, :, None].float() * frequencies
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)
