"""The `args` in each file of a Megatron-LM checkpoint: written for a model, and read as one.

They are written as the public converters read them, and read of any version.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from megacore.config.model import Activation, Family, ModelConfig
from megacore.config.spec import ModelSpec, SpecialTokens
from megacore.convert.counterparts import CARRIED, without_place
from megacore.errors import CheckpointError, ConversionError, ParallelLayoutError

_MADE_AS = {"gelu_tanh", "gelu", "swiglu"}
POSITIONS = ("learned_absolute", "rope", "none")
NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
_NO_PLACE: dict[str, Callable[[ModelConfig], bool]] = {
    "norm_position": lambda model: model.norm_position != "pre",
    "parallel_residual": lambda model: model.parallel_residual,
    "position_embedding_type": lambda model: model.position_embedding_type not in POSITIONS,
    "activation": lambda model: model.activation not in _MADE_AS,
    "rotary_percent": lambda model: (
        model.position_embedding_type == "rope"
        and int(model.head_dim * model.rotary_percent) != model.rotary_dim
    ),
    "sliding_window": lambda model: model.sliding_window is not None,
    "qk_layernorm": lambda model: model.qk_layernorm,
}
"""Options of a model for which Megatron-LM's legacy models have no counterpart, and when they are
used."""
_NO_PLACE_IN_BERT: dict[str, Callable[[ModelConfig], bool]] = {
    "normalization": lambda model: model.normalization != "layernorm",
    "position_embedding_type": lambda model: model.position_embedding_type != "learned_absolute",
    "activation": lambda model: model.activation not in {"gelu_tanh", "gelu"},
    "num_query_groups": lambda model: model.query_groups != model.num_attention_heads,
    "add_bias_linear": lambda model: not model.add_bias_linear,
    "untie_embeddings_and_output_weights": lambda model: model.untie_embeddings_and_output_weights,
}
"""Further ones that its BERT has not."""
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
"""Arguments in which all files of a checkpoint agree."""
_NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
_OFF: dict[str, tuple[Any, ...]] = {
    "num_experts": (1, [1]),
    "squared_relu": (),
    "glu_activation": (),
    "apply_residual_connection_post_layernorm": (),
    "apply_layernorm_1p": (),
    "rotary_interleaved": (),
    "rotary_seq_len_interpolation_factor": (1,),
    "use_rope_scaling": (),
    "qk_layernorm": (),
    "window_size": (),
}
"""Arguments with which the same weights are another model than any of ours, unless they are false,
null or one of these."""
_OTHER_ROWS = "ds_sequence_parallel_fpdt"
"""An argument of Megatron-DeepSpeed: since it has it, rows of query_key_value are in another order
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
"""Arguments that are called as our fields are, and may be missing."""


def check_megatron(spec: ModelSpec, *, tensor: int = 1, pipeline: int = 1) -> None:
    """Return when Megatron-LM's file form can hold this model, divided so.

    Raises:
        ConversionError: it has no place for the family or for an option of the model.
        ParallelLayoutError: heads, groups, widths, vocabulary or layers are not multiples of the
            sizes.
    """
    model = spec.model
    if spec.family == "t5":
        raise ConversionError(
            "family 't5' has no counterpart in Megatron's file form, which holds gpt and bert "
            "alone: export it with --format hf"
        )
    rules = _NO_PLACE | _NO_PLACE_IN_BERT if spec.family == "bert" else _NO_PLACE
    names = [name for name, rule in rules.items() if rule(model)]
    names += without_place(model, {*CARRIED, *_NO_PLACE, *_NO_PLACE_IN_BERT})
    used = [f"model.{name} {getattr(model, name)!r}" for name in names]
    if used:
        raise ConversionError(
            f"Megatron's file form of {spec.family} has no place for {', '.join(used)}: export the "
            "model with --format hf, or train it without"
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
            f"{what} {length} cannot be divided over a {kind} parallel size of {size} in "
            "Megatron's file form: choose a size that divides it"
        )


def args_of(
    spec: ModelSpec, *, iteration: int, tensor: int, pipeline: int
) -> "OrderedDict[str, Any]":
    """The arguments that Megatron-LM and the public converters read, as entries and as attributes.

    A Namespace is what Megatron-LM writes, and what `torch.load(weights_only=True)` refuses; this
    it accepts.
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
    """PretrainedFromHF is the type that public converters open without a network.

    NullTokenizer is Megatron's none.
    """
    special = {"special_tokens": spec.special_tokens.model_dump(mode="json")}
    if spec.tokenizer_directory is None:
        return {"tokenizer_type": "NullTokenizer", "tokenizer_name_or_path": None, **special}
    path = str(Path(spec.tokenizer_directory).absolute())
    return {"tokenizer_type": "PretrainedFromHF", "tokenizer_name_or_path": path, **special}


def _vocabulary_args(spec: ModelSpec, tensor: int) -> dict[str, Any]:
    """Megatron-LM pads to a multiple of the argument times the tensor-parallel size.

    It must come to our size.
    """
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


def tensor_size(args: Mapping[str, Any]) -> Any:
    """The tensor-parallel size, which versions before 3.0 call model_parallel_size.

    None where args do not say.
    """
    return args.get("tensor_model_parallel_size", args.get("model_parallel_size"))


def family_of(names: Collection[str], where: Path) -> Family:
    """The family of a model with tensors of these dotted names.

    Raises ConversionError for one that cannot be read.
    """
    if any(name.startswith("language_model.decoder.") for name in names):
        raise ConversionError(
            f"{where} holds a model with a decoder after an encoder, as T5's: this form is read "
            "for gpt and bert alone"
        )
    return "bert" if any(name.startswith("lm_head.") for name in names) else "gpt"


def spec_of(
    args: Mapping[str, Any], family: Family, layers: int, vocabulary_rows: int, where: Path
) -> ModelSpec:
    """The model that `args` describe.

    Args:
        args: of one file; those of any file, after they were found to agree.
        family: what the tensors' names say.
        layers: how many the files hold.
        vocabulary_rows: rows of the whole table of tokens.
        where: the checkpoint, for messages.

    Raises:
        ConversionError: an argument makes it a model that we do not have.
        CheckpointError: an argument is missing or has an impossible value.
    """
    _check_args(args, where)
    try:
        model = ModelConfig(**_model_fields(args, family))
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
            special_tokens=SpecialTokens(**args.get("special_tokens", {})),
            tokenizer_directory=_tokenizer_directory(args),
        )
    except (ValidationError, TypeError, ValueError, ArithmeticError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"args of {where} describe no model: {reason}: use another checkpoint"
        ) from error
    _check_held(
        spec, args.get("padded_vocab_size") or vocabulary_rows, vocabulary_rows, layers, where
    )
    return spec


def remarks_on(args: Mapping[str, Any], family: Family) -> tuple[str, ...]:
    """What the reader of such a file should know, in sentences."""
    remarks = []
    if not args.get("orig_vocab_size"):
        remarks.append(
            "the file does not say how many rows of the padded vocabulary are tokens: all of them "
            "count as such"
        )
    if family == "bert" and args.get("bias_gelu_fusion") and not args.get("openai_gelu"):
        remarks.append(
            "Megatron-LM trained this BERT with GELU's tanh approximation in its layers and the "
            "exact GELU in its masked LM's head: ours has one of them for both, and it is "
            "gelu_tanh"
        )
    return tuple(remarks)


def check_rows(spec: ModelSpec, version: float, where: Path) -> None:
    """Raise ConversionError for grouped queries in a checkpoint_version that precedes them."""
    if version < 2.0 and spec.model.query_groups != spec.model.num_attention_heads:
        raise ConversionError(
            f"{where} has num_query_groups {spec.model.query_groups} and checkpoint_version "
            f"{version}, of which the order of rows of query_key_value is known without groups "
            "alone"
        )


def _check_args(args: Mapping[str, Any], where: Path) -> None:
    missing = [name for name in _NEEDED if args.get(name) is None]
    if missing:
        raise CheckpointError(
            f"{where} does not say {', '.join(missing)} in its args, without which its weights "
            "cannot be told apart: use a checkpoint that was saved with its args"
        )
    others = [
        f"{name} {args[name]!r}"
        for name, off in _OFF.items()
        if args.get(name) and args[name] not in off
    ]
    if others:
        raise ConversionError(
            f"{where} was trained with {', '.join(others)}, which no model of ours has"
        )
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
        "add_bias_linear": _has_biases(args),
        "bert_binary_head": bool(args.get("bert_binary_head", True)) or family != "bert",
    }


def _activation(args: Mapping[str, Any]) -> Activation:
    """As Megatron-LM's MLP chooses.

    GELU fused with the bias, or of versions before the choice, is approximate.
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


def _normalization(args: Mapping[str, Any]) -> str:
    given = str(args.get("normalization") or NORMS["layernorm"])
    return given.lower()


def _position(args: Mapping[str, Any]) -> str:
    kind = args.get("position_embedding_type")
    if kind is None:
        learned = "learned_absolute" if args.get("add_position_embedding", True) else "none"
        return "rope" if args.get("use_rotary_position_embeddings") else learned
    if kind not in POSITIONS:
        raise ValueError(f"position_embedding_type {kind!r} is none of {', '.join(POSITIONS)}")
    return str(kind)


def _divisor(args: Mapping[str, Any], model: ModelConfig, vocabulary: int, rows: int) -> int:
    """What our vocabulary is padded to a multiple of, so that the table has these rows.

    Megatron-LM's argument counts for one tensor-parallel rank: it is ours where there is one.
    """
    own = args.get("make_vocab_size_divisible_by")
    given = [own] if isinstance(own, int) and own > 0 else []
    usual = [model.make_vocab_size_divisible_by, rows & -rows]
    candidates = [*given, *usual] if tensor_size(args) == 1 else [*usual, *given]
    return next((one for one in candidates if padded(vocabulary, one) == rows), rows)


def _check_held(spec: ModelSpec, said: int, rows: int, layers: int, where: Path) -> None:
    model = spec.model
    if model.num_layers != layers:
        raise CheckpointError(
            f"{where} holds {layers} layers where its args say num_layers {model.num_layers}: use "
            "another checkpoint"
        )
    if not spec.padded_vocab_size == said == rows:
        raise CheckpointError(
            f"{where} has a table of {rows} tokens where its args say padded_vocab_size {said} and "
            f"orig_vocab_size {spec.vocab_size}: use another checkpoint"
        )
    if (
        model.position_embedding_type == "rope"
        and int(model.head_dim * model.rotary_percent) != model.rotary_dim
    ):
        raise ConversionError(
            f"{where} was trained with rotary_percent {model.rotary_percent} of heads of "
            f"{model.head_dim}, an odd number of elements, where ours would rotate "
            f"{model.rotary_dim}"
        )


def _tokenizer_directory(args: Mapping[str, Any]) -> str | None:
    """Where the tokenizer is, if the file names a directory that is there."""
    name = (
        args.get("tokenizer_name_or_path")
        if args.get("tokenizer_type") == "PretrainedFromHF"
        else None
    )
    return name if isinstance(name, str) and Path(name).is_dir() else None
