"""Models whose weights identify their position, and changes of Megatron-LM files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.config.model import Family, ModelConfig
from megacore.config.spec import ModelSpec, SpecialTokens
from megacore.convert.megatron.checkpoint import write_megatron
from megacore.models.build import build_bare
from megacore.parallel.mesh import ProcessMesh

VOCAB_SIZE = 300
ITERATION = 1000
LLAMA = {
    "num_query_groups": 2,
    "activation": "swiglu",
    "normalization": "rmsnorm",
    "position_embedding_type": "rope",
    "rotary_percent": 0.5,
    "rotary_base": 5000.0,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
"""Every option that Megatron's form has beyond GPT-2."""
MODELS: dict[str, tuple[Family, dict[str, Any]]] = {
    "gpt": ("gpt", {}),
    "gpt-sizes": (
        "gpt",
        {"ffn_hidden_size": 40, "kv_channels": 16, "activation": "gelu", "layernorm_epsilon": 1e-6},
    ),
    "gpt-gated": ("gpt", {"activation": "swiglu", "num_query_groups": 2}),
    "llama": ("gpt", LLAMA),
    "llama3": (
        "gpt",
        LLAMA | {"rope_scaling": {"kind": "llama3", "factor": 32.0}, "add_qkv_bias": True},
    ),
    "linear-rope": (
        "gpt",
        {
            "position_embedding_type": "rope",
            "rope_scaling": {"kind": "linear", "factor": 3.0},
            "add_bias_linear": False,
            "add_qkv_bias": True,
        },
    ),
    "no-positions": (
        "gpt",
        {"position_embedding_type": "none", "num_query_groups": 2, "hidden_dropout": 0.0},
    ),
    "bert": ("bert", {"activation": "gelu"}),
    "bert-no-binary-head": ("bert", {"bert_binary_head": False}),
}


def megatron_spec(name: str, **model: Any) -> ModelSpec:
    """Return four layers of width 32 with 4 heads; the vocabulary of 300 is padded to 304."""
    family, options = MODELS[name]
    values = {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "max_position_embeddings": 24,
    }
    return ModelSpec(
        family=family,
        model=ModelConfig(**{**values, "make_vocab_size_divisible_by": 16, **options, **model}),
        vocab_size=VOCAB_SIZE,
        special_tokens=SpecialTokens(eod=3, sentinels=(7, 8)),
    )


def weights(spec: ModelSpec, *, numbered: bool = True) -> dict[str, Tensor]:
    """Return every parameter of the built model, with a different number in each element.

    Without `numbered`, models are not limited in size and numbers occur several times.
    """
    tensors: dict[str, Tensor] = {}
    begin = 0
    for name, parameter in build_bare(spec, ProcessMesh.serial()).named_parameters():
        tensors[name] = torch.arange(begin, begin + parameter.numel(), dtype=torch.float32).view(
            parameter.shape
        )
        begin += parameter.numel()
    assert begin < 2**24 or not numbered  # above 2**24, float32 skips numbers
    return tensors


def written(
    root: Path, name: str = "gpt", *, tensor: int = 1, pipeline: int = 1, **model: Any
) -> tuple[Path, dict[str, Tensor]]:
    """Write a checkpoint below `root`; return the directory of its iteration, and its tensors."""
    spec = megatron_spec(name, **model)
    tensors = weights(spec)
    write_megatron(spec, tensors, root, iteration=ITERATION, tensor=tensor, pipeline=pipeline)
    return root / f"iter_{ITERATION:07d}", tensors


def load(path: Path) -> dict[str, Any]:
    """Return the content of one rank's file, given its directory."""
    state: dict[str, Any] = torch.load(path / "model_optim_rng.pt", weights_only=True)
    return state


def change(path: Path, edit: Callable[[dict[str, Any]], None], **options: Any) -> None:
    """Save one rank's file again after `edit`."""
    state = load(path)
    edit(state)
    torch.save(state, path / "model_optim_rng.pt", **options)
