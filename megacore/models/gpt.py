"""GPT-2 (Radford et al. 2019) with Megatron-LM's parameter names."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.config.model import ModelConfig
from megacore.config.run import RunConfig
from megacore.models.layers.embedding import Embedding
from megacore.models.layers.transformer import Transformer
from megacore.parallel.mesh import ALONE, ParallelGroup
from megacore.tensor_parallel import vocab_parallel_cross_entropy
from megacore.tensor_parallel.mappings import copy_to_tensor_parallel_region, gather_from_tensor_parallel_region
from megacore.tokenizer import padded_vocab_size


class GPTModel(nn.Module):
    """A causal language model whose output weights are its token embeddings (Press and Wolf 2017).

    Parameters are fp32 and uninitialised; `megacore.models.build_model` builds one with its initial weights.

    Args:
        model: the architecture.
        padded_vocab_size: rows of the embedding (v); the padding's rows are ordinary rows that no text ever names.
        max_position_embeddings: the longest sequence it takes, in tokens.
        recompute: "full" keeps only each layer's input for the backward pass.
        tp: the ranks that share each layer.
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
        recompute: Literal["none", "full"] = "none",
        tp: ParallelGroup = ALONE,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.tp = tp
        self.padded_vocab_size = padded_vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.embedding = Embedding(
            padded_vocab_size,
            max_position_embeddings,
            model.hidden_size,
            hidden_dropout=model.hidden_dropout,
            tp=tp,
            device=device,
        )
        self.encoder = Transformer(model, recompute=recompute, tp=tp, device=device)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token: [b, s] ids -> [b, s, v], gathered over the ranks."""
        return gather_from_tensor_parallel_region(self._local_logits(tokens), self.tp)

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy of each label: [b, s] ids and [b, s] ids -> [b, s] in fp32; the logits are not gathered."""
        return vocab_parallel_cross_entropy(self._local_logits(tokens), labels, self.tp)

    def _local_logits(self, tokens: Tensor) -> Tensor:
        """[b, s] ids -> [b, s, v/t]."""
        hidden = copy_to_tensor_parallel_region(self.encoder(self.embedding(tokens)), self.tp)
        return F.linear(hidden, self.embedding.word_embeddings.weight)


def parameter_count(config: RunConfig, vocab_size: int, tensor_parallel_size: int = 1) -> int:
    """Parameters of the whole model, the vocabulary's padding included, without building it."""
    model = config.model
    hidden, ffn = model.hidden_size, model.ffn_size
    layernorm = 2 * hidden
    attention = (3 * hidden * hidden + 3 * hidden) + (hidden * hidden + hidden)
    mlp = (hidden * ffn + ffn) + (ffn * hidden + hidden)
    padded = padded_vocab_size(vocab_size, model.make_vocab_size_divisible_by, tensor_parallel_size)
    embeddings = (padded + config.max_position_embeddings) * hidden
    return embeddings + model.num_layers * (2 * layernorm + attention + mlp) + layernorm
