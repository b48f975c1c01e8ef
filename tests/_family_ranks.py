"""Results of t tensor-parallel ranks for the models of `tests/_families.py`, in one spawn."""

from typing import Any

import torch
from torch import Tensor

from megacore.kernels.choice import Kernels, choose_kernels, plain_kernels
from megacore.kernels.implementation import Setting
from megacore.models.base import Model
from megacore.parallel.mesh import SINGLE_RANK, ParallelGroup, ProcessMesh
from megacore.parallel.rank_layout import RankLayout
from megacore.tensor_parallel import partial_gradients, partitions
from tests import _families
from tests._dist import still_alive
from tests._families import DECODERS, VARIANTS

ALIKE = (
    "llama geglu, long base",
    "llama 3",
    "llama dynamic",
    "neox serial",
    "bert gelu_new",
    "bert masked lm",
)
"""Models that are sharded in the same way as another one."""
DIVIDED = tuple(name for name in VARIANTS if name not in ALIKE)
DROPPED = ("bert", "t5 v1.1")
"""Models trained with dropout; tests/models/test_gpt_parallel.py tests GPT's."""
SEED = 77
LONG = 300
"""Tokens of sequences of several blocks of the attention kernel."""
RECOMPUTED: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "full of one layer": {"recompute": "full", "recompute_num_layers": 1},
}


def run(world: int) -> dict[str, Any]:
    """Run every case in the same order on all ranks; sequence parallelism needs several ranks."""
    tp = ProcessMesh.build(RankLayout(tensor=world)).tensor_parallel if world > 1 else SINGLE_RANK
    kinds = ("plain", "sequence")[:world]
    results: dict[str, Any] = {}
    for name in VARIANTS if world == 1 else DIVIDED:
        still_alive()
        results[name] = {kind: _plain(name, tp, kind == "sequence") for kind in kinds}
    for name in DROPPED:
        still_alive()
        results[name]["dropped"] = {kind: _dropped(name, tp, kind == "sequence") for kind in kinds}
    return results


def leaks(world: int) -> dict[str, list[str]]:
    """Return what leaks between documents, by decoder, layout, type and kernels.

    Ranks divide layers, also with sequence parallelism, or sequences longer than a kernel's block.
    """
    tp = ProcessMesh.build(RankLayout(tensor=world)).tensor_parallel
    cp = ProcessMesh.build(RankLayout(context=world)).context_parallel
    layouts: dict[str, tuple[dict[str, Any], int]] = {
        "tensor": ({"tp": tp}, _families.LENGTH),
        "sequence": ({"tp": tp, "sequence_parallel": True}, _families.LENGTH),
        "context": ({"cp": cp}, LONG),
    }
    results: dict[str, list[str]] = {}
    for name in DECODERS:
        if name not in DIVIDED:
            continue
        still_alive()
        for layout, (options, length) in layouts.items():
            model_spec = _families.spec(name, max_position_embeddings=length)
            for kind, (kernels, dtype) in _kinds(name).items():

                def build(
                    spec: Any = model_spec,
                    options: Any = options | {"kernels": kernels},
                    dtype: torch.dtype = dtype,
                ) -> list[Model]:
                    return [_families.model(spec, **options).to(dtype)]

                results[f"{name} {layout} {kind}"] = _families.leaks(
                    build, length, options.get("cp", SINGLE_RANK)
                )
    return results


def _kinds(name: str) -> dict[str, tuple[Kernels, torch.dtype]]:
    """Return plain torch, and the kernels that are chosen for each type."""
    softcapped = "attn_logit_softcapping" in DECODERS[name]
    return {"plain": (plain_kernels(), torch.float32)} | {
        str(dtype): (
            choose_kernels(Setting(torch.device("cpu"), dtype, softcapped=softcapped)),
            dtype,
        )
        for dtype in (torch.float32, torch.bfloat16)
    }


def _plain(name: str, tp: ParallelGroup, sequence: bool) -> dict[str, Any]:
    """Return logits, losses and gradients of a whole model and of chunks of one layer.

    With several ranks, the pipeline of chunks is sequence parallel, which divides the hidden states
    between chunks.
    """
    model_spec = _families.spec(name)
    whole, micro_batch = (
        _families.model(model_spec, tp, sequence_parallel=sequence),
        _families.given(model_spec),
    )
    results = (
        {}
        if tp.size > 1 and not sequence
        else {"chunks": _families.backward(_pieces(name, tp, sequence), micro_batch)}
    )
    return results | {
        "partitions": partitions(whole),
        "partial": partial_gradients(whole),
        "logits": [part.detach() for part in _families.logits(whole, micro_batch)],
        "whole": _families.backward([whole], micro_batch),
    }


def _dropped(name: str, tp: ParallelGroup, sequence: bool) -> dict[str, dict[str, Tensor]]:
    """Return losses and gradients with all dropouts on.

    Cases: every kind of recomputation, a repetition, another seed, and chunks.
    """
    values = {"hidden_dropout": 0.2, "attention_dropout": 0.3}
    model_spec = _families.spec(name, **values)
    micro_batch = _families.given(model_spec)

    def passed(parts: list[Model], seed: int = SEED) -> dict[str, Tensor]:
        return _families.backward(parts, micro_batch, seed)

    def whole(**options: Any) -> list[Model]:
        return [_families.model(model_spec, tp, sequence_parallel=sequence, **options)]

    results = {way: passed(whole(**options)) for way, options in RECOMPUTED.items()}
    results["again"] = passed(whole())
    results["another seed"] = passed(whole(), SEED + 1)
    results["chunks"] = passed(_pieces(name, tp, sequence, **values))
    return results


def _pieces(name: str, tp: ParallelGroup, sequence: bool, **values: Any) -> list[Model]:
    model_spec = _families.spec(name, **values)
    return [
        _families.model(model_spec, tp, chunk=chunk, sequence_parallel=sequence)
        for chunk in _families.chunks(model_spec)
    ]
