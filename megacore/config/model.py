"""Section `model`: the architecture, with checks of what its family supports."""

from typing import Any, Literal

from megacore.config.base import Section, as_yaml, keyed
from megacore.config.rope import MOST_POSITIONS, RopeScaling, check_scaling

Family = Literal["gpt", "bert", "t5"]
PositionEmbedding = Literal["learned_absolute", "rope", "alibi", "relative", "none"]
Normalization = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu_tanh", "gelu", "relu", "swiglu", "geglu", "geglu_tanh"]
NormPosition = Literal["pre", "post", "sandwich", "reordered"]
QKLayernormScope = Literal["head", "projection"]
GATED = frozenset({"swiglu", "geglu", "geglu_tanh"})
"""Activations of gated units (Shazeer 2020, arXiv:2002.05202), whose MLP has a third matrix."""
_FOR_ONE: dict[str, Family] = {
    "num_decoder_layers": "t5",
    "relative_attention_num_buckets": "t5",
    "relative_attention_max_distance": "t5",
    "scale_decoder_outputs": "t5",
    "bert_binary_head": "bert",
    "parallel_residual": "gpt",
    "rotary_base": "gpt",
    "rotary_percent": "gpt",
    "rope_scaling": "gpt",
    "add_qkv_bias": "gpt",
    "sliding_window": "gpt",
    "window_attn_skip_freq": "gpt",
    "qk_layernorm": "gpt",
    "qk_layernorm_scope": "gpt",
    "query_pre_attn_scalar": "gpt",
    "attn_logit_softcapping": "gpt",
    "final_logit_softcapping": "gpt",
    "scale_embeddings": "gpt",
    "apply_layernorm_1p": "gpt",
    "num_query_groups": "gpt",
}
"""Fields that only one family supports; for other families they must have their defaults."""
_POSITIONS: dict[Family, tuple[str, ...]] = {
    "gpt": ("learned_absolute", "rope", "alibi", "none"),
    "bert": ("learned_absolute",),
    "t5": ("relative",),
}
_NORM_POSITIONS: dict[Family, tuple[NormPosition, ...]] = {
    "gpt": ("pre", "sandwich", "reordered"),
    "bert": ("pre", "post"),
    "t5": ("pre",),
}
MOST_LAYERS = 1024
"""Most layers. The deepest published transformer has 1,000 (Wang et al. 2022, arXiv:2203.00555);
division over pipeline stages compares all pairs."""
MOST_WIDTH = 2**20
"""Largest width of the residual stream; published models have up to 2**15."""
MOST_HEADS = 2**16
"""Most attention heads; published models have up to 2**8."""
MOST_INNER = 2**24
"""Largest width of the MLP and of a head; published models have up to 2**17."""
_NAMES = {"gpt": "GPT", "bert": "BERT", "t5": "T5"}


class ModelConfig(Section):
    """Architecture of a transformer as Megatron-LM builds it.

    The default sizes are those of a small model that two CPU cores train in minutes. The other
    defaults are those of GPT-2 (Radford et al. 2019).
    """

    num_layers: int = keyed(4, gt=0, le=MOST_LAYERS)
    """Number of transformer layers; for T5, of the encoder. At most 1,024."""
    num_decoder_layers: int | None = keyed(None, gt=0, le=MOST_LAYERS)
    """Number of layers of T5's decoder; null means num_layers. At most 1,024. T5 only."""
    hidden_size: int = keyed(256, gt=0, le=MOST_WIDTH)
    """Width of the residual stream (h), at most 1,048,576."""
    num_attention_heads: int = keyed(4, gt=0, le=MOST_HEADS)
    """Number of attention heads (n), at most 65,536."""
    num_query_groups: int | None = keyed(None, gt=0)
    """Number of key-value heads (g; Ainslie et al. 2023), each shared by n / g query heads; null
    means one per query head."""
    kv_channels: int | None = keyed(None, gt=0, le=MOST_INNER)
    """Size of one attention head (d); null means hidden_size / num_attention_heads."""
    ffn_hidden_size: int | None = keyed(None, gt=0, le=MOST_INNER)
    """Width of the MLP's inner layer; null means 4 x hidden_size."""
    activation: Activation = keyed("gelu_tanh")
    """Activation of the MLP: GELU (Hendrycks and Gimpel 2016), exact or in its tanh approximation;
    ReLU; or a gated unit (Shazeer 2020) with SiLU (swiglu), exact GELU (geglu) or approximate GELU
    (geglu_tanh)."""
    normalization: Normalization = keyed("layernorm")
    """Type of the norms: LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019)."""
    apply_layernorm_1p: bool = keyed(False, omit_default=True)
    """If true, norms multiply by 1 + weight (zero-centered gamma) and their weights begin at 0, as
    in Gemma. GPT only."""
    norm_position: NormPosition = keyed("pre")
    """Position of the norms: pre, before each branch; post, after each residual sum (Devlin et al.
    2018; BERT only); sandwich, before and after each branch (Ding et al. 2021; GPT only); or
    reordered, only after each branch (OLMo 2, Walsh et al. 2024; GPT only)."""
    parallel_residual: bool = keyed(False)
    """If true, attention and MLP read the same input and their outputs are summed (GPT-J,
    GPT-NeoX). GPT only."""
    position_embedding_type: PositionEmbedding = keyed("learned_absolute")
    """Position embedding: a learned table; rotary (Su et al. 2021, GPT only); ALiBi (Press et al.
    2021, GPT only); T5's relative bias (Raffel et al. 2019, T5 only); or none (GPT only)."""
    rotary_base: float = keyed(10000.0, gt=1.0)
    """Base of the rotary frequencies; used with position_embedding_type rope only."""
    rotary_percent: float = keyed(1.0, gt=0.0, le=1.0)
    """Fraction of each head's elements that is rotated, from 0 to 1; used with
    position_embedding_type rope only."""
    rope_scaling: RopeScaling | None = keyed(None, omit_default=True)
    """Change of the rotary frequencies for longer sequences; null means none. Used with
    position_embedding_type rope only."""
    relative_attention_num_buckets: int = keyed(32, gt=1, le=MOST_INNER)
    """Number of distance buckets of the relative bias. T5 only."""
    relative_attention_max_distance: int = keyed(128, gt=1)
    """Distance in tokens from which all distances share the last bucket of the relative bias. T5
    only."""
    sliding_window: int | None = keyed(None, gt=0)
    """Number of tokens that each token attends to, including itself (Jiang et al. 2023); null means
    all previous tokens. GPT only."""
    window_attn_skip_freq: int | None = keyed(None, gt=1, omit_default=True)
    """Distance between layers without sliding_window: with n, every n-th layer attends to all
    previous tokens; null means that every layer has the window. GPT only."""
    qk_layernorm: bool = keyed(False)
    """If true, queries and keys are normalized (Dehghani et al. 2023). GPT only."""
    qk_layernorm_scope: QKLayernormScope = keyed("head", omit_default=True)
    """Vectors that qk_layernorm normalizes: those of each head, or the whole projection of all
    heads (OLMo 2; RMSNorm only). GPT only."""
    query_pre_attn_scalar: int | None = keyed(None, gt=0, omit_default=True)
    """Number whose inverse square root multiplies the attention scores; null means the size of a
    head. GPT only."""
    attn_logit_softcapping: float | None = keyed(None, gt=0.0, omit_default=True)
    """Soft cap c of the attention scores, which become c tanh(score / c) (Gemma 2, Riviere et al.
    2024); null means none. The scores are stored, which needs memory. GPT only."""
    final_logit_softcapping: float | None = keyed(None, gt=0.0, omit_default=True)
    """Soft cap of the logits in the same form; null means none. GPT only."""
    scale_embeddings: bool = keyed(False, omit_default=True)
    """If true, the embeddings of tokens are multiplied by sqrt(hidden_size) (Vaswani et al. 2017),
    rounded to the type of the computation. GPT only."""
    add_bias_linear: bool = keyed(True)
    """If true, linear layers have biases."""
    add_qkv_bias: bool = keyed(False, omit_default=True)
    """If true, the projection to queries, keys and values has a bias even if add_bias_linear is
    false, as in Qwen2. GPT only."""
    untie_embeddings_and_output_weights: bool = keyed(False)
    """If true, the output layer has separate weights; if false, it shares those of the token
    embedding (Press and Wolf 2017)."""
    scale_decoder_outputs: bool | None = keyed(None, omit_default=True)
    """If true, the input of the output layer is divided by sqrt(hidden_size); null means so if the
    output layer is tied, as in T5, and not otherwise, as in T5 1.1. True needs a tied one. T5
    only."""
    bert_binary_head: bool = keyed(True, key="run", resolved="index")
    """If true, BERT has a pooler and a binary head that predicts how its two segments are related
    (data.masked_lm.sentence_task). BERT only."""
    max_position_embeddings: int | None = keyed(None, gt=0, le=MOST_POSITIONS)
    """Longest sequence in tokens, which is the number of rows of the learned position table; null
    means data.seq_length."""
    hidden_dropout: float = keyed(0.1, ge=0.0, lt=1.0)
    """Dropout probability after the embedding, the attention projection and the MLP."""
    attention_dropout: float = keyed(0.1, ge=0.0, lt=1.0)
    """Dropout probability of the attention weights."""
    init_method_std: float = keyed(0.02, gt=0.0)
    """Standard deviation of the initial weights. With norm_position pre, projections into the
    residual stream use std / sqrt(2 x num_layers). T5's deviations follow from its widths (Raffel
    et al. 2019)."""
    residual_init_std: float | None = keyed(None, omit_default=True, gt=0.0)
    """Standard deviation of the initial weights of projections into the residual stream, such as
    2 / (num_layers x sqrt(hidden_size)) (Wang and Komatsuzaki 2021); null means that of
    init_method_std. GPT and BERT only."""
    layernorm_epsilon: float = keyed(1e-5, gt=0.0)
    """Term added to the variance (LayerNorm) or mean square (RMSNorm) in all norms for numerical
    stability."""
    make_vocab_size_divisible_by: int = keyed(128, gt=0)
    """Number of entries to whose multiple the vocabulary is padded; the tensor-parallel size must
    divide the padded size."""

    @property
    def head_dim(self) -> int:
        """Size of one attention head (d), with the default filled in."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def attention_size(self) -> int:
        """Width of all heads together (n x d)."""
        return self.num_attention_heads * self.head_dim

    @property
    def query_groups(self) -> int:
        """Number of key-value heads, with the default filled in."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Width of the MLP's inner layer, with the default filled in."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def qkv_bias(self) -> bool:
        """True if the projection to queries, keys and values has a bias."""
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def gated(self) -> bool:
        """True if the MLP is a gated unit."""
        return self.activation in GATED

    @property
    def attention_scalar(self) -> int:
        """Number whose inverse square root multiplies the scores, with the default filled in."""
        return self.query_pre_attn_scalar or self.head_dim

    @property
    def score_scale(self) -> float | None:
        """Factor on the attention scores; None means 1 / sqrt(d)."""
        scalar = self.query_pre_attn_scalar
        return None if scalar is None else float(scalar**-0.5)

    def has_window(self, layer: int) -> bool:
        """Return True if layer number `layer`, from 0, has the sliding window."""
        skip = self.window_attn_skip_freq
        return self.sliding_window is not None and (skip is None or (layer + 1) % skip != 0)

    @property
    def decoder_layers(self) -> int:
        """Number of layers of T5's decoder, with the default filled in."""
        return self.num_decoder_layers or self.num_layers

    @property
    def scales_decoder_outputs(self) -> bool:
        """True if the input of T5's output layer is scaled."""
        tied = not self.untie_embeddings_and_output_weights
        return tied if self.scale_decoder_outputs is None else self.scale_decoder_outputs

    def padded_vocab_size(self, vocab_size: int) -> int:
        """Return the number of embedding rows (v) for a vocabulary of `vocab_size` entries.

        Megatron-LM multiplies `make_vocab_size_divisible_by` by the tensor-parallel size. Here the
        shape of a model does not depend on its layout, and the tensor-parallel size must divide the
        result.
        """
        divisible_by = self.make_vocab_size_divisible_by
        return -(-vocab_size // divisible_by) * divisible_by

    @property
    def rotary_dim(self) -> int:
        """Number of rotated elements of each head, always even."""
        return int(self.head_dim * self.rotary_percent) // 2 * 2


def check_model(family: Family, model: ModelConfig, seq_length: int) -> None:
    """Raise ValueError for an architecture that is invalid or that its family does not support."""
    _check_family(family, model)
    _check_heads(model)
    _check_biases(model)
    _check_positions(model, seq_length)


def _check_family(family: Family, model: ModelConfig) -> None:
    for name, owner in _FOR_ONE.items():
        if family != owner and not model.has_default(name):
            raise ValueError(
                f"model.{name} is {_text(getattr(model, name))} but family is {family}: it is only "
                f"for {_NAMES[owner]}; remove it"
            )
    positions = _POSITIONS[family]
    if model.position_embedding_type not in positions:
        raise ValueError(
            f"model.position_embedding_type is {model.position_embedding_type} but family is "
            f"{family}: {_NAMES[family]} takes {' or '.join(positions)}"
        )
    places = _NORM_POSITIONS[family]
    if model.norm_position not in places:
        raise ValueError(
            f"model.norm_position is {model.norm_position} but family is {family}: "
            f"{_NAMES[family]} takes {' or '.join(places)}"
        )
    if family == "gpt":
        _check_norms(model)
    if family == "bert":
        _check_bert(model)
    if family == "t5":
        _check_t5(model)


def _check_norms(model: ModelConfig) -> None:
    if model.parallel_residual and model.norm_position != "pre":
        raise ValueError(
            f"model.norm_position is {model.norm_position} but model.parallel_residual is true, "
            "which has norms before its branches only: set one of them to its default"
        )
    if model.qk_layernorm_scope == "projection":
        if not model.qk_layernorm:
            raise ValueError(
                "model.qk_layernorm_scope is projection but model.qk_layernorm is false: set the "
                "latter to true, or remove the former"
            )
        if model.normalization != "rmsnorm":
            raise ValueError(
                f"model.qk_layernorm_scope is projection but model.normalization is "
                f"{model.normalization}: set the latter to rmsnorm, or the former to head"
            )
    if model.window_attn_skip_freq is not None and model.sliding_window is None:
        raise ValueError(
            f"model.window_attn_skip_freq is {model.window_attn_skip_freq} but "
            "model.sliding_window is null: give the window, or remove the former"
        )


def _check_bert(model: ModelConfig) -> None:
    for name, expected in (
        ("normalization", "layernorm"),
        ("add_bias_linear", True),
        ("untie_embeddings_and_output_weights", False),
    ):
        if getattr(model, name) != expected:
            raise ValueError(
                f"model.{name} is {_text(getattr(model, name))} but family is bert, whose layers "
                f"are those of the published model: set it to {_text(expected)}"
            )


def _check_t5(model: ModelConfig) -> None:
    if not model.has_default("init_method_std"):
        raise ValueError(
            f"model.init_method_std is {model.init_method_std} but family is t5, whose initial "
            "weights follow from its widths: remove it"
        )
    if model.scale_decoder_outputs and model.untie_embeddings_and_output_weights:
        raise ValueError(
            "model.scale_decoder_outputs is true but so is "
            "model.untie_embeddings_and_output_weights, whose output layer is not scaled in any "
            "T5: remove the former"
        )
    if model.residual_init_std is not None:
        raise ValueError(
            f"model.residual_init_std is {model.residual_init_std} but family is t5, whose initial "
            "weights follow from its widths: remove it"
        )


def _check_heads(model: ModelConfig) -> None:
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads:
        raise ValueError(
            f"model.hidden_size {model.hidden_size} is not a multiple of model.num_attention_heads "
            f"{model.num_attention_heads}: choose heads that divide it, or give model.kv_channels"
        )
    if model.num_attention_heads % model.query_groups:
        raise ValueError(
            f"model.num_attention_heads {model.num_attention_heads} is not a multiple of "
            f"model.num_query_groups {model.num_query_groups}: choose groups that divide it"
        )


def _check_biases(model: ModelConfig) -> None:
    if model.add_qkv_bias and model.add_bias_linear:
        raise ValueError(
            "model.add_qkv_bias is true but so is model.add_bias_linear, with which every linear "
            "layer has a bias: remove the former, or set the latter to false"
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
                f"model.rotary_percent {model.rotary_percent} of a head of {model.head_dim} leaves "
                "no even number of elements to rotate: choose heads of an even size, or raise it"
            )
        if model.rope_scaling is not None:
            check_scaling(model.rope_scaling, model.rotary_dim)
    else:
        for name in ("rotary_base", "rotary_percent", "rope_scaling"):
            if not model.has_default(name):
                raise ValueError(
                    f"model.{name} is {_text(getattr(model, name))} but "
                    f"model.position_embedding_type is {model.position_embedding_type}: set the "
                    "latter to rope, or remove the former"
                )
    if model.position_embedding_type == "relative":
        buckets = model.relative_attention_num_buckets
        distance = model.relative_attention_max_distance
        if buckets % 4 or distance <= buckets // 2:
            raise ValueError(
                f"model.relative_attention_num_buckets {buckets} and "
                f"model.relative_attention_max_distance {distance}: the first must be a multiple "
                "of 4, and the second more than half of it"
            )


def _text(value: Any) -> str:
    """Return a value as YAML spells it, of a section only its kind."""
    if isinstance(value, Section):
        return f"{{kind: {getattr(value, 'kind', '')}}}"
    return as_yaml(value)
