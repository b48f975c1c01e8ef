"""Translation of nanotron's YAML files."""

from collections.abc import Mapping
from typing import Any

from megacore.adopt.check import ForeignModel
from megacore.adopt.data import MOST_ENTRIES, put_unnamed
from megacore.adopt.rules import (
    DECIDES_DATA,
    DECIDES_START,
    ONLY_SPEED,
    Absent,
    Choice,
    Draft,
    Joint,
    NoEffect,
    Rule,
    Rules,
    Setting,
    Settings,
    To,
    integer,
    integer_of,
    number,
    number_of,
    positive,
    put_ranks,
    require,
    sources,
    value_of,
    word,
)
from megacore.config.parallel import ZERO_STAGES
from megacore.foreign.files import leaves

_IDS = NoEffect("special tokens are those of the tokenizer")
_MODEL, _RATE = "model.model_config.", "optimizer.learning_rate_scheduler."
_UNREAD_SCALING = Absent(
    "scaled rotary positions, which nanotron itself does not compute from this key",
    "model.rope_scaling",
)

TABLE: dict[str, Rule] = {
    f"{_MODEL}num_hidden_layers": To("model.num_layers", positive),
    f"{_MODEL}hidden_size": To("model.hidden_size", positive),
    f"{_MODEL}num_attention_heads": To("model.num_attention_heads", positive),
    f"{_MODEL}num_key_value_heads": To("model.num_query_groups", positive),
    f"{_MODEL}intermediate_size": To("model.ffn_hidden_size", positive),
    f"{_MODEL}max_position_embeddings": To("model.max_position_embeddings", positive),
    f"{_MODEL}rms_norm_eps": To("model.layernorm_epsilon", number),
    f"{_MODEL}rope_theta": To("model.rotary_base", number),
    f"{_MODEL}hidden_act": Choice(
        "model.activation", {"silu": "swiglu", "gelu": "geglu"}, "this activation", "silu"
    ),
    f"{_MODEL}tie_word_embeddings": Joint("it decides the head"),
    f"{_MODEL}rope_scaling": _UNREAD_SCALING,
    f"{_MODEL}rope_seq_len_interpolation_factor": Joint("it decides the rotary positions"),
    f"{_MODEL}rope_interleaved": Absent("interleaved rotary pairs", "rope_interleaved: false"),
    f"{_MODEL}interleaved_rotary": Absent("interleaved rotary pairs", "interleaved_rotary: false"),
    f"{_MODEL}attention_bias": Joint("it decides the biases of queries, keys and values"),
    f"{_MODEL}sliding_window_size": To("model.sliding_window", integer),
    f"{_MODEL}no_rope_layer": Absent("rotary positions in some layers only", "rope in all layers"),
    f"{_MODEL}z_loss_enabled": Joint("it decides the z-loss"),
    f"{_MODEL}z_loss_coefficient": Joint("it decides the z-loss"),
    f"{_MODEL}_use_doc_masking": Joint("it decides the attention mask"),
    f"{_MODEL}vocab_size": NoEffect("the size follows from the tokenizer"),
    f"{_MODEL}initializer_range": NoEffect("model.init_method.std decides it"),
    f"{_MODEL}pretraining_tp": NoEffect("it is for transformers' models"),
    f"{_MODEL}use_cache": NoEffect("it is for generation"),
    f"{_MODEL}flex_attention_mask": Absent("this attention mask", "model.sliding_window"),
    f"{_MODEL}is_llama_config": NoEffect("it names the model, a Llama"),
    f"{_MODEL}is_qwen2_config": NoEffect("it names the model, a Llama with options"),
    f"{_MODEL}is_mamba_config": Absent("state-space layers (Mamba)", "family gpt"),
    f"{_MODEL}is_llamoe_config": Absent("mixture of experts", "a dense model"),
    f"{_MODEL}is_starcoder2_config": Absent("StarCoder2", "family gpt"),
    "model.init_method.std": To("model.init_method_std", number),
    "model.init_method.scaling_method": Absent("this scaling", "NUM_LAYERS", ("num_layers",)),
    "model.init_method.use_mup": Absent("µP", "model.init_method.std"),
    "model.init_method.path": DECIDES_START,
    "model.dtype": Choice(
        "train.precision",
        {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"},
        "this precision",
        "bfloat16",
    ),
    "model.make_vocab_size_divisible_by": Joint("it decides the padding of the vocabulary"),
    "model.ddp_bucket_cap_mb": To("parallel.grad_reduce_bucket_mb", number),
    "tokens.sequence_length": To("data.seq_length", positive),
    "tokens.train_steps": To("train.train_iters", positive),
    "tokens.micro_batch_size": To("train.micro_batch_size", positive),
    "tokens.batch_accumulation_per_replica": Joint("it decides the batch"),
    "tokens.val_check_interval": Joint("it decides the validations"),
    "tokens.limit_val_batches": Joint("it decides the validations"),
    "tokens.limit_test_batches": NoEffect("nanotron does not test"),
    "parallelism.tp": To("parallel.tensor_model_parallel_size", positive),
    "parallelism.pp": To("parallel.pipeline_model_parallel_size", positive),
    "parallelism.dp": Joint("it decides the number of ranks"),
    "parallelism.pp_engine": Choice(
        "parallel.pipeline_schedule", {"1f1b": "1f1b", "afab": "gpipe"}, "this schedule", "1f1b"
    ),
    "parallelism.tp_mode": Joint("it decides sequence parallelism"),
    "parallelism.recompute_layer": Joint("it decides what is recomputed"),
    "parallelism.context_parallel_size": To("parallel.context_parallel_size", positive),
    "parallelism.expert_parallel_size": Absent("expert parallelism", "a dense model", ("1",)),
    f"{_RATE}learning_rate": To("optim.lr", number),
    f"{_RATE}min_decay_lr": Joint("it decides the learning-rate schedule"),
    f"{_RATE}lr_warmup_steps": To("optim.lr_warmup_iters", integer),
    f"{_RATE}lr_warmup_style": Absent("this warm-up", "linear", ("linear",)),
    f"{_RATE}lr_decay_style": Joint("it decides the learning-rate schedule"),
    f"{_RATE}lr_decay_steps": Joint("it decides the learning-rate schedule"),
    f"{_RATE}lr_decay_starting_step": Joint("it decides the learning-rate schedule"),
    "optimizer.weight_decay": To("optim.weight_decay", number),
    "optimizer.weight_decay_exclude_named_params": Absent(
        "a choice of decayed weights", "matrices"
    ),
    "optimizer.clip_grad": To("optim.clip_grad", number),
    "optimizer.zero_stage": Joint("it decides ZeRO"),
    "optimizer.accumulate_grad_in_fp32": NoEffect("gradients are always accumulated in fp32"),
    "checkpoints.checkpoint_interval": To("checkpoint.save_interval", integer),
    "checkpoints.resume_checkpoint_path": DECIDES_START,
    "general.seed": To("seed", integer),
    "logging.iteration_step_info_interval": To("train.log_interval", integer),
    "tokenizer.tokenizer_name_or_path": Joint("it decides the tokenizer"),
    "tokenizer.tokenizer_revision": Joint("it decides the tokenizer"),
    "doremi": Absent("weights of domains that are learned", "data.blend"),
    "data_stages": DECIDES_DATA,
}
for _place in ("optimizer.", "optimizer.optimizer_factory."):
    TABLE |= {
        f"{_place}adam_beta1": To("optim.adam_beta1", number),
        f"{_place}adam_beta2": To("optim.adam_beta2", number),
        f"{_place}adam_eps": To("optim.adam_eps", number),
        f"{_place}torch_adam_is_fused": ONLY_SPEED,
        f"{_place}name": Absent(
            "other optimizers than AdamW",
            "adamW, or optim.name: muon in the file",
            ("adamw", "adam"),
        ),
    }
FAMILIES: tuple[tuple[str, Rule], ...] = (
    (
        rf"{_MODEL}moe_config.*|{_MODEL}moe_.*|{_MODEL}num_experts.*",
        Absent("mixture of experts", "a dense model", ("1",)),
    ),
    (
        rf"{_MODEL}(ssm_cfg|d_model|rms_norm|fused_add_norm|residual_in_fp32|pad_vocab|dtype).*",
        NoEffect("it is for Mamba, which is_mamba_config names"),
    ),
    (rf"{_MODEL}(bos|eos|pad)_token_id", _IDS),
    (
        rf"{_MODEL}(_fused|_attn|_use_qkv|log_attn|ring_attn).*|parallelism\.(tp_linear|tp_recompute|moe_layer).*",
        ONLY_SPEED,
    ),
    (r"model\.init_method\..*", Absent("this initialization", "model.init_method.std")),
    (
        rf"{_MODEL}rope_scaling\..*",
        _UNREAD_SCALING,
    ),
    (r"data\..*", Absent("nanotron's old form of data", "data_stages")),
    (r"doremi\..*", Absent("weights of domains that are learned", "data.blend")),
    (
        r"(lighteval|profiler|s3_upload|metrics_logging)(\..*)?",
        NoEffect("evaluation, profiles and uploads are the flow's own stages"),
    ),
    (
        r"(general|logging|checkpoints)\..*",
        NoEffect("a run has its place and its log in the workspace"),
    ),
    (r"tokenizer\..*", NoEffect("sequences have the length of tokens.sequence_length")),
)
NANOTRON = Rules(TABLE, FAMILIES)


_SIZES = {
    "model.num_layers": f"{_MODEL}num_hidden_layers",
    "model.hidden_size": f"{_MODEL}hidden_size",
    "model.num_attention_heads": f"{_MODEL}num_attention_heads",
    "model.ffn_hidden_size": f"{_MODEL}intermediate_size",
    "data.seq_length": "tokens.sequence_length",
    "train.micro_batch_size": "tokens.micro_batch_size",
    "train.train_iters": "tokens.train_steps",
}
"""Keys without which a run has no model, batch or length."""


def translate(settings: Settings, draft: Draft) -> None:
    """Fill the draft for a nanotron configuration."""
    draft.put("family", "gpt", "nanotron trains decoders")
    for setting in settings:
        NANOTRON.apply(setting, draft)
    if f"{_MODEL}is_mamba_config" not in settings:  # whose sizes have other names; it is refused
        require(settings, draft, _SIZES)
    _model(settings, draft)
    _qwen2(settings, draft)
    _layout(settings, draft)
    _schedule(settings, draft)
    _data(settings, draft)
    NANOTRON.finish(settings, draft)


def _whole(settings: Settings, draft: Draft, name: str, default: int, least: int = 0) -> int:
    """Return the whole number of a key; `default` if it is absent, null or rejected."""
    setting = settings.get(name)
    if setting is None or setting.value is None:
        return default
    value = integer_of(setting, draft, name, least=least)
    return default if value is None else value


def _drop_nulls(settings: Settings, draft: Draft, *names: str) -> None:
    for name in names:
        setting = settings.get(name)
        if setting is not None and setting.value is None:
            draft.ignore(setting, "it requests nothing")


def _model(settings: Settings, draft: Draft) -> None:
    model = "nanotron's Llama"
    draft.put("model.position_embedding_type", "rope", model)
    draft.put("model.normalization", "rmsnorm", model)
    draft.put("model.add_bias_linear", False, model)
    draft.put("model.hidden_dropout", 0.0, model)
    draft.put("model.attention_dropout", 0.0, model)
    for name, key, default in (
        ("model.layernorm_epsilon", "rms_norm_eps", 1e-6),
        ("model.activation", "hidden_act", "swiglu"),
    ):
        if name not in draft.values and f"{_MODEL}{key}" not in settings:
            draft.put(name, default, settings.default)
    tied = settings.get(f"{_MODEL}tie_word_embeddings")
    untied = not value_of(settings, f"{_MODEL}tie_word_embeddings", False)
    draft.put("model.untie_embeddings_and_output_weights", untied, tied or settings.default)
    enabled, loss = (
        settings.get(f"{_MODEL}z_loss_enabled"),
        settings.get(f"{_MODEL}z_loss_coefficient"),
    )
    if enabled is not None and enabled.value:
        coefficient = number_of(loss, draft, "train.z_loss")
        draft.put(
            "train.z_loss",
            1e-4 if coefficient is None else coefficient,
            *sources(enabled, loss),
        )
    draft.ignore_rest("the z-loss is off", enabled, loss)
    mask = settings.get(f"{_MODEL}_use_doc_masking")
    if mask is not None and mask.value:
        draft.put("data.reset_attention_mask", True, mask)
        draft.put("data.reset_position_ids", True, mask)
    elif mask is not None:
        draft.ignore(mask, "it requests nothing")
    divisible = settings.get("model.make_vocab_size_divisible_by")
    tensor = draft.get("parallel.tensor_model_parallel_size", 1)
    base = _whole(settings, draft, "model.make_vocab_size_divisible_by", 1, least=1)
    size = settings.get(f"{_MODEL}vocab_size")  # the formulas are compared with this vocabulary
    integer_of(size, draft, "data.tokenizer.vocab_size", least=1, most=MOST_ENTRIES)
    draft.put(
        "model.make_vocab_size_divisible_by",
        base * tensor,
        divisible or settings.default,
        *([f"x {tensor} tensor-parallel ranks"] if tensor > 1 else []),
    )


def _qwen2(settings: Settings, draft: Draft) -> None:
    """Set what only nanotron's Qwen2 computes: biases of q, k and v, and divided positions."""
    is_qwen2 = bool(value_of(settings, f"{_MODEL}is_qwen2_config", False))
    near = "model_config with is_qwen2_config: true"
    bias = settings.get(f"{_MODEL}attention_bias")
    if bias is not None and not bias.value:
        draft.ignore(bias, "it requests nothing")
    elif bias is not None and is_qwen2:
        draft.put("model.add_qkv_bias", True, bias)
    elif bias is not None:
        draft.refuse(bias, "biases of q, k and v, which nanotron's Llama lacks", near)
    factor = settings.get(f"{_MODEL}rope_seq_len_interpolation_factor")
    if factor is None:
        return
    if factor.value is None:
        draft.ignore(factor, "it requests nothing")
    elif is_qwen2 and value_of(settings, f"{_MODEL}_use_qkv_packed", True):
        divisor = number_of(factor, draft, "model.rope_scaling.factor")
        if divisor is not None:
            draft.put("model.rope_scaling.kind", "linear", factor)
            draft.put("model.rope_scaling.factor", divisor, factor)
    else:
        draft.refuse(factor, "divided positions, which this model of nanotron lacks", near)


def _layout(settings: Settings, draft: Draft) -> None:
    tensor, pipeline = (
        draft.get(f"parallel.{kind}_model_parallel_size", 1) for kind in ("tensor", "pipeline")
    )
    data, steps = (
        settings.get("parallelism.dp"),
        settings.get("tokens.batch_accumulation_per_replica"),
    )
    replicas, accumulated = (
        _whole(settings, draft, "parallelism.dp", 1, least=1),
        _whole(settings, draft, "tokens.batch_accumulation_per_replica", 1, least=1),
    )
    micro, batch = settings.get("tokens.micro_batch_size"), draft.get("train.micro_batch_size", 1)
    draft.put(
        "train.global_batch_size",
        batch * accumulated * replicas,
        *sources(micro, steps, data),
    )
    context = draft.get("parallel.context_parallel_size", 1)
    ranks = tensor * context * pipeline * replicas
    product = "dp x tp x cp x pp" if context > 1 else "dp x tp x pp"
    put_ranks(draft, ranks, f"{product} = {ranks} ranks")
    mode = settings.get("parallelism.tp_mode")
    if mode is not None:
        if str(mode.value).upper() == "REDUCE_SCATTER" and tensor > 1:
            draft.put("parallel.sequence_parallel", True, mode)
        else:
            draft.ignore(mode, "each tensor-parallel rank has the whole sequence")
    recompute = settings.get("parallelism.recompute_layer")
    if recompute is not None:
        draft.put("train.recompute", "full" if recompute.value else "none", recompute)
    stage = settings.get("optimizer.zero_stage")
    if stage is not None:
        if str(stage.value) in ("0", "1"):
            draft.put("parallel.data_parallel_sharding", ZERO_STAGES[int(stage.value)], stage)
        else:
            draft.refuse(
                stage,
                "this ZeRO stage, of which nanotron has 0 and 1 only",
                "zero_stage: 1, or parallel.data_parallel_sharding: gradients (ZeRO-2) or "
                "parameters (ZeRO-3) in the file",
            )


def _schedule(settings: Settings, draft: Draft) -> None:
    names = ("lr_decay_style", "lr_decay_steps", "lr_decay_starting_step", "lr_warmup_steps")
    style_s, steps_s, start_s, warmup_s = (settings.get(f"{_RATE}{name}") for name in names)
    total, warmup = (
        draft.get("train.train_iters", 0),
        _whole(settings, draft, f"{_RATE}lr_warmup_steps", 0),
    )
    begin = _whole(settings, draft, f"{_RATE}lr_decay_starting_step", warmup)
    # by default as many as if the decay began after the warm-up, also if it begins later
    steps = _whole(settings, draft, f"{_RATE}lr_decay_steps", total - warmup)
    style = word(value_of(settings, f"{_RATE}lr_decay_style", "linear"))
    origins = sources(style_s, steps_s, start_s, warmup_s)
    if begin > warmup:
        shape = {"linear": "linear", "cosine": "cosine", "1-sqrt": "minus_sqrt"}.get(style)
        draft.put("optim.lr_decay_style", "WSD", *origins)
        draft.put("optim.lr_wsd_decay_style", shape or "linear", *origins)
        draft.put("optim.lr_wsd_decay_iters", steps, *origins)
    elif style in ("linear", "cosine"):
        draft.put("optim.lr_decay_style", style, *sources(*origins, default=settings.default))
    elif style == "1-sqrt":
        draft.put("optim.lr_decay_style", "WSD", *origins)
        draft.put("optim.lr_wsd_decay_style", "minus_sqrt", *origins)
        draft.put("optim.lr_wsd_decay_iters", steps, *origins)
    elif style_s is not None:
        draft.refuse(style_s, "this schedule", "cosine, linear or 1-sqrt")
    draft.put(
        "optim.lr_decay_iters", max(1, begin + steps), *sources(*origins, default=settings.default)
    )
    low = settings.get(f"{_RATE}min_decay_lr")
    value = None if low is None or low.value is None else number_of(low, draft, "optim.min_lr")
    peak = draft.get("optim.lr", 0.0)
    draft.put(
        "optim.min_lr", peak if value is None else value, low or f"{settings.default}: no decay"
    )
    clip = settings.get("optimizer.clip_grad")
    if clip is None or clip.value is None:
        draft.put("optim.clip_grad", 0.0, clip or f"{settings.default}: no clipping")
    checks = settings.get("tokens.val_check_interval")
    rounds = settings.get("tokens.limit_val_batches")
    interval, batches = (
        _whole(settings, draft, "tokens.val_check_interval", -1, least=-1),
        _whole(settings, draft, "tokens.limit_val_batches", 0),
    )
    draft.put(
        "train.eval_interval",
        interval if interval > 0 else max(1, total),
        checks or settings.default,
    )
    draft.put("train.eval_iters", max(1, batches), rounds or settings.default)
    saved = draft.get("checkpoint.save_interval")
    if saved is not None:
        draft.put("checkpoint.keep_every", saved, "nanotron keeps all of them")
    if "model.init_method_std" not in draft.values:
        draft.put("model.init_method_std", 0.025, settings.default)
    draft.remarks.append(
        "nanotron decays all weights, here biases and norms are not decayed; unless "
        "optimizer.weight_decay_exclude_named_params names them"
    )


def _data(settings: Settings, draft: Draft) -> None:
    stages = settings.get("data_stages")
    stages_value = stages.value if stages is not None and isinstance(stages.value, list) else []
    if stages is not None:
        if len(stages_value) > 1:
            draft.refuse(
                Setting("data_stages", f"{len(stages_value)} stages", stages.place),
                "data that changes during the run",
                "a run for each stage, with resume.checkpoint",
            )
        else:
            stage = stages_value[0] if stages_value else {}
            data = stage.get("data") if isinstance(stage, Mapping) else stage
            dataset = data.get("dataset") if isinstance(data, Mapping) else data
            if isinstance(dataset, Mapping | None):
                _stage(stages, stage, draft)
            else:
                draft.reject(stages, "give a list of stages, each with data and its dataset")
    if "data.source.kind" not in draft.values:
        put_unnamed(draft, "no data that can be read here")
    draft.put("data.split", "969,30,1", "nanotron has no such split")
    draft.remarks.append(
        "nanotron trains on all documents; here data.split keeps 3.1 % of them for validation and "
        "test"
    )
    name = settings.get("tokenizer.tokenizer_name_or_path")
    if name is not None:
        draft.put("data.tokenizer.kind", "hf", name)
        draft.put("data.tokenizer.name", str(name.value), name)
        draft.put("data.tokenizer.eod_token", "<|endoftext|>", "its end of a document")
        draft.ask(
            "data.tokenizer.eod_token", "does the vocabulary end documents with <|endoftext|>?"
        )
        revision = settings.get("tokenizer.tokenizer_revision")
        if revision is not None and revision.value is not None:
            draft.put("data.tokenizer.revision", str(revision.value), revision)
    _drop_nulls(
        settings, draft, "tokenizer.tokenizer_revision", "checkpoints.resume_checkpoint_path"
    )
    for key, field in (
        ("checkpoints.resume_checkpoint_path", "resume.checkpoint"),
        ("model.init_method.path", "train.pretrained_checkpoint"),
    ):
        setting = settings.get(key)
        if setting is not None and setting.name not in draft.done:
            draft.put(field, str(setting.value), setting)
            draft.ask(field, f"import {setting.value} with megacore import, and name it")


_READ_KEYS = frozenset(
    (
        *("name", "dataset", "dataset_folder", "hf_dataset_or_datasets", "hf_dataset_splits"),
        *("text_column_name", "hf_dataset_config_name"),
    )
)
"""Keys of a data stage that are translated."""
_LOADING = frozenset(
    (
        *("seed", "num_loading_workers", "start_training_step", "dataset_overwrite_cache"),
        *("dataset_processing_num_proc_per_process", "return_positions", "token_size_in_bytes"),
        *("tokenizer_name", "vocab_size", "dataset_read_path"),
    )
)
"""Keys of a data stage that say how it is read."""


def _stage(stages: Setting, stage: Mapping[str, Any], draft: Draft) -> None:
    data = stage.get("data") or {}
    dataset = data.get("dataset") or {}
    shown = Setting("data_stages", stage.get("name", "one stage"), stages.place)
    named = dataset.get("hf_dataset_or_datasets")
    for key, value in leaves(stage):
        inner = Setting(f"data_stages.{key}", value, stages.place)
        if key.split(".")[-1] in _READ_KEYS or key.startswith("data.dataset.dataset_folder."):
            continue
        if value in (None, False) or key.split(".")[-1] in _LOADING:
            draft.ignore(inner, "it changes how the data is read, or requests nothing")
        else:
            draft.refuse(inner, "this option of a data set", "the section data")
    if isinstance(named, str):
        draft.put("data.source.kind", "hub", shown)
        draft.put("data.source.dataset", named, shown)
        split = dataset.get("hf_dataset_splits", "train")
        split = split[0] if isinstance(split, list) and split else split
        draft.put("data.source.split", str(split), shown)
        draft.put("data.source.key", str(dataset.get("text_column_name", "text")), shown)
        if dataset.get("hf_dataset_config_name"):
            draft.put("data.source.config", str(dataset["hf_dataset_config_name"]), shown)
        return
    if dataset.get("dataset_folder"):
        draft.refuse(
            Setting(
                "data_stages.data.dataset.dataset_folder", dataset["dataset_folder"], stages.place
            ),
            "token files of datatrove (.ds)",
            "the text they were made from, or Megatron's .bin and .idx",
        )
    elif isinstance(named, Mapping):
        draft.refuse(shown, "a mixture of data sets of the hub by name", "data.blend")
    else:
        draft.refuse(shown, "made-up data (dataset: null)", "data.source of kind hub or prefix")
    draft.done.add("data_stages")


def _count(settings: Settings, name: str) -> int:
    """Return a size of the model. Raises ValueError if it is not written."""
    setting = settings.get(f"{_MODEL}{name}")
    if setting is None:
        raise ValueError(name)
    return int(setting.value)


def foreign_model(settings: Settings, draft: Draft) -> ForeignModel | None:
    """Return the sizes by nanotron's keys; None if one is not written."""
    try:
        hidden, heads = _count(settings, "hidden_size"), _count(settings, "num_attention_heads")
        groups = value_of(settings, f"{_MODEL}num_key_value_heads", heads)
        return ForeignModel(
            family="gpt",
            layers=_count(settings, "num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            head_size=hidden // heads,
            groups=int(groups),
            inner=_count(settings, "intermediate_size"),
            gated=True,
            attention_bias=False,
            mlp_bias=False,
            norm_bias=False,
            qkv_bias=bool(value_of(settings, f"{_MODEL}attention_bias", False)),
            untied=not value_of(settings, f"{_MODEL}tie_word_embeddings", False),
            positions=0,
            sequence=int(value_of(settings, "tokens.sequence_length", 0)),
            vocabulary=_count(settings, "vocab_size"),
            multiple=int(value_of(settings, "model.make_vocab_size_divisible_by", 1))
            * int(value_of(settings, "parallelism.tp", 1)),
            batch=draft.get("train.global_batch_size", 0),
        )
    except (ValueError, TypeError, AttributeError, ArithmeticError):
        return None
