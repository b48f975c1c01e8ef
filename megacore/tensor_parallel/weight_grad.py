"""Where the gradients of weights go: straight into an fp32 main gradient, if the weight has one."""

from typing import Protocol

import torch
from torch import Tensor

from megacore.kernels.weight_gradient import WeightGradient


class GradSink(Protocol):
    """What a weight carries as attribute `grad_sink` when autograd is not to accumulate its gradient."""

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
    """The weight's sink, if any. To be asked in the forward pass: recomputation hands over a weight without it."""
    sink: GradSink | None = getattr(weight, "grad_sink", None)
    return sink


def matmul_gradient(sink: GradSink | None, dy: Tensor, x: Tensor) -> Tensor | None:
    """The gradient dyᵀ x of a weight [o, i]: returned without a sink, else added to it, and None is returned.

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


def lookup_gradient(sink: GradSink | None, weight: Tensor, ids: Tensor, dy: Tensor) -> Tensor | None:
    """The gradient of the rows `ids` of a table: returned without a sink, else added to it, and None is returned.

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
    """`table[ids] += rows` in an order that does not change: on a GPU index_add_ has atomics, index_put_ sorts."""
    if table.is_cuda:
        table.index_put_((ids,), rows, accumulate=True)
    else:
        table.index_add_(0, ids, rows)
