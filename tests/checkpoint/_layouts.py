"""Checkpoints of a model with distinct elements, written and read in every layout of four ranks."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacore.checkpoint.load import load_checkpoint, names_of_all
from megacore.checkpoint.save import save_checkpoint
from megacore.checkpoint.shard import TensorShard
from megacore.config.optim import OptimConfig
from megacore.config.parallel import DataParallelSharding, ParallelConfig
from megacore.data_parallel.grad_sync import build_grad_sync
from megacore.errors import CheckpointError
from megacore.optim.adam import MainWeightAdamW
from megacore.parallel.mesh import ProcessMesh
from megacore.parallel.rank_layout import RankLayout
from megacore.tensor_parallel.partition import Partition
from tests._dist import still_alive

SHAPES = {
    "embedding": (8, 6),
    "first.weight": (10, 6),
    "first.norm": (37,),
    "last.weight": (4, 3, 5),
    "last.bias": (11,),
}
DIVIDED = {"embedding": 0, "first.weight": 1, "last.weight": 0}
"""Dimensions along which tensor-parallel ranks divide parameters."""
KINDS = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
LAYOUTS: dict[str, tuple[RankLayout, DataParallelSharding]] = {
    "replicas": (RankLayout(data=4), "none"),
    "sharded": (RankLayout(data=4), "optimizer"),
    "tensor": (RankLayout(data=2, tensor=2), "none"),
    "gradients": (RankLayout(data=4), "gradients"),
    "parameters": (RankLayout(data=4), "parameters"),
    "tensor, sharded": (RankLayout(data=2, tensor=2), "optimizer"),
    "stages": (RankLayout(data=2, pipeline=2), "none"),
    "stages, sharded": (RankLayout(data=2, pipeline=2), "optimizer"),
    "tensor and stages": (RankLayout(tensor=2, pipeline=2), "none"),
}


def values() -> dict[str, Tensor]:
    """Return every tensor of the checkpoint; no two elements are equal."""
    tensors, first = {}, 1
    for kind in KINDS:
        for name, shape in SHAPES.items():
            size = math.prod(shape)
            tensors[f"{kind}.{name}"] = torch.arange(first, first + size, dtype=torch.float32).view(
                shape
            )
            first += size
    return tensors


def rank_tensors(
    mesh: ProcessMesh, sharding: DataParallelSharding
) -> dict[str, Tensor | TensorShard]:
    """Return the tensors of this rank's optimizer, filled with zeros."""
    tp = mesh.tensor_parallel
    partitions = (
        {name: Partition(dim, tp.rank, 2) for name, dim in DIVIDED.items()} if tp.size == 2 else {}
    )
    stages = [
        prefix
        for prefix, on_stage in (("first", mesh.is_first_stage), ("last", mesh.is_last_stage))
        if on_stage
    ]
    parameters = {
        name: nn.Parameter(
            partitions[name].shard(torch.zeros(shape)).clone()
            if name in partitions
            else torch.zeros(shape)
        )
        for name, shape in SHAPES.items()
        if name.split(".")[0] in {"embedding", *stages}
    }
    config = ParallelConfig(data_parallel_sharding=sharding, grad_reduce_bucket_mb=3e-4)
    shared = {"embedding": mesh.copies[0, 1]} if mesh.copies else {}
    sync = build_grad_sync(parameters, mesh, config, shared=shared)
    return MainWeightAdamW([sync], OptimConfig(lr=1.0), torch.float32, partitions).tensors()


def rectangles(tensor: Tensor | TensorShard, full: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each piece of the tensor on this rank with the same elements of the full tensor."""
    if isinstance(tensor, Tensor):
        yield tensor, full
        return
    for offsets, piece in tensor.pieces.items():
        slices = tuple(
            slice(first, first + length) for first, length in zip(offsets, piece.shape, strict=True)
        )
        yield piece, full[slices]


def run(root: str) -> dict[str, Any]:
    """Write in every layout, read in every layout and serially, and return the mismatches."""
    meshes = {
        name: ProcessMesh.build(layout, shared_stages=((0, 1),) if layout.pipeline > 1 else ())
        for name, (layout, _) in LAYOUTS.items()
    }
    expected, mismatches, most_pieces = values(), [], 0
    for writer, (_, sharding) in LAYOUTS.items():
        still_alive()
        tensors = rank_tensors(meshes[writer], sharding)
        for name, tensor in tensors.items():
            for piece, value in rectangles(tensor, expected[name]):
                piece.copy_(value)
            pieces = len(tensor.pieces) if isinstance(tensor, TensorShard) else 1
            most_pieces = max(most_pieces, pieces)
        path = save_checkpoint(Path(root) / writer, 1, tensors, {"writer": writer})
        for reader, (_, reader_sharding) in LAYOUTS.items():
            target = rank_tensors(meshes[reader], reader_sharding)
            load_checkpoint(path, target, expected=names_of_all(target))
            for name, tensor in target.items():
                same = all(
                    torch.equal(piece, value) for piece, value in rectangles(tensor, expected[name])
                )
                mismatches += [] if same else [f"{name} written by {writer}, read by {reader}"]
        serial = rank_tensors(ProcessMesh.serial(), "none")
        load_checkpoint(path, serial)
        mismatches += [
            f"{name} written by {writer}, read serially"
            for name in serial
            if not torch.equal(serial[name], expected[name])
        ]
    refusals = [
        _refusal(Path(root) / "stages/iter_0000001", meshes["stages"], change)
        for change in (False, True)
    ]
    return {
        "mismatches": mismatches,
        "most_pieces": most_pieces,
        "refusals": refusals,
        "names": sorted(tensors),
    }


def _refusal(path: Path, mesh: ProcessMesh, renamed: bool) -> str:
    """Return the error of loading another model's tensors and check that none was changed."""
    target = rank_tensors(mesh, "none")
    if renamed and dist.get_rank() == 3:
        target["model.last.scale"] = target.pop("model.last.bias")
    elif not renamed:
        target = {name: tensor for name, tensor in target.items() if "bias" not in name}
    try:
        load_checkpoint(path, target, expected=names_of_all(target))
    except CheckpointError as error:
        assert all(
            not piece.any()
            for name in target
            for piece, _ in rectangles(target[name], torch.zeros(99))
        )
        return str(error)
    return "nothing"
