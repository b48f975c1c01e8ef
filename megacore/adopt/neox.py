"""Translation of GPT-NeoX's YAML files."""

import math
from collections.abc import Mapping
from typing import Any

from megacore.adopt.check import OTHER_VOCABULARY, ForeignModel
from megacore.adopt.data import choose_tokenizer, prefix_source, put_padding, put_split, put_unnamed
from megacore.adopt.neox_keys import JSON_KEYS, NEOX
from megacore.adopt.rules import (
    Draft,
    Place,
    Setting,
    Settings,
    first,
    integer_of,
    number_of,
    put_ranks,
    require,
    sources,
    value_of,
    word,
)
from megacore.adopt.zero import put_scale, put_stage, read_json

_STRAIGHT = frozenset({"global", "flash"})
"""Kinds of attention_config that are full causal attention."""


_SIZES = {
    "model.num_layers": "num_layers",
    "model.hidden_size": "hidden_size",
    "model.num_attention_heads": "num_attention_heads",
    "data.seq_length": "seq_length",
    "model.max_position_embeddings": "max_position_embeddings",
}
"""Keys without which a run has no model."""


def translate(settings: Settings, draft: Draft) -> None:
    """Fill the draft for the keys of one or several YAML files."""
    draft.put("family", "gpt", "GPT-NeoX trains decoders")
    json: dict[str, Any] = {}
    for setting in settings:
        if setting.name in JSON_KEYS:
            json[setting.name] = setting.value
        else:
            NEOX.apply(setting, draft)
    for name, value in json.items():
        passed_on = settings.get(name)
        if passed_on is not None:
            read_json(draft, {name: value}, passed_on.place, passed_on.name)
            draft.done.add(name)
    require(settings, draft, _SIZES)
    _model(settings, draft)
    _layout(settings, draft)
    _batches(settings, draft)
    _schedule(settings, draft)
    _data(settings, draft)
    _start(settings, draft)
    NEOX.finish(settings, draft)


def _model(settings: Settings, draft: Draft) -> None:
    _attention(settings, draft)
    _mlp(settings, draft)
    _first_weights(settings, draft)
    if "model.position_embedding_type" not in draft.values and "pos_emb" not in settings:
        draft.put("model.position_embedding_type", "learned_absolute", settings.default)
    rope = draft.get("model.position_embedding_type") == "rope"
    for key, name in (
        ("rotary_pct", "model.rotary_percent"),
        ("rotary_emb_base", "model.rotary_base"),
    ):
        setting = settings.get(key)
        value = number_of(setting, draft, name)
        if setting is not None and value is not None:
            if rope:
                draft.put(name, value, setting)
            else:
                draft.ignore(setting, "the model has no rotary positions")
    rms = draft.get("model.normalization", "layernorm") == "rmsnorm"
    for key, used, default in (
        ("rms_norm_epsilon", rms, 1e-8),
        ("layernorm_epsilon", not rms, 1e-5),
    ):
        setting = settings.get(key)
        if used:
            value = number_of(setting, draft, "model.layernorm_epsilon")
            draft.put(
                "model.layernorm_epsilon",
                default if value is None else value,
                setting or settings.default,
            )
        elif setting is not None:
            draft.ignore(setting, "it is for the other norm")
    for name in ("hidden_dropout", "attention_dropout"):
        if name not in settings:
            draft.put(f"model.{name}", 0.0, settings.default)
    attention, mlp, norms = (
        settings.get(f"use_bias_in_{part}") for part in ("attn_linear", "mlp", "norms")
    )
    chosen = [True if each is None else bool(each.value) for each in (attention, mlp)]
    both = [each for each in (attention, mlp) if each is not None]
    if chosen[0] != chosen[1]:
        for each in both:
            draft.refuse(each, "biases in some linear layers", "model.add_bias_linear for all")
    elif both:
        draft.put("model.add_bias_linear", chosen[0], *both)
    if norms is not None:
        if rms or norms.value:
            draft.ignore(norms, "RMSNorm has no bias" if rms else "LayerNorm has a bias")
        else:
            draft.refuse(norms, "LayerNorm without bias", "model.normalization rmsnorm")


def _attention(settings: Settings, draft: Draft) -> None:
    setting, window = settings.get("attention_config"), settings.get("sliding_window_width")
    kinds = {"global"}
    if setting is not None:
        kinds = {str(kind) for kind in _kinds(setting.value)}
        if kinds <= _STRAIGHT:
            draft.ignore(setting, "all layers have causal attention, as here")
        else:
            names = ", ".join(sorted(kinds - _STRAIGHT))
            draft.refuse(setting, f"attention of kind {names}", "causal attention")
    if window is not None:
        width = integer_of(window, draft, "model.sliding_window")
        pipeline = bool(value_of(settings, "pipe_parallel_size", 0))
        fused = value_of(settings, "scaled_upper_triang_masked_softmax_fusion", False)
        if not pipeline and "flash" not in kinds:
            draft.ignore(window, "without a pipeline, only flash attention has it")
        elif "global" in kinds and (fused or not pipeline):
            draft.refuse(window, "a window in some layers or kernels", "attention of kind flash")
        elif width is not None:
            draft.put("model.sliding_window", width + 1, window, "and the token itself")


def _kinds(value: Any) -> list[Any]:
    """Return the kinds of attention in `[[[kind, …], count], …]`."""
    kinds: list[Any] = []
    for group in value if isinstance(value, list) else []:
        first_part = group[0] if isinstance(group, list) and group else group
        kinds += first_part if isinstance(first_part, list) else [first_part]
    return kinds


def inner_width(settings: Settings) -> int:
    """Return the width of the MLP after its activation, as NeoX computes it."""
    hidden = int(value_of(settings, "hidden_size", 0))
    multiple = int(value_of(settings, "mlp_multiple_of", 1))
    expansion = value_of(settings, "expansion_factor", None)
    width = value_of(settings, "intermediate_size", None)
    if width is None:
        width = int(float(expansion) * hidden) if expansion is not None else 4 * hidden
    width = int(width)
    if str(value_of(settings, "activation", "gelu")) in (
        "swiglu",
        "geglu",
        "reglu",
        "bilinear",
        "glu",
    ):
        width = int(width * 2 / 3) // 2
    return -(-width // multiple) * multiple


def _mlp(settings: Settings, draft: Draft) -> None:
    activation, fused = settings.get("activation"), settings.get("bias_gelu_fusion")
    name = str(value_of(settings, "activation", "gelu")).lower()
    if name == "gelu":
        tanh = bool(value_of(settings, "bias_gelu_fusion", False))
        origins = sources(activation, fused, default=settings.default)
        draft.put("model.activation", "gelu_tanh" if tanh else "gelu", *origins)
    elif name in ("swiglu", "geglu", "relu"):
        draft.put("model.activation", name, *([activation] if activation else []))
    elif activation is not None:
        draft.refuse(activation, f"the activation {name}", "model.activation gelu, relu or swiglu")
    draft.ignore_rest(f"the activation is {name}", fused, settings.get("onnx_safe"))
    sizes = [
        settings.get(key) for key in ("intermediate_size", "expansion_factor", "mlp_multiple_of")
    ]
    halved = ["x 2/3 / 2 for a gated unit"] if name in ("swiglu", "geglu") else []
    counts = (
        integer_of(sizes[0], draft, "model.ffn_hidden_size", least=1),
        number_of(sizes[1], draft, "model.ffn_hidden_size"),
        integer_of(sizes[2], draft, "model.ffn_hidden_size", least=1),
    )
    readable = all(
        size is None or count is not None for size, count in zip(sizes, counts, strict=True)
    )
    if not readable or "model.hidden_size" not in draft.values:
        return
    draft.put(
        "model.ffn_hidden_size",
        inner_width(settings),
        *sources(*sizes, default=f"{settings.default}: 4 h"),
        *halved,
    )


def _first_weights(settings: Settings, draft: Draft) -> None:
    """Set the deviations of the first weights, and of projections into the residual stream."""
    inner, outer = settings.get("init_method"), settings.get("output_layer_init_method")
    std, hidden = settings.get("init_method_std"), draft.get("model.hidden_size", 1)
    layers = draft.get("model.num_layers", 1)
    kind = str(value_of(settings, "init_method", "normal"))
    residual = str(value_of(settings, "output_layer_init_method", "scaled_normal"))
    deviation = number_of(std, draft, "model.init_method_std")
    normal = 0.02 if deviation is None else deviation
    deviations = {
        "normal": normal,
        "scaled_normal": normal / math.sqrt(2 * layers),
        "single_residual_scaled_normal": normal / math.sqrt(layers),
        "small_init": math.sqrt(2 / (5 * hidden)),
        "wang_init": 2 / layers / math.sqrt(hidden),
    }
    if kind in deviations:
        draft.put(
            "model.init_method_std",
            deviations[kind],
            *sources(inner, std, default=settings.default),
        )
    elif inner is not None:
        draft.refuse(inner, "this initialization", "model.init_method_std, a normal distribution")
        return
    if residual not in deviations:
        if outer is not None:
            draft.refuse(outer, "this initialization", "model.residual_init_std")
    elif math.isclose(deviations[residual], deviations[kind] / math.sqrt(2 * layers)):
        if outer is not None:
            draft.ignore(outer, "residual projections have std / sqrt(2 x layers)")
    else:
        origins = sources(outer, default=f"{settings.default} {residual}")
        draft.put("model.residual_init_std", deviations[residual], *origins)


def _layout(settings: Settings, draft: Draft) -> None:
    pipe = settings.get("pipe_parallel_size")
    size = integer_of(pipe, draft, "parallel.pipeline_model_parallel_size")
    if pipe is not None and size is not None:
        draft.put("parallel.pipeline_model_parallel_size", max(1, size), pipe)
    tensor = draft.get("parallel.tensor_model_parallel_size", 1)
    sequence = settings.get("sequence_parallel")
    if sequence is not None:
        if sequence.value and tensor > 1:
            draft.put("parallel.sequence_parallel", True, sequence)
        else:
            draft.ignore(sequence, "it requests nothing")
    put_padding(settings, draft, "make_vocab_size_divisible_by", "NeoX")
    stage_entry = draft.values.get("deepspeed.zero_stage")
    if stage_entry is not None:
        put_stage(draft, int(stage_entry.value), [stage_entry.origin])
    named = settings.get("precision")
    if "train.precision" not in draft.values:
        kind = {"bfloat16": "bf16", "fp16": "fp16", "fp32": "fp32"}.get(
            str(value_of(settings, "precision", "fp32"))
        )
        draft.put("train.precision", kind or "fp32", named or settings.default)
    draft.ignore_rest("its block says the same", named)
    if draft.get("train.precision") == "fp16":
        put_scale(draft)


def _batches(settings: Settings, draft: Draft) -> None:
    micro, steps = (
        settings.get("train_micro_batch_size_per_gpu"),
        settings.get("gradient_accumulation_steps"),
    )
    total = settings.get("train_batch_size")
    size = integer_of(micro, draft, "train.micro_batch_size", least=1)
    batch = integer_of(total, draft, "train.global_batch_size", least=1)
    accumulated = integer_of(steps, draft, "train.global_batch_size", least=1) or 1
    replica = draft.get("parallel.tensor_model_parallel_size", 1) * draft.get(
        "parallel.pipeline_model_parallel_size", 1
    )
    gpus, per_host = _gpus(settings, draft)
    if gpus is not None:
        put_ranks(draft, gpus, "the number of ranks", per_host)
    replicas = max(1, (gpus or replica) // replica)
    if size is None and batch is not None:
        size = max(1, batch // (replicas * accumulated))
    if size is None:
        if micro is None:
            for name in ("train.micro_batch_size", "train.global_batch_size"):
                draft.put(name, 1, "not written")
            draft.ask("train.global_batch_size", "which batch? give the file that has it too")
        return
    draft.put("train.micro_batch_size", size, micro or total or settings.default)
    if batch is not None and total is not None:
        draft.put("train.global_batch_size", batch, total)
        if steps is not None:
            draft.ignore(steps, "it follows from the batch sizes")
        return
    draft.put(
        "train.global_batch_size",
        size * accumulated * replicas,
        *sources(micro, steps),
        f"x {replicas} replicas",
    )
    if gpus is None:
        draft.ask(
            "train.global_batch_size",
            "how many GPUs? the files do not say it, and this is the batch of one replica "
            f"({replica} GPUs): give --ranks N",
        )


def _gpus(settings: Settings, draft: Draft) -> tuple[int | None, int | None]:
    """Return the number of GPUs and of those of each host; None for what is not written."""
    keys = [settings.get(key) for key in ("global_num_gpus", "num_gpus", "num_nodes")]
    total = integer_of(keys[0], draft, "launch.nproc_per_node", least=1)
    per_host = integer_of(keys[1], draft, "launch.nproc_per_node", least=1)
    hosts = integer_of(keys[2], draft, "launch.nnodes", least=-1)  # -1: all of the hostfile
    draft.ignore_rest("the section launch has the numbers of hosts and ranks", *keys)
    total = total or settings.ranks
    if total is None and per_host is not None and hosts is not None and hosts > 0:
        return per_host * hosts, per_host
    return total, None


def _schedule(settings: Settings, draft: Draft) -> None:
    for key, name, default in (
        ("optimizer.params.lr", "optim.lr", 1e-3),
        ("lr_decay_style", "optim.lr_decay_style", "linear"),
        ("warmup", "optim.lr_warmup_fraction", 0.01),
        ("weight_decay", "optim.weight_decay", 0.1),
        ("eval_iters", "train.eval_iters", 100),
        ("eval_interval", "train.eval_interval", 1000),
        ("log_interval", "train.log_interval", 100),
    ):
        if key not in settings and name not in draft.values:
            draft.put(name, default, settings.default)
    if "optimizer" not in settings:
        draft.ask("optim.lr", "which learning rate? give the file that has optimizer too")
    _linear(settings, draft)
    fraction = settings.get("lr_decay_fraction")
    share = number_of(fraction, draft, "optim.lr_decay_iters")
    if fraction is not None and "optim.lr_decay_iters" in draft.values:
        draft.ignore(fraction, "lr_decay_iters decides it")
    elif fraction is not None and share is not None:
        draft.put("optim.lr_decay_iters", int(share * draft.get("train.train_iters", 0)), fraction)
    decay, train = (draft.get(name, 0) for name in ("optim.lr_decay_iters", "train.train_iters"))
    if 0 < decay < train and draft.get("optim.lr_decay_style") == "cosine":
        draft.remarks.append(
            f"GPT-NeoX's cosine rises again after lr_decay_iters {decay}; here the learning rate "
            "stays at min_lr"
        )
    factor = settings.get("checkpoint_factor")
    interval = integer_of(factor, draft, "checkpoint.save_interval", least=1)
    if factor is not None and interval is not None:
        draft.put("checkpoint.save_interval", interval, factor)
        if "keep_last_n_checkpoints" not in settings:
            draft.put(
                "checkpoint.keep_every", interval, f"{settings.default}: all of them are kept"
            )
    recompute = settings.get("checkpoint_activations")
    if recompute is not None:
        draft.put("train.recompute", "full" if recompute.value else "none", recompute)


def _linear(settings: Settings, draft: Draft) -> None:
    """Refuse a linear decay that ends above zero: NeoX decays to zero and stops at min_lr."""
    lowest = settings.get("min_lr")
    if (
        lowest is not None
        and draft.get("optim.min_lr", 0.0) > 0
        and draft.get("optim.lr_decay_style") == "linear"
    ):
        draft.refuse(
            settings.get("lr_decay_style") or lowest,
            f"a linear decay to 0 that stops at min_lr {draft.get('optim.min_lr')}",
            "lr_decay_style cosine, or min_lr 0",
        )


def _data(settings: Settings, draft: Draft) -> None:
    path, split = settings.get("data_path"), settings.get("split")
    parts = [settings.get(f"{part}_data_paths") for part in ("train", "valid", "test")]
    if path is not None:
        draft.put("data.source.kind", "prefix", path)
        draft.put("data.source.prefix", str(path.value), path)
    elif all(parts):
        for part, paths in zip(("train", "valid", "test"), parts, strict=True):
            weights = settings.get(f"{part}_data_weights")
            numbers = weights.value if weights is not None else [1.0] * len(paths.value)  # type: ignore[union-attr]
            blend = [
                {"weight": float(weight), "source": prefix_source(str(name))}
                for weight, name in zip(numbers, paths.value, strict=False)  # type: ignore[union-attr]
            ]
            draft.put(f"data.split_blends.{part}", blend, *sources(paths, weights))
    else:
        put_unnamed(draft, question="which token files? give the file with data_path too")
    if split is not None and "data.split_blends.train" in draft.values:
        draft.ignore(split, "each split has its own data")
    elif "data.split_blends.train" not in draft.values:
        text = str(value_of(settings, "split", "969,30,1")).replace(" ", "")
        put_split(draft, text, split or settings.default)
    draft.put("data.index_style", "neox", "GPT-NeoX's order of samples")
    draft.put("data.shuffle_documents", False, "GPT-NeoX keeps the order of documents")
    for setting in (
        *parts,
        *(settings.get(f"{p}_data_weights") for p in ("train", "valid", "test")),
    ):
        if setting is not None and setting.name not in draft.done:
            draft.refuse(setting, "data for some splits only", "data.split_blends with all three")
    kind = settings.get("tokenizer_type")
    vocab, merges = settings.get("vocab_file"), settings.get("merge_file")
    name = word(first(kind)) if kind is not None else "GPT2BPETokenizer"
    choose_tokenizer(draft, name, kind, vocab=vocab, merges=merges, model=None)
    draft.ignore_rest(f"the tokenizer {name} does not read it", vocab, merges)


def _start(settings: Settings, draft: Draft) -> None:
    save, load, tune = settings.get("save"), settings.get("load"), settings.get("finetune")
    if save is not None:
        draft.ignore(save, "a run has its place in the workspace, runs/KEY")
    tuning = tune is not None and bool(tune.value)
    without = settings.get("no_load_optim")
    if load is not None and (tuning or save is None or load.value != save.value):
        if without is not None and without.value and not tuning:
            draft.refuse(
                without,
                f"it continues the iterations of load: {load.value} without its optimizer",
                "train.pretrained_checkpoint starts at iteration 0, as finetune: true does",
            )
        name = "train.pretrained_checkpoint" if tuning else "resume.checkpoint"
        draft.put(name, str(load.value), load, *([tune] if tune is not None and tuning else []))
        draft.ask(name, f"import {load.value} with megacore import, and name it")
    elif load is not None:
        draft.ignore(load, "a run resumes from its own newest checkpoint")
    if tuning and tune is not None and load is None:
        draft.put("train.pretrained_checkpoint", "<path of the checkpoint>", tune)
        draft.ask("train.pretrained_checkpoint", "which weights? import them with megacore import")
    reason = "a run resumes its own checkpoints completely"
    draft.ignore_rest(reason, tune, without, settings.get("no_load_rng"))
    hostfile, launcher = settings.get("hostfile"), settings.get("launcher")
    if hostfile is not None:
        draft.put("launch.hostfile", str(hostfile.value), hostfile)
    if launcher is not None:
        if str(launcher.value).lower() == "slurm":
            draft.put("launch.kind", "slurm", launcher)
        else:
            draft.ignore(launcher, "hosts are reached through ssh")


def foreign_model(settings: Settings, draft: Draft) -> ForeignModel | None:
    """Return the sizes by NeoX's keys and defaults; None if one is not written."""
    try:
        hidden, heads = (
            int(value_of(settings, "hidden_size", 0)),
            int(value_of(settings, "num_attention_heads", 0)),
        )
        norm = str(value_of(settings, "norm", "layernorm"))
        return ForeignModel(
            family="gpt",
            layers=int(value_of(settings, "num_layers", 0)),
            hidden=hidden,
            heads=heads,
            head_size=hidden // heads,
            groups=int(value_of(settings, "num_kv_heads", heads)),
            inner=inner_width(settings),
            gated=str(value_of(settings, "activation", "gelu")) in ("swiglu", "geglu"),
            attention_bias=bool(value_of(settings, "use_bias_in_attn_linear", True)),
            mlp_bias=bool(value_of(settings, "use_bias_in_mlp", True)),
            norm_bias=norm == "layernorm",
            untied=bool(value_of(settings, "no_weight_tying", False)),
            positions=int(value_of(settings, "max_position_embeddings", 0))
            if value_of(settings, "pos_emb", "learned") == "learned"
            else 0,
            sequence=int(value_of(settings, "seq_length", 0)),
            vocabulary=OTHER_VOCABULARY,
            multiple=int(value_of(settings, "make_vocab_size_divisible_by", 128))
            * int(value_of(settings, "model_parallel_size", 1)),
            batch=draft.get("train.global_batch_size", 0),
        )
    except (ValueError, TypeError, ArithmeticError):
        return None


def settings_of(files: list[tuple[str, Mapping[str, Any], Mapping[str, int]]]) -> Settings:
    """Return the keys of several files, later ones over earlier ones; null is no value.

    Args:
        files: name, content, and the line of each key, for each file.
    """
    items = [
        Setting(str(key).replace("-", "_"), value, Place(name, lines.get(str(key), 1)))
        for name, content, lines in files
        for key, value in content.items()
    ]
    last = {item.name: item for item in items}.values()
    remarks = [f"{item}: it requests nothing" for item in last if item.value is None]
    return Settings("neox", "GPT-NeoX", [each for each in last if each.value is not None], remarks)
