"""Checks of the architecture: what belongs to a family, and what fits together; each raises ValueError."""

from typing import Any

from megacore.config.model import Family, ModelConfig

_DEFAULTS = ModelConfig(num_layers=1, hidden_size=1, num_attention_heads=1)
_FOR_ONE: dict[str, Family] = {
    "num_decoder_layers": "t5",
    "relative_attention_num_buckets": "t5",
    "relative_attention_max_distance": "t5",
    "bert_binary_head": "bert",
    "norm_position": "bert",
    "parallel_residual": "gpt",
    "rotary_base": "gpt",
    "rotary_percent": "gpt",
    "sliding_window": "gpt",
    "qk_layernorm": "gpt",
    "num_query_groups": "gpt",
}
"""Fields that one family alone has; with the others they stay at their defaults."""
_POSITIONS: dict[Family, tuple[str, ...]] = {
    "gpt": ("learned_absolute", "rope", "alibi", "none"),
    "bert": ("learned_absolute",),
    "t5": ("relative",),
}
_NAMES = {"gpt": "GPT", "bert": "BERT", "t5": "T5"}


def check_model(family: Family, model: ModelConfig, seq_length: int) -> None:
    """Raise ValueError for an architecture that cannot be built, or that its family does not have."""
    _check_family(family, model)
    _check_heads(model)
    _check_positions(model, seq_length)


def _check_family(family: Family, model: ModelConfig) -> None:
    for name, owner in _FOR_ONE.items():
        value = getattr(model, name)
        if family != owner and value != getattr(_DEFAULTS, name):
            raise ValueError(
                f"model.{name} is {_text(value)} but family is {family}: it is for {_NAMES[owner]} alone; remove it"
            )
    positions = _POSITIONS[family]
    if model.position_embedding_type not in positions:
        raise ValueError(
            f"model.position_embedding_type is {model.position_embedding_type} but family is {family}: "
            f"{_NAMES[family]} takes {' or '.join(positions)}"
        )
    if family == "bert":
        _check_bert(model)
    if family == "t5":
        _check_t5(model)


def _check_bert(model: ModelConfig) -> None:
    for name, wanted in (
        ("normalization", "layernorm"),
        ("add_bias_linear", True),
        ("untie_embeddings_and_output_weights", False),
    ):
        if getattr(model, name) != wanted:
            raise ValueError(
                f"model.{name} is {_text(getattr(model, name))} but family is bert, whose layers are those of the "
                f"published model: set it to {_text(wanted)}"
            )


def _check_t5(model: ModelConfig) -> None:
    if model.init_method_std != _DEFAULTS.init_method_std:
        raise ValueError(
            f"model.init_method_std is {model.init_method_std} but family is t5, whose initial weights follow from its "
            "widths: remove it"
        )


def _check_heads(model: ModelConfig) -> None:
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads:
        raise ValueError(
            f"model.hidden_size {model.hidden_size} is not a multiple of model.num_attention_heads "
            f"{model.num_attention_heads}: choose heads that divide it, or give model.kv_channels"
        )
    if model.num_attention_heads % model.query_groups:
        raise ValueError(
            f"model.num_attention_heads {model.num_attention_heads} is not a multiple of model.num_query_groups "
            f"{model.num_query_groups}: choose groups that divide it"
        )


def _check_positions(model: ModelConfig, seq_length: int) -> None:
    positions = model.max_position_embeddings
    if positions is not None and positions < seq_length:
        raise ValueError(
            f"data.seq_length {seq_length} exceeds model.max_position_embeddings {positions}: "
            f"raise the latter to at least {seq_length}"
        )
    if model.position_embedding_type == "rope":
        if model.rotary_dim < 2 or (model.rotary_percent == 1 and model.head_dim % 2):
            raise ValueError(
                f"model.rotary_percent {model.rotary_percent} of a head of {model.head_dim} leaves no even number of "
                "elements to rotate: choose heads of an even size, or raise it"
            )
    else:
        for name in ("rotary_base", "rotary_percent"):
            if getattr(model, name) != getattr(_DEFAULTS, name):
                raise ValueError(
                    f"model.{name} is {getattr(model, name)} but model.position_embedding_type is "
                    f"{model.position_embedding_type}: set the latter to rope, or remove the former"
                )
    if model.position_embedding_type == "relative":
        buckets, distance = model.relative_attention_num_buckets, model.relative_attention_max_distance
        if buckets % 4 or distance <= buckets // 2:
            raise ValueError(
                f"model.relative_attention_num_buckets {buckets} and model.relative_attention_max_distance {distance}: "
                "the first must be a multiple of 4, and the second more than half of it"
            )


def _text(value: Any) -> str:
    """A value as YAML spells it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
