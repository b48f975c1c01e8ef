"""The position-wise feed-forward network."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.parallel.mesh import ParallelGroup
from megacore.tensor_parallel import ColumnParallelLinear, RowParallelLinear


class MLP(nn.Module):
    """Two linear layers around GELU in its tanh approximation (Hendrycks and Gimpel 2016), as GPT-2 has it."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        tp: ParallelGroup,
        sequence_parallel: bool,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.dense_h_to_4h = ColumnParallelLinear(
            hidden_size, ffn_hidden_size, tp=tp, sequence_parallel=sequence_parallel, device=device
        )
        self.dense_4h_to_h = RowParallelLinear(
            ffn_hidden_size, hidden_size, tp=tp, sequence_parallel=sequence_parallel, device=device
        )

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h], with sequence parallelism [b, s/t, h] on both sides."""
        inner = F.gelu(self.dense_h_to_4h(x), approximate="tanh")
        return self.dense_4h_to_h(inner)  # type: ignore[no-any-return]
