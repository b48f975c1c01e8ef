"""Tiny causal models with distinct weights, and their checkpoints."""

from pathlib import Path
from typing import Any

import torch

from megacore.checkpoint.save import save_checkpoint
from megacore.config.data import END_OF_TEXT
from megacore.config.model import ModelConfig
from megacore.config.spec import ModelSpec, SpecialTokens
from megacore.models.build import build_bare
from megacore.models.gpt import GPTModel
from megacore.parallel.mesh import ProcessMesh
from megacore.tokenizer import Tokenizer, load_tokenizer
from megacore.tokenizer.build import train_bpe
from megacore.tokenizer.load import JsonTokenizer

VOCAB = 101
POSITIONS = 64
EOD = 4
LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "num_query_groups": 2,
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
NEOX: dict[str, Any] = {
    "position_embedding_type": "rope",
    "rotary_percent": 0.25,
    "parallel_residual": True,
    "activation": "gelu",
    "untie_embeddings_and_output_weights": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": LLAMA,
    "mistral": {**LLAMA, "sliding_window": 6},
    "neox": NEOX,
    "qwen2, yarn": {
        **LLAMA,
        "add_qkv_bias": True,
        "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    },
    "dynamic": {
        **LLAMA,
        "rope_scaling": {"kind": "dynamic", "factor": 4.0, "original_max_position_embeddings": 16},
    },
    "longrope": {
        **LLAMA,
        "rope_scaling": {
            "kind": "longrope",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "short_factor": (1.0, 1.2, 1.5, 2.0),
            "long_factor": (2.0, 3.0, 4.0, 8.0),
        },
    },
    "alibi": {"position_embedding_type": "alibi", "qk_layernorm": True},
    "none": {"position_embedding_type": "none"},
}
"""Models by kind of position."""


def spec(
    vocab_size: int = VOCAB, *, eod: int = EOD, tokenizer: Path | None = None, **model: Any
) -> ModelSpec:
    """Return a specification of two layers of width 32 with 4 heads; `model` replaces values."""
    values = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "max_position_embeddings": POSITIONS,
        "make_vocab_size_divisible_by": 16,
    }
    return ModelSpec(
        family="gpt",
        model=ModelConfig.model_validate(values | model),
        vocab_size=vocab_size,
        special_tokens=SpecialTokens(eod=eod),
        tokenizer_directory=None if tokenizer is None else str(tokenizer),
    )


def random_model(model_spec: ModelSpec, seed: int = 3) -> GPTModel:
    """Build a model with all parameters random, including norms and the vocabulary's padding."""
    model = build_bare(model_spec, ProcessMesh.serial(), device="cpu")
    assert isinstance(model, GPTModel)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * drawn if name.endswith("norm.weight") else 0.3 * drawn)
    return model


def write_checkpoint(
    root: Path, model_spec: ModelSpec, model: GPTModel, iteration: int = 5
) -> Path:
    """Write a checkpoint like training does."""
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    return save_checkpoint(root, iteration, tensors, {"model": model_spec.model_dump(mode="json")})


def write_tokenizer(directory: Path, vocab_size: int = 300) -> Tokenizer:
    """Train and save a byte-level BPE of exactly `vocab_size` entries."""
    directory.mkdir(parents=True)
    texts = [
        f"the {name} of step {number} is not the {name} of step {number + 1} .\n"
        for number in range(40)
        for name in ("value", "sum")
    ]
    JsonTokenizer(train_bpe(texts, vocab_size), END_OF_TEXT).save(directory)
    return load_tokenizer(directory)


def prompts(
    lengths: tuple[int, ...] = (5, 1, 17, 9, 30), vocab_size: int = VOCAB
) -> list[list[int]]:
    """Return random prompts of these lengths."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths
    ]
