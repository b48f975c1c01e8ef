"""Translation between a model's spec and the `args` in the files of a Megatron-LM checkpoint.

The public converters can read the written args. Args of any version can be read.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from megacore.config.model import Activation, Family, ModelConfig
from megacore.config.rope import LinearRope, Llama3Rope, RopeScaling
from megacore.config.spec import ModelSpec, SpecialTokens
from megacore.convert.counterparts import SUPPORTED_FIELDS, unsupported_fields
from megacore.errors import CheckpointError, ConversionError, ParallelLayoutError, one_line
from megacore.paths import is_dir

ACTIVATIONS = {"gelu_tanh", "gelu", "swiglu"}
POSITIONS = ("learned_absolute", "rope", "none")
_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
_NO_PLACE: dict[str, Callable[[ModelConfig], bool]] = {
    "norm_position": lambda model: model.norm_position != "pre",
    "parallel_residual": lambda model: model.parallel_residual,
    "position_embedding_type": lambda model: model.position_embedding_type not in POSITIONS,
    "activation": lambda model: model.activation not in ACTIVATIONS,
    "rotary_percent": lambda model: rotates_otherwise(model),
    "rope_scaling": lambda model: _rope_args(model.rope_scaling) is None,
    "sliding_window": lambda model: model.sliding_window is not None,
    "qk_layernorm": lambda model: model.qk_layernorm,
}
"""Options that Megatron-LM's legacy models do not support, each with a test for its use."""
_NO_PLACE_IN_BERT: dict[str, Callable[[ModelConfig], bool]] = {
    "normalization": lambda model: model.normalization != "layernorm",
    "position_embedding_type": lambda model: model.position_embedding_type != "learned_absolute",
    "activation": lambda model: model.activation not in {"gelu_tanh", "gelu"},
    "num_query_groups": lambda model: model.query_groups != model.num_attention_heads,
    "add_bias_linear": lambda model: not model.add_bias_linear,
    "untie_embeddings_and_output_weights": lambda model: model.untie_embeddings_and_output_weights,
}
"""Further options that Megatron-LM's BERT does not support."""
MODEL_ARGS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "ffn_hidden_size",
    "max_position_embeddings",
    "padded_vocab_size",
    "position_embedding_type",
    "normalization",
    "swiglu",
    "openai_gelu",
    "bias_gelu_fusion",
    "tensor_model_parallel_size",
    "model_parallel_size",
    "pipeline_model_parallel_size",
)
"""Arguments that must be equal in all files of a checkpoint."""
_NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
_OFF: dict[str, tuple[Any, ...]] = {
    "num_experts": (1, [1]),
    "squared_relu": (),
    "glu_activation": (),
    "apply_residual_connection_post_layernorm": (),
    "apply_layernorm_1p": (),
    "rotary_interleaved": (),
    "qk_layernorm": (),
    "window_size": (),
}
"""Arguments that our models support only with a false value, null or one of these values."""
_OTHER_ROWS = "ds_sequence_parallel_fpdt"
"""Argument of later versions of Megatron-DeepSpeed, which order rows of query_key_value differently
under the same checkpoint_version."""
_SAME_NAMED = (
    "layernorm_epsilon",
    "hidden_dropout",
    "attention_dropout",
    "init_method_std",
    "kv_channels",
    "ffn_hidden_size",
    "untie_embeddings_and_output_weights",
    "rotary_base",
    "rotary_percent",
)
"""Optional arguments with the same names as our fields."""


def rotates_otherwise(model: ModelConfig) -> bool:
    """Return True if Megatron-LM rotates another part of each head than our model does."""
    rope = model.position_embedding_type == "rope"
    return rope and int(model.head_dim * model.rotary_percent) != model.rotary_dim


def check_megatron(spec: ModelSpec, *, tensor: int = 1, pipeline: int = 1) -> None:
    """Check that Megatron-LM's file format supports this model with these parallel sizes.

    Raises:
        ConversionError: if it does not support the family or an option of the model.
        ParallelLayoutError: if heads, groups, widths, vocabulary or layers are not multiples of the
            sizes.
    """
    model = spec.model
    if spec.family == "t5":
        raise ConversionError(
            "family 't5' has no counterpart in Megatron's file form, which holds only gpt and "
            "bert: export it with --format hf"
        )
    rules = _NO_PLACE | _NO_PLACE_IN_BERT if spec.family == "bert" else _NO_PLACE
    others = {*_NO_PLACE_IN_BERT, "add_qkv_bias"}
    refuse_options(model, rules, others, f"Megatron's file form of {spec.family}")
    divided = {
        "model.num_attention_heads": model.num_attention_heads,
        "model.num_query_groups": model.query_groups,
        "model.ffn_hidden_size": model.ffn_size,
        "the padded vocabulary of": spec.padded_vocab_size,
    }
    for what, length in divided.items():
        _check_divides(what, length, "tensor", tensor)
    _check_divides("model.num_layers", model.num_layers, "pipeline", pipeline)


def refuse_options(
    model: ModelConfig,
    rules: Mapping[str, Callable[[ModelConfig], bool]],
    others: Collection[str],
    form: str,
) -> None:
    """Raise ConversionError for options that a form of Megatron's checkpoints does not support.

    Args:
        model: the model.
        rules: options that it does not support with all values, each with a test for its use.
        others: further options that it supports, besides SUPPORTED_FIELDS.
        form: name of the form for the message.
    """
    names = [name for name, rule in rules.items() if rule(model)]
    names += unsupported_fields(model, {*SUPPORTED_FIELDS, *rules, *others})
    used = [f"model.{name} {getattr(model, name)!r}" for name in names]
    if used:
        raise ConversionError(
            f"{form} has no place for {', '.join(used)}: export the model with --format hf, or "
            "train it without"
        )


def _check_divides(what: str, length: int, kind: str, size: int) -> None:
    if size < 1 or length % size:
        raise ParallelLayoutError(
            f"{what} {length} cannot be divided over a {kind} parallel size of {size} in "
            "Megatron's file form: choose a size that divides it"
        )


def args_of(
    spec: ModelSpec, *, iteration: int, tensor: int, pipeline: int
) -> "OrderedDict[str, Any]":
    """Build the arguments for Megatron-LM and the public converters.

    Each argument is an entry and an attribute of the returned dictionary. Megatron-LM itself writes
    a Namespace, but `torch.load(weights_only=True)` refuses that.
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
        **(_rope_args(model.rope_scaling) or {}),
        "normalization": _NORMS[model.normalization],
        "layernorm_epsilon": model.layernorm_epsilon,
        "norm_epsilon": model.layernorm_epsilon,
        "apply_residual_connection_post_layernorm": False,
        "openai_gelu": model.activation == "gelu_tanh",
        "bias_gelu_fusion": False,
        "onnx_safe": False,
        "swiglu": model.activation == "swiglu",
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.qkv_bias,
        "untie_embeddings_and_output_weights": model.untie_embeddings_and_output_weights,
        "bert_binary_head": model.bert_binary_head,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "init_method_std": model.init_method_std,
        "num_experts": None,
    }


def _tokenizer_args(spec: ModelSpec) -> dict[str, Any]:
    """Return the arguments of the tokenizer.

    Public converters can open the type PretrainedFromHF without network access. NullTokenizer means
    that there is no tokenizer.
    """
    special = {"special_tokens": spec.special_tokens.model_dump(mode="json")}
    if spec.tokenizer_directory is None:
        return {"tokenizer_type": "NullTokenizer", "tokenizer_name_or_path": None, **special}
    path = str(Path(spec.tokenizer_directory).absolute())
    return {"tokenizer_type": "PretrainedFromHF", "tokenizer_name_or_path": path, **special}


def _vocabulary_args(spec: ModelSpec, tensor: int) -> dict[str, Any]:
    """Return the arguments of the vocabulary.

    Megatron-LM pads to a multiple of make_vocab_size_divisible_by times the tensor parallel size.
    The argument is chosen so that the result equals our padded size.
    """
    ours = spec.model.make_vocab_size_divisible_by
    same = padded(spec.vocab_size, ours * tensor) == spec.padded_vocab_size
    return {
        "orig_vocab_size": spec.vocab_size,
        "padded_vocab_size": spec.padded_vocab_size,
        "make_vocab_size_divisible_by": ours if same else spec.padded_vocab_size // tensor,
    }


def padded(size: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def usual_divisor(rows: int) -> int:
    """Return the make_vocab_size_divisible_by of a vocabulary whose padding is unknown."""
    return 128 if padded(rows, 128) == rows else rows & -rows


def tensor_size(args: Mapping[str, Any]) -> Any:
    """Return the tensor parallel size (model_parallel_size before version 3.0), or None."""
    return args.get("tensor_model_parallel_size", args.get("model_parallel_size"))


def family_of(names: Collection[str], where: Path) -> Family:
    """Return the family of a model from the dotted names of its tensors.

    Raises:
        ConversionError: if the family is not supported.
    """
    if any(name.startswith("language_model.decoder.") for name in names):
        raise ConversionError(
            f"{where} holds a model with a decoder after an encoder, as T5's: this form is read "
            "only for gpt and bert"
        )
    return "bert" if any(name.startswith("lm_head.") for name in names) else "gpt"


def spec_of(
    args: Mapping[str, Any],
    family: Family,
    layers: int,
    vocabulary_rows: int,
    where: Path,
    options: Mapping[str, Any] | None = None,
) -> ModelSpec:
    """Return the spec of the model that `args` describe.

    Args:
        args: arguments of any one file; all files must agree.
        family: family according to the tensors' names.
        layers: number of layers in the files.
        vocabulary_rows: rows of the complete token embedding.
        where: checkpoint that errors name.
        options: fields of our model that the args express in another way.

    Raises:
        ConversionError: if our models do not support an argument.
        CheckpointError: if an argument is missing, invalid or contradicts the tensors.
    """
    _check_args(args, where)
    try:
        model = ModelConfig(**(_model_fields(args, family) | dict(options or {})))
        vocabulary = args.get("orig_vocab_size") or vocabulary_rows
        model = model.model_copy(
            update={
                "make_vocab_size_divisible_by": _divisor(args, model, vocabulary, vocabulary_rows)
            }
        )
        spec = ModelSpec(
            family=family,
            model=model,
            vocab_size=vocabulary,
            special_tokens=_special_tokens(args),
            tokenizer_directory=_tokenizer_directory(args),
        )
    except (ValidationError, TypeError, ValueError, ArithmeticError) as error:
        reason = one_line(_reason(error), 300)
        raise CheckpointError(
            f"args of {where} describe no model: {reason}: use another checkpoint"
        ) from error
    _check_held(
        spec, args.get("padded_vocab_size") or vocabulary_rows, vocabulary_rows, layers, where
    )
    return spec


def _reason(error: Exception) -> str:
    """Return the first value that is refused and why, or the error's text."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    problem = first["msg"].removeprefix("Value error, ")
    return f"{name} is {first['input']!r}: {problem[:1].lower()}{problem[1:]}" if name else problem


def remarks_on(args: Mapping[str, Any], family: Family) -> tuple[str, ...]:
    """Return sentences for the user about ambiguities of files with these `args`."""
    remarks = []
    if not args.get("orig_vocab_size"):
        remarks.append(
            "the file does not say how many rows of the padded vocabulary are tokens: all of them "
            "count as such"
        )
    if family == "bert" and args.get("bias_gelu_fusion") and not args.get("openai_gelu"):
        remarks.append(
            "Megatron-LM trained this BERT with GELU's tanh approximation in its layers and the "
            "exact GELU in its masked LM's head: megacore's has one of them for both, and it is "
            "gelu_tanh"
        )
    return tuple(remarks)


def check_rows(spec: ModelSpec, version: float, where: Path) -> None:
    """Raise ConversionError for grouped queries in a checkpoint_version that precedes them."""
    if version < 2.0 and spec.model.query_groups != spec.model.num_attention_heads:
        raise ConversionError(
            f"{where} has num_query_groups {spec.model.query_groups} and checkpoint_version "
            f"{version}, for which the order of rows of query_key_value is known only without "
            "groups"
        )


def refuse_used(
    settings: Mapping[str, Any],
    off: Mapping[str, tuple[Any, ...]],
    where: Path,
    others: Sequence[str] = (),
) -> None:
    """Raise ConversionError for settings that no model of megacore has.

    Args:
        settings: values by name.
        off: for each such setting, the values with which it is off besides null and false ones.
        where: checkpoint that errors name.
        others: further settings that are used, with their values.
    """
    used = [
        f"{name} {settings[name]!r}"
        for name, values in off.items()
        if settings.get(name) and settings[name] not in values
    ]
    if used or others:
        raise ConversionError(
            f"{where} was trained with {', '.join([*used, *others])}, which no model of megacore "
            "has"
        )


def _check_args(args: Mapping[str, Any], where: Path) -> None:
    missing = [name for name in _NEEDED if args.get(name) is None]
    if missing:
        raise CheckpointError(
            f"{where} does not say {', '.join(missing)} in its args, without which its weights "
            "cannot be told apart: use a checkpoint that was saved with its args"
        )
    if args.get("use_rope_scaling") and args.get("rotary_seq_len_interpolation_factor"):
        raise ConversionError(
            f"{where} was trained with both use_rope_scaling and "
            "rotary_seq_len_interpolation_factor, of which models of megacore have only one"
        )
    refuse_used(args, _OFF, where)
    if _OTHER_ROWS in args:
        raise ConversionError(
            f"{where} was written by a Megatron-DeepSpeed that has the argument {_OTHER_ROWS}, "
            "whose rows of query_key_value are in another order than checkpoint_version says: "
            "convert it with the tools it came with"
        )


def _model_fields(args: Mapping[str, Any], family: Family) -> dict[str, Any]:
    usual = {
        "kv_channels": args["hidden_size"] // args["num_attention_heads"],
        "ffn_hidden_size": 4 * args["hidden_size"],
    }
    same = {
        name: args[name] for name in _SAME_NAMED if args.get(name) not in {None, usual.get(name)}
    }
    heads, groups = args["num_attention_heads"], args.get("num_query_groups")
    grouped = bool(args.get("group_query_attention")) and groups != heads
    if grouped and heads % groups:
        raise ValueError(
            f"num_attention_heads {heads} is not a multiple of num_query_groups {groups}"
        )
    return {
        "layernorm_epsilon": args.get("norm_epsilon") or 1e-5,
        **same,
        **{name: args[name] for name in _NEEDED},
        "num_query_groups": groups if grouped else None,
        "activation": _activation(args),
        "normalization": _normalization(args),
        "position_embedding_type": _position(args),
        "rope_scaling": _rope_scaling(args),
        "add_bias_linear": _has_biases(args),
        "add_qkv_bias": bool(args.get("add_qkv_bias")) and not _has_biases(args),
        "bert_binary_head": bool(args.get("bert_binary_head", True)) or family != "bert",
    }


def _activation(args: Mapping[str, Any]) -> Activation:
    """Return the activation that Megatron-LM's MLP uses with these arguments.

    GELU is approximate if it is fused with the bias, or in versions without a choice.
    """
    if args.get("openai_gelu") or not args.keys() & {"openai_gelu", "bias_gelu_fusion", "swiglu"}:
        return "gelu_tanh"
    if args.get("onnx_safe"):
        return "gelu"
    if args.get("swiglu"):
        return "swiglu"
    return "gelu_tanh" if args.get("bias_gelu_fusion") and _has_biases(args) else "gelu"


def _has_biases(args: Mapping[str, Any]) -> bool:
    return bool(args.get("add_bias_linear", not args.get("disable_bias_linear", False)))


def _rope_args(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Return the arguments of a scaling, or None if Megatron-LM lacks it.

    It divides positions by a whole number, or has Llama 3.1's scaling with a factor of choice.
    """
    values: dict[str, Any] = {
        "use_rope_scaling": False,
        "rope_scaling_factor": 8.0,
        "rotary_seq_len_interpolation_factor": None,
    }
    match scaling:
        case None:
            return values
        case LinearRope(factor=factor) if factor.is_integer():
            return values | {"rotary_seq_len_interpolation_factor": int(factor)}
        case Llama3Rope(factor=factor) if scaling == Llama3Rope(kind="llama3", factor=factor):
            return values | {"use_rope_scaling": True, "rope_scaling_factor": factor}
        case _:
            return None


def _rope_scaling(args: Mapping[str, Any]) -> RopeScaling | None:
    interpolation = args.get("rotary_seq_len_interpolation_factor")
    if _position(args) != "rope":
        return None
    if args.get("use_rope_scaling"):
        return Llama3Rope(kind="llama3", factor=args.get("rope_scaling_factor") or 8.0)
    if interpolation and interpolation != 1:
        return LinearRope(kind="linear", factor=interpolation)
    return None


def _normalization(args: Mapping[str, Any]) -> str:
    name = str(args.get("normalization") or _NORMS["layernorm"])
    return name.lower()


def _position(args: Mapping[str, Any]) -> str:
    kind = args.get("position_embedding_type")
    if kind is None:
        learned = "learned_absolute" if args.get("add_position_embedding", True) else "none"
        return "rope" if args.get("use_rotary_position_embeddings") else learned
    if kind not in POSITIONS:
        raise ValueError(f"position_embedding_type {kind!r} is none of {', '.join(POSITIONS)}")
    return str(kind)


def _divisor(args: Mapping[str, Any], model: ModelConfig, vocabulary: int, rows: int) -> int:
    """Return the make_vocab_size_divisible_by that pads our vocabulary to `rows`.

    Megatron-LM's argument applies per tensor-parallel rank, so it is preferred only at tensor
    parallel size 1.
    """
    value = args.get("make_vocab_size_divisible_by")
    saved = [value] if isinstance(value, int) and value > 0 else []
    usual = [model.make_vocab_size_divisible_by, rows & -rows]
    candidates = [*saved, *usual] if tensor_size(args) == 1 else [*usual, *saved]
    return next(
        (candidate for candidate in candidates if padded(vocabulary, candidate) == rows), rows
    )


def _check_held(spec: ModelSpec, size: int, rows: int, layers: int, where: Path) -> None:
    model = spec.model
    if model.num_layers != layers:
        raise CheckpointError(
            f"{where} holds {layers} layers where its args say num_layers {model.num_layers}: use "
            "another checkpoint"
        )
    if not spec.padded_vocab_size == size == rows:
        raise CheckpointError(
            f"{where} has a table of {rows} tokens where its args say padded_vocab_size {size} and "
            f"orig_vocab_size {spec.vocab_size}: use another checkpoint"
        )
    if rotates_otherwise(model):
        raise ConversionError(
            f"{where} was trained with rotary_percent {model.rotary_percent} of heads of "
            f"{model.head_dim}, an odd number of elements, where megacore's would rotate "
            f"{model.rotary_dim}"
        )


def _special_tokens(args: Mapping[str, Any]) -> SpecialTokens:
    """Return the ids that an export of megacore wrote; Megatron-LM's own value is a list."""
    value = args.get("special_tokens")
    return SpecialTokens(**value) if isinstance(value, Mapping) else SpecialTokens()


def _tokenizer_directory(args: Mapping[str, Any]) -> str | None:
    """Return the tokenizer's directory, if the args name an existing one."""
    if args.get("tokenizer_type") != "PretrainedFromHF":
        return None
    name = args.get("tokenizer_name_or_path")
    return str(Path(name).absolute()) if isinstance(name, str) and is_dir(name) else None
