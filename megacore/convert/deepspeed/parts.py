"""What one model rank of a DeepSpeed checkpoint holds, put together from its replicas' parts.

ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054) joins the parameters of a group end to end and
gives each replica a stretch of the result (stage 1 and 2), or gives each replica a stretch of each
parameter (stage 3). Without ZeRO the main weights in fp32 have no names: they are known by what
they round to, and equal ones by their order, which is the model's.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.convert.deepspeed.files import UNIVERSAL, Saved, open_file, plain, reading
from megacore.convert.inert import load_inert
from megacore.convert.key_map import Shape
from megacore.convert.megatron.table import leaves
from megacore.errors import CheckpointError, ConversionError

FP32 = "fp32"
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = (FP32, *MOMENTS)
"""Of each parameter the weights, and Adam's moments."""


@dataclass(frozen=True)
class Pieces:
    """A tensor whose elements lie in flat tensors, one stretch after the other."""

    shape: Shape
    flat: tuple[Tensor, ...]
    """Each of one dimension."""
    rows: int | None = None
    """Rows that the tensor is padded to with zeros; None: it is as it is."""

    @classmethod
    def of(cls, tensor: Tensor) -> "Pieces":
        """A tensor in one piece."""
        return cls(tuple(tensor.shape), (tensor.detach().reshape(-1),))

    def whole(self) -> Tensor:
        """The tensor."""
        tensor = (self.flat[0] if len(self.flat) == 1 else torch.cat(self.flat)).view(self.shape)
        if self.rows is None or self.rows <= len(tensor):
            return tensor
        return torch.cat([tensor, tensor.new_zeros(self.rows - len(tensor), *tensor.shape[1:])])


class Assembled(Mapping[str, Tensor]):
    """Tensors by name, each put together when it is asked for."""

    def __init__(self, held: Mapping[str, Pieces]) -> None:
        self._held = held

    def __getitem__(self, name: str) -> Tensor:
        return self._held[name].whole()

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


@dataclass
class Parts:
    """What one model rank holds, under DeepSpeed's names."""

    kinds: dict[str, dict[str, Pieces]] = field(
        default_factory=lambda: {kind: {} for kind in KINDS}
    )
    """By kind and name; moments are missing where a file does not have them."""
    others: dict[str, Pieces] = field(default_factory=dict)
    """Weights that the optimizer does not have."""
    steps: set[int] = field(default_factory=set)
    """Optimizer steps behind the moments, as each file says."""


def sharded_parts(saved: Saved, rank: int) -> Parts:
    """What the replicas of one model rank hold together, of ZeRO stage 1, 2 or 3.

    Raises CheckpointError for parts that are missing, of different stages, or of other sizes than
    the shapes.
    """
    files = {d: path for (d, m), path in sorted(saved.optimizer.items()) if m == rank}
    states = [(path, _optimizer_state(path)) for path in files.values()]
    stage = _stage_of(states, saved)
    model, path = saved.states[rank], saved.path_of(rank)
    with reading(path):
        groups = [list(group) for group in model["param_shapes"]]
        shapes = {
            name: tuple(shape) for group in model["param_shapes"] for name, shape in group.items()
        }
    parts = (
        _stretches_of_parameters(states, shapes)
        if stage == 3
        else _stretches_of_groups(states, shapes)
    )
    if stage < 3:
        _check_order(states, groups)
    _check_sizes(parts, shapes, saved.directory)
    parts.others = (
        _frozen(saved, rank, shapes, len(states)) if stage == 3 else _others(model, path, shapes)
    )
    return parts


def layer_parts(saved: Saved, tensor_rank: int) -> Parts:
    """What one tensor-parallel rank of a pipeline without ZeRO holds.

    The layers' files are told by their numbers.
    """
    parts = Parts()
    for (layer, rank), path in sorted(saved.layers.items()):
        if rank == tensor_rank:
            state = open_file(path)
            with reading(path):
                parts.kinds[FP32] |= {
                    f"{layer}.{name}": Pieces.of(tensor) for name, tensor in leaves(state)
                }
    return parts


def universal_parts(saved: Saved) -> Parts:
    """What a universal checkpoint holds: whole parameters, but for a vocabulary's padding."""
    parts = Parts()
    model, path = saved.states[0], saved.path_of(0)
    with reading(path):
        groups = model.get("param_shapes") or []
        shapes = {name: tuple(shape) for group in groups for name, shape in group.items()}
    for name, folder in saved.universal.items():
        for kind in KINDS:
            path = folder / f"{kind}.pt"
            if kind != FP32 and not path.is_file():
                continue
            parts.kinds[kind][name] = _universal_tensor(path, shapes.get(name))
        if (folder / "step.pt").is_file():
            parts.steps.add(_universal_step(folder / "step.pt"))
    common = saved.directory / UNIVERSAL / "optimizer_state.pt"
    if not parts.steps and common.is_file():
        state = open_file(common)
        with reading(common):
            # Of ZeRO stage 3 alone it keeps the whole state of the first rank.
            parts.steps = steps_of(state.get("optimizer_state_dict") or {"state": {}, **state})
    return parts


def _universal_tensor(path: Path, shape: Shape | None) -> Pieces:
    held = load_inert(path)
    with reading(path):
        if isinstance(held, Mapping):
            pieces = Pieces.of(held["param"])
            return Pieces(pieces.shape, pieces.flat, 0) if held.get("vocab_tensor") else pieces
        if not isinstance(held, Tensor):
            raise TypeError(f"{type(held).__name__} where a tensor belongs")
        # Of ZeRO stage 3 it is flat, and its shape is in the model's file.
        return Pieces.of(held if shape is None else held.view(shape))


def _universal_step(path: Path) -> int:
    held = load_inert(path)
    with reading(path):
        return int(held)


def module_tensors(model: Mapping[str, Any]) -> dict[str, Tensor]:
    """The parameters in a model's file, without buffers and second names."""
    left_out = {*(model.get("buffer_names") or ()), *(model.get("shared_params") or ())}
    held = {name: tensor for name, tensor in leaves(model["module"] or {}) if name not in left_out}
    other = next(
        (
            name
            for name, value in held.items()
            if value is not None and not isinstance(value, Tensor)
        ),
        None,
    )
    if other is not None:
        raise TypeError(f"module has {type(held[other]).__name__} as {other}")
    return {name: tensor for name, tensor in held.items() if tensor is not None}


def steps_in(state: Mapping[str, Any]) -> Iterator[int]:
    """Optimizer steps that the state of one tensor, or one group of an optimizer, says."""
    if state.get("step") is not None:
        yield int(state["step"])


def steps_of(optimizer: Mapping[str, Any]) -> set[int]:
    """Steps that an optimizer's state says, of each tensor, or of each group."""
    own = {step for state in optimizer["state"].values() for step in steps_in(state)}
    return own or {step for group in optimizer.get("param_groups", ()) for step in steps_in(group)}


def _optimizer_state(path: Path) -> Mapping[str, Any]:
    state = open_file(path).get("optimizer_state_dict")
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} has no optimizer_state_dict: use another checkpoint")
    if "ds_zero_partition_groups" in state:
        raise ConversionError(f"{path} holds experts, for which there is no model of ours")
    return state


def _stage_of(states: Sequence[tuple[Path, Mapping[str, Any]]], saved: Saved) -> int:
    """The stage that all files say. DeepSpeed's BF16_Optimizer says none, and is as stage 1."""
    stages = {path: plain(state.get("zero_stage", 1)) for path, state in states}
    (first, stage), *others = stages.items()
    for path, other in others:
        if other != stage:
            raise CheckpointError(
                f"{first} is of ZeRO stage {stage} and {path} of {other}: use one that is whole"
            )
    if stage not in (1, 2, 3) or (stage == 3) != bool(saved.divided_model):
        raise CheckpointError(
            f"{first} is of ZeRO stage {stage!r}, and the model's files beside it are of another: "
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


def _stretches_of_groups(
    states: Sequence[tuple[Path, Mapping[str, Any]]], shapes: Mapping[str, Shape]
) -> Parts:
    """Of stage 1 and 2: where in its stretch a replica has a parameter, its file says."""
    parts, found = Parts(), _lists(shapes)
    for path, state in states:
        if "param_slice_mappings" not in state:
            raise ConversionError(
                f"{path} does not say where its parameters lie (param_slice_mappings), as "
                f"DeepSpeed {state.get('ds_version')!r} did not: load it with that version and "
                "save it with a later one"
            )
        with reading(path):
            flats = state["single_partition_of_fp32_groups"]
            base = state["base_optimizer_state"]
            own = base if isinstance(base, Sequence) else _in_order(base["state"], len(flats))
            parts.steps |= (
                {step for one in base for step in steps_in(one)} if own is base else steps_of(base)
            )
            for flat, moments, addresses in zip(
                flats, own, state["param_slice_mappings"], strict=True
            ):
                for name, address in addresses.items():
                    for kind in KINDS:
                        source = flat if kind == FP32 else moments.get(kind)
                        if source is not None:
                            found[kind][name].append(
                                source.detach().narrow(0, address.start, address.numel)
                            )
    _put(parts, found, shapes)
    return parts


def _check_order(
    states: Sequence[tuple[Path, Mapping[str, Any]]], groups: Sequence[Sequence[str]]
) -> None:
    """Raise ConversionError where stretches are said to have another order than the shapes.

    The order of the shapes is the true one.
    """
    for number, group in enumerate(groups):
        said: list[str] = []
        for path, state in states:
            with reading(path):
                addresses = state["param_slice_mappings"][number]
                said += sorted(addresses, key=lambda name: addresses[name].start)
        if [name for name, _ in groupby(said)] != group:
            raise ConversionError(
                f"{states[0][0]} does not say where its parameters lie: with round_robin_gradients "
                "DeepSpeed takes one for another in param_slice_mappings; use a checkpoint of a "
                "run without it"
            )


def _stretches_of_parameters(
    states: Sequence[tuple[Path, Mapping[str, Any]]], shapes: Mapping[str, Shape]
) -> Parts:
    """Of stage 3: each replica has as much of every parameter.

    The last ones have padding beyond its end.
    """
    parts, found = Parts(), _lists(shapes)
    for replica, (path, state) in enumerate(states):
        with reading(path):
            flats = [flat.detach() for flat in state["fp32_flat_groups"]]
            moments = _in_order(state["optimizer_state_dict"]["state"], len(flats))
            parts.steps |= steps_of(state["optimizer_state_dict"])
            sources = {FP32: flats}
            sources |= {
                kind: [own[kind] for own in moments]
                for kind in MOMENTS
                if all(kind in own for own in moments)
            }
        for kind, tensors in sources.items():
            offset = 0
            for name, shape in shapes.items():
                count = math.prod(shape)
                share = math.ceil(count / len(states))
                own_count = max(0, min(share, count - replica * share))
                found[kind][name] += _read(tensors, offset, own_count)
                offset += share
            held = sum(tensor.numel() for tensor in tensors)
            if offset != held:
                raise CheckpointError(
                    f"{path} holds {held} elements of {kind} where the shapes of its parameters "
                    f"make {offset}: use another checkpoint"
                )
    _put(parts, found, shapes)
    return parts


def _read(tensors: Sequence[Tensor], start: int, count: int) -> list[Tensor]:
    """Elements `start` … `start + count` of flat tensors that lie end to end."""
    found = []
    for tensor in tensors:
        length = min(count, tensor.numel() - start)
        if length > 0 and start >= 0:
            found.append(tensor.narrow(0, start, length))
            count -= length
            start += length
        start -= tensor.numel()
    return found


def _lists(shapes: Mapping[str, Shape]) -> dict[str, dict[str, list[Tensor]]]:
    return {kind: {name: [] for name in shapes} for kind in KINDS}


def _in_order(state: Mapping[int, Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    return [state.get(number, {}) for number in range(count)]


def _put(
    parts: Parts, found: Mapping[str, Mapping[str, list[Tensor]]], shapes: Mapping[str, Shape]
) -> None:
    for kind in KINDS:
        parts.kinds[kind] = {
            name: Pieces(shapes[name], tuple(pieces))
            for name, pieces in found[kind].items()
            if pieces or kind == FP32
        }


def _check_sizes(parts: Parts, shapes: Mapping[str, Shape], where: Path) -> None:
    for kind in KINDS:
        for name, pieces in parts.kinds[kind].items():
            held, wanted = sum(piece.numel() for piece in pieces.flat), math.prod(shapes[name])
            if held != wanted:
                raise CheckpointError(
                    f"{where} holds {held} elements of {name} ({kind}), whose shape {shapes[name]} "
                    f"has {wanted}: a rank's file is of another checkpoint, use one that is whole"
                )


def _frozen(
    saved: Saved, rank: int, shapes: Mapping[str, Shape], replicas: int
) -> dict[str, Pieces]:
    """Parameters that stage 3 did not train, of which each replica's model file has a stretch."""
    first, path = saved.states[rank], saved.path_of(rank)
    with reading(path):
        wanted = {
            name: tuple(shape)
            for name, shape in (first.get("frozen_param_shapes") or {}).items()
            if name not in shapes
        }
        if not wanted:
            return {}
        files = [open_file(saved.divided_model[replica, rank]) for replica in range(replicas)]
        found = {}
        for name, shape in wanted.items():
            flat = torch.cat(
                [file["frozen_param_fragments"][name].detach().view(-1) for file in files]
            )
            found[name] = Pieces(shape, (flat.narrow(0, 0, math.prod(shape)),))
        return found


def _others(model: Mapping[str, Any], path: Path, shapes: Mapping[str, Shape]) -> dict[str, Pieces]:
    """Parameters of the model's file that the optimizer does not have."""
    with reading(path):
        return {
            name: Pieces.of(tensor)
            for name, tensor in module_tensors(model).items()
            if name not in shapes
        }


def undivided_parts(saved: Saved, rank: int) -> Parts:
    """What one model rank holds without ZeRO.

    Weights, in fp32 where its optimizer has them, and moments with a name.

    Raises CheckpointError for main weights that are those of no parameter.
    """
    model, path = saved.states[rank], saved.path_of(rank)
    with reading(path):
        return _with_masters(module_tensors(model), model.get("optimizer"), path)


def _with_masters(
    held: Mapping[str, Tensor], optimizer: Mapping[str, Any] | None, path: Path
) -> Parts:
    parts = Parts()
    parts.kinds[FP32] = {name: Pieces.of(tensor) for name, tensor in held.items()}
    if not optimizer:
        return parts
    if not optimizer.keys() & {"fp32_groups_flat", "fp32_groups"}:
        _take_named_moments(parts, held, optimizer)
        return parts
    parts.steps = steps_of(optimizer["optimizer_state_dict"])
    unused = dict(held)
    for sources in _groups(optimizer):
        names = list(unused)
        places = _places(sources[FP32], [unused[name] for name in names])
        if places is None:
            raise CheckpointError(
                f"{path} has {sources[FP32].numel()} main weights in fp32 that are not those of "
                f"its {len(held)} parameters: use another checkpoint"
            )
        for index, offset in places:
            half = unused.pop(names[index])
            for kind, source in sources.items():
                piece = source.narrow(0, offset, half.numel())
                parts.kinds[kind][names[index]] = Pieces(tuple(half.shape), (piece,))
    return parts


def _groups(optimizer: Mapping[str, Any]) -> Iterator[dict[str, Tensor]]:
    """Main weights and moments of each group, its parameters end to end.

    One kind of optimizer keeps them so, the other steps every parameter by itself.
    """
    state, flats = optimizer["optimizer_state_dict"]["state"], optimizer.get("fp32_groups_flat")
    groups: Sequence[Sequence[Tensor]] = (
        optimizer["fp32_groups"] if flats is None else [[flat] for flat in flats]
    )
    begin = 0
    for group in groups:
        own = [state.get(number, {}) for number in range(begin, begin + len(group))]
        begin += len(group)
        sources = {FP32: group} | {
            kind: [one[kind] for one in own] for kind in MOMENTS if all(kind in one for one in own)
        }
        yield {
            kind: torch.cat([one.detach().reshape(-1) for one in tensors])
            for kind, tensors in sources.items()
        }


def _places(flat: Tensor, halves: Sequence[Tensor]) -> list[tuple[int, int]] | None:
    """Which of `halves`, in their order, fill `flat`, and where each begins; None if none do.

    What follows is zeros.

    A search that takes each where it can: where that leads nowhere, as with equal values by chance,
    it is left out.
    """
    before: dict[tuple[int, int], tuple[int, int] | None] = {}
    stack: list[tuple[tuple[int, int], tuple[int, int] | None]] = [((0, 0), None)]
    while stack:
        at, parent = stack.pop()
        if at in before:
            continue
        before[at] = parent
        index, offset = at
        if index == len(halves):
            if not flat[offset:].any():
                return _path(before, at)
            continue
        stack.append(((index + 1, offset), at))
        count = halves[index].numel()
        if offset + count <= flat.numel() and _rounds(flat.narrow(0, offset, count), halves[index]):
            stack.append(((index + 1, offset + count), at))
    return None


def _path(
    before: Mapping[tuple[int, int], tuple[int, int] | None], end: tuple[int, int]
) -> list[tuple[int, int]]:
    """The steps to `end` that took something."""
    found, at, parent = [], end, before[end]
    while parent is not None:
        if at[1] != parent[1]:
            found.append(parent)
        at, parent = parent, before[parent]
    return found


def _rounds(main: Tensor, half: Tensor) -> bool:
    return torch.equal(main.to(half.dtype), half.reshape(-1))


def _take_named_moments(
    parts: Parts, held: Mapping[str, Tensor], optimizer: Mapping[str, Any]
) -> None:
    """Moments of an fp32 model, whose optimizer knows names if it was given them."""
    groups = optimizer.get("param_groups", ())
    names = [name for group in groups for name in group.get("param_names", ())]
    if set(names) != held.keys():
        return
    parts.steps = steps_of(optimizer)
    for number, name in enumerate(names):
        own = optimizer["state"].get(number, {})
        for kind in MOMENTS:
            if kind in own:
                parts.kinds[kind][name] = Pieces.of(own[kind])
