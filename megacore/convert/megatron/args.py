"""What Megatron-LM's file form can say of a model, and how: the `args` in each of its files."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megacore.config.model import ModelConfig
from megacore.config.spec import ModelSpec
from megacore.errors import ConversionError, ParallelLayoutError

_MADE_AS = {"gelu_tanh", "gelu", "swiglu"}
POSITIONS = ("learned_absolute", "rope", "none")
NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
_NO_PLACE: dict[str, Callable[[ModelConfig], bool]] = {
    "norm_position": lambda model: model.norm_position != "pre",
    "parallel_residual": lambda model: model.parallel_residual,
    "position_embedding_type": lambda model: model.position_embedding_type not in POSITIONS,
    "activation": lambda model: model.activation not in _MADE_AS,
    "rotary_percent": lambda model: (
        model.position_embedding_type == "rope" and int(model.head_dim * model.rotary_percent) != model.rotary_dim
    ),
    "sliding_window": lambda model: model.sliding_window is not None,
    "qk_layernorm": lambda model: model.qk_layernorm,
}
"""Options of a model for which Megatron-LM's legacy models have no counterpart, and when they are used."""
_NO_PLACE_IN_BERT: dict[str, Callable[[ModelConfig], bool]] = {
    "normalization": lambda model: model.normalization != "layernorm",
    "position_embedding_type": lambda model: model.position_embedding_type != "learned_absolute",
    "activation": lambda model: model.activation not in {"gelu_tanh", "gelu"},
    "num_query_groups": lambda model: model.query_groups != model.num_attention_heads,
    "add_bias_linear": lambda model: not model.add_bias_linear,
    "untie_embeddings_and_output_weights": lambda model: model.untie_embeddings_and_output_weights,
}
"""Further ones that its BERT has not."""


def check_megatron(spec: ModelSpec, *, tensor: int = 1, pipeline: int = 1) -> None:
    """Return when Megatron-LM's file form can hold this model, divided so.

    Raises:
        ConversionError: it has no place for the family or for an option of the model.
        ParallelLayoutError: heads, groups, widths, vocabulary or layers are not multiples of the sizes.
    """
    model = spec.model
    if spec.family == "t5":
        raise ConversionError(
            "family 't5' has no counterpart in Megatron's file form, which holds gpt and bert alone: "
            "export it with --format hf"
        )
    rules = _NO_PLACE | _NO_PLACE_IN_BERT if spec.family == "bert" else _NO_PLACE
    used = [f"model.{name} {getattr(model, name)!r}" for name, rule in rules.items() if rule(model)]
    if used:
        raise ConversionError(
            f"Megatron's file form of {spec.family} has no place for {', '.join(used)}: export the model with "
            "--format hf, or train it without"
        )
    divided = {
        "model.num_attention_heads": model.num_attention_heads,
        "model.num_query_groups": model.query_groups,
        "model.ffn_hidden_size": model.ffn_size,
        "the padded vocabulary of": spec.padded_vocab_size,
    }
    for what, length in divided.items():
        _check_divides(what, length, "tensor", tensor)
    _check_divides("model.num_layers", model.num_layers, "pipeline", pipeline)


def _check_divides(what: str, length: int, kind: str, size: int) -> None:
    if size < 1 or length % size:
        raise ParallelLayoutError(
            f"{what} {length} cannot be divided over a {kind} parallel size of {size} in Megatron's file form: "
            "choose a size that divides it"
        )


def args_of(spec: ModelSpec, *, iteration: int, tensor: int, pipeline: int) -> "OrderedDict[str, Any]":
    """The arguments that Megatron-LM and the public converters read, as entries and as attributes.

    A Namespace is what Megatron-LM writes, and what `torch.load(weights_only=True)` refuses; this it accepts.
    """
    values = {
        **_shape_args(spec),
        **_option_args(spec.model),
        **_tokenizer_args(spec),
        **_vocabulary_args(spec, tensor),
        "iteration": iteration,
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "virtual_pipeline_model_parallel_size": None,
        "data_parallel_size": 1,
        "world_size": tensor * pipeline,
        "params_dtype": torch.float32,
        "fp16": False,
        "bf16": False,
    }
    args = OrderedDict(values)
    vars(args).update(values)
    return args


def _shape_args(spec: ModelSpec) -> dict[str, Any]:
    model = spec.model
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_size,
        "num_attention_heads": model.num_attention_heads,
        "group_query_attention": model.query_groups != model.num_attention_heads,
        "num_query_groups": model.query_groups,
        "kv_channels": model.head_dim,
        "seq_length": spec.max_position_embeddings,
        "max_position_embeddings": spec.max_position_embeddings,
    }


def _option_args(model: ModelConfig) -> dict[str, Any]:
    return {
        "position_embedding_type": model.position_embedding_type,
        "add_position_embedding": model.position_embedding_type == "learned_absolute",
        "use_rotary_position_embeddings": model.position_embedding_type == "rope",
        "rotary_base": model.rotary_base,
        "rotary_percent": model.rotary_percent,
        "normalization": NORMS[model.normalization],
        "layernorm_epsilon": model.layernorm_epsilon,
        "norm_epsilon": model.layernorm_epsilon,
        "apply_residual_connection_post_layernorm": False,
        "openai_gelu": model.activation == "gelu_tanh",
        "bias_gelu_fusion": False,
        "onnx_safe": False,
        "swiglu": model.activation == "swiglu",
        "add_bias_linear": model.add_bias_linear,
        "untie_embeddings_and_output_weights": model.untie_embeddings_and_output_weights,
        "bert_binary_head": model.bert_binary_head,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "init_method_std": model.init_method_std,
        "num_experts": None,
    }


def _tokenizer_args(spec: ModelSpec) -> dict[str, Any]:
    """PretrainedFromHF is the type that public converters open without a network; NullTokenizer is Megatron's none."""
    special = {"special_tokens": spec.special_tokens.model_dump(mode="json")}
    if spec.tokenizer_directory is None:
        return {"tokenizer_type": "NullTokenizer", "tokenizer_name_or_path": None, **special}
    path = str(Path(spec.tokenizer_directory).absolute())
    return {"tokenizer_type": "PretrainedFromHF", "tokenizer_name_or_path": path, **special}


def _vocabulary_args(spec: ModelSpec, tensor: int) -> dict[str, Any]:
    """Megatron-LM pads to a multiple of the argument times the tensor-parallel size: it must come to our size."""
    ours = spec.model.make_vocab_size_divisible_by
    same = padded(spec.vocab_size, ours * tensor) == spec.padded_vocab_size
    return {
        "orig_vocab_size": spec.vocab_size,
        "padded_vocab_size": spec.padded_vocab_size,
        "make_vocab_size_divisible_by": ours if same else spec.padded_vocab_size // tensor,
    }


def padded(size: int, multiple: int) -> int:
    """The least multiple that is not below `size`."""
    return -(-size // multiple) * multiple
