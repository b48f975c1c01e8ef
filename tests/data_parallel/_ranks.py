"""Results of replicas, all cases of a world size in one spawn.

The tests compare them with serial computations.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacore.checkpoint.shard import pieces_of
from megacore.config.optim import OptimConfig
from megacore.config.parallel import ParallelConfig
from megacore.data_parallel.grad_sync import GradSync, build_grad_sync
from megacore.observe.timers import Timers
from megacore.optim.adam import MainWeightAdamW
from megacore.optim.muon import MainWeightMuon, RowParts
from megacore.parallel.mesh import ProcessMesh
from megacore.parallel.rank_layout import RankLayout
from megacore.parallel.rng import stable_seed
from megacore.tensor_parallel.partition import Partition
from tests.data_parallel._modules import Mixed, batch

OPTIM = OptimConfig(lr=1e-2, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8)
ITERATIONS = 4
REPEATED = frozenset({"tied"})
WAYS = {
    "whole": ParallelConfig(grad_reduce_bucket_mb=1e-4),
    "one bucket": ParallelConfig(),
    "sharded": ParallelConfig(grad_reduce_bucket_mb=1e-4, data_parallel_sharding="optimizer"),
    "sharded, one bucket": ParallelConfig(data_parallel_sharding="optimizer"),
    "gradients": ParallelConfig(grad_reduce_bucket_mb=1e-4, data_parallel_sharding="gradients"),
    "bf16": ParallelConfig(grad_reduce_bucket_mb=1e-4, grad_reduce_dtype="bf16"),
    "sharded, bf16": ParallelConfig(grad_reduce_dtype="bf16", data_parallel_sharding="optimizer"),
}


def replicas() -> dict[str, Any]:
    """Run every case that needs only data parallelism."""
    mesh = ProcessMesh.build(
        RankLayout(data=dist.get_world_size()), timers=Timers(torch.device("cpu"))
    )
    results: dict[str, Any] = {
        f"gradients, {way}": gradients(mesh, config) for way, config in WAYS.items()
    }
    results["reductions"], results["late_contribution"] = reductions(mesh), late_contribution(mesh)
    for way, config in WAYS.items():
        for dtype in (torch.float32, torch.bfloat16):
            results[f"training, {way}, {dtype}"] = training(mesh, config, dtype)
        results[f"clipped, {way}"] = training(
            mesh, config, torch.float32, max_norm=0.05, scale=64.0
        )
    results["reloaded"] = reloaded(mesh)
    assert mesh.data_parallel.timers is not None
    results["phases"] = mesh.data_parallel.timers.take(1)
    return results


def seeds_of_replica(mesh: ProcessMesh, iteration: int = 0) -> list[int]:
    """Return the seeds of this replica's two micro batches."""
    first = 2 * (iteration * mesh.data_parallel.size + mesh.data_parallel.rank)
    return [first, first + 1]


def backward(model: Mixed, sync: GradSync, seeds: list[int], scale: float = 1.0) -> list[int]:
    """Run micro batches; return the number of reduced buckets after each of them."""
    launched = []
    sync.zero()
    for seed in seeds:
        with sync.micro_step(last=seed == seeds[-1]):
            (model(batch(seed)) * scale).backward()
        launched.append(sync.launched)
    return launched


def gradients(mesh: ProcessMesh, config: ParallelConfig) -> dict[str, Tensor]:
    """Return gradients after a second iteration, which has the bits of the first.

    With a distributed optimizer they are sums only in this rank's shard.
    """
    model = Mixed()
    sync = build_grad_sync(dict(model.named_parameters()), mesh, config, repeated=REPEATED)
    sums = []
    for _ in range(2):
        backward(model, sync, seeds_of_replica(mesh))
        sync.finish()
        sums.append([bucket.reduced.clone() for bucket in sync.buckets])
    assert all(map(torch.equal, *sums))
    result = {name: gradient.clone() for name, gradient in sync.gradients.items()}
    for bucket in sync.buckets if not result else ():
        assert bucket.buffer is None
        for piece in bucket.layout.pieces:
            result[piece.name] = torch.full(sync.parameters[piece.name].shape, torch.nan)
        for piece in bucket.layout.within(bucket.shard):
            flat = result[piece.name].view(-1)
            flat[piece.start : piece.start + piece.length] = piece.of(bucket.reduced)
    return result


def reductions(mesh: ProcessMesh) -> list[list[int]]:
    """Return reduced buckets after each micro step and after `finish`, in four iterations.

    They have two, two, three and one micro batches, since a batch may grow.
    """
    model = Mixed()
    sync = GradSync(dict(model.named_parameters()), mesh, WAYS["whole"])
    counts = []
    for micro_batches in (2, 2, 3, 1):
        counts.append(backward(model, sync, [*seeds_of_replica(mesh), 99][:micro_batches]))
        sync.finish()
        counts[-1].append(sync.launched)
    return counts


def late_contribution(mesh: ProcessMesh) -> str:
    """Return the error of a backward pass with more contributions than the first one."""
    model = Mixed()
    sync = GradSync(dict(model.named_parameters()), mesh, WAYS["whole"])
    backward(model, sync, [0])
    sync.finish()
    sync.zero()
    try:
        with sync.micro_step(last=True):
            model(batch(0)).backward()
            model(batch(0)).backward()
    except AssertionError as error:
        return str(error)
    finally:
        sync.finish()
    return "nothing"


def training(
    mesh: ProcessMesh,
    config: ParallelConfig,
    dtype: torch.dtype,
    *,
    max_norm: float = 0.0,
    scale: float = 1.0,
) -> dict[str, Any]:
    """Run some iterations; return norms, the model's weights and this rank's optimizer state."""
    model = Mixed()
    sync = build_grad_sync(dict(model.named_parameters()), mesh, config, repeated=REPEATED)
    optimizer = MainWeightAdamW([sync], OPTIM, dtype)
    norms = []
    for iteration in range(ITERATIONS):
        backward(model, sync, seeds_of_replica(mesh, iteration), scale / 2)
        sync.finish()
        norms.append(optimizer.grad_norm(scale=scale))
        optimizer.step(1e-2, 0.1, norm=norms[-1], max_norm=max_norm, scale=scale)
    pieces = [main for part in optimizer._parts for main in part.weights]
    return {
        "norms": torch.stack(norms),
        "weights": {
            name: parameter.detach().clone() for name, parameter in model.named_parameters()
        },
        "state": {(p.name, p.start): (p.weight.clone(), p.exp_avg, p.exp_avg_sq) for p in pieces},
        "own copy": all(
            p.weight.untyped_storage().nbytes() <= p.exp_avg.untyped_storage().nbytes()
            for p in pieces
        ),
    }


def reloaded(mesh: ProcessMesh) -> dict[str, Tensor]:
    """Return the model's weights after this rank's main weights were overwritten and published."""
    model = Mixed()
    sync = GradSync(dict(model.named_parameters()), mesh, WAYS["sharded"])
    optimizer = MainWeightAdamW([sync], OPTIM, torch.bfloat16)
    for part in optimizer._parts:
        for main in part.weights:
            main.weight.copy_(torch.arange(main.start, main.start + main.weight.numel()))
    optimizer.write_back()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def four_ranks() -> dict[str, Any]:
    """Run four ranks with gradients shared over other axes, sharded and unsharded."""
    tensor = ProcessMesh.build(RankLayout(data=2, tensor=2), timers=Timers(torch.device("cpu")))
    pipeline = ProcessMesh.build(RankLayout(data=2, pipeline=2), shared_stages=((0, 1),))
    results = replicas()
    for way in ("whole", "sharded", "sharded, one bucket"):
        replicated = ProcessMesh.build(RankLayout(data=4))
        for dtype in (torch.float32, torch.bfloat16):
            results[f"muon, {way}, {dtype}"] = muon(replicated, WAYS[way], dtype)
        results[f"muon, tensor, {way}"] = muon(tensor, WAYS[way], torch.float32)
    for way in ("whole", "sharded", "bf16"):
        results[f"tensor, {way}"] = reduce_and_step(
            tensor, WAYS[way], TENSOR, partial=frozenset({"norm"})
        )
        results[f"pipeline, {way}"] = reduce_and_step(
            pipeline, WAYS[way], stage(pipeline), shared={"embedding": pipeline.copies[0, 1]}
        )
    return results


MATRICES = {"qkv": RowParts(3, 2), "up": RowParts(), "down": RowParts(), "square": RowParts()}
MUON = {
    "qkv": (12, 10),
    "up": (22, 10),
    "bias": (32,),
    "down": (10, 22),
    "table": (7, 10),
    "square": (10, 10),
}
"""Shapes of parameters of which Muon updates the matrices."""


def muon(mesh: ProcessMesh, config: ParallelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Make three steps with gradients whose sums are exact; return weights and state by name."""
    tp = mesh.tensor_parallel
    dims = {"qkv": 0, "up": 0, "bias": 0, "down": 1} if tp.size > 1 else {}
    partitions = {name: Partition(dim, tp.rank, tp.size) for name, dim in dims.items()}

    def part(name: str, whole: Tensor) -> Tensor:
        return partitions[name].shard(whole).contiguous() if name in partitions else whole

    parameters = {
        name: nn.Parameter(part(name, drawn(name, [], shape))) for name, shape in MUON.items()
    }
    sync = build_grad_sync(parameters, mesh, config)
    optimizer = MainWeightMuon([sync], OPTIM, dtype, partitions, matrices=MATRICES)
    for step in range(3):
        sync.zero()
        for name, shape in MUON.items():
            for replica in range(4)[mesh.data_parallel.rank :: mesh.data_parallel.size]:
                sync.gradients[name].add_(part(name, drawn(name, [step, replica], shape)))
        sync.finish()
        # The mean over four, whatever the number of replicas.
        scale = 4 / mesh.data_parallel.size
        optimizer.step(1e-2, 0.1, norm=optimizer.grad_norm(), scale=scale)
    return {
        "weights": {name: parameter.detach().clone() for name, parameter in parameters.items()},
        "state": {
            name: {tuple(place): piece.clone() for place, piece in pieces_of(tensor).items()}
            for name, tensor in optimizer.tensors().items()
        },
    }


TENSOR = {"norm": (37,), "bias": (5,), "rows": (6, 11)}
"""Shapes of parameters under tensor parallelism.

`norm` has a part of its gradient on each tensor-parallel rank, `bias` has the same one on both,
`rows` is sharded.
"""


def stage(mesh: ProcessMesh) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of this stage; the two stages share the embedding."""
    return {"embedding": (7, 9), "first" if mesh.is_first_stage else "last": (33,)}


def contribution(mesh: ProcessMesh, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the gradient of a parameter on this rank."""
    axes = [mesh.data_parallel.rank]
    axes += [mesh.tensor_parallel.rank] * (name in {"norm", "rows"})
    axes += [mesh.pipeline_parallel.rank] * (name == "embedding")
    return drawn(name, axes, shape)


def drawn(name: str, axes: list[int], shape: tuple[int, ...]) -> Tensor:
    """Return multiples of 1/8 below 2, whose sums bf16 represents, the same in every process."""
    generator = torch.Generator().manual_seed(stable_seed(name, *axes))
    return torch.randint(-15, 16, shape, generator=generator) / 8


def reduce_and_step(
    mesh: ProcessMesh, config: ParallelConfig, shapes: dict[str, tuple[int, ...]], **kinds: Any
) -> dict[str, Any]:
    """Pass gradients to the sinks and make one step; return reduced gradients, norm and weights."""
    parameters = {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    sync = build_grad_sync(parameters, mesh, config, **kinds)
    partitions = {"rows": Partition(0, mesh.tensor_parallel.rank, 2)} if "rows" in shapes else {}
    optimizer = MainWeightAdamW([sync], OPTIM, torch.float32, partitions)
    sync.zero()
    with sync.micro_step(last=True):
        for name, parameter in parameters.items():
            parameter.grad_sink.main_grad.add_(contribution(mesh, name, shapes[name]))  # type: ignore[attr-defined]
            sync.contributed(name)
    sync.finish()
    shards = {
        p.name: (p.start, p.gradient.clone().flatten())
        for part in optimizer._parts
        for p in part.weights
    }
    norm = optimizer.grad_norm()
    optimizer.step(1e-2, 0.0)
    weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    return {"gradients": shards, "norm": norm, "weights": weights}
