"""The position-wise feed-forward network."""

from functools import partial

from torch import Tensor, nn

from megacore.config.model import ModelConfig
from megacore.models.layers.shared import LayerSetup
from megacore.parallel.rng import tensor_parallel_region
from megacore.tensor_parallel import ColumnParallelLinear, RowParallelLinear, column_parallel
from megacore.tensor_parallel.linear import Affine


class MLP(nn.Module):
    """Two linear layers with an activation between them.

    A gated unit has f(gate x) * (up x) between them (Shazeer 2020).

    Args:
        model: model configuration.
        setup: kernels, ranks and device; with sequence parallelism input and output are this
            rank's part of the sequence.
        inner_dropout: probability of dropping an element between the layers, as in T5; it applies
            only in training, and the caller must seed it.

    Raises:
        ParallelLayoutError: the inner width cannot be divided over the ranks.
    """

    def __init__(
        self, model: ModelConfig, setup: LayerSetup, *, inner_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.activation = model.activation
        self.inner_dropout = inner_dropout
        self.kernels, self.tp = setup.kernels, setup.tp
        self.sequence_parallel = setup.sequence_parallel
        bias = model.add_bias_linear
        column = partial(
            ColumnParallelLinear,
            model.hidden_size,
            model.ffn_size,
            bias=bias,
            tp=setup.tp,
            sequence_parallel=setup.sequence_parallel,
            device=setup.device,
        )
        self.dense_h_to_4h_gate = column() if model.gated else None
        self.dense_h_to_4h = column()
        self.dense_4h_to_h = RowParallelLinear(
            model.ffn_size,
            model.hidden_size,
            bias=bias,
            tp=setup.tp,
            sequence_parallel=setup.sequence_parallel,
            device=setup.device,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, s, h] to [b, s, h]; with sequence parallelism both are [b, s/t, h]."""
        gate, *up = self.columns(x)
        inner = (
            self.kernels.gated(gate, up[0], self.activation)
            if up
            else self.kernels.bias_activation(gate, self.dense_h_to_4h.bias, self.activation)
        )
        if self.training and self.inner_dropout:
            with tensor_parallel_region(self.tp, inner):
                inner = self.kernels.dropout(inner, self.inner_dropout)
        return self.dense_4h_to_h(inner)  # type: ignore[no-any-return]

    def columns(self, x: Tensor) -> tuple[Tensor, ...]:
        """Project [b, s, h] to [b, s, f/t], without the bias.

        A gated unit returns the gate and the other half, both with bias.
        """
        gate, up = self.dense_h_to_4h_gate, self.dense_h_to_4h
        layers: list[Affine] = [(up.weight, None)]
        if gate is not None:
            layers = [(gate.weight, gate.bias), (up.weight, up.bias)]
        return column_parallel(x, layers, self.tp, self.sequence_parallel)
