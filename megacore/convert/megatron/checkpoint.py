"""Checkpoints of GPT and BERT in Megatron-LM's file format.

The files are `iter_0001000/mp_rank_TT[_PPP]/model_optim_rng.pt`.

Megatron-LM's legacy models and the public converters of transformers up to 4.46 can read the
written files. Files of any checkpoint_version and any tensor and pipeline parallel size can be
read. Only weights are converted: only megacore resumes a megacore checkpoint.

Source: NVIDIA/Megatron-LM, megatron/training/checkpointing.py (Shoeybi et al. 2019, Narayanan et
al. 2021).
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.artifact.files import staged
from megacore.checkpoint.format import directory_name, write_tracker
from megacore.config.spec import ModelSpec
from megacore.convert.key_map import name_mismatch
from megacore.convert.megatron.args import (
    args_of,
    check_megatron,
    check_rows,
    family_of,
    remarks_on,
    spec_of,
)
from megacore.convert.megatron.core import open_core
from megacore.convert.megatron.files import (
    CHECKPOINT_VERSION,
    FILE_NAME,
    MergedTensors,
    checkpoint_directory,
    is_distributed,
    layers_held,
    rank_files,
    read_rank_file,
    stages_of,
    vocabulary_rows,
    write_rank_file,
)
from megacore.convert.megatron.table import Slot, nested, slots, stage_slots
from megacore.convert.source import Foreign
from megacore.errors import ConversionError


def write_megatron(
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    output: Path,
    *,
    iteration: int,
    tensor: int = 1,
    pipeline: int = 1,
) -> None:
    """Write `output/iter_<iteration>/` and the tracker file, or nothing on failure.

    One rank's file and one complete tensor are in memory at a time. Each file looks up its tensors
    again.

    Args:
        spec: spec of the model.
        tensors: parameters by global name, with padded vocabulary; they are written in fp32.
        output: root directory, created if it does not exist.
        iteration: number of optimizer steps.
        tensor: tensor parallel size.
        pipeline: pipeline parallel size.

    Raises:
        ConversionError: if the format does not support the model, or `tensors` are of another one.
        ConfigError: if the iteration exists already.
        ParallelLayoutError: if the sizes do not divide the model.
        WorkspaceError: if the files cannot be written.
    """
    check_megatron(spec, tensor=tensor, pipeline=pipeline)
    table = slots(spec)
    expected = dict.fromkeys(name for slot in table for name in slot.ours)
    mismatch = name_mismatch(tensors.keys(), expected.keys())
    if mismatch is not None:
        raise ConversionError(
            f"the checkpoint is of another model than its description: {mismatch}: give the "
            "description it was saved with"
        )
    args = args_of(spec, iteration=iteration, tensor=tensor, pipeline=pipeline)
    count = spec.model.num_layers // pipeline
    with staged(output / directory_name(iteration)) as staging:
        for rank, stage in itertools.product(range(tensor), range(pipeline)):
            layers = range(stage * count, (stage + 1) * count)
            first, last = stage == 0, stage == pipeline - 1
            model = _rank_model(tensors, table, layers, (rank, tensor), first=first, last=last)
            name = f"mp_rank_{rank:02d}" if pipeline == 1 else f"mp_rank_{rank:02d}_{stage:03d}"
            state = {
                "args": args,
                "checkpoint_version": CHECKPOINT_VERSION,
                "iteration": iteration,
                "model": model,
            }
            write_rank_file(staging / name / FILE_NAME, state)
            del model, state
    write_tracker(output, iteration)


def open_megatron(directory: Path) -> Foreign:
    """Open a checkpoint of either form: the root with its tracker file, or one `iter_*`.

    Nothing in the files is executed. Tensors are read on access, except in the format of torch
    before 1.6.

    Raises:
        CheckpointError: if a file is missing or damaged, asks for more than data, or disagrees
            with another file.
        ConversionError: if our models do not support it, or it is in another form.
    """
    iteration_directory, iteration = checkpoint_directory(directory)
    if is_distributed(iteration_directory):
        return open_core(iteration_directory, iteration)
    paths = rank_files(iteration_directory)
    files = {rank: read_rank_file(path) for rank, path in paths.items()}
    stages = stages_of(files, iteration_directory)
    first = files[0, 0]
    family = family_of({name for stage in stages for name in stage[0]}, iteration_directory)
    spec = spec_of(
        first.args,
        family,
        layers_held(stages),
        vocabulary_rows(stages, iteration_directory),
        iteration_directory,
    )
    check_rows(spec, first.version, iteration_directory)
    tensors = MergedTensors(
        stages, slots(spec), first.version, spec.model.head_dim, iteration_directory
    )
    saved = iteration if first.iteration is None else first.iteration
    return Foreign(
        "megatron",
        f"Megatron-LM {family}",
        spec,
        tensors,
        tuple(paths.values()),
        saved or 0,
        remarks_on(first.args, family),
    )


def _rank_model(
    tensors: Mapping[str, Tensor],
    table: Iterable[Slot],
    layers: range,
    rank: tuple[int, int],
    *,
    first: bool,
    last: bool,
) -> dict[str, Any]:
    """Return the nested tensors of one tensor rank in the pipeline stage of `layers`.

    `rank` is the pair of tensor rank and tensor parallel size.
    """
    stage_table = stage_slots(table, layers, first=first, last=last)
    return nested(
        ((slot.name, slot.part(_taken(tensors, slot), *rank)) for slot in stage_table), layers.start
    )


def _taken(tensors: Mapping[str, Tensor], slot: Slot) -> Iterator[Tensor]:
    for name, shape in zip(slot.ours, slot.shapes, strict=True):
        tensor = tensors[name].detach().to(torch.float32)
        if tuple(tensor.shape) != shape:
            raise ConversionError(
                f"{name} has shape {tuple(tensor.shape)} where the model's description says "
                f"{shape}: give the description it was saved with"
            )
        yield tensor
