"""Linear layers divided by output (column) or by input (row) features.

The gradient of a weight is added directly to an fp32 main gradient, if the weight has one.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megacore.kernels.weight_gradient import WeightGradient
from megacore.parallel.collectives import (
    Pending,
    all_gather,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megacore.parallel.mesh import SINGLE_RANK, ParallelGroup
from megacore.tensor_parallel.mappings import (
    SEQUENCE,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megacore.tensor_parallel.partition import Partition, divide

Affine = tuple[Tensor, Tensor | None]
"""Weight [o, i] and its bias [o]."""


class InputDistribution(Enum):
    """Distribution of a linear layer's input over the ranks.

    It determines the reduction of the input's gradient.
    """

    LOCAL_FEATURES = "own features"
    """Each rank has different features; nothing is communicated."""
    EVERY_RANK = "every rank"
    """All ranks have the same input; the gradients are summed by all-reduce."""
    OWN_POSITIONS = "own positions"
    """Each rank has a part of the sequence, [b, s/t, h]; the parts are gathered, and the gradients
    are summed by reduce-scatter."""


class ColumnParallelLinear(nn.Module):
    """Linear layer y = x Wᵀ + b with the rows of W, the output features, divided over the ranks.

    Parameters are not initialized.

    Args:
        in_features: width of the input, replicated on every rank.
        out_features: width of the whole output; each rank computes out_features / t of it.
        bias: True to add b.
        tp: the ranks that share the layer; with one rank this is `torch.nn.Linear`.
        sequence_parallel: True if the input is this rank's part of the sequence; the output is of
            the whole sequence.
        device: device of the parameters.

    Raises:
        ParallelLayoutError: out_features is not a multiple of t.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        tp: ParallelGroup = SINGLE_RANK,
        sequence_parallel: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        local = divide(out_features, tp, "the number of output features")
        self.weight = nn.Parameter(torch.empty(local, in_features, device=device))
        self.bias = nn.Parameter(torch.empty(local, device=device)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to [..., in_features]; return [..., out_features / t]."""
        return column_parallel(x, [(self.weight, self.bias)], self.tp, self.sequence_parallel)[0]

    def partitions(self) -> dict[str, Partition]:
        """Return the division of both parameters along their rows."""
        part = Partition(0, self.tp.rank, self.tp.size)
        return {"weight": part} if self.bias is None else {"weight": part, "bias": part}


class RowParallelLinear(nn.Module):
    """Linear layer y = x Wᵀ + b with the columns of W, the input features, divided over the ranks.

    Each rank's partial result includes the share b / t of the bias, which every rank has as a
    whole; the partial results are summed over the ranks. Parameters are not initialized.

    Args:
        in_features: width of the whole input; each rank receives in_features / t of it.
        out_features: width of the output, replicated on every rank.
        bias: True to add b.
        tp: the ranks that share the layer; with one rank this is `torch.nn.Linear`.
        sequence_parallel: True if the output is this rank's part of the sequence.
        device: device of the parameters.

    Raises:
        ParallelLayoutError: in_features is not a multiple of t.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        tp: ParallelGroup = SINGLE_RANK,
        sequence_parallel: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        local = divide(in_features, tp, "the number of input features")
        self.weight = nn.Parameter(torch.empty(out_features, local, device=device))
        self.bias = nn.Parameter(torch.empty(out_features, device=device)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to [..., in_features / t]; return [..., out_features].

        With sequence parallelism, it maps [b, s, …] to [b, s/t, …].
        """
        partial = _linear(x, [(self.weight, self.bias)], self.tp, InputDistribution.LOCAL_FEATURES)[
            0
        ]
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(partial, self.tp)
        return reduce_from_tensor_parallel_region(partial, self.tp)

    def partitions(self) -> dict[str, Partition]:
        """Return the division of the weight along its columns; the bias is not divided."""
        return {"weight": Partition(1, self.tp.rank, self.tp.size)}


def column_parallel(
    x: Tensor,
    layers: Sequence[Affine],
    tp: ParallelGroup = SINGLE_RANK,
    sequence_parallel: bool = False,
) -> tuple[Tensor, ...]:
    """Apply several layers y = x Wᵀ + b, divided by rows, to one input.

    The layers share the communication of the input.

    Args:
        x: replicated, [..., i], or with sequence parallelism this rank's part of the sequence, [b,
            s/t, i].
        layers: this rank's part of each weight, [o/t, i], and of its bias.
        tp: the ranks that share the layers.
        sequence_parallel: True if `x` is a part of the sequence.

    Returns:
        [..., o/t] for each layer, of the whole sequence.
    """
    if tp.size == 1:
        return _linear(x, layers, tp, InputDistribution.LOCAL_FEATURES)
    return _linear(
        x,
        layers,
        tp,
        InputDistribution.OWN_POSITIONS if sequence_parallel else InputDistribution.EVERY_RANK,
    )


def _linear(
    x: Tensor, layers: Sequence[Affine], tp: ParallelGroup, input_on: InputDistribution
) -> tuple[Tensor, ...]:
    if not torch.is_grad_enabled():
        one_token = x.dim() == 3 and x.shape[1] == 1  # of each sequence, in generation
        return _outputs(x, layers, tp, input_on, _few_rows_affine if one_token else affine)
    parameters = [parameter for layer in layers for parameter in layer]
    outputs: tuple[Tensor, ...] = _Linear.apply(x, tp, input_on, *parameters)  # type: ignore[no-untyped-call]
    return outputs


def _outputs(
    x: Tensor,
    layers: Sequence[Affine],
    tp: ParallelGroup,
    input_on: InputDistribution,
    multiply: Callable[[Tensor, Tensor, Tensor | None, float], Tensor],
) -> tuple[Tensor, ...]:
    full_input = all_gather(x, tp, SEQUENCE) if input_on is InputDistribution.OWN_POSITIONS else x
    share = 1.0 / tp.size if input_on is InputDistribution.LOCAL_FEATURES else 1.0
    return tuple(multiply(full_input, weight, bias, share) for weight, bias in layers)


class _Linear(torch.autograd.Function):
    """Autograd function of one or several linear layers; backward overlaps with communication.

    The weight gradients are computed during the communication of the input gradient, as in
    Megatron-LM's LinearWithGradAccumulationAndAsyncCommunication. A gathered input is not kept but
    gathered again during the input-gradient matmul (Korthikanti et al. 2022, section 4.2.2).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        tp: ParallelGroup,
        input_on: InputDistribution,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights = [weight for weight in parameters[::2] if weight is not None]
        ctx.tp, ctx.input_on = tp, input_on
        ctx.sinks = [sink_of(weight) for weight in weights]
        ctx.save_for_backward(x, *weights)
        layers = list(zip(weights, parameters[1::2], strict=True))
        return _outputs(x, layers, tp, input_on, affine)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        gathering = (
            start_all_gather(x, ctx.tp, SEQUENCE)
            if ctx.input_on is InputDistribution.OWN_POSITIONS
            else None
        )
        rows = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        dx = (
            _input_gradient(rows, weights).view(*grads[0].shape[:-1], x.shape[-1])
            if ctx.needs_input_grad[0]
            else None
        )
        x = gathering.wait() if gathering else x
        reduction = _start_sum(dx, ctx.tp, ctx.input_on) if dx is not None else None
        columns = x.reshape(-1, x.shape[-1])
        parameter_grads: list[Tensor | None] = []
        for number, (dy, sink) in enumerate(zip(rows, ctx.sinks, strict=True)):
            needs_weight, needs_bias = ctx.needs_input_grad[3 + 2 * number : 5 + 2 * number]
            parameter_grads += [
                matmul_gradient(sink, dy, columns) if needs_weight else None,
                dy.sum(0) if needs_bias else None,
            ]
        return reduction.wait() if reduction else None, None, None, *parameter_grads


def affine(x: Tensor, weight: Tensor, bias: Tensor | None, share: float = 1.0) -> Tensor:
    """Return x Wᵀ + share · b in a tensor that is not a view.

    The caller may therefore change it in place.
    """
    y = x.new_empty(*x.shape[:-1], weight.shape[0])
    rows = x.reshape(-1, x.shape[-1])
    if bias is None:
        torch.mm(rows, weight.t(), out=y.view(-1, weight.shape[0]))
    else:
        torch.addmm(bias, rows, weight.t(), beta=share, out=y.view(-1, weight.shape[0]))
    return y


def _few_rows_affine(x: Tensor, weight: Tensor, bias: Tensor | None, share: float) -> Tensor:
    """Return the same as `affine`, with the C++ kernel for few rows where it runs."""
    kernel = _few_rows_kernel()
    if kernel is not None and kernel.supports(x, weight, bias):
        return kernel.affine(x, weight, bias, share)
    return affine(x, weight, bias, share)


@cache
def _few_rows_kernel() -> Any:
    """Return the module of the kernel, or None if megacore's C++ kernels are not compiled."""
    try:
        from megacore.kernels.cpu import few_rows
    except ImportError:
        return None
    return few_rows


def _input_gradient(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    dx = grads[0] @ weights[0]
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        dx.addmm_(grad, weight)
    return dx


def _start_sum(dx: Tensor, tp: ParallelGroup, input_on: InputDistribution) -> Pending:
    """Start summing the input gradients over the ranks, if the distribution requires it."""
    if input_on is InputDistribution.OWN_POSITIONS:
        return start_reduce_scatter(dx, tp, SEQUENCE)
    return start_all_reduce(dx, tp if input_on is InputDistribution.EVERY_RANK else SINGLE_RANK)


class GradSink(Protocol):
    """Interface of a weight's `grad_sink`, which replaces autograd's gradient accumulation."""

    main_grad: Tensor
    """Sum of all contributions: fp32, in the weight's shape."""

    @property
    def add_product(self) -> WeightGradient:
        """Function that adds the weight gradient of a linear layer to a main gradient."""
        ...

    def accumulated(self) -> None:
        """Record that one contribution has been added."""
        ...


def sink_of(weight: Tensor) -> GradSink | None:
    """Return the weight's sink, if any.

    Call this in the forward pass, because recomputation passes a weight without the sink.
    """
    sink: GradSink | None = getattr(weight, "grad_sink", None)
    return sink


def matmul_gradient(sink: GradSink | None, dy: Tensor, x: Tensor) -> Tensor | None:
    """Compute the gradient dyᵀ x of a weight [o, i].

    Return it if there is no sink, else add it to the sink and return None.

    Args:
        sink: sink of the weight.
        dy: gradient of the output, [rows, o].
        x: input, [rows, i].
    """
    if sink is None:
        return dy.t() @ x
    sink.add_product(sink.main_grad, dy, x)
    sink.accumulated()
    return None


def lookup_gradient(
    sink: GradSink | None, weight: Tensor, ids: Tensor, dy: Tensor
) -> Tensor | None:
    """Compute the gradient of the rows `ids` of a table.

    Return it if there is no sink, else add it to the sink and return None.

    Args:
        sink: sink of the table.
        weight: the table, [v, h], for its shape and type.
        ids: rows that were looked up, [n]; the gradients of equal rows are summed.
        dy: gradient of each row, [n, h].
    """
    if sink is None:
        gradient = torch.zeros_like(weight)
        _add_rows_(gradient, ids, dy)
        return gradient
    _add_rows_(sink.main_grad, ids, dy.to(sink.main_grad.dtype))
    sink.accumulated()
    return None


def _add_rows_(table: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Compute `table[ids] += rows` in a deterministic order.

    On a GPU index_add_ uses atomics, while index_put_ sorts.
    """
    if table.is_cuda:
        table.index_put_((ids,), rows, accumulate=True)
    else:
        table.index_add_(0, ids, rows)
