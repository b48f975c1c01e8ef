"""The architecture."""

from megacore.config.base import Section, keyed


class ModelConfig(Section):
    """A GPT-2 decoder (Radford et al. 2019), as Megatron-LM builds it."""

    num_layers: int = keyed(gt=0)
    """Transformer layers."""
    hidden_size: int = keyed(gt=0)
    """Width of the residual stream (h)."""
    num_attention_heads: int = keyed(gt=0)
    """Attention heads (n); head size d = hidden_size / num_attention_heads."""
    num_query_groups: int | None = keyed(None, gt=0)
    """Key-value heads (g; Ainslie et al. 2023), each shared by n / g query heads; null means one per query head."""
    ffn_hidden_size: int | None = keyed(None, gt=0)
    """Width of the MLP's inner layer; null means 4 x hidden_size."""
    max_position_embeddings: int | None = keyed(None, gt=0)
    """Rows of the learned position table, in tokens; null means data.seq_length."""
    hidden_dropout: float = keyed(0.1, ge=0.0, lt=1.0)
    """Probability of dropping an element after the embedding, the attention projection and the MLP."""
    attention_dropout: float = keyed(0.1, ge=0.0, lt=1.0)
    """Probability of dropping an attention weight."""
    init_method_std: float = keyed(0.02, gt=0.0)
    """Standard deviation of the initial weights; projections into the residual use std / sqrt(2 x num_layers)."""
    layernorm_epsilon: float = keyed(1e-5, gt=0.0)
    """Epsilon of every layer norm."""
    make_vocab_size_divisible_by: int = keyed(128, gt=0)
    """The vocabulary is padded to a multiple of this, in tokens; a tensor-parallel size divides the result."""

    @property
    def head_dim(self) -> int:
        """Size of one attention head (d)."""
        return self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Key-value heads, resolved."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Width of the MLP's inner layer, resolved."""
        return self.ffn_hidden_size or 4 * self.hidden_size
