"""Main weights in fp32 that DeepSpeed keeps without ZeRO, under no names: they are known by what they round to.

Each group of the optimizer has its parameters in the model's order, by which equal ones are told apart.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.convert.deepspeed.files import Saved, reading
from megacore.convert.deepspeed.parts import FP32, MOMENTS, Parts, Pieces, module_tensors, steps_of
from megacore.errors import CheckpointError


def undivided_parts(saved: Saved, rank: int) -> Parts:
    """What one model rank holds without ZeRO: weights, in fp32 where its optimizer has them, and moments with a name.

    Raises CheckpointError for main weights that are those of no parameter.
    """
    model, path = saved.states[rank], saved.path_of(rank)
    with reading(path):
        return _with_masters(module_tensors(model), model.get("optimizer"), path)


def _with_masters(held: Mapping[str, Tensor], optimizer: Mapping[str, Any] | None, path: Path) -> Parts:
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
                f"{path} has {sources[FP32].numel()} main weights in fp32 that are not those of its {len(held)} "
                "parameters: use another checkpoint"
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
    groups: Sequence[Sequence[Tensor]] = optimizer["fp32_groups"] if flats is None else [[flat] for flat in flats]
    begin = 0
    for group in groups:
        own = [state.get(number, {}) for number in range(begin, begin + len(group))]
        begin += len(group)
        sources = {FP32: group} | {
            kind: [one[kind] for one in own] for kind in MOMENTS if all(kind in one for one in own)
        }
        yield {kind: torch.cat([one.detach().reshape(-1) for one in tensors]) for kind, tensors in sources.items()}


def _places(flat: Tensor, halves: Sequence[Tensor]) -> list[tuple[int, int]] | None:
    """Which of `halves`, in their order, fill `flat`, and where each begins; None if none do. What follows is zeros.

    A search that takes each where it can: where that leads nowhere, as with equal values by chance, it is left out.
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


def _path(before: Mapping[tuple[int, int], tuple[int, int] | None], end: tuple[int, int]) -> list[tuple[int, int]]:
    """The steps to `end` that took something."""
    found, at, parent = [], end, before[end]
    while parent is not None:
        if at[1] != parent[1]:
            found.append(parent)
        at, parent = parent, before[parent]
    return found


def _rounds(main: Tensor, half: Tensor) -> bool:
    return torch.equal(main.to(half.dtype), half.reshape(-1))


def _take_named_moments(parts: Parts, held: Mapping[str, Tensor], optimizer: Mapping[str, Any]) -> None:
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
