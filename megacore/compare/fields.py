"""Differences of two models or runs, field by field, with the cause that each stands for."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megacore.checkpoint.spec import FREE, RESOLVED
from megacore.compare.report import Finding
from megacore.config.model import GATED, ModelConfig
from megacore.config.spec import ModelSpec, SpecialTokens

_ABSENT = frozenset({"make_vocab_size_divisible_by"})
"""Fields that most formats do not store."""


class _Cause(NamedTuple):
    name: str
    text: str


_CAUSES: Mapping[str, _Cause] = {
    "num_layers": _Cause("layers_missing", "number of layers"),
    "num_decoder_layers": _Cause("layers_missing", "number of decoder layers"),
    "hidden_size": _Cause("width", "width of the residual stream"),
    "num_attention_heads": _Cause("heads", "number of attention heads"),
    "num_query_groups": _Cause("query_groups", "number of key-value heads"),
    "kv_channels": _Cause("heads", "size of a head"),
    "ffn_hidden_size": _Cause("width", "width of the MLP"),
    "activation": _Cause("activation", "activation"),
    "normalization": _Cause("norm_kind", "kind of the norms"),
    "norm_position": _Cause("norm_position", "position of the norms"),
    "parallel_residual": _Cause("parallel_residual", "parallel attention and MLP"),
    "position_embedding_type": _Cause("position_embedding", "position embedding"),
    "rotary_base": _Cause("rope_base", "base of the rotary frequencies"),
    "rotary_percent": _Cause("rope_share", "rotated share of a head"),
    "relative_attention_num_buckets": _Cause("relative_bias", "buckets of the relative bias"),
    "relative_attention_max_distance": _Cause(
        "relative_bias", "largest distance of the relative bias"
    ),
    "sliding_window": _Cause("sliding_window", "sliding window"),
    "qk_layernorm": _Cause("qk_norm", "norms of queries and keys"),
    "add_bias_linear": _Cause("missing_bias", "biases of linear layers"),
    "untie_embeddings_and_output_weights": _Cause(
        "tied_embeddings", "separate weights of the output layer"
    ),
    "bert_binary_head": _Cause("binary_head", "binary head"),
    "max_position_embeddings": _Cause("position_table", "number of positions"),
    "layernorm_epsilon": _Cause("norm_epsilon", "epsilon of the norms"),
}
_BY_PART = {
    "rope_scaling": "rope_scaling",
    "rotary_scaling": "rope_scaling",
    "rope": "rope_base",
    "rotary": "rope_base",
    "softcap": "soft_cap",
    "soft_cap": "soft_cap",
    "window": "sliding_window",
    "bias": "missing_bias",
    "norm": "norm_kind",
    "scale": "attention_scale",
    "multiplier": "attention_scale",
}
"""Causes of other fields by part of the name."""


def effective(model: ModelConfig, field: str) -> Any:
    """Return a field's value with its default filled in."""
    return getattr(model, RESOLVED.get(field, field))


def differing_fields(a: ModelSpec, b: ModelSpec) -> Iterator[tuple[str, Any, Any]]:
    """Yield name and both values of each field of the architecture that differs."""
    if a.vocab_size != b.vocab_size:
        yield "vocab_size", a.vocab_size, b.vocab_size
    for field in ModelConfig.model_fields:
        if field in _ABSENT or (field == "num_decoder_layers" and a.family != "t5"):
            continue
        ours, theirs = effective(a.model, field), effective(b.model, field)
        if ours != theirs:
            yield field, ours, theirs


def field_findings(a: ModelSpec, b: ModelSpec) -> list[Finding]:
    """Return a finding for each field of the architecture that differs."""
    if a.family != b.family:
        sentence = f"A is a model of family {a.family}, B of family {b.family}"
        return [Finding("architecture", "family", sentence, ("family",), a.family, b.family)]
    return [_finding(name, ours, theirs, b) for name, ours, theirs in differing_fields(a, b)]


def _finding(name: str, ours: Any, theirs: Any, b: ModelSpec) -> Finding:
    if name == "vocab_size":
        cause, text = "vocabulary_padding", "size of the vocabulary"
    else:
        cause, text = _CAUSES.get(name) or _Cause(_by_part(name), name)
    if name == "activation" and (ours in GATED) != (theirs in GATED):
        cause = "gated_unit"
    learned = b.model.position_embedding_type == "learned_absolute"
    free = name in FREE or (name == "max_position_embeddings" and not learned)
    sentence = f"{text} ({name}): {shown(ours)} in A, {shown(theirs)} in B"
    return Finding("architecture", cause, sentence, (name,), ours, theirs, differs=not free)


def _by_part(name: str) -> str:
    return next((cause for part, cause in _BY_PART.items() if part in name), "configuration")


def with_fields(spec: ModelSpec, other: ModelSpec, fields: tuple[str, ...]) -> ModelSpec:
    """Return `spec` with the values that these fields have in `other`."""
    values = {field: effective(other.model, field) for field in fields if field != "vocab_size"}
    vocabulary = {"vocab_size": other.vocab_size} if "vocab_size" in fields else {}
    model = spec.model.model_copy(update=values)
    return spec.model_copy(update={"model": model, **vocabulary})


def special_token_findings(a: ModelSpec, b: ModelSpec) -> list[Finding]:
    """Return a finding for each special token that both specifications name differently.

    Begin and further ends are compared as config.json has them.
    """
    findings = []
    for role in SpecialTokens.model_fields:
        if role in ("bos", "ends"):
            continue
        ours, theirs = getattr(a.special_tokens, role), getattr(b.special_tokens, role)
        if ours in (None, ()) or theirs in (None, ()) or ours == theirs:
            continue
        sentence = f"special token {role}: id {shown(ours)} in A, {shown(theirs)} in B"
        findings.append(Finding("tokenizer", "special_tokens", sentence, (role,), ours, theirs))
    return findings


def shown(value: Any) -> str:
    """Return a value of a model or run for a sentence, shortened."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


AT_ONCE = frozenset(
    {
        "seed",
        "data",
        "tokenizer",
        "sample_order",
        "samples",
        "initial_weights",
        "resumed_from",
        "architecture",
        "dropout",
        "precision",
        "loss",
        "batch_size",
        "skipped_iterations",
        "family",
    }
)
"""Causes that change the loss or the gradient of the first iteration in which they apply."""
ROUNDING = frozenset(
    {
        "layout",
        "kernels",
        "versions",
        "hardware",
        "micro_batch_size",
        "recompute",
        "engine",
        "determinism",
    }
)
"""Causes that change results by rounding only, if nothing is wrong."""
_FIELDS = {
    "seed": "seed",
    "family": "family",
    "name": "remark",
    "verify": "remark",
    "data.tokenizer": "tokenizer",
    "data.source": "data",
    "data.sources": "data",
    "data.workers": "remark",
    "data.shard": "remark",
    "data.dask": "remark",
    "data.curate_workers": "remark",
    "data.curate_executor": "remark",
    "data.max_document_mb": "data",
    "data": "samples",
    "model.hidden_dropout": "dropout",
    "model.attention_dropout": "dropout",
    "model.init_method_std": "initial_weights",
    "model.residual_init_std": "initial_weights",
    "model": "architecture",
    "optim.lr": "lr_schedule",
    "optim.min_lr": "lr_schedule",
    "optim.loss_scale": "loss_scale",
    "optim": "optimizer",
    "train.global_batch_size": "batch_size",
    "train.rampup_batch_size": "batch_size",
    "train.micro_batch_size": "micro_batch_size",
    "train.precision": "precision",
    "train.pretrained_checkpoint": "initial_weights",
    "train.skip_samples": "skipped_iterations",
    "train.label_smoothing": "loss",
    "train.z_loss": "loss",
    "train.kernels": "kernels",
    "train.compile": "kernels",
    "train.cuda_graphs": "kernels",
    "train.tf32": "precision",
    "train.deterministic": "determinism",
    "train.recompute": "recompute",
    "train.train_iters": "train_iters",
    "train.loss_spike": "skipped_iterations",
    "train.nonfinite": "skipped_iterations",
    "train.exit": "remark",
    "train.log_interval": "remark",
    "train.eval": "remark",
    "train.profile": "remark",
    "train": "training",
    "resume": "resumed_from",
    "resume.override": "remark",
    "engine": "engine",
    "deepspeed": "engine",
    "parallel": "layout",
    "launch": "remark",
    "checkpoint": "remark",
    "evaluate": "remark",
    "export": "remark",
    "tracking": "remark",
    "limits": "samples",
    "task": "data",
}
"""Cause by the longest beginning of a field's dotted name."""


def cause_of_field(name: str) -> str:
    """Return the cause that a value of the configuration stands for, or "configuration"."""
    matches = [prefix for prefix in _FIELDS if name.startswith(prefix)]
    return _FIELDS[max(matches, key=len)] if matches else "configuration"
