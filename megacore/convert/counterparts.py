"""Mapping from our model configurations to classes of transformers. Imports no torch.

The check that a configuration can be exported runs before training starts.
`megacore.convert.hf.forms` describes the weights and the configuration of each class.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from megacore.artifact.files import read_json
from megacore.config.base import Section, as_yaml
from megacore.config.data import (
    DataConfig,
    HfTokenizer,
    SentencePieceTokenizer,
    TokenizerChoice,
)
from megacore.config.model import Activation, Family, ModelConfig
from megacore.config.rope import LongRope
from megacore.data.index_options import parse_split
from megacore.errors import ConfigError, ConversionError
from megacore.paths import is_file

_GIVEN = "any number"
"""Marker among the allowed values of an option: any value except null."""
_PLAIN: tuple[Activation, ...] = ("gelu_tanh", "gelu", "relu")
_GATED: tuple[Activation, ...] = ("swiglu", "geglu", "geglu_tanh")
_CAUSAL: dict[str, tuple[object, ...]] = {"norm_position": ("pre",)}
_LEARNED_POSITIONS: dict[str, tuple[object, ...]] = {
    "position_embedding_type": ("learned_absolute",),
    "normalization": ("layernorm",),
    "activation": _PLAIN,
    "parallel_residual": (False,),
    "sliding_window": (None,),
    "qk_layernorm": (False,),
    "add_bias_linear": (True,),
}
_GPT2 = _CAUSAL | _LEARNED_POSITIONS
_LLAMA: dict[str, tuple[object, ...]] = _CAUSAL | {
    "position_embedding_type": ("rope",),
    "rotary_percent": (1.0,),
    "rope_scaling": (None, _GIVEN),
    "normalization": ("rmsnorm",),
    "activation": _GATED,
    "parallel_residual": (False,),
    "sliding_window": (None,),
    "qk_layernorm": (False,),
    "add_qkv_bias": (False,),
    "add_bias_linear": (False, True),
}
_MISTRAL = _LLAMA | {"sliding_window": (_GIVEN,), "add_bias_linear": (False,)}
_QWEN3 = _LLAMA | {
    "sliding_window": (None, _GIVEN),
    "qk_layernorm": (True,),
    "add_bias_linear": (False,),
}
_QWEN2 = _LLAMA | {
    "sliding_window": (None, _GIVEN),
    "add_bias_linear": (False,),
    "add_qkv_bias": (True,),
}
_PHI3 = _LLAMA | {
    "rotary_percent": (_GIVEN,),
    "rope_scaling": (None, LongRope),
    "sliding_window": (None, _GIVEN),
    "add_bias_linear": (False,),
}
_NEOX = _GPT2 | {
    "position_embedding_type": ("rope",),
    "rope_scaling": (None, _GIVEN),
    "parallel_residual": (False, True),
}
_GEMMA2 = _LLAMA | {
    "norm_position": ("sandwich",),
    "apply_layernorm_1p": (True,),
    "scale_embeddings": (True,),
    "sliding_window": (None, _GIVEN),
    "window_attn_skip_freq": (None, _GIVEN),
    "query_pre_attn_scalar": (None, _GIVEN),
    "attn_logit_softcapping": (None, _GIVEN),
    "final_logit_softcapping": (None, _GIVEN),
    "add_bias_linear": (False,),
}
_OLMO2 = _LLAMA | {
    "norm_position": ("reordered",),
    "qk_layernorm": (True,),
    "qk_layernorm_scope": ("projection",),
    "add_bias_linear": (False,),
}
_STARCODER2 = _LLAMA | {
    "normalization": ("layernorm",),
    "activation": _PLAIN,
    "sliding_window": (None, _GIVEN),
}
_BERT = _LEARNED_POSITIONS | {"untie_embeddings_and_output_weights": (False,)}
_T5: dict[str, tuple[object, ...]] = {
    "position_embedding_type": ("relative",),
    "normalization": ("rmsnorm",),
    "norm_position": ("pre",),
    "activation": (*_PLAIN, "swiglu", "geglu_tanh"),
    "parallel_residual": (False,),
    "sliding_window": (None,),
    "qk_layernorm": (False,),
    "add_bias_linear": (False,),
}
SUPPORTED_FIELDS = frozenset(
    [
        "num_layers",
        "num_decoder_layers",
        "hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "ffn_hidden_size",
        "rotary_base",
        "rotary_percent",
        "relative_attention_num_buckets",
        "relative_attention_max_distance",
        "bert_binary_head",
        "scale_decoder_outputs",
        "max_position_embeddings",
        "hidden_dropout",
        "attention_dropout",
        "init_method_std",
        "residual_init_std",
        "layernorm_epsilon",
        "make_vocab_size_divisible_by",
        "untie_embeddings_and_output_weights",
    ]
)
"""Fields of `model` that every format can represent, or that only training reads. A field that is
neither here nor in a table of options must have its default in any format without a place for it.
"""
Dtype = Literal["float32", "bfloat16"]
"""Types of exported weights."""


class Obstacle(NamedTuple):
    """Value of the configuration that a class does not support."""

    option: str
    """Name of the field of `model`."""
    value: str
    """Configured value."""
    supported: str
    """Supported value to set instead."""


@dataclass(frozen=True)
class Counterpart:
    """Class of transformers, and the options of our models that it can express."""

    architecture: str
    """Name of the class."""
    model_type: str
    """`model_type` in config.json."""
    family: Family
    """Family of our models."""
    options: Mapping[str, tuple[object, ...]]
    """Allowed values by field of `ModelConfig`.

    Of the other fields, those in SUPPORTED_FIELDS may have any value, the rest only their default.
    """
    grouped_queries: bool = False
    """True if there may be fewer key-value heads than query heads."""
    any_head_size: bool = False
    """True if the total width of all heads may differ from hidden_size."""
    heads_divide_width: bool = False
    """True if the class refuses a hidden_size that is not a multiple of the query heads."""

    @property
    def tag(self) -> str:
        """Tag of the model card."""
        return self.model_type.removeprefix("megatron-")

    def obstacles(self, model: ModelConfig) -> list[Obstacle]:
        """Return every value of `model` that this class does not support."""
        result = [
            Obstacle(name, _written(value), " or ".join(map(_written, allowed)))
            for name, allowed in self.options.items()
            if not _is_among(value := getattr(model, name), allowed)
        ]
        result += [
            Obstacle(name, _written(getattr(model, name)), _written(default))
            for name, default in unsupported_fields(model, SUPPORTED_FIELDS).items()
            if name not in self.options
        ]
        if not self.grouped_queries and model.query_groups != model.num_attention_heads:
            result.append(
                Obstacle(
                    "num_query_groups", str(model.num_query_groups), str(model.num_attention_heads)
                )
            )
        if not self.any_head_size and model.attention_size != model.hidden_size:
            supported = f"{model.hidden_size / model.num_attention_heads:g}"
            result.append(Obstacle("kv_channels", str(model.head_dim), supported))
        heads, width = model.num_attention_heads, model.hidden_size
        if self.heads_divide_width and width % heads:
            divisor = next(count for count in range(heads, 0, -1) if width % count == 0)
            result.append(Obstacle("num_attention_heads", str(heads), str(divisor)))
        if (
            model.position_embedding_type == "rope"
            and int(model.head_dim * model.rotary_percent) % 2
        ):
            rotated = model.head_dim * model.rotary_percent
            even = int(rotated) - 1
            result.append(
                Obstacle(
                    "rotary_percent", f"{model.rotary_percent:g}", f"{even / model.head_dim:g}"
                )
            )
        return result


def unsupported_fields(model: ModelConfig, known: Collection[str]) -> dict[str, object]:
    """Return the defaults of the fields that are not in `known` and have another value."""
    defaults = {name: field.default for name, field in ModelConfig.model_fields.items()}
    return {
        name: default
        for name, default in defaults.items()
        if name not in known and getattr(model, name) != default
    }


def _bert(
    architecture: str, model_type: str, norm_position: str, *, binary_head: bool
) -> Counterpart:
    options = _BERT | {"norm_position": (norm_position,), "bert_binary_head": (binary_head,)}
    return Counterpart(architecture, model_type, "bert", options)


COUNTERPARTS = (
    Counterpart("GPT2LMHeadModel", "gpt2", "gpt", _GPT2),
    Counterpart(
        "Phi3ForCausalLM",
        "phi3",
        "gpt",
        _PHI3 | {"rope_scaling": (LongRope,)},
        grouped_queries=True,
    ),
    Counterpart(
        "LlamaForCausalLM",
        "llama",
        "gpt",
        _LLAMA,
        grouped_queries=True,
        any_head_size=True,
        heads_divide_width=True,
    ),
    Counterpart(
        "MistralForCausalLM", "mistral", "gpt", _MISTRAL, grouped_queries=True, any_head_size=True
    ),
    Counterpart(
        "Qwen2ForCausalLM", "qwen2", "gpt", _QWEN2, grouped_queries=True, any_head_size=True
    ),
    Counterpart(
        "Qwen3ForCausalLM", "qwen3", "gpt", _QWEN3, grouped_queries=True, any_head_size=True
    ),
    Counterpart("Phi3ForCausalLM", "phi3", "gpt", _PHI3, grouped_queries=True),
    Counterpart("GPTNeoXForCausalLM", "gpt_neox", "gpt", _NEOX),
    Counterpart(
        "Gemma2ForCausalLM",
        "gemma2",
        "gpt",
        _GEMMA2,
        grouped_queries=True,
        any_head_size=True,
        heads_divide_width=True,
    ),
    Counterpart("Olmo2ForCausalLM", "olmo2", "gpt", _OLMO2, grouped_queries=True),
    Counterpart("Starcoder2ForCausalLM", "starcoder2", "gpt", _STARCODER2, grouped_queries=True),
    _bert("BertForPreTraining", "bert", "post", binary_head=True),
    _bert("MegatronBertForPreTraining", "megatron-bert", "pre", binary_head=True),
    _bert("BertForMaskedLM", "bert", "post", binary_head=False),
    _bert("MegatronBertForMaskedLM", "megatron-bert", "pre", binary_head=False),
    Counterpart("T5ForConditionalGeneration", "t5", "t5", _T5, any_head_size=True),
)
"""Supported classes; the first one that can express a model is used. Phi3ForCausalLM is first for
models with LongRoPE, which it introduced, and after Llama's other relatives for those without."""


def counterpart(family: str, model: ModelConfig) -> Counterpart:
    """Return the class of transformers for this architecture.

    Raises:
        ConversionError: if there is none; the message names the nearest class and what to set.
    """
    candidates = [candidate for candidate in COUNTERPARTS if candidate.family == family]
    if not candidates:
        families = ", ".join(dict.fromkeys(candidate.family for candidate in COUNTERPARTS))
        raise ConversionError(
            f"family {family!r} has no counterpart in transformers: choose one of {families}"
        )
    nearest, conflicts = min(
        ((candidate, candidate.obstacles(model)) for candidate in candidates),
        key=lambda pair: len(pair[1]),
    )
    if not conflicts:
        return nearest
    lacking = ", ".join(f"model.{obstacle.option} {obstacle.value}" for obstacle in conflicts)
    changes = ", ".join(
        f"model.{obstacle.option} to {obstacle.supported}" for obstacle in conflicts
    )
    raise ConversionError(
        "no class of transformers is a model of this configuration: the nearest, "
        f"{nearest.architecture}, has no {lacking}: set {changes}, or train by "
        "megacore.ranks.pretrain, which exports nothing"
    )


def by_architecture(architecture: str) -> Counterpart | None:
    """Return the supported class of this name, or None."""
    return next((entry for entry in COUNTERPARTS if entry.architecture == architecture), None)


def _is_among(value: object, allowed: tuple[object, ...]) -> bool:
    kinds = tuple(kind for kind in allowed if isinstance(kind, type))
    return value in allowed or isinstance(value, kinds) or (_GIVEN in allowed and value is not None)


def _written(value: object) -> str:
    """Return `value` as written in YAML, of a section or its class only the kind."""
    if isinstance(value, Section) or (isinstance(value, type) and issubclass(value, Section)):
        kind = type(value) if isinstance(value, Section) else value
        return f"{{kind: {get_args(kind.model_fields['kind'].annotation)[0]}}}"
    return as_yaml(value)


_OWN_TOKENIZER = frozenset({"mistral", "olmo2", "phi3"})
"""Model types for which transformers 5 replaces the class of a SentencePiece model without a
tokenizer.json by another one, which encodes differently."""
_QWEN2_DIVISION = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Expression by which the class Qwen2Tokenizer divides texts, after the normalization NFC.
transformers 5 reads the tokenizer of every Qwen2 as this class, whatever its files say."""


def _check_tokenizer(hf_class: Counterpart, tokenizer: TokenizerChoice) -> None:
    if hf_class.model_type == "qwen2" and not _is_of_qwen2(tokenizer):
        raise ConfigError(
            f"data.tokenizer of kind {tokenizer.kind} divides texts otherwise than Qwen2's, as "
            f"which transformers reads the tokenizer of every {hf_class.architecture}, so that the "
            "export would fail its gate: set model.add_qkv_bias to false, or give a tokenizer.json "
            "that divides texts as Qwen2's with data.tokenizer.kind hf"
        )
    if hf_class.model_type in _OWN_TOKENIZER and isinstance(tokenizer, SentencePieceTokenizer):
        # imported here because other tokenizers do not need it
        from megacore.tokenizer.sentencepiece_model import SentencePieceModel

        path = Path(tokenizer.model_file)
        # A later export does not need the file; a training without it is refused elsewhere.
        if is_file(path) and SentencePieceModel.read(path).exported() is None:
            raise ConfigError(
                "data.tokenizer is a SentencePiece model that no tokenizer.json equals, which "
                f"transformers reads as another tokenizer for {hf_class.architecture}, so that the "
                "export would fail its gate: give the tokenizer as a tokenizer.json with "
                "data.tokenizer.kind hf, or a SentencePiece BPE without normalization rules"
            )


def _is_of_qwen2(tokenizer: TokenizerChoice) -> bool:
    """Return True if the class Qwen2Tokenizer divides texts in the same way.

    A file that cannot be read yet counts as such.
    """
    if not isinstance(tokenizer, HfTokenizer):
        return False
    return tokenizer.local_file is None or _divides_as_qwen2(Path(tokenizer.local_file))


def _divides_as_qwen2(tokenizer_json: Path) -> bool:
    """Return True if a tokenizer.json normalizes and divides texts as Qwen2's, or is unreadable."""
    try:
        content = read_json(tokenizer_json)
        parts = content["pre_tokenizer"]["pretokenizers"]
        return (
            content["normalizer"] == {"type": "NFC"}
            and parts[0]["pattern"] == {"Regex": _QWEN2_DIVISION}
            and [part["type"] for part in parts] == ["Split", "ByteLevel"]
        )
    except (OSError, ValueError):
        return True
    except (LookupError, TypeError):
        return False


def replaces_tokenizer(hf_class: Counterpart, tokenizer_json: Path) -> bool:
    """Return True if transformers 5 reads the tokenizer of an export as another one.

    `tokenizer_json` is the path that its tokenizer.json has; there may be none.
    """
    of_qwen2 = hf_class.model_type == "qwen2"
    if not is_file(tokenizer_json):
        return of_qwen2 or hf_class.model_type in _OWN_TOKENIZER
    return of_qwen2 and not _divides_as_qwen2(tokenizer_json)


def exportable(family: Family, model: ModelConfig, data: DataConfig) -> None:
    """Check that a model of these configuration sections can be converted and pass the gate.

    Raises:
        ConversionError: if no class of transformers has this configuration; the message names what
            to set.
        ConfigError: if the gate would have no validation samples, or only samples too short for a
            continuation, or if transformers would read the tokenizer with another class.
        DataFormatError, FileAccessError: if a SentencePiece model is damaged or cannot be read.
    """
    _check_tokenizer(counterpart(family, model), data.tokenizer)
    if parse_split(data.split_weights)[1] == 0:
        raise ConfigError(
            f"data.split {data.split_weights!r} leaves no validation samples on which the "
            "export can be compared: give its second weight a value above 0"
        )
    if data.seq_length < 2:
        raise ConfigError(
            f"data.seq_length {data.seq_length} leaves no token to predict from a prompt of "
            "one: raise it to at least 2"
        )
