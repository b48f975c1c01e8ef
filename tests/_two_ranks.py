"""What two tensor-parallel ranks compute, all of it in one spawn; the tests compare it with serial computations."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megacore.errors import ParallelLayoutError
from megacore.models import build_model
from megacore.parallel.mesh import ParallelGroup, ProcessMesh
from megacore.parallel.rank_layout import RankLayout
from megacore.parallel.rng import seed_micro_batch, tensor_parallel_region
from megacore.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    partitions,
    vocab_parallel_cross_entropy,
)
from megacore.tensor_parallel.mappings import gather_from_tensor_parallel_region
from tests._tiny import tiny_config

VOCAB = 128
"""Entries of the vocabulary: a multiple of 8 x 2, so that one and two ranks pad it alike (not at all)."""


def random(name: str, *shape: int) -> Tensor:
    """Float64 numbers that every process draws alike."""
    generator = torch.Generator().manual_seed(sum(name.encode("ascii")))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def ids(*shape: int, vocab: int = VOCAB) -> Tensor:
    """Token ids that every process draws alike."""
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(5))


def run() -> dict[str, Any]:
    """Every case, in one order on both ranks."""
    mesh = ProcessMesh.build(RankLayout(tensor=2))
    cases: tuple[Callable[[ParallelGroup], Any], ...] = (
        column, row, embedding, cross_entropy, gather, region_rng, gpt, attention_dropout, uneven_padding,
    )  # fmt: skip
    return {"mesh": _meshes(), **{case.__name__: case(mesh.tensor_parallel) for case in cases}}


def _meshes() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for axis in ("data", "pipeline", "tensor"):
        mesh = ProcessMesh.build(RankLayout(**{axis: 2}))
        groups = (mesh.data_parallel, mesh.pipeline_parallel, mesh.tensor_parallel)
        found[axis] = (mesh.rank, mesh.world_size, [(group.rank, group.size, group.group is None) for group in groups])
    try:
        ProcessMesh.build(RankLayout(data=4))
    except ParallelLayoutError as error:
        found["error"] = str(error)
    return found


def column(tp: ParallelGroup) -> dict[str, Tensor]:
    """ColumnParallelLinear(6, 8) on [2, 3, 6]."""
    layer = ColumnParallelLinear(6, 8, tp=tp).double()
    _load(layer, tp, weight=(random("w", 8, 6), 0), bias=(random("b", 8), 0))
    return _run_layer(layer, random("x", 2, 3, 6), random("g", 2, 3, 8).chunk(2, -1)[tp.rank])


def row(tp: ParallelGroup) -> dict[str, Tensor]:
    """RowParallelLinear(8, 6) on this rank's half of [2, 3, 8]."""
    layer = RowParallelLinear(8, 6, tp=tp).double()
    _load(layer, tp, weight=(random("w", 6, 8), 1), bias=(random("b", 6), None))
    return _run_layer(layer, random("x", 2, 3, 8).chunk(2, -1)[tp.rank], random("g", 2, 3, 6))


def embedding(tp: ParallelGroup) -> dict[str, Tensor]:
    """VocabParallelEmbedding(128, 6) on ids of both halves."""
    layer = VocabParallelEmbedding(VOCAB, 6, tp=tp).double()
    _load(layer, tp, weight=(random("e", VOCAB, 6), 0))
    y = layer(ids(2, 5))
    y.backward(random("g", 2, 5, 6))
    return {"y": y.detach(), "weight": _grad(layer.weight)}


def cross_entropy(tp: ParallelGroup) -> dict[str, Tensor]:
    """Losses of logits beyond what exp can take, and their gradient under unequal weights."""
    leaf = (200 * random("l", 2, 5, VOCAB)).chunk(2, -1)[tp.rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(leaf * 1.0, ids(2, 5), tp)
    loss.backward(random("g", 2, 5))
    return {"loss": loss.detach(), "logits": _grad(leaf)}


def gather(tp: ParallelGroup) -> dict[str, Tensor]:
    """The whole of [2, 3, 8] from two halves."""
    part = random("x", 2, 3, 8).chunk(2, -1)[tp.rank].clone().requires_grad_()
    y = gather_from_tensor_parallel_region(part, tp)
    y.backward(random("g", 2, 3, 8))
    return {"y": y.detach(), "x": _grad(part)}


def region_rng(tp: ParallelGroup) -> dict[str, Tensor]:
    """Numbers drawn before, within (twice) and after the region."""
    found = {}
    for turn in ("first", "second"):
        seed_micro_batch(1, 2, 3, 0)
        found[f"{turn} before"] = torch.rand(4)
        with tensor_parallel_region(tp, found[f"{turn} before"]):
            found[f"{turn} within"] = torch.rand(4)
        found[f"{turn} after"] = torch.rand(4)
    return found


def gpt(tp: ParallelGroup) -> dict[str, Any]:
    """A whole model: initial parameters, logits, losses and every gradient."""
    model = build_model(tiny_config(), VOCAB, ProcessMesh(tensor_parallel=tp)).double()
    loss = model.loss(ids(2, 16), ids(2, 16).roll(-1, 1))
    loss.mean().backward()
    return {
        "initial": {name: parameter.detach() for name, parameter in model.named_parameters()},
        "partitions": partitions(model),
        "logits": model(ids(2, 16)).detach(),
        "loss": loss.detach(),
        "grads": {name: _grad(parameter) for name, parameter in model.named_parameters()},
    }


def attention_dropout(tp: ParallelGroup) -> dict[str, dict[str, Tensor]]:
    """Gradients with all dropouts on, with and without recomputation."""
    grads = {}
    for recompute in ("none", "full"):
        config = tiny_config(hidden_dropout=0.2, attention_dropout=0.3, train={"recompute": recompute})
        model = build_model(config, VOCAB, ProcessMesh(tensor_parallel=tp)).double()
        seed_micro_batch(3, 0, 0, 0)
        model.loss(ids(2, 16), ids(2, 16)).mean().backward()
        grads[recompute] = {name: _grad(parameter) for name, parameter in model.named_parameters()}
    return grads


def uneven_padding(tp: ParallelGroup) -> Tensor:
    """The word embeddings of a vocabulary of 117, which two ranks pad to 128 and one pads to 120."""
    model = build_model(tiny_config(), 117, ProcessMesh(tensor_parallel=tp))
    return model.embedding.word_embeddings.weight.detach()


def _load(layer: torch.nn.Module, tp: ParallelGroup, **values: tuple[Tensor, int | None]) -> None:
    for name, (value, dim) in values.items():
        part = value if dim is None else value.chunk(2, dim)[tp.rank]
        with torch.no_grad():
            layer.get_parameter(name).copy_(part)


def _run_layer(layer: torch.nn.Module, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(grad)
    grads = {name: _grad(parameter) for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "x": _grad(x), **grads}


def _grad(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad
