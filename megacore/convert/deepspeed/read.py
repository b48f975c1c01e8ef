"""Import of DeepSpeed's checkpoints of our models and of Megatron-DeepSpeed's GPT and BERT.

Checkpoints of ZeRO stage 0 to 3, pipelines, and universal checkpoints can be read, with any number
of ranks. Nothing in them is executed, and deepspeed is not needed.

Source: microsoft/DeepSpeed, deepspeed/utils/zero_to_fp32.py and deepspeed/checkpoint;
Megatron-DeepSpeed, megatron/checkpointing.py.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.artifact.workspace import RUN_FILE
from megacore.checkpoint.format import STATE_NAME
from megacore.checkpoint.spec import read_spec
from megacore.config.spec import ModelSpec
from megacore.convert.deepspeed.files import Saved, checkpoint_directory, saved_files
from megacore.convert.deepspeed.parts import (
    FP32,
    KINDS,
    MOMENTS,
    Parts,
    Pieces,
    layer_parts,
    sharded_parts,
    undivided_parts,
    universal_parts,
)
from megacore.convert.key_map import LazyTensors, Shape, name_mismatch
from megacore.convert.megatron.args import check_rows, family_of, remarks_on, spec_of
from megacore.convert.megatron.files import VERSIONS, MergedTensors, args_in
from megacore.convert.megatron.table import WORD_EMBEDDINGS, current_name, layer_numbers, slots
from megacore.convert.source import Foreign, parameter_shapes
from megacore.errors import CheckpointError, ConfigError, ConversionError, listed
from megacore.jobs.run import TrainJob
from megacore.models.build import build_bare
from megacore.parallel.mesh import ParallelGroup, ProcessMesh
from megacore.paths import is_file
from megacore.tensor_parallel import partitions

_WRAPPERS = re.compile(r"^(?:(?:module|model|chunk|\d+|tied_modules\.\w+)\.)+")
"""Prefixes of our parameters' names: from the wrapper that calls the model with a batch, or from
the layer of a pipeline."""
_TIED = re.compile(r"^(?:module\.)?tied_modules\.(\w+)\.weight$")
"""Name of a parameter that stages of our pipeline share."""
_TIED_LAYER = re.compile(r"^\d+\.weight$")
"""Name of such a parameter in the files of layers, without its module's name. The file of the
module that owns the parameter contains it too."""
_OUR_LAYER = re.compile(r"(?:^|\.)(?:encoder|decoder)\.layers\.\d+\.")
_PIPELINE_LAYER = re.compile(
    r"^(?:module\.)?(\d+)\.((?:(?:input|post_attention)_(?:layer)?norm|(?:self_)?attention|mlp)\.."
    r"+)$"
)
_PIPELINE_REST: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(rf"^(?:module\.)?(?:\d+|tied_modules\.\w+)\.{theirs}$"), ours)
    for theirs, ours in (
        (
            r"(word|position|tokentype)_embeddings\.weight",
            r"language_model.embedding.\1_embeddings.weight",
        ),
        (r"(?:final_layernorm\.)?(weight|bias)", r"language_model.encoder.final_layernorm.\1"),
        (r"lm_head\.weight", "language_model.output_layer.weight"),
    )
)
"""Names of the modules in Megatron-DeepSpeed's pipeline other than transformer layers. The final
norm may have only its number as a name."""
_LEVELS = 3
_TABLE = f"language_model.{WORD_EMBEDDINGS}"
_OF_FIRST_STAGE = re.compile(r"\btied_modules\.\w+\.(position|tokentype)_embeddings\.")
"""Parameters of a tied embedding, other than the token embedding, which the last stage of a
pipeline has but neither uses nor trains."""
_OTHERS = "others"
"""Pseudo-kind of weights that are not in the optimizer, until they are renamed."""
Ranks = list[dict[str, dict[str, Pieces]]]
"""Tensors of each tensor-parallel rank, by kind and name."""


class JoinedTensors(LazyTensors):
    """Mapping of our fp32 parameters by global name, joined from all ranks on access.

    Args:
        spec: spec of the model.
        ranks: tensors of each tensor-parallel rank, by global name.
        where: checkpoint that errors name.

    Raises:
        CheckpointError: on construction, if a tensor is missing, unknown or of a wrong shape, or
            differs between ranks that must have the same values.
        ParallelLayoutError: on construction, if the model cannot be divided over the ranks.
    """

    def __init__(self, spec: ModelSpec, ranks: Sequence[Mapping[str, Tensor]], where: Path) -> None:
        self._ranks = ranks
        mesh = ProcessMesh(tensor_parallel=ParallelGroup(size=len(ranks)))
        model = build_bare(spec, mesh)
        self._cuts = {name: part.dim for name, part in partitions(model).items()}
        shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
        super().__init__(shapes, self._joined)
        for rank, tensors in enumerate(ranks):
            mismatch = name_mismatch(tensors.keys(), shapes)
            if mismatch is not None:
                raise CheckpointError(
                    f"{where}, tensor rank {rank}, is of another model than its description: "
                    f"{mismatch}: use the description it was saved with"
                )
            for name, shape in shapes.items():
                self._check(name, shape, rank, where)

    def _joined(self, name: str) -> Tensor:
        cut = self._cuts.get(name)
        if cut is None:
            return self._ranks[0][name].to(torch.float32, copy=True)
        return torch.cat([rank[name] for rank in self._ranks], cut).to(torch.float32)

    def _check(self, name: str, shape: Shape, rank: int, where: Path) -> None:
        tensor = self._ranks[rank][name]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{where} has {name} of shape {tuple(tensor.shape)} on tensor rank {rank}, where "
                f"the model has {shape}: use the description it was saved with"
            )
        if rank and name not in self._cuts and not torch.equal(tensor, self._ranks[0][name]):
            raise CheckpointError(
                f"{where} holds two of what should be one: {name} of tensor rank {rank} differs "
                "from that of tensor rank 0: use another checkpoint"
            )


def open_deepspeed(directory: Path) -> Foreign:
    """Open a checkpoint; its tensors are read on access.

    Args:
        directory: directory of one checkpoint, or a run's directory with a file `latest`.

    Raises:
        CheckpointError: if a file is missing or damaged, contains objects other than data, or
            disagrees with another file.
        ConversionError: if none of our models matches the checkpoint, or no file describes its
            model.
        ParallelLayoutError: if the model cannot be divided over the checkpoint's ranks.
    """
    saved = saved_files(checkpoint_directory(directory))
    where, first = saved.directory, next(iter(saved.states.values()))
    _check_agreement(saved)
    ranks, steps = _tensor_ranks(saved)
    names = {name for rank in ranks for name in (*rank[FP32], *rank[_OTHERS])}
    saved_spec = _find_model_spec(where) if _are_ours(names, where) else None
    current = (
        _our_names(names, parameter_shapes(saved_spec))
        if saved_spec
        else _megatron_names(names, where)
    )
    ranks = [
        {kind: _renamed(tensors, current, where) for kind, tensors in rank.items()}
        for rank in ranks
    ]
    for rank in ranks:
        rank[FP32] = rank.pop(_OTHERS) | rank[FP32]
    remarks: list[str] = []
    if any(
        piece.dtype != torch.float32
        for tensors in ranks[0][FP32].values()
        for piece in tensors.flat
    ):
        remarks.append("the files hold weights in half precision, without main weights in fp32")
    kinds = (FP32, *_whole_moments(ranks, steps, remarks))
    read: Mapping[str, Mapping[str, Tensor]]
    if saved_spec:
        spec = saved_spec
        read = {
            kind: JoinedTensors(spec, _stage(ranks, kind, spec.padded_vocab_size), where)
            for kind in kinds
        }
    else:
        spec, read = _megatron(first, ranks, kinds, where)
        remarks += remarks_on(args_in(first), spec.family)
    return Foreign(
        "deepspeed",
        kind=(
            f"{_form(saved)} of "
            f"{'a model of megacore' if saved_spec else 'Megatron-DeepSpeed'}, {spec.family}"
        ),
        spec=spec,
        tensors=read[FP32],
        moments={kind: read[kind] for kind in MOMENTS if kind in read},
        optimizer_steps=max(steps) if len(kinds) > 1 else None,
        iteration=_iteration(first),
        files=saved.files,
        remarks=tuple(remarks),
    )


def _form(saved: Saved) -> str:
    if saved.universal:
        return "DeepSpeed's universal checkpoint"
    return "DeepSpeed's sharded checkpoint" if saved.optimizer else "DeepSpeed's checkpoint"


def _iteration(state: Mapping[str, Any]) -> int:
    values = (state.get(name) for name in ("iteration", "global_steps"))
    return next((value for value in values if type(value) is int and value >= 0), 0)


def _check_agreement(saved: Saved) -> None:
    (first, state), *others = saved.states.items()
    for rank, other in others:
        for what in ("global_steps", "iteration", "ds_version", "dp_world_size", "mp_world_size"):
            if state.get(what) != other.get(what):
                raise CheckpointError(
                    f"{saved.path_of(first)} has {what} {state.get(what)!r} and "
                    f"{saved.path_of(rank)} {other.get(what)!r}: they are of different "
                    "checkpoints, use one that was saved as a whole"
                )
    size = state.get("mp_world_size")
    if type(size) is int and size != len(saved.states) and not saved.universal:
        raise CheckpointError(
            f"{saved.directory} has model files of {len(saved.states)} ranks where "
            f"{saved.path_of(first)} says mp_world_size {size}: use a whole checkpoint"
        )


def _tensor_ranks(saved: Saved) -> tuple[Ranks, set[int]]:
    """Return the tensors of each tensor-parallel rank over all stages, and the optimizer steps."""
    if saved.universal:
        parts = {0: [universal_parts(saved)]}
    elif saved.optimizer:
        parts = _by_tensor_rank(saved, sharded_parts)
    elif saved.layers:
        parts = {rank: [layer_parts(saved, rank)] for rank in range(saved.tensor_size)}
    else:
        parts = _by_tensor_rank(saved, undivided_parts)
    steps = {step for stages in parts.values() for part in stages for step in part.steps}
    return [_joined(parts[rank], saved.directory) for rank in sorted(parts)], steps


def _by_tensor_rank(saved: Saved, read: Callable[[Saved, int], Parts]) -> dict[int, list[Parts]]:
    parts: dict[int, list[Parts]] = {rank: [] for rank in range(saved.tensor_size)}
    for rank in saved.states:
        parts[rank % saved.tensor_size].append(read(saved, rank))
    return parts


def _joined(stages: Sequence[Parts], where: Path) -> dict[str, dict[str, Pieces]]:
    """Merge the tensors of all pipeline stages; tensors in several stages must be equal."""
    kinds: dict[str, dict[str, Pieces]] = {kind: {} for kind in KINDS}
    for parts in stages:
        for kind in KINDS:
            for name, pieces in parts.kinds[kind].items():
                if not (name in kinds[kind] and _OF_FIRST_STAGE.search(name)):
                    _add(kinds[kind], name, pieces, where)
    return kinds | {
        _OTHERS: {name: pieces for parts in stages for name, pieces in parts.others.items()}
    }


def _renamed(
    tensors: Mapping[str, Pieces], current: Mapping[str, str], where: Path
) -> dict[str, Pieces]:
    renamed: dict[str, Pieces] = {}
    for name, pieces in tensors.items():
        if name in current:
            _add(renamed, current[name], pieces, where)
    return renamed


def _add(tensors: dict[str, Pieces], name: str, pieces: Pieces, where: Path) -> None:
    """Add a tensor, or compare it with the one of that name.

    Raises:
        CheckpointError: if the two differ.
    """
    other = tensors.setdefault(name, pieces)
    if other is not pieces and (
        other.shape != pieces.shape or not torch.equal(other.whole(), pieces.whole())
    ):
        raise CheckpointError(
            f"{where} holds two of what should be one: {name} differs between pipeline stages: use "
            "another checkpoint"
        )


def _whole_moments(ranks: Ranks, steps: set[int], remarks: list[str]) -> tuple[str, ...]:
    """Return the kinds of moments to import: both if every parameter has them, else none.

    If none, a remark is added.
    """
    complete = [
        kind for kind in MOMENTS if all(rank[kind].keys() == rank[FP32].keys() for rank in ranks)
    ]
    if len(complete) == len(MOMENTS) and len(steps) == 1:
        return MOMENTS
    if any(rank[kind] for rank in ranks for kind in MOMENTS):
        remarks.append(
            "the files do not hold Adam's moments of every parameter after one number of steps: "
            "none is taken"
        )
    else:
        remarks.append(
            "the files do not say which parameters Adam's moments belong to, or have none: only "
            "the weights are taken"
        )
    return ()


def _stage(ranks: Ranks, kind: str, rows: int) -> tuple[LazyTensors, ...]:
    """Return one kind of tensors of each rank, with unpadded embeddings padded to `rows`."""
    return tuple(_assembled(rank[kind], rows) for rank in ranks)


def _assembled(held: Mapping[str, Pieces], rows: int) -> LazyTensors:
    """Return a rank's tensors, each assembled on access."""
    return LazyTensors(held, lambda name: held[name].whole(rows))


def _megatron(
    first: Mapping[str, Any], ranks: Ranks, kinds: Sequence[str], where: Path
) -> tuple[ModelSpec, dict[str, Mapping[str, Tensor]]]:
    """Return the spec that the files' args describe, and the merged tensors by kind."""
    args = args_in(first)
    if not args:
        raise ConversionError(
            f"{where} holds a model of Megatron-DeepSpeed whose mp_rank_00_model_states.pt has no "
            "args, which nothing else says: use a checkpoint that Megatron-DeepSpeed's pretrain "
            "scripts saved"
        )
    version = first.get("checkpoint_version", 0.0)
    if version not in VERSIONS:
        raise ConversionError(
            f"{where} has checkpoint_version {version!r}, known are {', '.join(map(str, VERSIONS))}"
        )
    names = set(ranks[0][FP32])
    if any(_TABLE not in rank[FP32] for rank in ranks):
        raise CheckpointError(f"{where} has no {_TABLE}: use a whole checkpoint")
    padded = args.get("padded_vocab_size") or 0
    tables = [rank[FP32][_TABLE] for rank in ranks]
    rows = sum(max(table.shape[0], padded if table.unpadded else 0) for table in tables)
    spec = spec_of(args, family_of(names, where), len(layer_numbers(names)), rows, where)
    check_rows(spec, float(version), where)
    return spec, {
        kind: MergedTensors(
            [_stage(ranks, kind, spec.padded_vocab_size)],
            slots(spec),
            float(version),
            spec.model.head_dim,
            where,
        )
        for kind in kinds
    }


def _are_ours(names: Collection[str], where: Path) -> bool:
    """Return True for parameters named as ours, False for Megatron-DeepSpeed's.

    Raises:
        ConversionError: if it is neither.
    """
    if any("language_model." in name for name in names) or any(
        _PIPELINE_LAYER.match(name) for name in names
    ):
        return False
    if any(_OUR_LAYER.search(name) for name in names):
        return True
    shown = listed(sorted(names)) or "none"
    raise ConversionError(
        f"{where} has parameters {shown}, which are neither megacore's nor Megatron-DeepSpeed's: "
        "only those are read from DeepSpeed's checkpoints"
    )


def _our_names(names: Iterable[str], known: Collection[str]) -> dict[str, str]:
    """Map each parameter name in the files of one of our models to its global name.

    Args:
        names: names in the files.
        known: global names of the model, which identify tied modules.
    """
    tied = {name.replace(".", "_"): name for name in known}
    global_names = {}
    for name in names:
        match = _TIED.match(name)
        if match and match[1] in tied:
            global_names[name] = tied[match[1]]
        elif not _TIED_LAYER.match(name):
            global_names[name] = _WRAPPERS.sub("", name)
    return global_names


def _megatron_names(names: Collection[str], where: Path) -> dict[str, str]:
    """Map each weight's name in Megatron-DeepSpeed to the dotted name of `megatron.table`.

    Args:
        names: names in all pipeline stages, because layers are numbered across stages.
        where: checkpoint that errors name.

    Raises:
        ConversionError: if a module of a pipeline is unknown.
    """
    if any("language_model." in name for name in names):
        dotted_names = {name: current_name(_WRAPPERS.sub("", name)) for name in names}
        return {name: current for name, current in dotted_names.items() if current is not None}
    layers = sorted({int(match[1]) for name in names if (match := _PIPELINE_LAYER.match(name))})
    numbers = {layer: number for number, layer in enumerate(layers)}
    return {
        name: current
        for name in names
        if (renamed := _of_pipeline(name, numbers, where))
        and (current := current_name(renamed)) is not None
    }


def _of_pipeline(name: str, numbers: Mapping[int, int], where: Path) -> str:
    layer = _PIPELINE_LAYER.match(name)
    if layer:
        return f"language_model.encoder.layers.{numbers[int(layer[1])]}.{layer[2]}"
    for pattern, ours in _PIPELINE_REST:
        if match := pattern.match(name):
            return match.expand(ours)
    raise ConversionError(
        f"{where} has a parameter {name}, for which Megatron-DeepSpeed's GPT has no place"
    )


def _find_model_spec(directory: Path) -> ModelSpec:
    """Read the spec of one of our models from JSON in or above `directory`.

    The file is run.json of the run, or state.json of a megacore checkpoint.

    Raises:
        ConversionError: if there is neither file.
        CheckpointError: if the file is damaged.
    """
    candidates = [directory, *directory.absolute().parents][:_LEVELS]
    for candidate in candidates:
        if is_file(candidate / RUN_FILE):
            try:
                return TrainJob.read(candidate / RUN_FILE).spec
            except ConfigError as error:
                raise CheckpointError(str(error)) from error
        if is_file(candidate / STATE_NAME):
            return read_spec(candidate)
    raise ConversionError(
        f"{directory} holds a model of megacore and does not say which: put the {RUN_FILE} of its "
        f"run, or the {STATE_NAME} of a checkpoint of the same model, into it or into "
        f"{directory.absolute().parent}"
    )
