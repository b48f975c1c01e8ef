"""Translation of the options of Megatron-LM's and Megatron-DeepSpeed's models."""

from megacore.adopt.check import OTHER_VOCABULARY, ForeignModel
from megacore.adopt.rules import (
    BadValueError,
    Draft,
    Setting,
    Settings,
    first,
    integer,
    integer_of,
    number,
    number_of,
    sources,
    word,
)

_LLAMA3_FACTOR = 8.0
"""Megatron's default of --rope-scaling-factor."""
_VOCABULARIES = {
    "gpt2bpetokenizer": 50257,
    "bertwordpiecelowercase": 30522,
    "bertwordpiececase": 28996,
    "llama2tokenizer": 32000,
    "gptsentencepiecetokenizer": 32000,
}
"""Entries of the published vocabularies by Megatron's name of the tokenizer."""


def put_model(settings: Settings, draft: Draft, family: str) -> None:
    """Set positions, MLP, attention, norms and biases, and the masks of BERT and T5."""
    _positions(settings, draft, family)
    _mlp(settings, draft)
    groups, grouped = settings.get("--num-query-groups"), settings.get("--group-query-attention")
    if groups is not None and grouped is not None:
        count = integer_of(groups, draft, "model.num_query_groups", least=1)
        if count is not None:
            draft.put("model.num_query_groups", count, groups, grouped)
    for setting in (groups, grouped):
        if setting is not None and setting.name not in draft.done:
            if setting is grouped:
                draft.put("model.num_query_groups", 1, grouped, settings.default)
            else:
                draft.ignore(setting, "Megatron reads it with --group-query-attention only")
    one_plus = settings.get("--apply-layernorm-1p")
    if one_plus is not None and family == "gpt":
        draft.put("model.apply_layernorm_1p", True, one_plus)
    elif one_plus is not None:
        draft.ignore(one_plus, "weights of norms are not decayed: it is the same function")
    bias = settings.get("--add-qkv-bias")
    if bias is not None and "--disable-bias-linear" in settings:
        draft.put("model.add_qkv_bias", True, bias)
    elif bias is not None:
        draft.ignore(bias, "all linear layers have biases")
    _window(settings, draft)
    _rope_scaling(settings, draft)
    if family == "t5" and "model.init_method_std" in draft.values:
        std = settings.get("--init-method-std")
        del draft.values["model.init_method_std"]
        if std is not None:
            draft.refuse(std, "a chosen deviation for T5", "T5's own, which follow from its widths")
    for name in ("--mask-prob", "--short-seq-prob"):
        setting = settings.get(name)
        if setting is None:
            continue
        section = {"bert": "data.masked_lm", "t5": "data.span_corruption"}.get(family)
        key = "short_seq_prob" if name == "--short-seq-prob" else "masked_lm_prob"
        key = "noise_density" if key == "masked_lm_prob" and family == "t5" else key
        if section is None:
            draft.ignore(setting, "it is for BERT and T5")
            continue
        value = number_of(setting, draft, f"{section}.{key}")
        if value is not None:
            draft.put(f"{section}.{key}", value, setting)


def _positions(settings: Settings, draft: Draft, family: str) -> None:
    kind, rotary = (
        settings.get("--position-embedding-type"),
        settings.get("--use-rotary-position-embeddings"),
    )
    alibi, none = (
        settings.get("--use-alibi-position-embeddings"),
        settings.get("--no-position-embedding"),
    )
    value, origins = "learned_absolute", [each for each in (kind, rotary, alibi, none) if each]
    if kind is not None:
        value = word(first(kind))
    if rotary is not None:
        value = "rope"
    elif alibi is not None:
        value = "alibi"
    elif none is not None and kind is None:
        value = "none"
    known = {"gpt": ("learned_absolute", "rope", "alibi", "none"), "bert": ("learned_absolute",)}
    if value not in known.get(family, ("relative",)):
        near = {"t5": "relative", "bert": "learned_absolute"}.get(family, "rope")
        name = origins[0] if origins else f"--position-embedding-type {value} ({settings.default})"
        draft.refuse(
            name, f"positions {value} in family {family}", f"model.position_embedding_type {near}"
        )
        draft.done |= {each.name for each in origins}
        draft.put("model.position_embedding_type", near, "the nearest of what is refused")
        return
    draft.put("model.position_embedding_type", value, *sources(*origins, default=settings.default))


def ignore_rotary(settings: Settings, draft: Draft) -> None:
    """Note rotary flags without effect where the positions are others."""
    if draft.get("model.position_embedding_type") == "rope":
        return
    for flag, name in (
        ("--rotary-base", "model.rotary_base"),
        ("--rotary-position-embeddings-theta", "model.rotary_base"),
        ("--rotary-percent", "model.rotary_percent"),
    ):
        setting = settings.get(flag)
        if setting is not None and name in draft.values:
            del draft.values[name]
            draft.ignore(setting, "the model has no rotary positions")


def _mlp(settings: Settings, draft: Draft) -> None:
    """Set activation and width as Megatron's arguments are completed.

    The fused GELU with bias is the tanh approximation, PyTorch's own is exact.
    """
    swiglu, openai = settings.get("--swiglu"), settings.get("--openai-gelu")
    unfused, exact = settings.get("--no-bias-gelu-fusion"), settings.get("--onnx-safe")
    no_bias = settings.get("--disable-bias-linear")
    used: list[Setting | str] = []
    if swiglu is not None:
        activation, used = "swiglu", [swiglu]
    elif openai is not None:
        activation, used = "gelu_tanh", [openai]
    elif exact is not None:
        activation, used = "gelu", [exact]
    elif unfused is not None or no_bias is not None:
        activation = "gelu"
        used = sources(unfused, no_bias)
    else:
        activation, used = "gelu_tanh", [f"{settings.default}: the fused GELU"]
    draft.put("model.activation", activation, *used)
    draft.ignore_rest(f"the activation is {activation}", openai, unfused, exact)
    width = settings.get("--ffn-hidden-size")
    hidden = draft.get("model.hidden_size")
    if width is not None:
        size = integer_of(width, draft, "model.ffn_hidden_size", least=1)
        if size is not None:
            draft.put("model.ffn_hidden_size", size, width)
    elif hidden is not None:
        size = int((4 * hidden * 2 / 3) / 64) * 64 if activation == "swiglu" else 4 * hidden
        rule = "int(8/3 h / 64) x 64" if activation == "swiglu" else "4 h"
        draft.put("model.ffn_hidden_size", size, f"{settings.default}: {rule}")


def _window(settings: Settings, draft: Draft) -> None:
    """Set the window, whose left side does not count the token itself, and the layers without it.

    As here, every n-th layer has no window.
    """
    window, skip = settings.get("--window-size"), settings.get("--window-attn-skip-freq")
    every: int | None = None
    if skip is not None and window is None:
        draft.ignore(skip, "Megatron reads it with --window-size only")
    elif skip is not None:
        try:
            every = integer(first(skip))
        except BadValueError:
            every = 0
        if every < 1 or len(skip.words) != 1:
            draft.refuse(skip, "a list of layers with a window", "model.window_attn_skip_freq N")
            every = None
    if window is None:
        return
    sizes = " ".join(window.words).strip("()'\" ").replace(",", " ").split()
    if len(sizes) != 2 or sizes[1] != "0" or not sizes[0].isdecimal():
        draft.refuse(window, "a window after the token", "model.sliding_window")
        draft.ignore_rest("the window is refused", skip)
    elif skip is not None and every == 1:
        draft.ignore(window, f"{skip} leaves no layer with a window")
        draft.ignore(skip, "no layer has a window")
    else:
        draft.put("model.sliding_window", int(sizes[0]) + 1, window)
        if skip is not None and every is not None:
            draft.put("model.window_attn_skip_freq", every, skip)


def _rope_scaling(settings: Settings, draft: Draft) -> None:
    """Set the scaling of rotary positions: Llama 3's, or positions divided by a number."""
    llama, factor = settings.get("--use-rope-scaling"), settings.get("--rope-scaling-factor")
    linear = settings.get("--rotary-seq-len-interpolation-factor")
    present = [each for each in (llama, factor, linear) if each is not None]
    if draft.get("model.position_embedding_type") != "rope":
        for each in present:
            draft.ignore(each, "the model has no rotary positions")
        return
    name = "model.rope_scaling"
    divisor = number_of(linear, draft, f"{name}.factor")
    if linear is not None and divisor == 1:
        draft.ignore(linear, "it requests nothing")
        linear = None
    if llama is not None and linear is not None:
        draft.refuse(linear, f"two scalings at once, with {llama}", "one of them")
        linear = None
    if llama is not None:
        value = number_of(factor, draft, f"{name}.factor")
        if factor is None or value is not None:
            draft.put(f"{name}.kind", "llama3", llama)
            origin = factor or f"Megatron-LM's default {_LLAMA3_FACTOR:g}"
            draft.put(f"{name}.factor", _LLAMA3_FACTOR if value is None else value, origin)
    elif factor is not None:
        draft.ignore(factor, "Megatron reads it with --use-rope-scaling only")
    if linear is not None and divisor is not None:
        draft.put(f"{name}.kind", "linear", linear)
        draft.put(f"{name}.factor", divisor, linear)


def model_sizes(settings: Settings, family: str, replicas: int | None) -> ForeignModel | None:
    """Return the sizes by Megatron's flags and defaults; None if a number is not written.

    `replicas` is the number of data-parallel replicas; None if it is not written.
    """

    def count(flag: str, default: float | None = None) -> int:
        setting = settings.get(flag)
        if setting is None:
            if default is None:
                raise BadValueError(flag)
            return int(default)
        return int(number(first(setting)))

    try:
        hidden, heads = count("--hidden-size"), count("--num-attention-heads")
        layers = count(
            "--num-layers",
            None if "--num-layers" in settings else count("--encoder-num-layers", -1),
        )
        swiglu = "--swiglu" in settings
        inner = count(
            "--ffn-hidden-size",
            int((4 * hidden * 2 / 3) / 64) * 64 if swiglu else 4 * hidden,
        )
        groups = heads
        if "--group-query-attention" in settings:
            groups = count("--num-query-groups", 1)
        groups = count("--num-key-value-heads", groups)
        sequence = count(
            "--seq-length",
            None if "--seq-length" in settings else count("--encoder-seq-length", -1),
        )
        learned = not any(
            flag in settings
            for flag in (
                "--use-rotary-position-embeddings",
                "--no-position-embedding",
                "--use-alibi-position-embeddings",
            )
        )
        kind = settings.get("--position-embedding-type")
        if kind is not None:
            learned = learned and word(first(kind)) == "learned_absolute"
        bias = "--disable-bias-linear" not in settings
        norm = settings.get("--normalization")
        tokenizer = settings.get("--tokenizer-type")
        name = {"bert": "bertwordpiecelowercase"}.get(family, "gpt2bpetokenizer")
        name = name if tokenizer is None else word(first(tokenizer)).lower()
        batch = count("--global-batch-size", count("--micro-batch-size") * (replicas or 1))
        rampup, steps = (
            settings.get("--rampup-batch-size"),
            settings.get("--step-batch-size-schedule"),
        )
        if rampup is not None:
            batch = int(number(rampup.words[0]))
        if steps is not None:
            batch = int(
                " ".join(steps.words).strip("\"'").replace(",", " ").split()[0].partition(":")[2]
            )
        return ForeignModel(
            family=family,
            layers=layers,
            hidden=hidden,
            heads=heads,
            head_size=count("--kv-channels", hidden // heads),
            groups=groups,
            inner=inner,
            gated=swiglu,
            attention_bias=bias,
            mlp_bias=bias,
            norm_bias=norm is None or word(first(norm)).lower() == "layernorm",
            untied="--untie-embeddings-and-output-weights" in settings,
            positions=count("--max-position-embeddings", sequence) if learned else 0,
            sequence=sequence,
            vocabulary=count("--vocab-size", _VOCABULARIES.get(name, OTHER_VOCABULARY)),
            multiple=count("--make-vocab-size-divisible-by", 128)
            * count("--tensor-model-parallel-size", 1),
            batch=batch,
            qk_norm="--qk-layernorm" in settings,
            qkv_bias="--add-qkv-bias" in settings,
            binary_head=family == "bert" and "--bert-no-binary-head" not in settings,
        )
    except (BadValueError, ValueError, ArithmeticError, IndexError):
        return None
