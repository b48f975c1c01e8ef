"""Linear layers divided by output (column) or by input (row) features.

The gradient of a weight is added directly to an fp32 main gradient, if the weight has one. In a
graph of torch.compile, layers with their communication are the operator `megacore::linear`. Its
backward operator adds to main gradients through keys (`expose_sinks`): it looks the sinks up when
it runs, so one graph serves all layers of a shape, and a sink is informed each time.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from megacore.kernels.implementation import differentiable, operator
from megacore.kernels.matmul import add_product_, affine, multiply
from megacore.kernels.weight_gradient import WeightGradient
from megacore.parallel.collectives import (
    Pending,
    all_gather,
    all_reduce_,
    reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megacore.parallel.mesh import SINGLE_RANK, ParallelGroup, group_of
from megacore.tensor_parallel.mappings import (
    SEQUENCE,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megacore.tensor_parallel.partition import Partition, divide

Affine = tuple[Tensor, Tensor | None]
"""Weight [o, i] and its bias [o]."""


class Distribution(Enum):
    """Distribution of a linear layer's input, or of its output, over the ranks.

    The input's determines the reduction of its gradient.
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
        layers = [(self.weight, self.bias)]
        if torch.compiler.is_compiling():
            total = (
                Distribution.OWN_POSITIONS if self.sequence_parallel else Distribution.EVERY_RANK
            )
            return _traced(x, layers, self.tp, Distribution.LOCAL_FEATURES, total)[0]
        partial = _linear(x, layers, self.tp, Distribution.LOCAL_FEATURES)[0]
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
        return _linear(x, layers, tp, Distribution.LOCAL_FEATURES)
    return _linear(
        x,
        layers,
        tp,
        Distribution.OWN_POSITIONS if sequence_parallel else Distribution.EVERY_RANK,
    )


def _linear(
    x: Tensor, layers: Sequence[Affine], tp: ParallelGroup, input_on: Distribution
) -> tuple[Tensor, ...]:
    if torch.compiler.is_compiling():
        return _traced(x, layers, tp, input_on, Distribution.LOCAL_FEATURES)
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
    input_on: Distribution,
    multiply: Callable[[Tensor, Tensor, Tensor | None, float], Tensor],
) -> tuple[Tensor, ...]:
    """Return the output of each layer; partial sums if the ranks have different features."""
    full_input = all_gather(x, tp, SEQUENCE) if input_on is Distribution.OWN_POSITIONS else x
    share = 1.0 / tp.size if input_on is Distribution.LOCAL_FEATURES else 1.0
    return tuple(multiply(full_input, weight, bias, share) for weight, bias in layers)


class _Linear(torch.autograd.Function):
    """Autograd function of one or several linear layers with one input."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        tp: ParallelGroup,
        input_on: Distribution,
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
        dx, weight_grads, bias_grads = _gradients(
            grads, x, weights, ctx.sinks, ctx.tp, ctx.input_on, ctx.needs_input_grad
        )
        pairs = zip(weight_grads, bias_grads, strict=True)
        return dx, None, None, *(gradient for pair in pairs for gradient in pair)


def _gradients(
    grads: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    sinks: Sequence["GradSink | None"],
    tp: ParallelGroup,
    input_on: Distribution,
    needs: Sequence[bool],
) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
    """Return the gradients of the input, the weights and the biases; overlap communication.

    The weight gradients are computed during the communication of the input gradient, as in
    Megatron-LM's LinearWithGradAccumulationAndAsyncCommunication; if they are delayed, nothing is.
    A gathered input is not kept but gathered again during the input-gradient matmul (Korthikanti
    et al. 2022, section 4.2.2).

    Args:
        grads: gradients of the outputs.
        x: input of this rank.
        weights: weight of each layer.
        sinks: sink of each weight.
        tp: ranks that share the layers.
        input_on: distribution of the input.
        needs: flags of the gradients to compute: of the input at 0, of weight and bias of the i-th
            layer at 3 + 2i and 4 + 2i.
    """
    gathering = (
        start_all_gather(x, tp, SEQUENCE) if input_on is Distribution.OWN_POSITIONS else None
    )
    rows = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
    dx = (
        _input_gradient(rows, weights).view(*grads[0].shape[:-1], x.shape[-1]) if needs[0] else None
    )
    x = gathering.wait() if gathering else x
    reduction = _start_sum(dx, tp, input_on) if dx is not None else None
    columns = x.reshape(-1, x.shape[-1])
    weight_grads: list[Tensor | None] = []
    bias_grads: list[Tensor | None] = []
    for number, (dy, sink) in enumerate(zip(rows, sinks, strict=True)):
        needs_weight, needs_bias = needs[3 + 2 * number : 5 + 2 * number]
        weight_grads.append(matmul_gradient(sink, dy, columns) if needs_weight else None)
        bias_grads.append(dy.sum(0) if needs_bias else None)
    return reduction.wait() if reduction else None, weight_grads, bias_grads


def _few_rows_affine(x: Tensor, weight: Tensor, bias: Tensor | None, share: float) -> Tensor:
    """Return the same as `affine`, with the C++ kernel for few rows where it runs."""
    if x.device.type == "cpu":
        from megacore.kernels.cpu import few_rows

        if few_rows.supports(x, weight, bias):
            return few_rows.affine(x, weight, bias, share)
    return affine(x, weight, bias, share)


def _input_gradient(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    dx = multiply(grads[0], weights[0])
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        add_product_(dx, grad, weight)
    return dx


def _start_sum(dx: Tensor, tp: ParallelGroup, input_on: Distribution) -> Pending:
    """Start summing the input gradients over the ranks, if the distribution requires it."""
    if input_on is Distribution.OWN_POSITIONS:
        return start_reduce_scatter(dx, tp, SEQUENCE)
    return start_all_reduce(dx, tp if input_on is Distribution.EVERY_RANK else SINGLE_RANK)


class GradSink(Protocol):
    """Interface of a weight's `grad_sink`, which replaces autograd's gradient accumulation."""

    main_grad: Tensor
    """Sum of all contributions: fp32, in the weight's shape."""

    @property
    def add_product(self) -> WeightGradient:
        """Function that adds the weight gradient of a linear layer to a main gradient."""
        ...

    @property
    def delays(self) -> bool:
        """True if `contribute` keeps functions for later."""
        ...

    def contribute(self, add: Callable[[], None]) -> None:
        """Call a function that adds one contribution to the main gradient, now or later."""
        ...


def sink_of(weight: Tensor) -> GradSink | None:
    """Return the weight's sink, if any.

    Call this in the forward pass, because recomputation passes a weight without the sink.
    """
    sink: GradSink | None = getattr(weight, "grad_sink", None)
    return sink


def matmul_gradient(sink: GradSink | None, dy: Tensor, x: Tensor) -> Tensor | None:
    """Compute the gradient dyᵀ x of a weight [o, i].

    Return it if there is no sink, else return None: the sink adds it, now or later.

    Args:
        sink: sink of the weight.
        dy: gradient of the output, [rows, o].
        x: input, [rows, i].
    """
    if sink is None:
        return multiply(dy.t(), x)
    sink.contribute(lambda: sink.add_product(sink.main_grad, dy, x))
    return None


def lookup_gradient(
    sink: GradSink | None, weight: Tensor, ids: Tensor, dy: Tensor
) -> Tensor | None:
    """Compute the gradient of the rows `ids` of a table.

    Return it if there is no sink, else return None: the sink adds it, now or later.

    Args:
        sink: sink of the table.
        weight: the table, [v, h], for its shape and type.
        ids: rows that were looked up, [n]; the gradients of equal rows are summed.
        dy: gradient of each row, [n, h].
    """
    if sink is None:
        gradient = torch.zeros_like(weight)
        add_rows_(gradient, ids, dy)
        return gradient
    sink.contribute(lambda: add_rows_(sink.main_grad, ids, dy.to(sink.main_grad.dtype)))
    return None


def add_rows_(table: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Compute `table[ids] += rows` in a deterministic order.

    On a GPU index_add_ uses atomics, while index_put_ sorts. The lookup has checked the ids; some
    versions of torch would read their extremes on the host to do so again.
    """
    if table.is_cuda:
        torch._index_put_impl_(table, (ids,), rows, accumulate=True, unsafe=True)
    else:
        table.index_add_(0, ids, rows)


_SINKS: WeakValueDictionary[int, GradSink] = WeakValueDictionary()
_SINK_KEYS = itertools.count()


def expose_sinks(parameters: Iterable[nn.Parameter]) -> None:
    """Give every parameter with a sink a `sink_key`, which a compiled graph passes to operators.

    The key is a tensor, an int64 scalar on the CPU, because a graph would store a number as a
    constant and then serve one layer only.
    """
    for parameter in parameters:
        sink = sink_of(parameter)
        if sink is not None and parameter.requires_grad:
            key = next(_SINK_KEYS)
            _SINKS[key] = sink
            parameter.sink_key = torch.tensor(key)  # type: ignore[attr-defined]


def _traced(
    x: Tensor,
    layers: Sequence[Affine],
    tp: ParallelGroup,
    input_on: Distribution,
    output_on: Distribution,
) -> tuple[Tensor, ...]:
    """Apply layers by the operator `megacore::linear`; all or none have a bias, and a sink."""
    weights = [weight for weight, _ in layers]
    biases = [bias for _, bias in layers if bias is not None]
    keys = [weight.sink_key for weight in weights if hasattr(weight, "sink_key")]
    assert len(biases) in (0, len(layers)), "some layers have a bias"
    assert len(keys) in (0, len(layers)), "some weights have a sink"
    return tuple(
        torch.ops.megacore.linear(x, weights, biases, keys, tp.key, input_on.name, output_on.name)
    )


def _fake_linear(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    sinks: list[Tensor],
    group: int,
    input_on: str,
    output_on: str,
) -> list[Tensor]:
    shape, size = list(x.shape), group_of(group).size
    if Distribution[input_on] is Distribution.OWN_POSITIONS:
        shape[SEQUENCE] *= size
    if Distribution[output_on] is Distribution.OWN_POSITIONS:
        shape[SEQUENCE] //= size
    return [x.new_empty([*shape[:-1], weight.shape[0]]) for weight in weights]


@operator(
    "linear(Tensor x, Tensor[] weights, Tensor[] biases, Tensor[] sinks, int group, str input_on, "
    "str output_on) -> Tensor[]",
    _fake_linear,
)
def _linear_operator(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    sinks: list[Tensor],
    group: int,
    input_on: str,
    output_on: str,
) -> list[Tensor]:
    """Apply layers to one input, and sum the outputs over the ranks if `output_on` requires it."""
    tp = group_of(group)
    none: list[Tensor | None] = [None] * len(weights)
    layers = list(zip(weights, biases or none, strict=True))
    outputs = _outputs(x, layers, tp, Distribution[input_on], affine)
    match Distribution[output_on]:
        case Distribution.EVERY_RANK:
            return [all_reduce_(output, tp) for output in outputs]
        case Distribution.OWN_POSITIONS:
            return [reduce_scatter(output, tp, SEQUENCE) for output in outputs]
    return list(outputs)


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, biases, sinks, ctx.group, ctx.input_on, ctx.output_on = inputs
    ctx.counts = len(weights), len(biases), len(sinks)
    ctx.save_for_backward(x, *weights, *sinks)


def _linear_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    """Return the gradients of the operator's arguments; the biases' are sums over all ranks."""
    weight_count, bias_count, sink_count = ctx.counts
    x, *rest = ctx.saved_tensors
    weights, sinks = rest[:weight_count], rest[weight_count:]
    dx, *others = torch.ops.megacore.linear_backward(
        grads, x, weights, sinks, bias_count > 0, ctx.group, ctx.input_on, ctx.output_on
    )
    weight_grads = [None] * weight_count if sinks else others[:weight_count]
    bias_grads = others[-bias_count:] if bias_count else []
    return dx, weight_grads, bias_grads, [None] * sink_count, None, None, None


differentiable("linear", _linear_backward, _save_linear)


def _fake_backward(
    grads: list[Tensor],
    x: Tensor,
    weights: list[Tensor],
    sinks: list[Tensor],
    with_bias: bool,
    group: int,
    input_on: str,
    output_on: str,
) -> list[Tensor]:
    weight_grads = [] if sinks else [weight.new_empty(weight.shape) for weight in weights]
    bias_grads = [weight.new_empty(weight.shape[0]) for weight in weights if with_bias]
    return [x.new_empty(x.shape), *weight_grads, *bias_grads]


@operator(
    "linear_backward(Tensor[] grads, Tensor x, Tensor[] weights, Tensor[] sinks, bool with_bias, "
    "int group, str input_on, str output_on) -> Tensor[]",
    _fake_backward,
)
def _linear_backward_operator(
    grads: list[Tensor],
    x: Tensor,
    weights: list[Tensor],
    sinks: list[Tensor],
    with_bias: bool,
    group: int,
    input_on: str,
    output_on: str,
) -> list[Tensor]:
    """Return gradients of input, weights without a sink, and biases; add the others to sinks."""
    tp = group_of(group)
    if Distribution[output_on] is Distribution.OWN_POSITIONS:
        grads = [all_gather(grad, tp, SEQUENCE) for grad in grads]
    grad_sinks = [_SINKS[int(key)] for key in sinks]
    if any(sink.delays for sink in grad_sinks):
        # The compiled graph may reuse the memory of its tensors after this operator. What has been
        # gathered is not the graph's.
        if tp.size == 1 or Distribution[output_on] is not Distribution.OWN_POSITIONS:
            grads = [grad.clone() for grad in grads]
        if tp.size == 1 or Distribution[input_on] is not Distribution.OWN_POSITIONS:
            x = x.clone()
    dx, weight_grads, bias_grads = _gradients(
        grads,
        x,
        weights,
        grad_sinks or [None] * len(weights),
        tp,
        Distribution[input_on],
        [True, False, False, *[True, with_bias] * len(weights)],
    )
    return [each for each in (dx, *weight_grads, *bias_grads) if each is not None]


# Its results may be unused, but not its additions to main gradients. Inductor keeps it because a
# layer always needs the gradient of its input.
torch.fx.node.has_side_effect(torch.ops.megacore.linear_backward.default)
