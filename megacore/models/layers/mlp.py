"""The position-wise feed-forward network."""

from functools import partial

import torch
from torch import Tensor, nn

from megacore.config.model import ModelConfig
from megacore.kernels.choice import Kernels
from megacore.parallel.mesh import ParallelGroup
from megacore.parallel.rng import tensor_parallel_region
from megacore.tensor_parallel import ColumnParallelLinear, RowParallelLinear, column_parallel
from megacore.tensor_parallel.linear import Affine


class MLP(nn.Module):
    """Two linear layers around an activation.

    Of a gated unit f(gate x) * (up x) is between (Shazeer 2020).

    Args:
        model: the architecture.
        inner_dropout: probability of dropping an element between the layers, as T5 does; in
            training alone, and then the caller seeds it.
        kernels: what computes.
        tp: the ranks that share the layers.
        sequence_parallel: input and output are this rank's part of the sequence.
        device: where the parameters are.

    Raises:
        ParallelLayoutError: the inner width cannot be divided over the ranks.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        inner_dropout: float = 0.0,
        kernels: Kernels,
        tp: ParallelGroup,
        sequence_parallel: bool,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.activation = model.activation
        self.inner_dropout = inner_dropout
        self.kernels = kernels
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        bias = model.add_bias_linear
        column = partial(
            ColumnParallelLinear,
            model.hidden_size,
            model.ffn_size,
            bias=bias,
            tp=tp,
            sequence_parallel=sequence_parallel,
            device=device,
        )
        self.dense_h_to_4h_gate = column() if model.gated else None
        self.dense_h_to_4h = column()
        self.dense_4h_to_h = RowParallelLinear(
            model.ffn_size,
            model.hidden_size,
            bias=bias,
            tp=tp,
            sequence_parallel=sequence_parallel,
            device=device,
        )

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h], with sequence parallelism [b, s/t, h] on both sides."""
        inner = self._inner(x)
        if self.training and self.inner_dropout:
            with tensor_parallel_region(self.tp, inner):
                inner = self.kernels.dropout(inner, self.inner_dropout)
        return self.dense_4h_to_h(inner)  # type: ignore[no-any-return]

    def _inner(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, f/t]."""
        gate, *up = self.columns(x)
        if up:
            return self.kernels.gated(gate, up[0], self.activation)
        return self.kernels.bias_activation(gate, self.dense_h_to_4h.bias, self.activation)

    def columns(self, x: Tensor) -> tuple[Tensor, ...]:
        """[b, s, h] -> [b, s, f/t] without its bias.

        Of a gated unit the gate and the other half, with theirs.
        """
        gate, up = self.dense_h_to_4h_gate, self.dense_h_to_4h
        layers: list[Affine] = [(up.weight, None)]
        if gate is not None:
            layers = [(gate.weight, gate.bias), (up.weight, up.bias)]
        return column_parallel(x, layers, self.tp, self.sequence_parallel)
