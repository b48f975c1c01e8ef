"""Translation of Megatron-LM's and Megatron-DeepSpeed's command lines."""

import math
from itertools import pairwise
from typing import NamedTuple

from megacore.adopt.check import ForeignModel
from megacore.adopt.data import put_data, put_padding, put_tokenizer
from megacore.adopt.megatron_flags import MEGATRON
from megacore.adopt.megatron_model import ignore_rotary, model_sizes, put_model
from megacore.adopt.rules import (
    BadValueError,
    Draft,
    Setting,
    Settings,
    first,
    integer_of,
    number,
    number_of,
    positive,
    put_hostfile,
    require,
    sources,
    word,
)
from megacore.adopt.zero import put_constant_scale, put_zero
from megacore.foreign.files import read_number

_TWO_NAMES = (("--num-layers", "--encoder-num-layers"), ("--seq-length", "--encoder-seq-length"))
"""Flags of one value, of which Megatron takes one only."""
_FAMILIES = {"pretrain_gpt": "gpt", "pretrain_bert": "bert", "pretrain_t5": "t5"}
"""Family of the model of each training program."""
_SIZES = {
    "model.num_layers": "--num-layers",
    "model.hidden_size": "--hidden-size",
    "model.num_attention_heads": "--num-attention-heads",
    "data.seq_length": "--seq-length",
}
"""Flags without which a run has no model."""
_ITERATIONS = 1000
"""Length of a run that no flag gives."""
_RATE = 1e-3
"""Learning rate that no flag gives."""


class Fixed(NamedTuple):
    """Option of Muon with one possible value here."""

    value: str
    default: str
    """Megatron-LM's value without the flag."""
    feature: str
    """Feature that other values request."""


MUON = {
    "--muon-scale-mode": Fixed("spectral", "spectral", "another scale of Muon's updates"),
    "--muon-extra-scale-factor": Fixed("0.2", "1.0", "another factor of Muon's updates than 0.2"),
    "--muon-num-ns-steps": Fixed("5", "5", "another number of Newton-Schulz iterations than 5"),
    "--muon-coefficient-type": Fixed(
        "simple", "quintic", "other coefficients of Newton-Schulz than 3.4445, -4.7750, 2.0315"
    ),
    "--muon-fp32-matmul-prec": Fixed("medium", "medium", "Newton-Schulz in another type than bf16"),
    "--muon-scalar-optimizer": Fixed("adam", "adam", "another optimizer than AdamW beside Muon"),
}
"""Options of Megatron-LM's Muon that are constants of `megacore.optim.muon`."""


def translate(settings: Settings, draft: Draft) -> None:
    """Fill the draft for the flags of the training program in `settings.entry`."""
    family = _FAMILIES.get(settings.entry, "gpt")
    draft.put("family", family, f"{settings.entry}.py")
    for setting in settings:
        if setting.name.startswith("-"):
            MEGATRON.apply(setting, draft)
        else:
            draft.refuse(setting, "a word that belongs to no flag", "leave it out")
    for flag, other in _TWO_NAMES:
        second = settings.get(other)
        if second is not None and flag in settings:
            draft.reject(second, f"give it or {flag}, not both")
    require(settings, draft, _SIZES)
    put_model(settings, draft, family)
    _layout(settings, draft)
    put_zero(settings, draft)
    _put_launch(settings, draft)
    _batches(settings, draft)
    _compare_batches(settings, draft)
    _schedule(settings, draft)
    _optimizer(settings, draft)
    _precision(settings, draft)
    _recompute(settings, draft)
    _intervals(settings, draft)
    _mean(settings, draft)
    _start(settings, draft)
    put_data(settings, draft, family)
    put_tokenizer(settings, draft, family)
    ignore_rotary(settings, draft)
    MEGATRON.finish(settings, draft)
    if settings.entry in ("pretrain_hybrid", "pretrain_mamba"):
        draft.refuse(f"{settings.entry}.py", "state-space layers (Mamba)", "pretrain_gpt.py")
    if settings.entry == "pretrain_t5":
        draft.refuse("pretrain_t5.py", "a bias of T5's output layer", "conf/t5-220m.yaml")


def foreign_model(settings: Settings, draft: Draft) -> ForeignModel | None:
    """Return the sizes by Megatron's flags; None for T5, or if a number is not written."""
    family = _FAMILIES.get(settings.entry, "gpt")
    if family == "t5":
        return None
    return model_sizes(settings, family, _data_parallel_size(settings, draft))


def _layout(settings: Settings, draft: Draft) -> None:
    off = settings.get("--no-pipeline-parallel")
    pipeline = draft.get("parallel.pipeline_model_parallel_size", 1)
    if off is not None:
        if pipeline > 1:
            draft.put("parallel.pipeline_model_parallel_size", 1, off)
            pipeline = 1
        else:
            draft.ignore(off, "there is one pipeline stage")
    tensor = draft.get("parallel.tensor_model_parallel_size", 1)
    sequence = settings.get("--sequence-parallel")
    if sequence is not None and tensor > 1:
        draft.put("parallel.sequence_parallel", True, sequence)
    elif sequence is not None:
        draft.ignore(sequence, "Megatron turns it off for one tensor-parallel rank")
    put_padding(settings, draft, "--make-vocab-size-divisible-by", "Megatron")
    layers, virtual = draft.get("model.num_layers"), 1
    per_chunk = settings.get("--num-layers-per-virtual-pipeline-stage")
    count = integer_of(per_chunk, draft, "parallel.virtual_pipeline_model_parallel_size", least=1)
    if per_chunk is not None and count is not None and layers is not None:
        virtual = max(1, layers // pipeline // count)
        draft.put("parallel.virtual_pipeline_model_parallel_size", virtual, per_chunk)
    virtual = draft.get("parallel.virtual_pipeline_model_parallel_size", virtual)
    ends = [settings.get(f"--decoder-{end}-pipeline-num-layers") for end in ("first", "last")]
    if any(ends) and layers is not None and pipeline > 1 and virtual == 1:
        _uneven(draft, ends, layers, pipeline)
    elif pipeline > 1 and layers is not None and layers % (pipeline * virtual) == 0:
        draft.put("parallel.pipeline_partition", "uniform", "Megatron divides the layers evenly")


def _uneven(draft: Draft, ends: list[Setting | None], layers: int, pipeline: int) -> None:
    """Set the layers of each stage from those of the first and the last."""
    counts = [integer_of(end, draft, "parallel.pipeline_partition", least=1) for end in ends]
    fixed = [count for count in counts if count is not None]
    inner = pipeline - len(fixed)
    each = (layers - sum(fixed)) // max(1, inner)
    first_one = [counts[0]] if counts[0] is not None else []
    last_one = [counts[1]] if counts[1] is not None else []
    draft.put(
        "parallel.pipeline_partition",
        [*first_one, *[each] * inner, *last_one],
        *[end for end in ends if end is not None],
    )


def _put_launch(settings: Settings, draft: Draft) -> None:
    """Set ranks and hosts from the options of the launcher."""
    per_host, hosts = settings.ranks_per_host, settings.hosts or 1
    origin = ", ".join(map(str, settings.launcher)) or "the launch command"
    model = _ranks_per_replica(draft)
    if per_host is None:
        return
    if per_host * hosts % model:
        hosts = math.lcm(per_host, model) // per_host
        draft.remarks.append(
            f"the launch starts {per_host * (settings.hosts or 1)} ranks and one replica has "
            f"{model}: launch.nnodes is {hosts}, the smallest number that works"
        )
        origin = f"{model} ranks per replica, {origin}"
    draft.put("launch.nproc_per_node", per_host, origin)
    if hosts > 1:
        draft.put("launch.nnodes", hosts, origin)
        put_hostfile(draft, hosts)
    settings.hosts = hosts


def _ranks_per_replica(draft: Draft) -> int:
    """Return the product of tensor, context and pipeline parallel size."""
    sizes = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
    return math.prod(draft.get(f"parallel.{name}", 1) for name in sizes)


def _data_parallel_size(settings: Settings, draft: Draft) -> int | None:
    """Return the number of replicas; None if the number of ranks is not written."""
    ranks = settings.ranks
    model = _ranks_per_replica(draft)
    return None if ranks is None else max(1, ranks // model)


def _batches(settings: Settings, draft: Draft) -> None:
    micro, total = settings.get("--micro-batch-size"), settings.get("--global-batch-size")
    size = integer_of(micro, draft, "train.micro_batch_size", least=1)
    if micro is not None and size is not None:
        draft.put("train.micro_batch_size", size, micro)
    batch = integer_of(total, draft, "train.global_batch_size", least=1)
    replicas = _data_parallel_size(settings, draft)
    if total is not None and batch is not None:
        draft.put("train.global_batch_size", batch, total)
    elif total is None and micro is not None and size is not None and replicas is not None:
        draft.put("train.global_batch_size", size * replicas, micro, f"x {replicas} replicas")
    _growth(settings, draft)
    batch = draft.get("train.global_batch_size")
    if batch is not None and micro is None and "train.micro_batch_size" not in draft.values:
        draft.put("train.micro_batch_size", 1, "not written")
        draft.ask("train.micro_batch_size", "how many samples has a micro batch? no flag says it")
    if batch is None:
        if draft.missing or "--step-batch-size-schedule" in settings:
            return
        batch = draft.get("train.micro_batch_size", 1)
        draft.put("train.micro_batch_size", batch, *sources(micro, default="not written"))
        draft.put("train.global_batch_size", batch, "not written")
        draft.ask("train.global_batch_size", "how many samples has a step? no flag says it")
    lengths: list[tuple[int, Setting]] = []
    units = (("--train-iters", None), ("--train-samples", False), ("--train-tokens", True))
    if not any(flag in settings for flag, _ in units):
        draft.put("train.train_iters", _ITERATIONS, "not written")
        draft.ask("train.train_iters", "how many iterations? no flag says it")
    for flag, is_tokens in units:
        setting = settings.get(flag)
        value = integer_of(setting, draft, "train.train_iters")
        if setting is None or value is None:
            continue
        iterations = value
        if is_tokens is not None:
            iterations = _iterations_of(draft, value, tokens=is_tokens, up=is_tokens)
        lengths.append((iterations, setting))
    if lengths:
        shortest = min(lengths, key=lambda each: each[0])
        draft.put("train.train_iters", max(1, shortest[0]), shortest[1])
        for iterations, setting in lengths:
            draft.ignore_rest(f"its {iterations} iterations are not reached", setting)


def _compare_batches(settings: Settings, draft: Draft) -> None:
    """Refuse batch sizes of DeepSpeed's JSON that contradict the flags."""
    json = settings.json or {}
    path = settings.get("--deepspeed_config") or settings.get("--deepspeed-config")
    micro, total = (draft.values.get(f"train.{part}_batch_size") for part in ("micro", "global"))
    if path is None or micro is None or total is None:
        return
    replicas = _data_parallel_size(settings, draft)
    steps = None if replicas is None else total.value / (micro.value * replicas)
    for key, expected, origin in (
        ("train_micro_batch_size_per_gpu", micro.value, micro.origin),
        ("train_batch_size", total.value, total.origin),
        ("gradient_accumulation_steps", steps, total.origin),
    ):
        value = read_number(json.get(key))
        if value is not None and expected is not None and value != expected:
            setting = Setting(key, json[key], path.place)
            draft.refuse(setting, f"it contradicts {origin}", "the same batch in both")


def _iterations_of(draft: Draft, amount: float, *, tokens: bool, up: bool = False) -> int:
    """Return the iterations in which a run consumes a number of samples or tokens.

    During a ramp-up a batch is smaller. `up` rounds up instead of to the nearest.
    """
    samples = amount / draft.get("data.seq_length", 1) if tokens else amount
    batch, start = draft.get("train.global_batch_size"), draft.get("train.rampup_batch_size.start")
    iterations, consumed = 0, 0
    if start is not None:
        step = draft.get("train.rampup_batch_size.increment")
        most = draft.get("train.rampup_batch_size.samples")
        each = most / max(1, (batch - start) // step)
        while consumed < min(most, samples):
            consumed += start + int(consumed / each) * step
            iterations += 1
    rest = max(0.0, samples - consumed) / batch
    return iterations + (math.ceil(rest) if up else round(rest) if tokens else int(rest))


def _growth(settings: Settings, draft: Draft) -> None:
    """Set the ramp-up of the batch, from three numbers or from steps of equal size."""
    rampup, steps = settings.get("--rampup-batch-size"), settings.get("--step-batch-size-schedule")
    name = "train.rampup_batch_size"
    if rampup is not None:
        if rampup.unknown:
            draft.lack(rampup, name)
        elif len(rampup.words) != 3:
            draft.refuse(rampup, "three numbers are needed", "START INCREMENT SAMPLES")
        else:
            try:
                numbers = [positive(text) for text in rampup.words]
            except BadValueError:
                draft.reject(rampup, "give three integers above 0: START INCREMENT SAMPLES")
                return
            for key, value in zip(("start", "increment", "samples"), numbers, strict=True):
                draft.put(f"{name}.{key}", value, rampup)
    if steps is None:
        return
    written = " ".join(steps.words).strip("\"'").replace(",", " ")
    pairs = [pair.partition(":")[::2] for pair in written.split()]
    try:
        at = [_amount(tokens) for tokens, _ in pairs]
        sizes = [positive(size) for _, size in pairs]
    except ValueError:
        draft.refuse(steps, "this notation", "train.rampup_batch_size")
        return
    even = (
        len(at) > 1
        and at[0] == 0
        and all(abs(t - number * at[1]) < 1 for number, t in enumerate(at))
        and all(b - a == sizes[1] - sizes[0] > 0 for a, b in pairwise(sizes))
    )
    if not even or not draft.get("data.seq_length"):
        draft.refuse(steps, "batch sizes in uneven steps", "train.rampup_batch_size")
        return
    draft.put(f"{name}.start", sizes[0], steps)
    draft.put(f"{name}.increment", sizes[1] - sizes[0], steps)
    draft.put(f"{name}.samples", round(at[-1] / draft.get("data.seq_length")), steps)
    draft.put("train.global_batch_size", sizes[-1], steps)


def _amount(text: str) -> float:
    """Return a number of tokens such as 2.4B. Raises BadValueError."""
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 1.0)
    return number(text[:-1] if scale != 1.0 else text) * scale


def _schedule(settings: Settings, draft: Draft) -> None:
    if "--lr" not in settings:
        draft.put("optim.lr", _RATE, "not written")
        draft.ask("optim.lr", "which learning rate? no flag says it")
    style = settings.get("--lr-decay-style")
    if style is None:
        draft.put("optim.lr_decay_style", "linear", settings.default)
    elif word(first(style)) in ("cosine", "linear", "constant", "inverse-square-root", "WSD"):
        draft.put("optim.lr_decay_style", word(first(style)), style)
    else:
        draft.refuse(style, "this schedule", "cosine, linear, constant or WSD")
    if draft.get("optim.lr_decay_style") != "WSD":
        _ignore_wsd(settings, draft)
    if draft.get("train.global_batch_size") is None:
        return
    fraction = settings.get("--lr-warmup-fraction")
    each = _samples_of_an_iteration(settings, draft)
    for part, name in (("decay", "optim.lr_decay_iters"), ("warmup", "optim.lr_warmup_iters")):
        for unit in ("iters", "samples", "tokens"):
            setting = settings.get(f"--lr-{part}-{unit}")
            value = integer_of(setting, draft, name)
            if setting is None or value is None:
                continue
            origins: list[Setting | str] = [setting]
            counted = unit
            if unit == "iters" and each is not None:
                value, counted = value * each, "samples"
                origins.append(f"x {each} samples")
            if part == "warmup" and (fraction is not None or value == 0):
                draft.ignore(setting, "it requests no warm-up of its own")
            elif part == "warmup" and counted == "samples":
                draft.put("optim.lr_warmup_samples", value, *origins)
            elif counted == "iters":
                draft.put(name, value, setting)
            else:
                iterations = _iterations_of(draft, value, tokens=counted == "tokens")
                draft.put(name, max(1, iterations), *origins)
    if each is not None and "optim.lr_decay_iters" not in draft.values:
        run = _iterations_of(draft, draft.get("train.train_iters", 1) * each, tokens=False)
        draft.put("optim.lr_decay_iters", run, settings.default, f"--train-iters x {each} samples")
    share = number_of(fraction, draft, "optim.lr_warmup_fraction")
    if fraction is not None and share is not None:
        growing = "train.rampup_batch_size.start" in draft.values
        decay = _decay_samples(settings, draft, each) if growing else None
        if decay is None:
            draft.put("optim.lr_warmup_fraction", share, fraction)
        else:
            draft.put(
                "optim.lr_warmup_samples", int(share * decay), fraction, f"of {decay} samples"
            )
    for unit in ("samples", "iters") if draft.get("optim.lr_decay_style") == "WSD" else ():
        setting = settings.get(f"--lr-wsd-decay-{unit}")
        value = integer_of(setting, draft, "optim.lr_wsd_decay_iters")
        if setting is None or value is None:
            continue
        samples = value if unit == "samples" else value * (each or 0)
        if samples:
            value = samples // draft.get("train.global_batch_size")
        draft.put("optim.lr_wsd_decay_iters", value, setting)
    if "train.rampup_batch_size.start" in draft.values:
        draft.remarks.append(
            "Megatron moves the learning rate by samples, here it moves by iterations: they differ "
            "until the batch has grown"
        )


def _ignore_wsd(settings: Settings, draft: Draft) -> None:
    """Note flags of WSD's final decay, which another schedule does not read."""
    draft.values.pop("optim.lr_wsd_decay_style", None)
    for part in ("style", "samples", "iters"):
        setting = settings.get(f"--lr-wsd-decay-{part}")
        if setting is not None:
            draft.ignore(setting, "the schedule is not WSD")


def _samples_of_an_iteration(settings: Settings, draft: Draft) -> int | None:
    """Return by how many samples Megatron's schedule counts an iteration; None if it does not.

    Its learning rate moves by samples. A schedule in iterations is multiplied by the batch of the
    flags, also while the batch is smaller.
    """
    growing = "train.rampup_batch_size.start" in draft.values
    if not growing or "--train-iters" not in settings:
        return None
    total: int = draft.get("train.global_batch_size")
    replicas = _data_parallel_size(settings, draft)
    if "--global-batch-size" in settings or replicas is None:
        return total
    micro: int = draft.get("train.micro_batch_size", 1)
    return micro * replicas


def _decay_samples(settings: Settings, draft: Draft, each: int | None) -> int | None:
    """Return the samples until the learning rate is lowest; None if tokens say it."""
    flags = ("--lr-decay-iters", "--train-iters", "--lr-decay-samples", "--train-samples")
    for flag in flags:
        setting = settings.get(flag)
        value = None if setting is None or setting.unknown else read_number(first(setting))
        if value is not None:
            return int(value) * (each or 1)
    return None


def _optimizer(settings: Settings, draft: Draft) -> None:
    """Set the optimizer, and compare Megatron-LM's Muon with `megacore.optim.muon`."""
    chosen = settings.get("--optimizer")
    name = "adam" if chosen is None else word(first(chosen)).lower()
    if chosen is not None and chosen.unknown:
        draft.lack(chosen, "optim.name")
    elif chosen is not None and name in ("muon", "dist_muon"):
        draft.put("optim.name", "muon", chosen)
        if name == "dist_muon":
            draft.put("parallel.data_parallel_sharding", "optimizer", chosen)
        _muon(settings, draft)
        return
    elif chosen is not None and name in ("adam", "adamw"):
        draft.ignore(chosen, "AdamW is the default")
    elif chosen is not None:
        draft.refuse(chosen, "other optimizers than AdamW and Muon", "adam or muon")
    for setting in settings:
        if setting.name.startswith("--muon-"):
            draft.ignore(setting, "it is for the optimizer muon")


def _muon(settings: Settings, draft: Draft) -> None:
    momentum = settings.get("--muon-momentum")
    decay = 0.9 if momentum is None else number_of(momentum, draft, "optim.muon_momentum")
    if decay is not None:
        draft.put("optim.muon_momentum", decay, *sources(momentum, default=settings.default))
    nesterov, whole = settings.get("--muon-nesterov"), settings.get("--muon-no-split-qkv")
    if nesterov is None:
        draft.refuse("no --muon-nesterov", "momentum without Nesterov's term", "--muon-nesterov")
    else:
        draft.ignore(nesterov, "Nesterov's momentum is always used")
    if whole is not None:
        draft.refuse(
            whole, "queries, keys and values as one matrix", "three matrices: leave it out"
        )
    for flag, option in MUON.items():
        setting = settings.get(flag)
        if setting is not None and setting.unknown:
            draft.lack(setting, f"{option.feature}, which is absent here")
        elif _value(setting, option.default) == _value(None, option.value):
            if setting is not None:
                draft.ignore(setting, "it is the only value here")
        else:
            shown = setting or f"no {flag} ({settings.default} {option.default})"
            draft.refuse(shown, option.feature, f"{flag} {option.value}")
    mode = settings.get("--muon-tp-mode")
    tensor = draft.get("parallel.tensor_model_parallel_size", 1)
    if mode is not None and word(first(mode)).lower() == "blockwise" and tensor > 1:
        draft.refuse(
            mode, "Newton-Schulz of a rank's part of a matrix", "--muon-tp-mode duplicated"
        )
    elif mode is not None:
        draft.ignore(mode, "matrices are whole in every layout")
    if (fused := settings.get("--muon-use-syrk")) is not None:
        draft.ignore(fused, "it changes speed only")
    if settings.get("--swiglu") is not None:
        draft.remarks.append(
            "Muon: Megatron-LM orthogonalizes gate and up projection as one matrix, here as two"
        )
    if draft.get("model.position_embedding_type", "learned_absolute") == "learned_absolute":
        draft.remarks.append(
            "Muon: Megatron-LM orthogonalizes the position embedding, here AdamW updates it"
        )


def _value(setting: Setting | None, text: str) -> float | str:
    """Return the number or the word of a setting, else of `text`."""
    written = text if setting is None else word(first(setting)).lower()
    value = read_number(written)
    return written if value is None else float(value)


def _precision(settings: Settings, draft: Draft) -> None:
    chosen = [each for each in map(settings.get, ("--bf16", "--fp16")) if each is not None]
    if "train.precision" not in draft.values:
        kind = chosen[0].name[2:] if chosen else "fp32"
        draft.put("train.precision", kind, *sources(*chosen[:1], default=settings.default))
    for each in chosen:
        if each.name[2:] == draft.get("train.precision"):
            entry = draft.values["train.precision"]
            if str(each) not in entry.origin:
                draft.put("train.precision", entry.value, entry.origin, each)
        else:
            draft.ignore(each, f"{draft.values['train.precision'].origin} decides the precision")
    scale = settings.get("--loss-scale")
    scale = None if scale is None or scale.name in draft.done else scale
    value = number_of(scale, draft, "optim.loss_scale.initial")
    if scale is not None and value is not None:
        put_constant_scale(draft, value, scale)


def _recompute(settings: Settings, draft: Draft) -> None:
    kind, sources = "none", list[Setting]()
    for flag, value in (
        ("--checkpoint-activations", "full"),
        ("--activations-checkpoint-method", "full"),
        ("--recompute-activations", "selective"),
    ):
        setting = settings.get(flag)
        if setting is not None:
            kind, sources = value, [*sources, setting]
    granularity = settings.get("--recompute-granularity")
    if granularity is not None:
        kind, sources = word(first(granularity)), [*sources, granularity]
    method = settings.get("--recompute-method") or settings.get("--activations-checkpoint-method")
    layers = settings.get("--recompute-num-layers") or settings.get(
        "--activations-checkpoint-num-layers"
    )
    if kind not in ("none", "full", "selective"):
        draft.refuse(sources[-1], "this recomputation", "train.recompute full or selective")
        return
    if sources:
        draft.put("train.recompute", kind, *sources)
    count = integer_of(layers, draft, "train.recompute_num_layers")
    if method is not None and word(first(method)) == "block" and layers is not None and count:
        draft.put("train.recompute_num_layers", count, layers, method)
    modules = settings.get("--recompute-modules")
    if modules is not None:
        if set(modules.words) <= {"core_attn"} or kind != "selective":
            draft.ignore(modules, "selective recomputation is that of the attention core")
        else:
            draft.refuse(modules, "recomputation of these modules", "train.recompute full")
    for flag in (
        "--recompute-method",
        "--recompute-num-layers",
        "--checkpoint-num-layers",
        "--activations-checkpoint-num-layers",
        "--deepspeed-activation-checkpointing",
    ):
        draft.ignore_rest("each layer's input is stored: memory only", settings.get(flag))


def _intervals(settings: Settings, draft: Draft) -> None:
    iterations = draft.get("train.train_iters")
    # Megatron-LM does not validate during training unless it is told when.
    never = settings.program == "megatron" and iterations is not None
    if "train.log_interval" not in draft.values:
        draft.put("train.log_interval", 100, settings.default)
    if "train.eval_interval" not in draft.values:
        note = f"{settings.default}: none before the end" if never else settings.default
        draft.put("train.eval_interval", iterations if never else 1000, note)
    rounds = settings.get("--eval-iters")
    count = integer_of(rounds, draft, "train.eval_iters")
    if rounds is None:
        draft.put("train.eval_iters", 100, settings.default)
    elif count is not None and count > 0:
        draft.put("train.eval_iters", count, rounds)
    elif count == 0 and iterations is not None:
        draft.put("train.eval_iters", 1, rounds)
        draft.put("train.eval_interval", iterations, rounds)
        draft.remarks.append(f"{rounds} turns validation off; here one follows the last iteration")
        often = settings.get("--eval-interval")
        if often is not None:
            draft.ignore(often, "there is one validation, at the end")
    save = settings.get("--save-interval") or settings.get("--persistent-save-interval")
    interval = integer_of(save, draft, "checkpoint.save_interval")
    if save is not None and interval:
        draft.put("checkpoint.save_interval", interval, save)
        if "checkpoint.keep_every" not in draft.values:
            draft.put("checkpoint.keep_every", interval, "Megatron keeps all of them")
    elif iterations is not None and (save is None or interval == 0):
        draft.put(
            "checkpoint.save_interval", iterations, f"{save or settings.default}: at the end only"
        )
        if save is not None:
            draft.done.add(save.name)
    profile = [
        settings.get(flag) for flag in ("--profile", "--profile-step-start", "--profile-step-end")
    ]
    if profile[0] is not None:
        begin = integer_of(profile[1], draft, "train.profile.from")
        end = integer_of(profile[2], draft, "train.profile.to")
        origins = [each for each in profile if each is not None and not each.unknown]
        draft.put("train.profile.from", (10 if begin is None else begin) + 1, *origins)
        draft.put("train.profile.to", 12 if end is None else end, *origins)
    draft.ignore_rest("Megatron reads it with --profile only", *profile[1:])


def _mean(settings: Settings, draft: Draft) -> None:
    """Set the mean of the loss over a batch; only masked tokens make a difference."""
    each, masked = settings.get("--calculate-per-token-loss"), settings.get("--eod-mask-loss")
    if each is not None and masked is not None:
        draft.refuse(
            each, f"a mean over the tokens of the batch with {masked}", "one of the two flags"
        )
    elif each is not None:
        draft.ignore(each, "without masked tokens both means are the same")


def _start(settings: Settings, draft: Draft) -> None:
    """Set what a run starts from; its own checkpoints are found by themselves."""
    save, load = settings.get("--save"), settings.get("--load")
    weights = settings.get("--pretrained-checkpoint")
    if save is not None:
        draft.ignore(save, "a run has its place in the workspace, runs/KEY")
    restart = [
        setting
        for flag in ("--finetune", "--reset-iteration")
        if (setting := settings.get(flag)) is not None
    ]
    without = settings.get("--no-load-optim")
    partial = restart + ([] if without is None else [without])
    if load is not None and (save is None or load.words != save.words):
        if without is not None and not restart:
            partial = []
            draft.refuse(
                without,
                f"it continues the iterations of {load} without the optimizer's state",
                "--finetune, which starts from the weights",
            )
        name = "train.pretrained_checkpoint" if restart or without else "resume.checkpoint"
        draft.put(name, " ".join(load.words), load, *partial)
        draft.ask(name, f"import {load.text.partition(' ')[2]} with megacore import, and name it")
    elif load is not None:
        draft.ignore(load, "a run resumes from its own newest checkpoint")
    if weights is not None:
        draft.put("train.pretrained_checkpoint", " ".join(weights.words), weights)
        draft.ask("train.pretrained_checkpoint", "import it with megacore import, and name it")
    for flag, reason in {
        "--finetune": "there is nothing to load",
        "--no-load-optim": "a run resumes its own checkpoints completely",
        "--no-load-rng": "a run resumes its own checkpoints completely",
        "--no-load-lr-state": "a run's schedule is that of its configuration",
        "--reset-iteration": "a run counts its own iterations",
        "--universal-checkpoint": "any layout loads any checkpoint",
        "--load-tag": "it names a checkpoint's directory",
        "--ckpt-step": "it names a checkpoint's directory",
    }.items():
        draft.ignore_rest(reason, settings.get(flag))
