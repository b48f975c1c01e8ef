"""Files like Megatron-DeepSpeed's, written from a model of megacore without either program."""

import argparse
import math
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.config.spec import ModelSpec
from megacore.convert.megatron.args import args_of
from megacore.convert.megatron.table import WORD_EMBEDDINGS, slots
from tests.convert._megatron import ITERATION, megatron_spec, weights

REPLICAS = 2
TABLE = f"language_model.{WORD_EMBEDDINGS}"
FACTORS = {"fp32": 1.0, "exp_avg": 2.0, "exp_avg_sq": 4.0}
"""Ratio of the main weights and moments to the weights."""


@dataclass
class fragment_address:  # noqa: N801 - its name in the files
    """Position of a parameter in a replica's flat range.

    The files refer to DeepSpeed's class of this name.
    """

    numel: int
    start: int


@contextmanager
def as_deepspeeds() -> Iterator[None]:
    """Pickle this file's class under DeepSpeed's name without importing DeepSpeed."""
    name = "deepspeed.utils.tensor_fragment"
    modules = {part: types.ModuleType(part) for part in ("deepspeed", "deepspeed.utils", name)}
    modules[name].fragment_address = fragment_address  # type: ignore[attr-defined]
    before = {part: sys.modules.get(part) for part in modules}
    module_name = fragment_address.__module__
    sys.modules.update(modules)
    fragment_address.__module__ = name
    try:
        yield
    finally:
        fragment_address.__module__ = module_name
        for part, module in before.items():
            sys.modules.pop(part)
            if module is not None:
                sys.modules[part] = module


def rank_tensors(
    spec: ModelSpec, tensors: dict[str, Tensor], tensor: int
) -> list[dict[str, Tensor]]:
    """Return the tensors of each tensor-parallel rank of Megatron-DeepSpeed, by dotted name."""
    table = [slot for slot in slots(spec) if slot.place != "head copy"]
    return [
        {slot.name: slot.part([tensors[o] for o in slot.ours], rank, tensor) for slot in table}
        for rank in range(tensor)
    ]


def pipeline_name(name: str, layers: int) -> str:
    """Return the name of a tensor in a GPTModelPipe.

    The pipeline is an embedding, a module without weights, the layers, another module without
    weights, and a final norm.
    """
    if ".embedding." in name:
        return f"tied_modules.embed.{name.rpartition('embedding.')[2]}"
    if ".layers." in name:
        number, _, rest = name.partition(".layers.")[2].partition(".")
        return f"{int(number) + 3}.{rest}"
    if ".final_layernorm." in name:
        return f"{layers + 4}.{name.rpartition('.')[2]}"
    assert name == "language_model.output_layer.weight", name
    return f"{layers + 5}.lm_head.weight"


def stage_of(name: str, layers: int, stages: int) -> tuple[int, ...]:
    """Return the pipeline stages that have a tensor."""
    if name.startswith("tied_modules."):
        return (0, stages - 1)
    number = int(name.partition(".")[0]) - 3
    return (min(number * stages // layers, stages - 1),)


def common(spec: ModelSpec, *, tensor: int, pipeline: int = 1) -> dict[str, Any]:
    """Return what every file of a model contains besides its weights."""
    args = dict(args_of(spec, iteration=ITERATION, tensor=tensor, pipeline=pipeline))
    return {
        "args": argparse.Namespace(**args, deepspeed=True, zero_stage=1),
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
        "global_steps": ITERATION,
        "mp_world_size": tensor * pipeline,
        "dp_world_size": REPLICAS,
        "buffer_names": [],
        "shared_params": {},
        "optimizer": None,
    }


def write_zero1(
    folder: Path, rank: int, tensors: dict[str, Tensor], state: dict[str, Any], module: Any
) -> None:
    """Write one model rank's files of ZeRO stage 1.

    Each of the two groups is cut in the middle of a tensor; the rest is padding.
    """
    names = sorted(tensors)
    split = [n for n in names if tensors[n].dim() > 1], [n for n in names if tensors[n].dim() == 1]
    groups = [group for group in split if group]
    shapes = [{name: tensors[name].shape for name in group} for group in groups]
    torch.save(
        {**state, "module": module, "param_shapes": shapes},
        folder / f"mp_rank_{rank:02d}_model_states.pt",
    )
    for replica in range(REPLICAS):
        cuts = [_stretch({name: tensors[name] for name in group}, replica) for group in groups]
        optimizer = {
            "base_optimizer_state": {
                "state": {
                    i: {
                        "step": torch.tensor(float(ITERATION)),
                        **{k: flat * f for k, f in list(FACTORS.items())[1:]},
                    }
                    for i, (flat, _) in enumerate(cuts)
                },
                "param_groups": [],
            },
            "single_partition_of_fp32_groups": [flat for flat, _ in cuts],
            "param_slice_mappings": [addresses for _, addresses in cuts],
            "partition_count": [REPLICAS] * len(groups),
            "zero_stage": 1,
        }
        with as_deepspeeds():
            path = folder / f"bf16_zero_pp_rank_{replica}_mp_rank_{rank:02d}_optim_states.pt"
            torch.save({"optimizer_state_dict": optimizer}, path)


def _stretch(
    tensors: dict[str, Tensor], replica: int
) -> tuple[Tensor, dict[str, fragment_address]]:
    flat = torch.cat([value.reshape(-1) for value in tensors.values()])
    size = math.ceil(len(flat) / REPLICAS / 8) * 8
    begin, addresses, offset = replica * size, {}, 0
    for name, value in tensors.items():
        first, last = max(offset, begin), min(offset + value.numel(), begin + size)
        if first < last:
            addresses[name] = fragment_address(numel=last - first, start=first - begin)
        offset += value.numel()
    return flat[begin : begin + size].clone(), addresses


def nested(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Nest tensors by module in half precision, like a model without pipeline saves itself."""
    modules: dict[str, Any] = {}
    for name, value in tensors.items():
        _, part, rest = name.split(".", 2)
        modules.setdefault("language_model", {}).setdefault(part, {})[rest] = (
            value % 128
        ).bfloat16()
    return modules


def written_zero1(
    folder: Path, *, tensor: int = 2, **model: Any
) -> tuple[ModelSpec, dict[str, Tensor]]:
    """Write a checkpoint of a GPT without pipeline, and return the model's weights."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = megatron_spec("gpt", **model)
    tensors = weights(spec)
    for rank, by_name in enumerate(rank_tensors(spec, tensors, tensor)):
        write_zero1(folder, rank, by_name, common(spec, tensor=tensor), nested(by_name))
    return spec, tensors


def written_pipeline(
    folder: Path, *, tensor: int = 2, pipeline: int = 2, zero: bool = True, **model: Any
) -> tuple[ModelSpec, dict[str, Tensor]]:
    """Write a checkpoint of a pipeline: files of layers, and the optimizer's parts with `zero`."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = megatron_spec("gpt", **model)
    tensors, count = weights(spec), spec.model.num_layers
    state = common(spec, tensor=tensor, pipeline=pipeline)
    for rank, by_name in enumerate(rank_tensors(spec, tensors, tensor)):
        named = {pipeline_name(name, count): value for name, value in by_name.items()}
        files: dict[int, dict[str, Tensor]] = {}
        for name, value in named.items():
            tied = name.startswith("tied_modules.")
            number = 1 if tied else int(name.partition(".")[0])
            files.setdefault(number, {})[name.partition("embed." if tied else ".")[2]] = value
        for number, layer in files.items():
            torch.save(layer, folder / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
        for stage in range(pipeline):
            stage_tensors = {
                name: value
                for name, value in named.items()
                if stage in stage_of(name, count, pipeline)
            }
            # The last stage builds the whole tied module, but only its token table is tied.
            if stage:
                stage_tensors |= {
                    name: torch.zeros_like(value)
                    for name, value in stage_tensors.items()
                    if "position_emb" in name
                }
            if zero:
                write_zero1(folder, stage * tensor + rank, stage_tensors, state, None)
            else:
                torch.save(
                    {**state, "module": None},
                    folder / f"mp_rank_{stage * tensor + rank:02d}_model_states.pt",
                )
    return spec, tensors


def written_universal(folder: Path, **model: Any) -> tuple[ModelSpec, dict[str, Tensor]]:
    """Write a universal checkpoint of a pipeline, with an unpadded vocabulary."""
    spec = megatron_spec("gpt", **model)
    tensors, count = weights(spec), spec.model.num_layers
    (by_name,) = rank_tensors(spec, tensors, 1)
    for name, value in by_name.items():
        place = folder / "zero" / pipeline_name(name, count)
        place.mkdir(parents=True)
        for kind, factor in FACTORS.items():
            tables = {"vocab_tensor": True} if "word_embeddings" in name else {}
            rows = spec.vocab_size if tables else len(value)
            torch.save(
                {"param": value[:rows] * factor, "cat_dim": 0, **tables}, place / f"{kind}.pt"
            )
        torch.save(torch.tensor(float(ITERATION)), place / "step.pt")
    state = common(spec, tensor=2, pipeline=2)
    for rank in range(4):
        torch.save({**state, "module": None}, folder / f"mp_rank_{rank:02d}_model_states.pt")
    return spec, tensors
