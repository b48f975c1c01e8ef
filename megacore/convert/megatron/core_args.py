"""Arguments in the checkpoints of Megatron core's models, and what they mean to our models.

Megatron core reads some arguments differently from Megatron-LM's models before it, has more
options, and supports norms of queries and keys and a sliding window. The rest is in `args`.

Source: NVIDIA/Megatron-LM, megatron/training/argument_utils.py and
megatron/core/transformer/transformer_config.py.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megacore.config.model import Family
from megacore.config.spec import ModelSpec
from megacore.convert.megatron.args import spec_of
from megacore.errors import CheckpointError, ConversionError

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "activation_func_clamp_value": (),
    "apply_layernorm_1p": (),
    "attention_output_gate": (),
    "enable_hyper_connections": (),
    "enable_mhc_connections": (),
    "experimental_attention_variant": (),
    "glu_linear_offset": (),
    "heterogeneous_layers_config_encoded_json": (),
    "heterogeneous_layers_config_path": (),
    "hybrid_layer_pattern": (),
    "hybrid_override_pattern": (),
    "is_hybrid_model": (),
    "layernorm_zero_centered_gamma": (),
    "linear_attention_freq": (),
    "mrope_section": (),
    "mtp_num_layers": (),
    "multi_latent_attention": (),
    "no_rope_freq": (),
    "num_experts": (),
    "qk_l2_norm": (),
    "quick_geglu": (),
    "retro_add_retriever": (),
    "rope_type": ("rope",),
    "softmax_scale": (),
    "softmax_type": ("vanilla",),
    "spec": (),
    "squared_relu": (),
    "use_mup": (),
}
"""Arguments that our models support only with a false value, null or one of these values. Each
changes what the model computes."""
_QUANTIZED = ("fp8", "fp4")
"""Arguments of training with quantized products, which are computed as usual here."""


def core_spec(
    args: Mapping[str, Any], family: Family, layers: int, vocabulary_rows: int, where: Path
) -> ModelSpec:
    """Return the spec of the model that Megatron core builds with `args`; see `args.spec_of`.

    Raises:
        ConversionError: if our models do not support an argument.
        CheckpointError: if an argument is missing, invalid or contradicts the tensors.
    """
    used = [
        f"{name} {args[name]!r}"
        for name, neutral in NEUTRAL.items()
        if args.get(name) and args[name] not in neutral
    ]
    if used:
        raise ConversionError(
            f"{where} was trained with {', '.join(used)}, which no model of megacore has"
        )
    options: dict[str, Any] = {"qk_layernorm": bool(args.get("qk_layernorm"))}
    options |= _window(args, where)
    # Megatron core ignores openai_gelu.
    read = {**args, "openai_gelu": False, "onnx_safe": False}
    read |= {"qk_layernorm": False, "window_size": None}
    if args.get("tokenizer_type") == "HuggingFaceTokenizer":
        tokenizer = {"tokenizer_type": "PretrainedFromHF"}
        read |= tokenizer | {"tokenizer_name_or_path": args.get("tokenizer_model")}
    return spec_of(read, family, layers, vocabulary_rows, where, options)


def _window(args: Mapping[str, Any], where: Path) -> dict[str, int]:
    """Return our sliding_window, which counts the token itself and its window's left part.

    Every n-th layer has no window, here as in Megatron core, with window_attn_skip_freq n.
    """
    window = args.get("window_size")
    if not window:
        return {}
    if not (
        isinstance(window, tuple | list)
        and len(window) == 2
        and all(type(side) is int for side in window)
    ):
        raise CheckpointError(
            f"args of {where} have window_size {window!r}, which is no pair of numbers: use "
            "another checkpoint"
        )
    left, right = window
    if right not in (0, -1):
        raise ConversionError(
            f"{where} was trained with window_size {tuple(window)!r}, in which tokens attend to "
            "later ones, which no GPT of megacore does"
        )
    skip = args.get("window_attn_skip_freq")
    if skip is not None and (type(skip) is not int or skip < 1):
        raise ConversionError(
            f"{where} was trained with window_attn_skip_freq {skip!r}: models of megacore have a "
            "window in all layers, or in all but every n-th"
        )
    if left < 0 or skip == 1:
        return {}
    return {"sliding_window": left + 1} | ({"window_attn_skip_freq": skip} if skip else {})


def core_remarks(args: Mapping[str, Any]) -> tuple[str, ...]:
    """Return sentences about what the import leaves out."""
    quantized = [f"{name} {args[name]}" for name in _QUANTIZED if args.get(name)]
    return tuple(
        f"the model was trained with {name}: megacore computes its products in the precision of "
        "the weights"
        for name in quantized
    )
