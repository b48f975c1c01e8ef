"""Checks across the sections of a configuration; each raises ValueError with one sentence.

The checks of models that read sentences (BERT, T5) are at the end.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING

from megacore.config.base import as_yaml
from megacore.config.batch_schedule import BatchSchedule
from megacore.config.blend_schedule import check_blends
from megacore.config.curate import check_across_sources
from megacore.config.data import (
    MASKED_LM_SPECIAL_TOKENS,
    NEOX_DEFAULTS,
    SPELLINGS,
    T5_SPECIAL_TOKENS,
    DataConfig,
    Gpt2BpeTokenizer,
    HfTokenizer,
    SentencePieceTokenizer,
    TrainBpeTokenizer,
    WarcSource,
    holds_tokens,
)
from megacore.config.layouts import ParallelLayout, check_layout
from megacore.config.model import Family, ModelConfig, check_model
from megacore.config.optim import LossScaleConfig, OptimConfig
from megacore.config.sequence_schedule import check_sequence_schedule
from megacore.config.train import KernelsConfig, LmEvalConfig, TrainConfig
from megacore.errors import ConfigError

if TYPE_CHECKING:
    from megacore.config.run import RunConfig

LEAST_FLEX_HEAD = 16
"""Least size of a head for FlexAttention, whose matrix products are Triton's."""
_DOCUMENT_SAMPLE_FIELDS = (
    "packing",
    "index_style",
    "add_extra_token",
    "drop_last_partial",
    "reset_position_ids",
    "reset_attention_mask",
    "eod_mask_loss",
    "fim",
)
"""Fields that apply only to samples cut from documents; for samples of sentences they must have
their defaults."""
NEEDED_ROLES: dict[Family, tuple[str, ...]] = {
    "gpt": (),
    "bert": ("cls", "sep", "mask", "pad"),
    "t5": ("pad",),
}
"""Roles of the special tokens that a family's samples need."""
_BERT_TOKENS = tuple(SPELLINGS[role][0] for role in NEEDED_ROLES["bert"])
_KERNEL_DEVICES = {"cpp": "cpu", "apex": "cuda", "flex": "cuda", "torch_fp32": "cuda"}
"""Types of device that implementations in `train.kernels` need."""
_SPAN_WITHOUT_MEAN = 3.0
"""Assumed mean span length in tokens when data.span_corruption gives none."""


def check_sections(config: "RunConfig") -> None:
    """Raise ValueError for the first invalid combination of values."""
    check_sentences(config.family, config.model, config.data)
    _check_data(config.data)
    _check_curation(config.data, searched=config.evaluate.contamination is not None)
    check_model(config.family, config.model, config.data.seq_length)
    check_sequence_schedule(config)
    _check_reset_positions(config.data, config.model)
    _check_rampup(config.train)
    _check_recompute(config.train)
    _check_profile(config.train)
    _check_kernels(config.train)
    _check_attention(config)
    if config.engine == "deepspeed":
        _check_native_options(config.train)
    _check_warmup(config)
    _check_decay(config.optim, config.lr_warmup_iters, config.lr_decay_iters)
    _check_muon(config.optim)
    _check_loss_scale(config.optim.loss_scale)
    _check_weight_decay(config.optim)
    _check_zero_shot(config)
    _check_lm_eval(config.evaluate.lm_eval, config.family)
    _check_contamination(config)
    _check_resume(config)
    launch = config.launch
    ranks = None
    if launch.nproc_per_node != "auto" and launch.hostfile is None and not launch.elastic:
        ranks = launch.nproc_per_node * (launch.node_range or (1, 1))[0]
    if config.engine == "deepspeed":
        from megacore.config.deepspeed_checks import check_deepspeed

        layout = ParallelLayout.of(config.parallel, ranks)
        check_deepspeed(config, None if ranks is None else layout.data)
    check_layout(config, ranks)


def _check_resume(config: "RunConfig") -> None:
    resume, pretrained = config.resume, config.train.pretrained_checkpoint
    if resume.checkpoint is not None and pretrained is not None:
        raise ValueError(
            f"resume.checkpoint is {resume.checkpoint} and train.pretrained_checkpoint is "
            f"{pretrained}: give the first to resume a training, or the second to begin with "
            "its weights"
        )
    for name in resume.override:
        values: object = config.model_dump(mode="json")
        for part in name.split("."):
            if isinstance(values, Mapping) and part not in values:
                near = get_close_matches(part, list(values), 1)
                hint = f", did you mean {near[0]}" if near else ""
                raise ValueError(
                    f"resume.override has {name!r}, which has no value {part!r}{hint}: give dotted "
                    "names such as optim.lr"
                )
            # Null values and lists have no named values below them to check.
            values = values[part] if isinstance(values, Mapping) else None


def _check_data(data: DataConfig) -> None:
    names = [
        f"data.{name}"
        for name in ("source", "blend", "split_blends")
        if getattr(data, name) is not None
    ]
    if not names:
        raise ValueError(
            "data.source is missing: give it a value, or give data.blend or data.split_blends "
            "instead"
        )
    if len(names) > 1:
        raise ValueError(f"{' and '.join(names)} are given together: keep one of them")
    if data.split_blends is None:
        check_split(data.split_weights)
    elif data.split is not None:
        raise ValueError(
            f"data.split is {data.split!r} but data.split_blends says what each split holds: "
            "remove one of them"
        )
    check_blends(data)
    if data.packing != "packed":
        cut = ("index_style", "split_sentences", "drop_last_partial")
        _check_defaults(data, "packing", cut, "which is for samples cut from documents end to end")
    if data.index_style == "neox":
        _check_defaults(data, "index_style", NEOX_DEFAULTS, "which GPT-NeoX does not have")
    _check_ends(data)
    if data.dask_address is not None and data.shard_runner != "dask":
        raise ValueError(
            f"data.dask_address is {data.dask_address} but data.shard_runner is "
            f"{data.shard_runner}: set it to dask, or remove the address"
        )
    if not data.split_sentences:
        for name in ("keep_newlines", "sentence_splitter", "language"):
            if not data.has_default(name):
                raise ValueError(
                    f"data.{name} is {as_yaml(getattr(data, name))} but data.split_sentences is "
                    "false: set the latter to true, or leave the former out"
                )


def _check_defaults(data: DataConfig, name: str, others: tuple[str, ...], reason: str) -> None:
    """Raise ValueError if a field differs from its default, which the value of `name` needs."""
    for other in others:
        if not data.has_default(other):
            raise ValueError(
                f"data.{name} is {getattr(data, name)} but data.{other} is "
                f"{as_yaml(getattr(data, other))}, {reason}: set one of them to its default"
            )


def _check_ends(data: DataConfig) -> None:
    """Raise ValueError for options that need tokens that the data will not contain."""
    if not data.append_eod and not any(map(holds_tokens, data.sources)):
        for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            if getattr(data, name):
                raise ValueError(
                    f"data.{name} is true but data.append_eod is false, so that no document has an "
                    "end: set both, or neither"
                )
    if data.fim is not None and isinstance(data.tokenizer, TrainBpeTokenizer):
        tokens = (data.fim.prefix_token, data.fim.middle_token, data.fim.suffix_token)
        missing = [token for token in tokens if token not in data.tokenizer.special_tokens]
        if missing:
            raise ValueError(
                f"data.fim needs the tokens {', '.join(missing)}: add them to "
                "data.tokenizer.special_tokens"
            )


def _check_curation(data: DataConfig, *, searched: bool) -> None:
    """Raise ValueError for a curation of tokens, or for options of one without steps."""
    for source in data.sources if data.curate else ():
        if holds_tokens(source):
            raise ValueError(
                f"data.curate has steps, but a source of kind {source.kind} has tokens instead of "
                "text: curate its text and tokenize it again, or remove data.curate"
            )
    if not data.curate and any(isinstance(source, WarcSource) for source in data.sources):
        raise ValueError(
            "a source of kind warc has web pages, which only data.curate reads: give it steps, "
            "`- step: extract_text` for HTML or `- step: exact_dedup` for WET files"
        )
    for name, value in (
        ("curate_shard_mb", data.curate_shard_mb),
        ("curate_workers", data.curate_workers),
        ("curate_executor", data.curate_executor.kind),
    ):
        used = data.curate or (searched and name == "curate_workers")
        if not used and not data.has_default(name):
            raise ValueError(
                f"data.{name} is {value} but data.curate has no steps: give it steps, or leave "
                f"data.{name} out"
            )
    check_across_sources(data.curate, len(data.sources))


def check_split(split: str) -> None:
    """Raise ValueError unless `split` consists of three positive weights."""
    try:
        weights = [float(part) for part in split.split(",")]
    except ValueError:
        weights = []
    if len(weights) != 3 or not all(0 < weight < float("inf") for weight in weights):
        raise ValueError(
            f"data.split is {split!r}: give three positive weights for train, validation and test, "
            "as in 969,30,1"
        )


def _check_reset_positions(data: DataConfig, model: ModelConfig) -> None:
    kind = model.position_embedding_type
    if data.reset_position_ids and kind not in ("learned_absolute", "rope"):
        raise ValueError(
            f"data.reset_position_ids is true but model.position_embedding_type is {kind}, which "
            "counts no positions: set the former to false (data.reset_attention_mask keeps "
            "documents apart), or the latter to learned_absolute or rope"
        )


def _check_rampup(train: TrainConfig) -> None:
    rampup, total = train.rampup_batch_size, train.global_batch_size
    if rampup is None:
        return
    if rampup.start >= total:
        raise ValueError(
            f"train.rampup_batch_size.start {rampup.start} is not below train.global_batch_size "
            f"{total}: lower it, or remove train.rampup_batch_size"
        )
    rest = total - rampup.start
    if rest % rampup.increment:
        raise ValueError(
            f"train.global_batch_size {total} - train.rampup_batch_size.start {rampup.start} = "
            f"{rest} is not a multiple of train.rampup_batch_size.increment {rampup.increment}: "
            f"choose an increment that divides {rest}"
        )


def _check_recompute(train: TrainConfig) -> None:
    if train.recompute == "none" and train.recompute_num_layers is not None:
        raise ValueError(
            f"train.recompute_num_layers is {train.recompute_num_layers} but train.recompute is "
            "none: set the latter to selective or full, or remove the former"
        )


def _check_profile(train: TrainConfig) -> None:
    profile = train.profile
    if profile is not None and not profile.first <= profile.last <= train.train_iters:
        raise ValueError(
            f"train.profile is from {profile.first} to {profile.last} with train.train_iters "
            f"{train.train_iters}: give from <= to <= {train.train_iters}"
        )


def _check_kernels(train: TrainConfig) -> None:
    """Raise ValueError for kernels that cannot run in the precision, or in compiled layers."""
    for operation in KernelsConfig.model_fields:
        if train.precision == "fp16" and getattr(train.kernels, operation) == "cpp":
            raise ValueError(
                f"train.kernels.{operation} is cpp but train.precision is fp16, and the C++ "
                "kernels compute in fp32 and bf16 only: set the former to auto or plain, or change "
                "the latter"
            )
    option = train.kernels.weight_gradient
    if train.precision == "fp32" and option in ("apex", "torch_fp32"):
        raise ValueError(
            f"train.kernels.weight_gradient is {option} but train.precision is fp32, and it "
            "multiplies in half precision only: set the former to auto or plain, or change the "
            "latter"
        )
    if train.kernels.dropout == "cpp" and train.compile == "on":
        raise ValueError(
            "train.kernels.dropout is cpp but train.compile is on, and it does not run in layers "
            "that torch.compile compiles: set the former to auto or plain, or the latter to off"
        )


def _check_attention(config: "RunConfig") -> None:
    """Raise ValueError for an implementation of attention that the rest rules out."""
    option, cap = config.train.kernels.attention, config.model.attn_logit_softcapping
    if option == "cpp" and cap is not None:
        raise ValueError(
            f"train.kernels.attention is cpp but model.attn_logit_softcapping is {cap:g}, and the "
            "C++ kernel has no soft cap: set the former to auto or plain"
        )
    if option == "flex" and (config.engine == "deepspeed" or config.train.compile == "off"):
        reason = "engine is deepspeed" if config.engine == "deepspeed" else "train.compile is off"
        raise ValueError(
            f"train.kernels.attention is flex but {reason}, and FlexAttention runs in compiled "
            "layers only: set the former to auto or plain, or change the latter"
        )
    if option == "flex" and config.model.attention_dropout:
        raise ValueError(
            "train.kernels.attention is flex but model.attention_dropout is "
            f"{config.model.attention_dropout:g}, and FlexAttention drops no weights: set the "
            "former to auto or plain, or the latter to 0"
        )
    if option == "flex" and config.model.head_dim < LEAST_FLEX_HEAD:
        raise ValueError(
            f"train.kernels.attention is flex but the heads have {config.model.head_dim} features, "
            f"and FlexAttention needs {LEAST_FLEX_HEAD} or more: set the former to auto or plain"
        )


def _check_native_options(train: TrainConfig) -> None:
    """Raise ValueError for options that the engine deepspeed does not have."""
    if train.compile == "on":
        raise ValueError(
            "train.compile is on and engine is deepspeed, whose hooks torch.compile would lose: "
            "set train.compile to auto, or engine to native"
        )
    if train.loss_spike_action == "skip":
        raise ValueError(
            "train.loss_spike_action is skip and engine is deepspeed, which changes the weights "
            "before it sees a spike: set train.loss_spike_action to warn or stop, or engine to "
            "native"
        )
    if train.cuda_graphs:
        raise ValueError(
            "train.cuda_graphs is true and engine is deepspeed, which waits for the GPU in every "
            "pass: set train.cuda_graphs to false, or engine to native"
        )
    for operation in ("weight_gradient", "adamw"):
        option = getattr(train.kernels, operation)
        if option not in ("auto", "plain"):
            raise ValueError(
                f"train.kernels.{operation} is {option}, which has no effect with "
                "engine deepspeed, whose own optimizer is used: remove it, or set engine to native"
            )


def check_device(train: TrainConfig, device_type: str, owner: str = "this machine") -> None:
    """Raise ConfigError if an option of the training needs another type of device, cpu or cuda.

    `owner` names the device's host in the message.
    """
    for name in ("cuda_graphs", "tf32"):
        if getattr(train, name) and device_type != "cuda":
            raise ConfigError(
                f"train.{name} is true, which needs a GPU, and {owner} has none: set it to false"
            )
    for operation in KernelsConfig.model_fields:
        option = getattr(train.kernels, operation)
        if _KERNEL_DEVICES.get(option, device_type) != device_type:
            gpu = device_type == "cuda"
            raise ConfigError(
                f"train.kernels.{operation} is {option}, which runs on {'CPUs' if gpu else 'GPUs'} "
                f"only, and {owner} has {'GPUs' if gpu else 'none'}: give auto or plain, or remove "
                "it"
            )


def _check_warmup(config: "RunConfig") -> None:
    optim, warmup, decay = config.optim, config.lr_warmup_iters, config.lr_decay_iters
    names = ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction")
    options = [
        f"optim.{name} {getattr(optim, name)}" for name in names if getattr(optim, name) is not None
    ]
    if len(options) > 1:
        raise ValueError(f"{' and '.join(options)} are given together: keep one of them")
    if warmup >= decay:
        in_samples = optim.lr_warmup_samples is not None
        limit = (
            BatchSchedule.of(config.train).consumed_after(decay - 1) + 1 if in_samples else decay
        )
        raise ValueError(
            f"{options[0]}{f', which are {warmup} iterations,' if in_samples else ''} does not end "
            f"before the decay does at {decay}: set it below {limit}"
        )
    if optim.lr_warmup_init > 0 and warmup == 0:
        raise ValueError(
            f"optim.lr_warmup_init is {optim.lr_warmup_init} and there is no warm-up: give "
            "optim.lr_warmup_iters, or remove it"
        )
    if optim.lr_warmup_style == "log" and warmup == 0:
        raise ValueError(
            "optim.lr_warmup_style is log and there is no warm-up: give optim.lr_warmup_iters, or "
            "remove it"
        )
    if optim.lr_decay_style == "inverse-square-root" and warmup == 0:
        raise ValueError(
            "optim.lr_decay_style inverse-square-root counts from the end of the warm-up, and "
            "there is none: give optim.lr_warmup_iters, or choose another style"
        )


def _check_decay(optim: OptimConfig, warmup: int, decay: int) -> None:
    for name, value in (("min_lr", optim.min_lr), ("lr_warmup_init", optim.lr_warmup_init)):
        if value > optim.lr:
            raise ValueError(f"optim.{name} {value} is above optim.lr {optim.lr}: lower it")
    last_part = optim.lr_wsd_decay_iters
    if optim.lr_decay_style != "WSD":
        for name in ("lr_wsd_decay_iters", "lr_wsd_decay_style"):
            if not optim.has_default(name):
                raise ValueError(
                    f"optim.{name} is {getattr(optim, name)} but optim.lr_decay_style is "
                    f"{optim.lr_decay_style}: set the latter to WSD, or remove the former"
                )
        return
    if last_part is None:
        raise ValueError(
            "optim.lr_decay_style is WSD without optim.lr_wsd_decay_iters: say how many iterations "
            "its decay takes"
        )
    if last_part > decay - warmup:
        raise ValueError(
            f"optim.lr_wsd_decay_iters {last_part} is longer than the {decay - warmup} iterations "
            f"between the end of the warm-up at {warmup} and the end of the decay at {decay}: "
            f"lower it to at most {decay - warmup}"
        )


def _check_muon(optim: OptimConfig) -> None:
    if optim.name != "muon" and not optim.has_default("muon_momentum"):
        raise ValueError(
            f"optim.muon_momentum is {optim.muon_momentum} but optim.name is {optim.name}: set the "
            "latter to muon, or remove the former"
        )


def _check_loss_scale(scale: LossScaleConfig) -> None:
    if scale.initial < scale.minimum:
        raise ValueError(
            f"optim.loss_scale.initial {scale.initial:g} is below optim.loss_scale.minimum "
            f"{scale.minimum:g}: raise the former, or lower the latter"
        )


def _check_weight_decay(optim: OptimConfig) -> None:
    names = ("start_weight_decay", "end_weight_decay")
    options = [
        f"optim.{name} {getattr(optim, name)}" for name in names if getattr(optim, name) is not None
    ]
    if optim.weight_decay_incr_style == "constant" and options:
        raise ValueError(
            f"{' and '.join(options)} {'are' if len(options) > 1 else 'is'} given but "
            "optim.weight_decay_incr_style is constant: set it to linear or cosine, or give only "
            "optim.weight_decay"
        )
    if optim.weight_decay_incr_style != "constant" and not options:
        raise ValueError(
            f"optim.weight_decay_incr_style is {optim.weight_decay_incr_style} but neither "
            "optim.start_weight_decay nor optim.end_weight_decay is given: give one or both"
        )


def _check_zero_shot(config: "RunConfig") -> None:
    zero_shot, seq_length = config.evaluate.zero_shot, config.data.seq_length
    values = {
        "wikitext": zero_shot.wikitext,
        "lambada": zero_shot.lambada,
        "passkey.lengths": list(zero_shot.passkey.lengths) or None,
    }
    for name, value in values.items():
        if config.family != "gpt" and value is not None:
            raise ValueError(
                f"evaluate.zero_shot.{name} is {value} but family is {config.family}: only gpt "
                "predicts a text from left to right: remove it"
            )
    longest, positions = max(zero_shot.passkey.lengths, default=0), config.max_position_embeddings
    if longest > positions:
        raise ValueError(
            f"evaluate.zero_shot.passkey.lengths has {longest} but the model has {positions} "
            f"positions: give lengths of at most {positions} tokens, or raise "
            "model.max_position_embeddings"
        )
    stride = zero_shot.overlapping_eval
    if stride is not None and zero_shot.wikitext is None:
        raise ValueError(
            f"evaluate.zero_shot.overlapping_eval is {stride} but there is no "
            "evaluate.zero_shot.wikitext, whose windows it sets: give both, or neither"
        )
    if stride is not None and stride > seq_length:
        raise ValueError(
            f"evaluate.zero_shot.overlapping_eval {stride} exceeds data.seq_length {seq_length}, "
            f"so that windows would leave tokens out: lower it to at most {seq_length}"
        )


def _check_lm_eval(lm_eval: LmEvalConfig, family: Family) -> None:
    if lm_eval.tasks and family != "gpt":
        raise ValueError(
            f"evaluate.lm_eval.tasks is {', '.join(lm_eval.tasks)} but family is {family}: only "
            "gpt predicts a text from left to right: remove the tasks"
        )
    if twice := sorted({name for name in lm_eval.tasks if lm_eval.tasks.count(name) > 1}):
        raise ValueError(f"evaluate.lm_eval.tasks names {twice[0]} twice: remove one")
    values = {"include_path", "num_fewshot", "limit"} & lm_eval.model_fields_set
    options = sorted(name for name in values if getattr(lm_eval, name) is not None)
    if options and not lm_eval.tasks:
        raise ValueError(
            f"evaluate.lm_eval.{options[0]} is {getattr(lm_eval, options[0])} but there are no "
            "evaluate.lm_eval.tasks: name some, or remove it"
        )


def _check_contamination(config: "RunConfig") -> None:
    evaluate = config.evaluate
    for name in ("contamination_ngram", "contamination_limit"):
        if evaluate.contamination is None and not evaluate.has_default(name):
            raise ValueError(
                f"evaluate.{name} is {getattr(evaluate, name)} but evaluate.contamination is null: "
                f"give report, remove or refuse, or leave {name} out"
            )
    for source in config.data.sources if evaluate.contamination else ():
        if holds_tokens(source):
            raise ValueError(
                f"evaluate.contamination is {evaluate.contamination}, but a source of kind "
                f"{source.kind} has tokens instead of text, which cannot be searched: give its "
                "text, or remove evaluate.contamination"
            )


def check_sentences(family: Family, model: ModelConfig, data: DataConfig) -> None:
    """Raise ValueError for data options from which a family's samples cannot be built.

    Options of another family are refused too.
    """
    if family != "bert" and not data.has_default("masked_lm"):
        raise ValueError(
            f"data.masked_lm is given but family is {family}: it is only for bert; remove it"
        )
    if family != "t5" and not data.has_default("span_corruption"):
        raise ValueError(
            f"data.span_corruption is given but family is {family}: it is only for t5; remove it"
        )
    if family == "gpt":
        return
    _check_reading(family, data)
    if family == "bert":
        _check_bert(model, data)
    else:
        _check_t5(data)


def _check_reading(family: Family, data: DataConfig) -> None:
    if not data.split_sentences:
        raise ValueError(
            f"data.split_sentences is false but family {family} reads sentences: set it to true"
        )
    if data.append_eod:
        raise ValueError(
            f"data.append_eod is true but samples of family {family} have special tokens of their "
            "own: set it to false"
        )
    for name in _DOCUMENT_SAMPLE_FIELDS:
        if not data.has_default(name):
            raise ValueError(
                f"data.{name} is given but family is {family}: it is for samples of gpt, which are "
                "cut from documents; remove it"
            )
    if data.seq_length < 8:
        raise ValueError(
            f"data.seq_length is {data.seq_length}: a sample of family {family} takes 8 tokens or "
            "more"
        )
    name = "masked_lm" if family == "bert" else "span_corruption"
    share = getattr(data, name).short_seq_prob
    if 0 < share < 1e-6:
        raise ValueError(f"data.{name}.short_seq_prob is {share}: give 0, or at least 0.000001")


def _check_bert(model: ModelConfig, data: DataConfig) -> None:
    if not model.bert_binary_head and data.masked_lm.sentence_task != "sop":
        raise ValueError(
            f"data.masked_lm.sentence_task is {data.masked_lm.sentence_task} but "
            "model.bert_binary_head is false: set the latter to true, or remove the former"
        )
    share, tokens = data.masked_lm.masked_lm_prob, data.seq_length - MASKED_LM_SPECIAL_TOKENS
    if share * tokens < 1:
        raise ValueError(
            f"data.masked_lm.masked_lm_prob {share:g} of the {tokens} tokens of a sample of "
            f"data.seq_length {data.seq_length} is less than one, so that no token would be "
            "predicted: raise one of them"
        )
    tokenizer = data.tokenizer
    if isinstance(tokenizer, Gpt2BpeTokenizer | SentencePieceTokenizer):
        raise ValueError(
            f"data.tokenizer.kind is {tokenizer.kind}, whose vocabularies have no "
            f"{', '.join(_BERT_TOKENS)}: take bert-wordpiece, train-wordpiece, or hf for family "
            "bert"
        )
    if isinstance(tokenizer, TrainBpeTokenizer):
        missing = [token for token in _BERT_TOKENS if token not in tokenizer.special_tokens]
        if missing:
            raise ValueError(
                f"family bert needs the tokens {', '.join(missing)}: add them to "
                "data.tokenizer.special_tokens"
            )


def _check_t5(data: DataConfig) -> None:
    tokenizer, room = data.tokenizer, data.span_corruption.decoder_seq_length
    if isinstance(tokenizer, Gpt2BpeTokenizer):
        raise ValueError(
            "data.tokenizer.kind is gpt2-bpe, whose vocabularies have no padding token: take "
            "another for family t5"
        )
    if isinstance(tokenizer, TrainBpeTokenizer) and not set(SPELLINGS["pad"]) & set(
        tokenizer.special_tokens
    ):
        raise ValueError(
            "family t5 needs a padding token: add <pad> to data.tokenizer.special_tokens"
        )
    spans = most_spans(data)
    if (
        not isinstance(tokenizer, HfTokenizer | SentencePieceTokenizer)
        and tokenizer.vocab_extra_ids < spans
    ):
        raise ValueError(
            f"data.tokenizer.vocab_extra_ids is {tokenizer.vocab_extra_ids}, but a sample of "
            f"data.seq_length {data.seq_length} may have {spans} spans, each with a sentinel: "
            f"raise it to at least {spans}"
        )
    noise = most_noise(data)
    needed = (
        noise
        + max(1, round(noise / (data.span_corruption.mean_span_length or _SPAN_WITHOUT_MEAN)))
        + 1
    )
    if needed > room:
        raise ValueError(
            f"data.span_corruption.decoder_seq_length is {room}, but the {noise} tokens of the "
            f"spans of a sample of data.seq_length {data.seq_length}, with their sentinels and an "
            f"end, take {needed}: raise it to at least {needed}, or lower noise_density"
        )


def most_noise(data: DataConfig) -> int:
    """Return the maximum number of tokens in the spans of a T5 sample."""
    text = data.seq_length - T5_SPECIAL_TOKENS
    return max(1, round(text * data.span_corruption.noise_density))


def most_spans(data: DataConfig) -> int:
    """Return the maximum number of spans in a T5 sample, each of which has a sentinel."""
    corruption = data.span_corruption
    if corruption.mean_span_length is not None:
        return max(1, round(most_noise(data) / corruption.mean_span_length))
    return min(most_noise(data), (corruption.decoder_seq_length - 1) // 2)
