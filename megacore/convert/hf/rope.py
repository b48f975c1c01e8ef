"""Rotary positions in config.json, as transformers 4 and 5 write and read them.

transformers 4 has the base in `rope_theta` and the scaling in `rope_scaling`; version 5 has both in
`rope_parameters`. Of a file with both mappings, version 5 takes `rope_scaling`, and so do we.
"""

from dataclasses import dataclass
from typing import Any

from megacore.config.model import ModelConfig
from megacore.config.rope import MOST_POSITIONS, DynamicRope, LongRope
from megacore.config.spec import ModelSpec
from megacore.convert.hf.config import HfConfig
from megacore.errors import ConversionError
from megacore.foreign.files import shortened

ORIGINAL = "original_max_position_embeddings"
_BASE = 10000.0
_OF_OTHER_KINDS = (
    "type",
    "factor",
    ORIGINAL,
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "short_factor",
    "long_factor",
    "low_freq_factor",
    "high_freq_factor",
)
"""Keys of the mapping that transformers reads for some kinds and ignores for the others."""
_WITHOUT_EFFECT = ("finetuned",)


@dataclass(frozen=True)
class RopeKeys:
    """Keys of rotary positions, where classes differ."""

    base: str = "rope_theta"
    """Key of the base outside of the mappings."""
    share: tuple[str, float] | None = None
    """Key of the rotated share of each head outside of the mappings, and its default; None if the
    class rotates whole heads."""
    extended_from: int | None = None
    """Default of `original_max_position_embeddings` in a class whose only scaling is LongRoPE; None
    for a class with any scaling."""


def read_rope(config: HfConfig, positions: int, keys: RopeKeys) -> dict[str, Any]:
    """Translate the rotary positions of a config.json to values of `ModelConfig`.

    Args:
        config: the configuration.
        positions: default of max_position_embeddings.
        keys: keys of the class.

    Raises:
        ConversionError: if our models do not support a value.
    """
    chosen = _chosen(config)
    key = "max_position_embeddings"
    longest = _length(config, key, config.get(key, int, positions))
    base = config.get(keys.base, float, _BASE)
    if "rope_theta" in chosen.values:
        base = chosen.get("rope_theta", float)
    if keys.base != "rope_theta":
        config.refuse_unless("rope_theta", base)
    scaling = _scaling(config, chosen, keys, longest)
    percent = _percent(config, chosen, keys)
    chosen.refuse_unread(_OF_OTHER_KINDS, _WITHOUT_EFFECT)
    if scaling is not None and scaling["kind"] == "dynamic":
        longest = int(min(longest * scaling["factor"], MOST_POSITIONS))
    return {
        "position_embedding_type": "rope",
        "rotary_base": base,
        "rotary_percent": percent,
        "rope_scaling": scaling,
        "max_position_embeddings": longest,
    }


def _chosen(config: HfConfig) -> HfConfig:
    """Return the mapping that transformers takes, `rope_scaling` unless it is empty."""
    mappings = {key: config.optional(key, dict) for key in ("rope_scaling", "rope_parameters")}
    key = next((key for key, values in mappings.items() if values), "rope_parameters")
    return HfConfig(mappings[key] or {}, f"{config.path}: {key}")


def _percent(config: HfConfig, chosen: HfConfig, keys: RopeKeys) -> float:
    """Return the rotated fraction of each head."""
    key = "partial_rotary_factor"
    if keys.share is None:
        config.refuse_unless(key, 1.0)
        chosen.refuse_unless(key, 1.0)
        return 1.0
    outside, default = keys.share
    percent = config.get(outside, float, default)
    if key in chosen.values:
        percent = chosen.get(key, float)
    if outside != key:
        config.refuse_unless(key, percent)
    return percent


def _scaling(
    config: HfConfig, chosen: HfConfig, keys: RopeKeys, longest: int
) -> dict[str, Any] | None:
    """Return the values of `model.rope_scaling`."""
    kind = chosen.get("rope_type", str, chosen.get("type", str, "default"))
    only_longrope = keys.extended_from is not None
    if only_longrope and kind in ("su", "yarn"):
        kind = "longrope"
    if only_longrope and kind not in ("default", "longrope"):
        raise ConversionError(
            f"{chosen.path} is of type {kind!r}, which Phi3ForCausalLM lacks: only 'default' and "
            "'longrope' can be read"
        )
    original = _original(config, chosen, keys, longest)
    ratio = max(1.0, longest / original)
    values: dict[str, Any] = {"kind": kind}
    match kind:
        case "default":
            return None
        case "linear":
            return values | {"factor": chosen.get("factor", float)}
        case "dynamic":
            return values | {"factor": chosen.get("factor", float), ORIGINAL: longest}
        case "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor")
            values |= {name: chosen.get(name, float) for name in names}
        case "yarn":
            values |= _yarn(chosen, ratio)
        case "longrope":
            values |= _longrope(chosen, ratio, original)
        case _:
            raise ConversionError(
                f"{chosen.path} is of type {kind!r}, which models here lack: only 'default', "
                "'linear', 'dynamic', 'yarn', 'llama3' and 'longrope' can be read"
            )
    return values | {ORIGINAL: original}


def _yarn(chosen: HfConfig, ratio: float) -> dict[str, Any]:
    names = ("mscale", "mscale_all_dim", "beta_fast", "beta_slow")
    # 0 means the default, too
    options = {name: chosen.optional(name, float) or None for name in names}
    options["attention_factor"] = chosen.optional("attention_factor", float)
    return {
        **{name: value for name, value in options.items() if value is not None},
        "factor": _factor(chosen, ratio),
        "truncate": chosen.get("truncate", bool, True),
    }


def _longrope(chosen: HfConfig, ratio: float, original: int) -> dict[str, Any]:
    factor = _factor(chosen, ratio) if "factor" in chosen.values else ratio
    attention_factor = chosen.optional("attention_factor", float)
    if attention_factor == _default_of_longrope(factor, original):
        attention_factor = None
    return {
        "short_factor": tuple(chosen.get("short_factor", list)),
        "long_factor": tuple(chosen.get("long_factor", list)),
        "factor": factor,
        "attention_factor": attention_factor,
    }


def _original(config: HfConfig, chosen: HfConfig, keys: RopeKeys, longest: int) -> int:
    """Return the longest sequence before the extension, which transformers seeks at three places.

    Outside of the mapping it comes first.
    """
    outside = config.optional(ORIGINAL, int)
    if outside is None:
        outside = keys.extended_from
    original = chosen.get(ORIGINAL, int, longest) if outside is None else outside
    return _length(config, ORIGINAL, original)


def _length(config: HfConfig, key: str, value: int) -> int:
    """Return `value`, a number of positions under `key`."""
    if not 1 <= value <= MOST_POSITIONS:
        raise ConversionError(
            f"{config.path} has {key} {shortened(str(value))}: a sequence has from 1 to "
            f"{MOST_POSITIONS:,} positions"
        )
    return value


def _factor(chosen: HfConfig, ratio: float) -> float:
    """Return the factor; null means the ratio of the longest sequences."""
    if "factor" in chosen.values and chosen.values["factor"] is None:
        return ratio
    return chosen.get("factor", float)


def _default_of_longrope(factor: float, original: int) -> float | None:
    if factor < 1 or original < 2:
        return None
    return LongRope.model_construct(
        factor=factor, original_max_position_embeddings=original, attention_factor=None
    ).scale


def write_rope(spec: ModelSpec) -> dict[str, Any]:
    """Return the rotary positions for config.json, for both transformers 4 and 5."""
    model = spec.model
    scaling = model.rope_scaling
    kind = "default" if scaling is None else scaling.kind
    values = _values(model)
    result = {
        "max_position_embeddings": spec.max_position_embeddings,
        "rope_theta": model.rotary_base,
        "rope_parameters": {"rope_type": kind, "rope_theta": model.rotary_base, **values},
    }
    if scaling is not None:
        result["rope_scaling"] = {"rope_type": kind, "type": kind, **values}
    if isinstance(scaling, DynamicRope):
        result["max_position_embeddings"] = scaling.original_max_position_embeddings
    return result


def _values(model: ModelConfig) -> dict[str, Any]:
    """Return the numbers of the rotation; options without a value are left out."""
    scaling = model.rope_scaling
    partial = {} if model.rotary_percent == 1 else {"partial_rotary_factor": model.rotary_percent}
    if scaling is None:
        return partial
    values = scaling.model_dump(mode="json", exclude={"kind"}, exclude_none=True)
    if isinstance(scaling, DynamicRope):
        del values[ORIGINAL]
    if isinstance(scaling, LongRope):
        # transformers 4 derives it from the ratio of the longest sequences, and not from the factor
        values["attention_factor"] = scaling.scale
    return {**values, **partial}
