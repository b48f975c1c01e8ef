"""Linear layers divided by output (column) or by input (row) features.

The gradient of a weight goes straight into an fp32 main gradient, if the weight has one.
"""

from collections.abc import Sequence
from enum import Enum
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
from megacore.parallel.mesh import ALONE, ParallelGroup
from megacore.tensor_parallel.mappings import (
    SEQUENCE,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megacore.tensor_parallel.partition import Partition, divide

Affine = tuple[Tensor, Tensor | None]
"""A weight [o, i] and its bias [o]."""


class InputOn(Enum):
    """What the ranks hold of a linear layer's input, which says how its gradient is made whole."""

    OWN_FEATURES = "own features"
    """Each rank its own; nothing is communicated."""
    EVERY_RANK = "every rank"
    """All the same; the gradients are summed by all-reduce."""
    OWN_POSITIONS = "own positions"
    """Parts of the sequence, [b, s/t, h], which are gathered; the gradients are summed by
    reduce-scatter."""


class ColumnParallelLinear(nn.Module):
    """y = x Wᵀ + b with the rows of W, the output features, divided over the ranks.

    Parameters are left uninitialised.

    Args:
        in_features: width of the input, replicated on every rank.
        out_features: width of the whole output; each rank computes out_features / t of it.
        bias: whether there is a b.
        tp: the ranks that share the layer; a group of one makes it `torch.nn.Linear`.
        sequence_parallel: the input is this rank's part of the sequence, the output is of the whole
            sequence.
        device: where the parameters are.

    Raises:
        ParallelLayoutError: out_features is not a multiple of t.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        tp: ParallelGroup = ALONE,
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
        """[..., in_features] -> [..., out_features / t]."""
        return column_parallel(x, [(self.weight, self.bias)], self.tp, self.sequence_parallel)[0]

    def partitions(self) -> dict[str, Partition]:
        """Both parameters are divided along their rows."""
        part = Partition(0, self.tp.rank, self.tp.size)
        return {"weight": part} if self.bias is None else {"weight": part, "bias": part}


class RowParallelLinear(nn.Module):
    """y = x Wᵀ + b with the columns of W, the input features, divided over the ranks.

    The partial results, each with its share b / t of the bias that is whole on every rank, are
    summed over the ranks. Parameters are left uninitialised.

    Args:
        in_features: width of the whole input; each rank is given in_features / t of it.
        out_features: width of the output, replicated on every rank.
        bias: whether there is a b.
        tp: the ranks that share the layer; a group of one makes it `torch.nn.Linear`.
        sequence_parallel: the output is this rank's part of the sequence.
        device: where the parameters are.

    Raises:
        ParallelLayoutError: in_features is not a multiple of t.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        tp: ParallelGroup = ALONE,
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
        """[..., in_features / t] -> [..., out_features].

        With sequence parallelism [b, s, …] -> [b, s/t, …].
        """
        partial = _linear(x, [(self.weight, self.bias)], self.tp, InputOn.OWN_FEATURES)[0]
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(partial, self.tp)
        return reduce_from_tensor_parallel_region(partial, self.tp)

    def partitions(self) -> dict[str, Partition]:
        """The weight is divided along its columns, the bias not at all."""
        return {"weight": Partition(1, self.tp.rank, self.tp.size)}


def column_parallel(
    x: Tensor, layers: Sequence[Affine], tp: ParallelGroup = ALONE, sequence_parallel: bool = False
) -> tuple[Tensor, ...]:
    """One input through several layers y = x Wᵀ + b divided by rows.

    They share the input's communication.

    Args:
        x: replicated, [..., i], or with sequence parallelism this rank's part of the sequence, [b,
            s/t, i].
        layers: this rank's part of each weight, [o/t, i], and of its bias.
        tp: the ranks that share the layers.
        sequence_parallel: whether `x` is a part of the sequence.

    Returns:
        [..., o/t] for each layer, of the whole sequence.
    """
    if tp.size == 1:
        return _linear(x, layers, tp, InputOn.OWN_FEATURES)
    return _linear(
        x, layers, tp, InputOn.OWN_POSITIONS if sequence_parallel else InputOn.EVERY_RANK
    )


def _linear(
    x: Tensor, layers: Sequence[Affine], tp: ParallelGroup, input_on: InputOn
) -> tuple[Tensor, ...]:
    parameters = [parameter for layer in layers for parameter in layer]
    outputs: tuple[Tensor, ...] = _Linear.apply(x, tp, input_on, *parameters)  # type: ignore[no-untyped-call]
    return outputs


class _Linear(torch.autograd.Function):
    """The matmuls of one or several layers, with communication beside those of the backward pass.

    The weight gradients are computed while the input gradient travels, as in Megatron-LM's
    LinearWithGradAccumulationAndAsyncCommunication. A gathered input is not kept but gathered
    again, beside the input-gradient matmul (Korthikanti et al. 2022, section 4.2.2).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tp: ParallelGroup, input_on: InputOn, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights = [weight for weight in parameters[::2] if weight is not None]
        ctx.tp, ctx.input_on = tp, input_on
        ctx.sinks = [sink_of(weight) for weight in weights]
        ctx.save_for_backward(x, *weights)
        whole = all_gather(x, tp, SEQUENCE) if input_on is InputOn.OWN_POSITIONS else x
        share = 1.0 / tp.size if input_on is InputOn.OWN_FEATURES else 1.0
        return tuple(
            affine(whole, weight, bias, share)
            for weight, bias in zip(weights, parameters[1::2], strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        gathering = (
            start_all_gather(x, ctx.tp, SEQUENCE) if ctx.input_on is InputOn.OWN_POSITIONS else None
        )
        rows = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        dx = (
            _input_gradient(rows, weights).view(*grads[0].shape[:-1], x.shape[-1])
            if ctx.needs_input_grad[0]
            else None
        )
        x = gathering.wait() if gathering else x
        travelling = _start_sum(dx, ctx.tp, ctx.input_on) if dx is not None else None
        columns = x.reshape(-1, x.shape[-1])
        parameter_grads: list[Tensor | None] = []
        for number, (dy, sink) in enumerate(zip(rows, ctx.sinks, strict=True)):
            wants_weight, wants_bias = ctx.needs_input_grad[3 + 2 * number : 5 + 2 * number]
            parameter_grads += [
                matmul_gradient(sink, dy, columns) if wants_weight else None,
                dy.sum(0) if wants_bias else None,
            ]
        return travelling.wait() if travelling else None, None, None, *parameter_grads


def affine(x: Tensor, weight: Tensor, bias: Tensor | None, share: float = 1.0) -> Tensor:
    """The output x Wᵀ + share · b, in a tensor that is no view.

    So the caller may go on to change it in place.
    """
    y = x.new_empty(*x.shape[:-1], weight.shape[0])
    rows = x.reshape(-1, x.shape[-1])
    if bias is None:
        torch.mm(rows, weight.t(), out=y.view(-1, weight.shape[0]))
    else:
        torch.addmm(bias, rows, weight.t(), beta=share, out=y.view(-1, weight.shape[0]))
    return y


def _input_gradient(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    dx = grads[0] @ weights[0]
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        dx.addmm_(grad, weight)
    return dx


def _start_sum(dx: Tensor, tp: ParallelGroup, input_on: InputOn) -> Pending:
    """Sum the ranks' input gradients, where they are of the same input."""
    if input_on is InputOn.OWN_POSITIONS:
        return start_reduce_scatter(dx, tp, SEQUENCE)
    return start_all_reduce(dx, tp if input_on is InputOn.EVERY_RANK else ALONE)


class GradSink(Protocol):
    """What a weight has as `grad_sink` when autograd is not to accumulate its gradient."""

    main_grad: Tensor
    """Takes the sum of all contributions: fp32, shaped like the weight."""

    @property
    def add_product(self) -> WeightGradient:
        """Adds the weight gradient of a linear layer to a main gradient."""
        ...

    def accumulated(self) -> None:
        """One contribution has been added."""
        ...


def sink_of(weight: Tensor) -> GradSink | None:
    """The weight's sink, if any.

    To be asked in the forward pass: recomputation hands over a weight without it.
    """
    sink: GradSink | None = getattr(weight, "grad_sink", None)
    return sink


def matmul_gradient(sink: GradSink | None, dy: Tensor, x: Tensor) -> Tensor | None:
    """The gradient dyᵀ x of a weight [o, i].

    Returned without a sink, else added to it, and None is returned.

    Args:
        sink: of the weight.
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
    """The gradient of the rows `ids` of a table.

    Returned without a sink, else added to it, and None is returned.

    Args:
        sink: of the table.
        weight: the table, [v, h], for its shape and type.
        ids: rows that were looked up, [n]; equal ones are summed.
        dy: gradient of each, [n, h].
    """
    if sink is None:
        gradient = torch.zeros_like(weight)
        _add_rows_(gradient, ids, dy)
        return gradient
    _add_rows_(sink.main_grad, ids, dy.to(sink.main_grad.dtype))
    sink.accumulated()
    return None


def _add_rows_(table: Tensor, ids: Tensor, rows: Tensor) -> None:
    """`table[ids] += rows` in an order that does not change.

    On a GPU index_add_ has atomics, index_put_ sorts.
    """
    if table.is_cuda:
        table.index_put_((ids,), rows, accumulate=True)
    else:
        table.index_add_(0, ids, rows)
