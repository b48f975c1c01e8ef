"""Results of each of t tensor-parallel ranks, in one spawn.

The tests compare them with serial torch. Every layer is a separate case, also in its
sequence-parallel form if it has one. For t = 1 the cases run in the process of the tests.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megacore.config.model import ModelConfig
from megacore.errors import ParallelLayoutError
from megacore.kernels.choice import plain_kernels
from megacore.models.layers.attention import SelfAttention
from megacore.models.layers.mlp import MLP
from megacore.models.layers.shared import LayerSetup
from megacore.observe.timers import Timers
from megacore.parallel import collectives
from megacore.parallel.mesh import SINGLE_RANK, ParallelGroup, ProcessMesh
from megacore.parallel.rank_layout import RankLayout
from megacore.parallel.rng import tensor_parallel_region
from megacore.parallel.shared_memory import SharedMemory
from megacore.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    column_parallel,
    linear_cross_entropy,
    mappings,
    partitions,
)
from tests import _gpt_ranks
from tests._dist import still_alive
from tests._tiny import tiny_config

VOCAB = 128
"""Size of the vocabulary: a multiple of 8 x 4, which up to four ranks do not pad."""
HEADS = 8
SMOOTHING, Z_LOSS = 0.1, 0.01
LARGE = 2000.0
"""Factor of logits whose maxima on two ranks are too far apart for exp in double precision."""
LOSSES = {
    "plain": (0.0, 0.0),
    "smoothed": (SMOOTHING, 0.0),
    "z": (0.0, Z_LOSS),
    "both": (SMOOTHING, Z_LOSS),
}
"""Label smoothing and z-loss of the cross entropy, by case."""
Tensors = dict[str, Tensor]


def random(name: str, *shape: int) -> Tensor:
    """Return float64 numbers that are the same in every process."""
    generator = torch.Generator().manual_seed(sum(name.encode("ascii")))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def ids(*shape: int, vocab: int = VOCAB) -> Tensor:
    """Return token ids that are the same in every process."""
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(5))


def every_id() -> Tensor:
    """Return token ids [2, 80] that include each id of the vocabulary, some of them twice."""
    return torch.cat([torch.arange(VOCAB), ids(32)]).view(2, 80)


def run(world: int) -> dict[str, Any]:
    """Run every case in the same order on all ranks."""
    tp = ProcessMesh.build(RankLayout(tensor=world)).tensor_parallel if world > 1 else SINGLE_RANK
    cases: tuple[Callable[[ParallelGroup], Any], ...] = (
        column, two_weights, row, embedding, attention, mlp, cross_entropy, communication,
        mapping_results, waiting, region_rng,
    )  # fmt: skip
    results: dict[str, Any] = {}
    for case in cases:
        still_alive()
        results[case.__name__] = case(tp)
    for model_case in _gpt_ranks.CASES:
        still_alive()
        results[model_case.__name__] = model_case(tp, tokens=ids(2, 16))
    return results | ({"mesh": _meshes()} if world == 2 else {})


def _meshes() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for axis in ("data", "pipeline", "tensor"):
        mesh = ProcessMesh.build(RankLayout(**{axis: 2}))
        groups = (mesh.data_parallel, mesh.pipeline_parallel, mesh.tensor_parallel)
        results[axis] = (
            mesh.rank,
            mesh.world_size,
            [(group.rank, group.size, group.group is None) for group in groups],
        )
        results[f"{axis} copies"] = mesh.copies
    shared = ProcessMesh.build(RankLayout(pipeline=2), shared_stages=((0,), (0, 1))).copies
    results["copies"] = {stages: (group.rank, group.size) for stages, group in shared.items()}
    try:
        ProcessMesh.build(RankLayout(data=4))
    except ParallelLayoutError as error:
        results["error"] = str(error)
    return results


def column(tp: ParallelGroup) -> dict[bool, Tensors]:
    """Run ColumnParallelLinear(6, 8) on [2, 4, 6]; the key is True for sequence parallelism."""
    results = {}
    for sequence in (False, True):
        layer = ColumnParallelLinear(6, 8, tp=tp, sequence_parallel=sequence).double()
        _load(layer, weight=random("w", 8, 6), bias=random("b", 8))
        results[sequence] = _run_layer(
            layer, _part(random("x", 2, 4, 6), tp, 1, sequence), _part(random("g", 2, 4, 8), tp)
        )
    return results


def two_weights(tp: ParallelGroup) -> dict[bool, Tensors]:
    """Run two weights, 8 x 6 with bias and 4 x 6 without, on one input."""
    results = {}
    for sequence in (False, True):
        first, bias = _part(random("w", 8, 6), tp, 0).clone(), _part(random("b", 8), tp, 0).clone()
        second, x = (
            _part(random("v", 4, 6), tp, 0).clone(),
            _part(random("x", 2, 4, 6), tp, 1, sequence).clone(),
        )
        leaves = [leaf.requires_grad_() for leaf in (first, bias, second, x)]
        outputs = column_parallel(x, [(first, bias), (second, None)], tp, sequence)
        torch.autograd.backward(outputs, [_part(random("g", 2, 4, width), tp) for width in (8, 4)])
        names = ("w", "b", "v", "x")
        results[sequence] = {name: _grad(leaf) for name, leaf in zip(names, leaves, strict=True)}
        results[sequence] |= {"y": outputs[0].detach(), "u": outputs[1].detach()}
    return results


def row(tp: ParallelGroup) -> dict[bool, Tensors]:
    """Run RowParallelLinear(8, 6) on this rank's part of [2, 4, 8]."""
    results = {}
    for sequence in (False, True):
        layer = RowParallelLinear(8, 6, tp=tp, sequence_parallel=sequence).double()
        _load(layer, weight=random("w", 6, 8), bias=random("b", 6))
        results[sequence] = _run_layer(
            layer, _part(random("x", 2, 4, 8), tp), _part(random("g", 2, 4, 6), tp, 1, sequence)
        )
    return results


def embedding(tp: ParallelGroup) -> dict[bool, Tensors]:
    """Run VocabParallelEmbedding(128, 6) on ids of all shards, some of them twice."""
    results = {}
    for sequence in (False, True):
        layer = VocabParallelEmbedding(VOCAB, 6, tp=tp, sequence_parallel=sequence).double()
        _load(layer, weight=random("e", VOCAB, 6))
        y = layer(every_id())
        y.backward(_part(random("g", 2, 80, 6), tp, 1, sequence))
        results[sequence] = {"y": y.detach(), "weight": _grad(layer.weight)}
    return results


def attention(tp: ParallelGroup) -> dict[tuple[int, bool], Tensors]:
    """Run eight heads of size 2 on [2, 8, 16], by number of groups and sequence parallelism."""
    results = {}
    for groups in (HEADS, 4, 2, 1):
        for sequence in (False, True):
            model = tiny_config(
                hidden_size=16, num_attention_heads=HEADS, num_query_groups=groups
            ).model
            setup = LayerSetup(plain_kernels(), tp, sequence and tp.size > 1)
            layer = SelfAttention(model, setup, 0, recompute=False).double()
            _load(layer, **_attention_weights(groups))
            x, g = random("x", 2, 8, 16), random("g", 2, 8, 16)
            results[groups, sequence] = _run_layer(
                layer, _part(x, tp, 1, sequence), _part(g, tp, 1, sequence)
            )
    return results


def _attention_weights(groups: int) -> Tensors:
    """Return the parameters of the whole layer.

    Those of query and key_value are joined to query_key_value when g = n.
    """
    shapes = {"query": 16, "key_value": 4 * groups, "dense": 16}
    values = {f"{name}.weight": random(name, rows, 16) for name, rows in shapes.items()}
    values |= {f"{name}.bias": random(f"{name} bias", rows) for name, rows in shapes.items()}
    if groups == HEADS:
        for kind in ("weight", "bias"):
            query, key_value = values.pop(f"query.{kind}"), values.pop(f"key_value.{kind}")
            parts = (query.unflatten(0, (HEADS, 1, 2)), key_value.unflatten(0, (HEADS, 2, 2)))
            values[f"query_key_value.{kind}"] = torch.cat(parts, 1).flatten(0, 2)
    return values


def attention_reference(groups: int) -> Tensors:
    """Compute attention by its formula, with torch's linear and one head at a time."""
    weights = {name: value.requires_grad_() for name, value in _attention_weights(groups).items()}
    x = random("x", 2, 8, 16).requires_grad_()
    linear = nn.functional.linear
    if groups == HEADS:
        mixed = linear(
            x, weights["query_key_value.weight"], weights["query_key_value.bias"]
        ).unflatten(-1, (HEADS, 3, 2))
        query, key, value = mixed.unbind(-2)
    else:
        query = linear(x, weights["query.weight"], weights["query.bias"]).unflatten(-1, (HEADS, 2))
        mixed = linear(x, weights["key_value.weight"], weights["key_value.bias"]).unflatten(
            -1, (groups, 2, 2)
        )
        key, value = mixed.unbind(-2)
    mask = torch.ones(8, 8, dtype=torch.bool).triu(1)
    heads = []
    for head in range(HEADS):
        group = head // (HEADS // groups)
        scores = query[:, :, head] @ key[:, :, group].transpose(1, 2) / math.sqrt(2)
        heads.append(scores.masked_fill(mask, -math.inf).softmax(-1) @ value[:, :, group])
    y = linear(torch.cat(heads, -1), weights["dense.weight"], weights["dense.bias"])
    y.backward(random("g", 2, 8, 16))
    return {"y": y.detach(), "x": _grad(x), **{name: _grad(leaf) for name, leaf in weights.items()}}


def mlp(tp: ParallelGroup) -> dict[bool, Tensors]:
    """Run an MLP 6 -> 8 -> 6 on [2, 4, 6]."""
    results = {}
    for sequence in (False, True):
        model = ModelConfig(num_layers=1, hidden_size=6, num_attention_heads=1, ffn_hidden_size=8)
        layer = MLP(model, LayerSetup(plain_kernels(), tp, sequence)).double()
        _load(layer, **MLP_WEIGHTS)
        x, g = random("x", 2, 4, 6), random("g", 2, 4, 6)
        results[sequence] = _run_layer(layer, _part(x, tp, 1, sequence), _part(g, tp, 1, sequence))
    return results


MLP_WEIGHTS = {
    "dense_h_to_4h.weight": random("w", 8, 6),
    "dense_h_to_4h.bias": random("b", 8),
    "dense_4h_to_h.weight": random("v", 6, 8),
    "dense_4h_to_h.bias": random("c", 6),
}


def cross_entropy(tp: ParallelGroup) -> dict[tuple[str, bool], Tensors]:
    """Return losses of logits too large for exp, and gradients under unequal weights."""
    results = {}
    for name, (smoothing, z_loss) in LOSSES.items():
        for sequence in (False, True):
            hidden = _part(random("x", 2, 4, 6), tp, 1, sequence).clone().requires_grad_()
            weight = _part(LARGE * random("w", VOCAB, 6), tp, 0).clone().requires_grad_()
            bias = _part(random("b", VOCAB), tp, 0).clone().requires_grad_()
            loss = linear_cross_entropy(
                hidden,
                weight,
                ids(2, 4),
                bias=bias,
                tp=tp,
                sequence_parallel=sequence,
                label_smoothing=smoothing,
                z_loss=z_loss,
            )
            loss.backward(random("g", 2, 4))
            with torch.no_grad():
                scored = linear_cross_entropy(
                    hidden,
                    weight,
                    ids(2, 4),
                    bias=bias,
                    tp=tp,
                    sequence_parallel=sequence,
                    label_smoothing=smoothing,
                    z_loss=z_loss,
                )
            results[name, sequence] = {
                "loss": loss.detach(),
                "scored": scored,
                "hidden": _grad(hidden),
                "weight": _grad(weight),
                "bias": _grad(bias),
            }
    return results


def communication(tp: ParallelGroup) -> dict[str, dict[str, Tensor]]:
    """Run every collective through the memory that the ranks share, and through messages."""
    results = {"memory": _collectives(tp), "messages": _collectives(replace(tp, shared=None))}
    if tp.size > 1:
        assert tp.shared is not None
        closed = SharedMemory(tp.shared._group, tp.rank, tp.size)
        closed._possible = False  # like ranks on several hosts
        results["none to share"] = _collectives(replace(tp, shared=closed))
        pieces = SharedMemory(tp.shared._group, tp.rank, tp.size, piece=1000)
        results["pieces"] = _collectives(replace(tp, shared=pieces), growth=150)
    return results


def _collectives(tp: ParallelGroup, growth: int = 150_000) -> dict[str, Tensor]:
    """Run collectives on numbers that identify their rank: x + r on rank r, with x [4, 8, 12].

    Each sum of the last ones has `growth` numbers more than the one before.
    """
    x = random("x", 4, 8, 12) + tp.rank
    results = {"all_reduce": collectives.all_reduce(x.transpose(0, 1), tp), "own": x.clone()}
    for dim in (0, 1, -1):
        results[f"all_gather {dim}"] = collectives.all_gather(x, tp, dim)
        results[f"reduce_scatter {dim}"] = collectives.reduce_scatter(x, tp, dim)
    flights = [
        collectives.start_all_reduce(x.clone(), tp),
        collectives.start_all_gather(x, tp, 1),
        collectives.start_reduce_scatter(x, tp, 1),
        collectives.start_all_reduce(2 * x, tp),
        collectives.start_all_gather(3 * x, tp, 1),
    ]
    for number in (4, 0, 2, 1, 3):
        results[f"flight {number}"] = flights[number].wait()
    results["maximum"] = collectives.all_reduce_(x.clone(), tp, collectives.MAX)
    for early in (True, False):
        small = random("small", 60) * (tp.rank + 0.1)
        large = random("large", 4000) / (tp.rank + 0.3)
        pending = collectives.start_all_reduce(small, tp) if early else None
        results[f"beside another {early}"] = collectives.all_reduce(large, tp)
        (pending or collectives.start_all_reduce(small, tp)).wait()
    # Each call has another size and type than the previous one: the memory grows and the turns
    # stay in order.
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64) * 3):
        small = torch.full((1 + growth * number,), float(tp.rank + number), dtype=dtype)
        results[f"turn {number}"] = collectives.all_reduce(small, tp).unique()
    return results


def mapping_results(tp: ParallelGroup) -> dict[str, Tensors]:
    """Return the output and gradient of each mapping.

    The gradients of outputs differ between ranks where the outputs may differ.
    """
    same_gradients = (
        mappings.reduce_from_tensor_parallel_region,
        mappings.gather_from_tensor_parallel_region,
    )
    own_gradients = (
        mappings.gather_within_tensor_parallel_region,
        mappings.reduce_scatter_to_sequence_parallel_region,
    )
    results = {}
    for mapping in (*same_gradients, *own_gradients):
        leaf = (random("x", 2, 4, 8) + tp.rank).requires_grad_()
        y = mapping(leaf * 1.0, tp)
        y.backward(random("g", *y.shape) + (tp.rank if mapping in own_gradients else 0))
        results[mapping.__name__] = {"y": y.detach(), "x": _grad(leaf)}
    return results


def waiting(tp: ParallelGroup) -> set[str]:
    """Return the phases that the timer recorded."""
    timers = Timers(torch.device("cpu"))
    timed = ParallelGroup(tp.group, tp.rank, tp.size, "tensor", timers)
    layer = RowParallelLinear(8, 6, tp=timed).double()
    layer(_part(random("x", 2, 4, 8), tp))
    return set(timers.take(1))


def region_rng(tp: ParallelGroup) -> dict[str, Tensor]:
    """Return numbers drawn before, twice within, and after the region."""
    draws = {}
    for turn in ("first", "second"):
        torch.manual_seed(123)
        draws[f"{turn} before"] = torch.rand(4)
        with tensor_parallel_region(tp, draws[f"{turn} before"]):
            draws[f"{turn} within"] = torch.rand(4)
        draws[f"{turn} after"] = torch.rand(4)
    return draws


def joined(ranks: list[Tensors], name: str, dim: int | None) -> Tensor:
    """Return the whole tensor of which each rank has a part along `dim`.

    With `dim` None, assert that all ranks have the same bits.
    """
    parts = [rank[name] for rank in ranks]
    if dim is not None:
        return torch.cat(parts, dim)
    assert all(torch.equal(part, parts[0]) for part in parts), name
    return parts[0]


def _part(whole: Tensor, tp: ParallelGroup, dim: int = -1, divided: bool = True) -> Tensor:
    return whole.chunk(tp.size, dim)[tp.rank] if divided else whole


def _load(layer: nn.Module, **values: Tensor) -> None:
    """Copy this rank's part of the whole parameters into a layer."""
    parts = partitions(layer)
    assert {name for name, _ in layer.named_parameters()} == values.keys()
    with torch.no_grad():
        for name, value in values.items():
            layer.get_parameter(name).copy_(parts[name].shard(value) if name in parts else value)


def _run_layer(layer: nn.Module, x: Tensor, grad: Tensor) -> Tensors:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(grad)
    grads = {name: _grad(parameter) for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "x": _grad(x), **grads}


def _grad(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad
