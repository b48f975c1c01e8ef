"""Checkpoints as nanotron writes them, made of models of transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


def nanotron_config(model: Any, **changes: Any) -> dict[str, Any]:
    """Return the content of model_config.json for a LlamaForCausalLM."""
    config = model.config
    values = {
        "is_llama_config": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_scaling": None,
        "rope_interleaved": False,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": False,
        "vocab_size": config.vocab_size,
        "initializer_range": 0.02,
    }
    return values | changes


def nanotron_parameters(model: Any, *, interleaved: bool = False) -> dict[str, tuple[Any, ...]]:
    """Return each parameter, the dimension that is divided, and the lengths of its chunks."""
    state = model.state_dict()
    heads, size = model.config.num_attention_heads, model.config.head_dim
    groups, inner = model.config.num_key_value_heads, model.config.intermediate_size

    def rotated(rows: Tensor) -> Tensor:
        if not interleaved:
            return rows
        order = [number for pair in range(size // 2) for number in (pair, pair + size // 2)]
        return torch.cat([head[order] for head in rows.split(size)])

    words = "model.token_position_embeddings.pp_block.token_embedding.weight"
    parameters: dict[str, tuple[Any, ...]] = {words: (state["model.embed_tokens.weight"], 0, None)}
    for layer in range(model.config.num_hidden_layers):
        old, new = f"model.layers.{layer}", f"model.decoder.{layer}.pp_block"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            parameters[f"{new}.{norm}.weight"] = (state[f"{old}.{norm}.weight"], None, None)
        query, key, value = (state[f"{old}.self_attn.{name}_proj.weight"] for name in "qkv")
        fused = torch.cat([rotated(query), rotated(key), value])
        chunks = (heads * size, groups * size, groups * size)
        parameters[f"{new}.attn.qkv_proj.weight"] = (fused, 0, chunks)
        dense = state[f"{old}.self_attn.o_proj.weight"]
        parameters[f"{new}.attn.o_proj.weight"] = (dense, 1, None)
        halves = [state[f"{old}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
        parameters[f"{new}.mlp.gate_up_proj.weight"] = (torch.cat(halves), 0, (inner, inner))
        down = state[f"{old}.mlp.down_proj.weight"]
        parameters[f"{new}.mlp.down_proj.weight"] = (down, 1, None)
    norm = state["model.norm.weight"]
    parameters["model.final_layer_norm.pp_block.weight"] = (norm, None, None)
    if not model.config.tie_word_embeddings:
        parameters["model.lm_head.pp_block.weight"] = (state["lm_head.weight"], 0, None)
    return parameters


def _shard(
    whole: Tensor, dim: int, chunks: tuple[int, ...] | None, rank: int, size: int
) -> tuple[Tensor, str]:
    """Return one rank's tensor, and the text of its places."""
    parts, texts, local, begin = [], [], 0, 0
    for length in chunks or (whole.shape[dim],):
        own = length // size
        start = begin + rank * own
        parts.append(whole.narrow(dim, start, own))
        sides = []
        for place in ((local, local + own), (start, start + own)):
            each = ["None,None,None"] * whole.dim()
            each[dim] = f"{place[0]},{place[1]},None"
            sides.append("|".join(each))
        texts.append("#".join(sides))
        local, begin = local + own, begin + length
    return torch.cat(parts, dim).contiguous(), ";".join(texts)


def write_nanotron(
    root: Path, parameters: Mapping[str, tuple[Any, ...]], config: Mapping[str, Any], size: int = 1
) -> Path:
    """Write a checkpoint below `root` and return the directory of its step."""
    directory = root / "30"
    directory.mkdir(parents=True)
    (root / "latest.txt").write_text("30")
    (directory / "model_config.json").write_text(json.dumps(config))
    metadata = {"version": "1.5", "tp": size, "dp": 1, "metas": {"last_train_step": 30}}
    (directory / "checkpoint_metadata.json").write_text(json.dumps(metadata))
    for name, (whole, dim, chunks) in parameters.items():
        *folders, end = name.split(".")
        folder = directory.joinpath("model", *folders)
        folder.mkdir(parents=True, exist_ok=True)
        if dim is None:
            save_file({"data": whole.contiguous()}, folder / f"model_{end}.safetensors")
            continue
        for rank in range(size):
            part, text = _shard(whole, dim, chunks, rank, size)
            header = {
                "version": "1.5",
                "local_global_slices_pairs": text,
                "unsharded_shape": str(tuple(whole.shape)),
            }
            file = f"model_{end}_pp-rank-0-of-1_tp-rank-{rank}-of-{size}.safetensors"
            save_file({"data": part}, folder / file, metadata=header)
    return directory
