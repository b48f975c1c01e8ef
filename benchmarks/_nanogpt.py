"""A GPT-2 in plain torch, with the structure and names of karpathy/nanoGPT but our code.

Learned positions, pre-norm layers with biases, exact GeLU, scaled_dot_product_attention, the output
layer tied to the embedding, and the logits of the whole batch into F.cross_entropy.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._entrants import Case


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(hidden, 3 * hidden)
        self.c_proj = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, s, h] to [b, s, h]."""
        b, s, h = x.shape
        q, k, v = (
            part.view(b, s, self.heads, h // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split(h, 2)
        )
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [b, n, s, d]
        output: Tensor = self.c_proj(context.transpose(1, 2).contiguous().view(b, s, h))
        return output


class Mlp(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(hidden, 4 * hidden)
        self.c_proj = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, s, h] to [b, s, h]."""
        output: Tensor = self.c_proj(F.gelu(self.c_fc(x)))
        return output


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(hidden), Attention(hidden, heads)
        self.ln_2, self.mlp = nn.LayerNorm(hidden), Mlp(hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, s, h] to [b, s, h]."""
        x = x + self.attn(self.ln_1(x))
        output: Tensor = x + self.mlp(self.ln_2(x))
        return output


class NanoGpt(nn.Module):
    """GPT-2 that returns logits and loss, with nanoGPT's parameter names."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(case.vocab_size, case.hidden),
                "wpe": nn.Embedding(case.seq_length, case.hidden),
                "h": nn.ModuleList(Block(case.hidden, case.heads) for _ in range(case.layers)),
                "ln_f": nn.LayerNorm(case.hidden),
            }
        )
        self.lm_head = nn.Linear(case.hidden, case.vocab_size, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight  # type: ignore[assignment]

    def forward(self, ids: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Map ids and targets [b, s] to logits [b, s, v] and, given targets, their mean loss."""
        parts = self.transformer
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = parts["wte"](ids) + parts["wpe"](positions)
        for block in parts["h"]:  # type: ignore[attr-defined]
            x = block(x)
        logits = self.lm_head(parts["ln_f"](x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))
