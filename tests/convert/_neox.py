"""Checkpoints as GPT-NeoX writes them, made of models of transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

VOCABULARY = 128
SETTINGS: dict[str, Any] = {
    "num-layers": 3,
    "hidden-size": 32,
    "num-attention-heads": 4,
    "max-position-embeddings": 48,
    "seq-length": 48,
    "pos-emb": "rotary",
    "no-weight-tying": True,
    "hidden-dropout": 0.0,
    "attention-dropout": 0.0,
    "attention_config": [[["flash"], 3]],
    "optimizer": {"type": "Adam"},
}


def randomized(model: torch.nn.Module) -> None:
    """Give every parameter random values, biases and norms too."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * drawn if "norm.weight" in name else 0.2 * drawn)


def neox_model(*, parallel: bool = True, tied: bool = False, rotary: float = 0.5) -> Any:
    """Return a random GPTNeoXForCausalLM."""
    config = GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=48,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": rotary,
        },
        use_parallel_residual=parallel,
        tie_word_embeddings=tied,
        hidden_act="gelu",
    )
    model = GPTNeoXForCausalLM(config).eval()
    randomized(model)
    return model


def llama_model(groups: int = 2) -> Any:
    """Return a random LlamaForCausalLM."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=groups,
        intermediate_size=48,
        max_position_embeddings=48,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
    )
    model = LlamaForCausalLM(config).eval()
    randomized(model)
    return model


def neox_settings(**changes: Any) -> dict[str, Any]:
    """Return the settings of `neox_model`."""
    return SETTINGS | {"gpt-j-residual": True, "rotary-pct": 0.5} | changes


def llama_settings(**changes: Any) -> dict[str, Any]:
    """Return the settings of `llama_model`."""
    values = {
        "num-kv-heads": 2,
        "norm": "rmsnorm",
        "rms_norm_epsilon": 1.0e-6,
        "activation": "swiglu",
        "intermediate-size": 144,
        "mlp-multiple-of": 1,
        "rotary-emb-base": 50000,
        "use_bias_in_attn_linear": False,
        "use_bias_in_mlp": False,
    }
    return SETTINGS | values | changes


def _rows(tensor: Tensor, size: int) -> list[Tensor]:
    return [part.clone() for part in tensor.chunk(size)]


def _columns(tensor: Tensor, size: int) -> list[Tensor]:
    return [part.clone() for part in tensor.chunk(size, 1)]


def _copies(tensor: Tensor, size: int) -> list[Tensor]:
    return [tensor.clone() for _ in range(size)]


def _summands(tensor: Tensor, size: int) -> list[Tensor]:
    """Return different tensors whose sum is `tensor`."""
    shares = [torch.full_like(tensor, 0.25 * rank) for rank in range(1, size)]
    return [tensor - sum(shares, torch.zeros_like(tensor)), *shares]


def neox_layers(model: Any, size: int, *, parallel: bool, legacy: bool = False) -> dict[int, Any]:
    """Return the tensors of each rank by layer, of a GPTNeoXForCausalLM."""
    state = model.state_dict()
    up, down = ("dense_h_to_4h", "dense_4h_to_h") if legacy else ("linear1", "linear2")
    bias = _summands if parallel else _copies
    layers = {0: {"word_embeddings.weight": _rows(state["gpt_neox.embed_in.weight"], size)}}
    for layer in range(3):
        theirs = {
            name.removeprefix(f"gpt_neox.layers.{layer}."): value
            for name, value in state.items()
            if name.startswith(f"gpt_neox.layers.{layer}.")
        }
        tensors = {}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            for end in ("weight", "bias"):
                tensors[f"{norm}.{end}"] = _copies(theirs[f"{norm}.{end}"], size)
        for ours, name in (
            ("attention.query_key_value", "attention.query_key_value"),
            (f"mlp.{up}", "mlp.dense_h_to_4h"),
        ):
            for end in ("weight", "bias"):
                tensors[f"{ours}.{end}"] = _rows(theirs[f"{name}.{end}"], size)
        for ours, name in (
            ("attention.dense", "attention.dense"),
            (f"mlp.{down}", "mlp.dense_4h_to_h"),
        ):
            tensors[f"{ours}.weight"] = _columns(theirs[f"{name}.weight"], size)
            tensors[f"{ours}.bias"] = bias(theirs[f"{name}.bias"], size)
        tensors["attention.rotary_emb.inv_freq"] = _copies(torch.ones(2), size)
        layers[layer + 2] = tensors
    ends = ("weight", "bias")
    layers[6] = {
        f"norm.{end}": _copies(state[f"gpt_neox.final_layer_norm.{end}"], size) for end in ends
    }
    if model.config.tie_word_embeddings:
        layers[7] = {"word_embeddings.weight": layers[0]["word_embeddings.weight"]}
    else:
        layers[7] = {
            "final_linear.weight": _rows(model.get_output_embeddings().weight.detach(), size)
        }
    return layers


def llama_layers(model: Any, size: int, *, legacy: bool = False) -> dict[int, Any]:
    """Return the tensors of each rank by layer, of a LlamaForCausalLM."""
    state, count = model.state_dict(), model.config.num_hidden_layers
    heads_per_rank = model.config.num_attention_heads // size
    layers = {0: {"word_embeddings.weight": _rows(state["model.embed_tokens.weight"], size)}}
    for layer in range(count):
        theirs = {
            name.removeprefix(f"model.layers.{layer}."): value
            for name, value in state.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        parts = [_rows(theirs[f"self_attn.{name}_proj.weight"], size) for name in "qkv"]
        fused = [torch.cat(rows) for rows in zip(*parts, strict=True)]
        if model.config.num_key_value_heads == model.config.num_attention_heads:
            heads = [
                [part.chunk(heads_per_rank) for part in rows] for rows in zip(*parts, strict=True)
            ]
            fused = [
                torch.cat([row for head in zip(*rank, strict=True) for row in head])
                for rank in heads
            ]
        gate = _rows(theirs["mlp.gate_proj.weight"], size)
        up = _rows(theirs["mlp.up_proj.weight"], size)
        down = _columns(theirs["mlp.down_proj.weight"], size)
        mlp = (
            {"mlp.w1.weight": gate, "mlp.w3.weight": up, "mlp.w2.weight": down}
            if legacy
            else {
                "mlp.linear1.weight": [torch.cat(rows) for rows in zip(up, gate, strict=True)],
                "mlp.linear2.weight": down,
            }
        )
        layers[layer + 2] = {
            "input_layernorm.scale": _copies(theirs["input_layernorm.weight"], size),
            "post_attention_layernorm.scale": _copies(
                theirs["post_attention_layernorm.weight"], size
            ),
            "attention.query_key_value.weight": fused,
            "attention.dense.weight": _columns(theirs["self_attn.o_proj.weight"], size),
            **mlp,
        }
    layers[count + 3] = {"norm.scale": _copies(state["model.norm.weight"], size)}
    layers[count + 4] = {"final_linear.weight": _rows(state["lm_head.weight"], size)}
    return layers


def write_neox(
    root: Path,
    layers: Mapping[int, Mapping[str, list[Tensor]]],
    settings: Mapping[str, Any],
    *,
    pipeline: bool = True,
) -> Path:
    """Write a checkpoint below `root` and return its directory."""
    directory = root / "global_step20"
    (directory / "configs").mkdir(parents=True)
    size = len(layers[0]["word_embeddings.weight"])
    given = dict(settings) | {"model-parallel-size": size, "pipe-parallel-size": int(pipeline)}
    names = list(given)
    for file, half in (("model.yml", names[::2]), ("local.yml", names[1::2])):
        text = yaml.safe_dump({name: given[name] for name in half})
        (directory / "configs" / file).write_text(text)
    for rank in range(size):
        state: dict[str, Any] = {"iteration": 20, "args": {"num_layers": 3}, "module": None}
        if not pipeline:
            state["module"] = {
                f"sequential.{layer}.{name}": parts[rank]
                for layer, tensors in layers.items()
                for name, parts in tensors.items()
            }
        torch.save(state, directory / f"mp_rank_{rank:02d}_model_states.pt")
        for layer, tensors in layers.items() if pipeline else ():
            content = {name: parts[rank] for name, parts in tensors.items()}
            torch.save(content, directory / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")
    (root / "latest").write_text(directory.name)
    return directory
