"""Assembly of one model rank's tensors from its replicas' partitions in a DeepSpeed checkpoint.

ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054) concatenates the parameters of a group and assigns
a slice of the result to each replica (stage 1 and 2), or assigns a slice of each parameter to each
replica (stage 3). Without ZeRO, the fp32 main weights have no names. They are identified by the
half-precision weights to which they round, and equal weights by the order of the parameters.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.convert.deepspeed.files import UNIVERSAL, Saved, reading, zero_stage
from megacore.convert.inert import load_inert, load_inert_mapping
from megacore.convert.key_map import Shape
from megacore.convert.megatron.table import leaves
from megacore.errors import CheckpointError, ConversionError
from megacore.paths import is_file

FP32 = "fp32"
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = (FP32, *MOMENTS)
"""Kinds of tensors per parameter: the weights and Adam's moments."""


@dataclass(frozen=True)
class Pieces:
    """Tensor whose elements are distributed over consecutive flat tensors."""

    shape: Shape
    flat: tuple[Tensor, ...]
    """One-dimensional tensors, in order."""
    unpadded: bool = False
    """True for a table of tokens without the rows that pad the vocabulary."""

    @classmethod
    def of(cls, tensor: Tensor, *, unpadded: bool = False) -> "Pieces":
        """Wrap a complete tensor as one piece."""
        return cls(tuple(tensor.shape), (tensor.detach().reshape(-1),), unpadded)

    def whole(self, rows: int = 0) -> Tensor:
        """Return the complete tensor, an unpadded one with zeros up to `rows` rows."""
        tensor = (self.flat[0] if len(self.flat) == 1 else torch.cat(self.flat)).view(self.shape)
        if not self.unpadded or rows <= len(tensor):
            return tensor
        return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])


@dataclass
class Parts:
    """Tensors of one model rank, under DeepSpeed's names."""

    kinds: dict[str, dict[str, Pieces]] = field(
        default_factory=lambda: {kind: {} for kind in KINDS}
    )
    """Tensors by kind and name, without moments that the files lack."""
    others: dict[str, Pieces] = field(default_factory=dict)
    """Weights that are not in the optimizer."""
    steps: set[int] = field(default_factory=set)
    """Numbers of optimizer steps that all files record for the moments."""


def sharded_parts(saved: Saved, rank: int) -> Parts:
    """Assemble the tensors of one model rank from its replicas, for ZeRO stage 1, 2 or 3.

    Raises:
        CheckpointError: if partitions are missing, of different stages, or do not match the shapes.
        ConversionError: if the files do not locate their parameters.
    """
    files = {d: path for (d, m), path in sorted(saved.optimizer.items()) if m == rank}
    states = [(path, _optimizer_state(path)) for path in files.values()]
    stage = _stage_of(states, saved)
    model, path = saved.states[rank], saved.path_of(rank)
    with reading(path):
        groups = [list(group) for group in model["param_shapes"]]
        shapes = {
            name: tuple(torch.Size(shape))
            for group in model["param_shapes"]
            for name, shape in group.items()
        }
    parts = (
        _slices_of_parameters(states, shapes) if stage == 3 else _slices_of_groups(states, shapes)
    )
    if stage < 3:
        _check_order(states, groups)
    _check_sizes(parts, shapes, saved.directory)
    parts.others = (
        _frozen(saved, rank, shapes, len(states)) if stage == 3 else _others(model, path, shapes)
    )
    return parts


def layer_parts(saved: Saved, tensor_rank: int) -> Parts:
    """Read the tensors of one tensor-parallel rank of a pipeline without ZeRO.

    Names are prefixed with the number of the layer's file.
    """
    parts = Parts()
    for (layer, rank), path in sorted(saved.layers.items()):
        if rank == tensor_rank:
            state = load_inert_mapping(path)
            with reading(path):
                parts.kinds[FP32] |= {
                    f"{layer}.{name}": Pieces.of(tensor) for name, tensor in leaves(state)
                }
    return parts


def universal_parts(saved: Saved) -> Parts:
    """Read a universal checkpoint: complete parameters, except for the vocabulary's padding."""
    parts = Parts()
    model, path = saved.states[0], saved.path_of(0)
    with reading(path):
        groups = model.get("param_shapes") or []
        shapes = {name: tuple(shape) for group in groups for name, shape in group.items()}
    for name, folder in saved.universal.items():
        for kind in KINDS:
            path = folder / f"{kind}.pt"
            if kind != FP32 and not is_file(path):
                continue
            parts.kinds[kind][name] = _universal_tensor(path, shapes.get(name))
        if is_file(folder / "step.pt"):
            parts.steps.add(_universal_step(folder / "step.pt"))
    common = saved.directory / UNIVERSAL / "optimizer_state.pt"
    if not parts.steps and is_file(common):
        state = load_inert_mapping(common)
        with reading(common):
            # With ZeRO stage 3, and only then, this file has the first rank's complete state.
            parts.steps = _steps_of(state.get("optimizer_state_dict") or {"state": {}, **state})
    return parts


def _universal_tensor(path: Path, shape: Shape | None) -> Pieces:
    content = load_inert(path)
    with reading(path):
        if isinstance(content, Mapping):
            return Pieces.of(content["param"], unpadded=bool(content.get("vocab_tensor")))
        if not isinstance(content, Tensor):
            raise TypeError(f"{type(content).__name__} where a tensor belongs")
        # With ZeRO stage 3 the tensor is flat, and its shape is in the model's file.
        return Pieces.of(content if shape is None else content.view(shape))


def _universal_step(path: Path) -> int:
    step = load_inert(path)
    with reading(path):
        return int(step)


def _module_tensors(model: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the parameters in a model file, without buffers and second names.

    Raises:
        TypeError: if an entry is not a tensor.
    """
    skipped = {*(model.get("buffer_names") or ()), *(model.get("shared_params") or ())}
    tensors = {}
    for name, value in leaves(model["module"] or {}):
        if name in skipped or value is None:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"module has {type(value).__name__} as {name}")
        tensors[name] = value
    return tensors


def _steps_in(state: Mapping[str, Any]) -> Iterator[int]:
    """Yield the optimizer step in the state of one tensor or one parameter group, if any."""
    if state.get("step") is not None:
        yield int(state["step"])


def _steps_of(optimizer: Mapping[str, Any]) -> set[int]:
    """Return the steps in an optimizer's state of tensors, or else of parameter groups."""
    tensor_steps = {step for state in optimizer["state"].values() for step in _steps_in(state)}
    return tensor_steps or {
        step for group in optimizer.get("param_groups", ()) for step in _steps_in(group)
    }


def _optimizer_state(path: Path) -> Mapping[str, Any]:
    state = load_inert_mapping(path).get("optimizer_state_dict")
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} has no optimizer_state_dict: use another checkpoint")
    if "ds_zero_partition_groups" in state:
        raise ConversionError(f"{path} holds experts, which no model of megacore has")
    return state


def _stage_of(states: Sequence[tuple[Path, Mapping[str, Any]]], saved: Saved) -> int:
    """Return the ZeRO stage of all files.

    DeepSpeed's BF16_Optimizer records no stage; its files are those of stage 1.

    Raises:
        CheckpointError: if files differ in the stage, or files of a replica are missing.
    """
    stages = {path: zero_stage(state.get("zero_stage", 1)) for path, state in states}
    (first, stage), *others = stages.items()
    for path, other in others:
        if other != stage:
            raise CheckpointError(
                f"{first} is of ZeRO stage {stage} and {path} of {other}: use one that is whole"
            )
    if stage not in (1, 2, 3) or (stage == 3) != bool(saved.divided_model):
        raise CheckpointError(
            f"{first} is of ZeRO stage {stage!r}, and the model's files next to it are of another: "
            "use one that is whole"
        )
    for path, state in states:
        with reading(path):
            count = state["partition_count"]
            replicas = max(count) if isinstance(count, Sequence) else int(count)
        if replicas != len(states):
            raise CheckpointError(
                f"{path} is one of {replicas} data-parallel ranks, and {len(states)} files are "
                "there: use one that is whole"
            )
    return int(stage)


def _slices_of_groups(
    states: Sequence[tuple[Path, Mapping[str, Any]]], shapes: Mapping[str, Shape]
) -> Parts:
    """Collect the slices of stage 1 and 2; each file locates the parameters in its slice."""
    parts, pieces = Parts(), _lists(shapes)
    for path, state in states:
        if "param_slice_mappings" not in state:
            raise ConversionError(
                f"{path} does not say where its parameters are (param_slice_mappings), which "
                f"DeepSpeed {state.get('ds_version')!r} did not write: load it with that version "
                "and save it with a later one"
            )
        with reading(path):
            flats = state["single_partition_of_fp32_groups"]
            base = state["base_optimizer_state"]
            if isinstance(base, Sequence):
                groups = base
                parts.steps |= {step for group in base for step in _steps_in(group)}
            else:
                groups = _in_order(base["state"], len(flats))
                parts.steps |= _steps_of(base)
            for flat, moments, addresses in zip(
                flats, groups, state["param_slice_mappings"], strict=True
            ):
                for name, address in addresses.items():
                    for kind in KINDS:
                        source = flat if kind == FP32 else moments.get(kind)
                        if source is not None:
                            pieces[kind][name].append(
                                source.detach().narrow(0, address.start, address.numel)
                            )
    _put(parts, pieces, shapes)
    return parts


def _check_order(
    states: Sequence[tuple[Path, Mapping[str, Any]]], groups: Sequence[Sequence[str]]
) -> None:
    """Raise ConversionError if the slices are not recorded in the order of the shapes.

    The order of the shapes is correct.
    """
    for number, group in enumerate(groups):
        order: list[str] = []
        for path, state in states:
            with reading(path):
                addresses = state["param_slice_mappings"][number]
                order += sorted(addresses, key=lambda name: addresses[name].start)
        if [name for name, _ in groupby(order)] != group:
            raise ConversionError(
                f"{states[0][0]} does not say where its parameters are: with round_robin_gradients "
                "DeepSpeed confuses them in param_slice_mappings; use a checkpoint of a run "
                "without it"
            )


def _slices_of_parameters(
    states: Sequence[tuple[Path, Mapping[str, Any]]], shapes: Mapping[str, Shape]
) -> Parts:
    """Collect the slices of stage 3: each replica has an equal slice of every parameter.

    The slices of the last replicas are padded after the end of the parameter.
    """
    parts, pieces = Parts(), _lists(shapes)
    for replica, (path, state) in enumerate(states):
        with reading(path):
            flats = [flat.detach() for flat in state["fp32_flat_groups"]]
            moments = _in_order(state["optimizer_state_dict"]["state"], len(flats))
            parts.steps |= _steps_of(state["optimizer_state_dict"])
            sources = {FP32: flats}
            sources |= {
                kind: [group_state[kind] for group_state in moments]
                for kind in MOMENTS
                if all(kind in group_state for group_state in moments)
            }
        for kind, tensors in sources.items():
            offset = 0
            for name, shape in shapes.items():
                count = math.prod(shape)
                share = math.ceil(count / len(states))
                slice_count = max(0, min(share, count - replica * share))
                pieces[kind][name] += _read(tensors, offset, slice_count)
                offset += share
            total = sum(tensor.numel() for tensor in tensors)
            if offset != total:
                raise CheckpointError(
                    f"{path} holds {total} elements of {kind} where the shapes of its parameters "
                    f"make {offset}: use another checkpoint"
                )
    _put(parts, pieces, shapes)
    return parts


def _read(tensors: Sequence[Tensor], start: int, count: int) -> list[Tensor]:
    """Return views of elements `start` … `start + count` of consecutive flat tensors."""
    views = []
    for tensor in tensors:
        length = min(count, tensor.numel() - start)
        if length > 0 and start >= 0:
            views.append(tensor.narrow(0, start, length))
            count -= length
            start += length
        start -= tensor.numel()
    return views


def _lists(shapes: Mapping[str, Shape]) -> dict[str, dict[str, list[Tensor]]]:
    return {kind: {name: [] for name in shapes} for kind in KINDS}


def _in_order(state: Mapping[int, Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    return [state.get(number, {}) for number in range(count)]


def _put(
    parts: Parts, lists: Mapping[str, Mapping[str, list[Tensor]]], shapes: Mapping[str, Shape]
) -> None:
    """Add the tensors that consist of these slices; only weights may have none."""
    for kind in KINDS:
        parts.kinds[kind] = {
            name: Pieces(shapes[name], tuple(pieces))
            for name, pieces in lists[kind].items()
            if pieces or kind == FP32
        }


def _check_sizes(parts: Parts, shapes: Mapping[str, Shape], where: Path) -> None:
    for kind in KINDS:
        for name, pieces in parts.kinds[kind].items():
            size, expected = sum(piece.numel() for piece in pieces.flat), math.prod(shapes[name])
            if size != expected:
                raise CheckpointError(
                    f"{where} holds {size} elements of {name} ({kind}), whose shape {shapes[name]} "
                    f"has {expected}: a rank's file is of another checkpoint, use one that is whole"
                )


def _frozen(
    saved: Saved, rank: int, shapes: Mapping[str, Shape], replicas: int
) -> dict[str, Pieces]:
    """Join the parameters that stage 3 did not train from the slices in the model files."""
    first, path = saved.states[rank], saved.path_of(rank)
    with reading(path):
        frozen_shapes = {
            name: tuple(shape)
            for name, shape in (first.get("frozen_param_shapes") or {}).items()
            if name not in shapes
        }
        if not frozen_shapes:
            return {}
        files = [
            load_inert_mapping(saved.divided_model[replica, rank]) for replica in range(replicas)
        ]
        parameters = {}
        for name, shape in frozen_shapes.items():
            flat = torch.cat(
                [file["frozen_param_fragments"][name].detach().view(-1) for file in files]
            )
            parameters[name] = Pieces(shape, (flat.narrow(0, 0, math.prod(shape)),))
        return parameters


def _others(model: Mapping[str, Any], path: Path, shapes: Mapping[str, Shape]) -> dict[str, Pieces]:
    """Return the parameters in the model file that are not in the optimizer."""
    with reading(path):
        return {
            name: Pieces.of(tensor)
            for name, tensor in _module_tensors(model).items()
            if name not in shapes
        }


def undivided_parts(saved: Saved, rank: int) -> Parts:
    """Read the tensors of one model rank without ZeRO.

    These are the weights, in fp32 if the optimizer has main weights, and the moments whose
    parameter is known.

    Raises:
        CheckpointError: if main weights match no parameter.
    """
    model, path = saved.states[rank], saved.path_of(rank)
    with reading(path):
        return _with_masters(_module_tensors(model), model.get("optimizer"), path)


def _with_masters(
    weights: Mapping[str, Tensor], optimizer: Mapping[str, Any] | None, path: Path
) -> Parts:
    parts = Parts()
    parts.kinds[FP32] = {name: Pieces.of(tensor) for name, tensor in weights.items()}
    if not optimizer:
        return parts
    if not optimizer.keys() & {"fp32_groups_flat", "fp32_groups"}:
        _take_named_moments(parts, weights, optimizer)
        return parts
    parts.steps = _steps_of(optimizer["optimizer_state_dict"])
    unused = dict(weights)
    for sources in _groups(optimizer):
        names = list(unused)
        matches = _places(sources[FP32], [unused[name] for name in names])
        if matches is None:
            raise CheckpointError(
                f"{path} has {sources[FP32].numel()} main weights in fp32 that are not those of "
                f"its {len(weights)} parameters: use another checkpoint"
            )
        for index, offset in matches:
            half = unused.pop(names[index])
            for kind, source in sources.items():
                piece = source.narrow(0, offset, half.numel())
                parts.kinds[kind][names[index]] = Pieces(tuple(half.shape), (piece,))
    return parts


def _groups(optimizer: Mapping[str, Any]) -> Iterator[dict[str, Tensor]]:
    """Yield the concatenated main weights and moments of each parameter group.

    One kind of optimizer stores each group as one flat tensor, the other a tensor per parameter.
    """
    state, flats = optimizer["optimizer_state_dict"]["state"], optimizer.get("fp32_groups_flat")
    groups: Sequence[Sequence[Tensor]] = (
        optimizer["fp32_groups"] if flats is None else [[flat] for flat in flats]
    )
    start = 0
    for group in groups:
        states = [state.get(number, {}) for number in range(start, start + len(group))]
        start += len(group)
        sources = {FP32: group} | {
            kind: [item[kind] for item in states]
            for kind in MOMENTS
            if all(kind in item for item in states)
        }
        yield {
            kind: torch.cat([item.detach().reshape(-1) for item in tensors])
            for kind, tensors in sources.items()
        }


def _places(flat: Tensor, halves: Sequence[Tensor]) -> list[tuple[int, int]] | None:
    """Find the tensors of `halves` that, in order, are the rounded values of `flat`.

    The rest of `flat` must be zeros. A backtracking search first matches each tensor if possible.
    If that fails later, for example because of accidentally equal values, it skips the tensor.

    Returns:
        Index and offset in `flat` of each matched tensor, or None if there is no solution.
    """
    parents: dict[tuple[int, int], tuple[int, int] | None] = {}
    stack: list[tuple[tuple[int, int], tuple[int, int] | None]] = [((0, 0), None)]
    while stack:
        node, parent = stack.pop()
        if node in parents:
            continue
        parents[node] = parent
        index, offset = node
        if index == len(halves):
            if not flat[offset:].any():
                return _path(parents, node)
            continue
        stack.append(((index + 1, offset), node))
        count = halves[index].numel()
        if offset + count <= flat.numel() and _rounds(flat.narrow(0, offset, count), halves[index]):
            stack.append(((index + 1, offset + count), node))
    return None


def _path(
    parents: Mapping[tuple[int, int], tuple[int, int] | None], end: tuple[int, int]
) -> list[tuple[int, int]]:
    """Return the nodes on the path to `end` at which a tensor was matched."""
    matches, node, parent = [], end, parents[end]
    while parent is not None:
        if node[1] != parent[1]:
            matches.append(parent)
        node, parent = parent, parents[parent]
    return matches


def _rounds(main: Tensor, half: Tensor) -> bool:
    return torch.equal(main.to(half.dtype), half.reshape(-1))


def _take_named_moments(
    parts: Parts, weights: Mapping[str, Tensor], optimizer: Mapping[str, Any]
) -> None:
    """Add the moments of an fp32 model, if its optimizer has the parameters' names."""
    groups = optimizer.get("param_groups", ())
    names = [name for group in groups for name in group.get("param_names", ())]
    if set(names) != weights.keys():
        return
    parts.steps = _steps_of(optimizer)
    for number, name in enumerate(names):
        state = optimizer["state"].get(number, {})
        for kind in MOMENTS:
            if kind in state:
                parts.kinds[kind][name] = Pieces.of(state[kind])
