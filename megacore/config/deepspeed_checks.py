"""Checks of the DeepSpeed options against each other and the rest of the configuration."""

import math
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from megacore.config.deepspeed import LOSS_SCALE, DeepSpeedConfig, UserSettings, user_settings_of
from megacore.config.optim import LossScaleConfig, OptimConfig
from megacore.config.train import TrainConfig
from megacore.foreign.deepspeed import pretraining_keys

if TYPE_CHECKING:
    from megacore.config.parallel import ParallelConfig
    from megacore.config.run import RunConfig

_STAGE = "zero_optimization.stage"
_STAGE_3_ONLY = (
    "sub_group_size stage3_prefetch_bucket_size stage3_param_persistence_threshold "
    "stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance "
    "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential"
)


def check_deepspeed(config: "RunConfig", data_parallel_size: int | None) -> None:
    """Raise ValueError for options of a run with the engine deepspeed that it does not support.

    The data-parallel size is None if it is not yet known, here and below.
    """
    if config.optim.name != "adam":
        raise ValueError(
            f"optim.name is {config.optim.name}, which needs the engine native, but engine is "
            "deepspeed, which has AdamW only: change one of them"
        )
    user_settings = user_settings_of(config)
    _check_stage(config.parallel, user_settings)
    _check_offload(config.deepspeed, user_settings)
    _check_recompute(config, user_settings)
    if config.train.kernels.sum_of_squares == "apex" and user_settings.stage > 0:
        raise ValueError(
            "train.kernels.sum_of_squares is apex, which has no effect with ZeRO stage "
            f"{user_settings.stage} of DeepSpeed, whose own norm is used: remove it, or set engine "
            "to native"
        )
    if config.train.precision != "auto":
        accumulation_type(user_settings, config.train.precision)
    if user_settings.in_file:
        check_agreement(config, user_settings, data_parallel_size)
    if config.train.precision == "fp16":
        _check_scale(config.optim.loss_scale, user_settings)


def accumulation_type(asked: UserSettings, precision: str) -> str:
    """Return the data type in which micro batches' gradients accumulate: fp32 from stage 1 on.

    Raises ValueError if the JSON requests an unsupported type.
    """
    best = "fp32" if asked.stage > 0 else precision
    dtype = str(asked.values.get("data_types.grad_accum_dtype", best))
    if dtype not in (best, precision):
        raise ValueError(
            f"data_types.grad_accum_dtype of deepspeed.config is {dtype} but with ZeRO stage "
            f"{asked.stage} and precision {precision} gradients add up in "
            f"{' or '.join(dict.fromkeys((best, precision)))}: use that, or ZeRO stage 1 to 3"
        )
    return dtype


def _check_stage(parallel: "ParallelConfig", asked: UserSettings) -> None:
    stage = asked.stage
    if stage < parallel.zero_stage:
        raise ValueError(
            f"{asked.named(_STAGE)} is {stage} but parallel.data_parallel_sharding is "
            f"{parallel.data_parallel_sharding}, which is stage {parallel.zero_stage}: change one "
            "of them"
        )
    for name in _STAGE_3_ONLY.split() if stage < 3 else ():
        key = f"zero_optimization.{name}"
        if key in asked.values:
            raise ValueError(
                f"{asked.named(key)} is {str(asked.values[key]).lower()} but "
                f"{asked.named(_STAGE)} is {stage}, and only stage 3 divides weights: set it to "
                "3, or remove the former"
            )
    _check_buckets(asked)


def _check_buckets(asked: UserSettings) -> None:
    name = "zero_optimization.allgather_bucket_size"
    size = asked.values.get(name)
    if size is not None and asked.stage == 3:
        raise ValueError(
            f"{asked.named(name)} is {size} but {asked.named(_STAGE)} is 3, where weights are "
            "gathered as they are used: remove the former"
        )
    if size is not None and size % 2:
        raise ValueError(
            f"{asked.named(name)} is {size}, which is odd: DeepSpeed takes elements in pairs, use "
            f"{size + 1}"
        )
    for name in ("overlap_comm", "reduce_bucket_size", "allgather_bucket_size"):
        key = f"zero_optimization.{name}"
        if asked.stage == 0 and not asked.in_file and key in asked.values:
            raise ValueError(
                f"{asked.named(key)} is {str(asked.values[key]).lower()} but "
                f"{asked.named(_STAGE)} is 0, which has no such buckets: remove the former, or "
                "choose stage 1, 2 or 3"
            )


def _check_offload(section: DeepSpeedConfig, asked: UserSettings) -> None:
    devices = {what: asked.device(what) for what in ("offload_optimizer", "offload_param")}
    for what, device in devices.items():
        key = f"zero_optimization.{what}.device"
        least = 3 if what == "offload_param" or device == "nvme" else 1
        if device != "none" and asked.stage < least:
            raise ValueError(
                f"{asked.named(key)} is {device} but {asked.named(_STAGE)} is {asked.stage}: it "
                f"needs stage {'3' if least == 3 else '1, 2 or 3'}"
            )
        path = f"zero_optimization.{what}.nvme_path"
        if device == "nvme" and path not in asked.values:
            raise ValueError(
                f"{asked.named(key)} is nvme but {asked.named(path)} is missing: name a directory "
                "on a local disk"
            )
    if section.nvme_path is not None and "nvme" not in devices.values():
        raise ValueError(
            f"deepspeed.nvme_path is {section.nvme_path} but nothing is offloaded to nvme: remove "
            "it, or set deepspeed.offload_optimizer or deepspeed.offload_param to nvme"
        )
    if not section.pin_memory and not asked.in_file and set(devices.values()) == {"none"}:
        raise ValueError("deepspeed.pin_memory is false but nothing is offloaded: remove it")
    if section.cpu_adam != "auto" and devices["offload_optimizer"] == "none":
        raise ValueError(
            f"deepspeed.cpu_adam is {section.cpu_adam} but the optimizer is not offloaded: remove "
            "it, or set deepspeed.offload_optimizer to cpu"
        )
    disk = sorted(key for key in asked.values if key.startswith("aio."))
    if disk and "nvme" not in devices.values():
        raise ValueError(
            f"{asked.named(disk[0])} is {asked.values[disk[0]]} but nothing is offloaded to nvme: "
            "remove the block aio"
        )


def _check_recompute(config: "RunConfig", asked: UserSettings) -> None:
    train, parallel = config.train, config.parallel
    block = "activation_checkpointing"
    enabled = {key: value for key, value in asked.values.items() if key.startswith(block) and value}
    for key, value in enabled.items():
        if config.family == "t5":
            raise ValueError(
                f"{asked.named(key)} is {str(value).lower()} but family is t5, whose layers share "
                "tensors that DeepSpeed's checkpointing would lose: remove the former"
            )
        if train.recompute != "full":
            raise ValueError(
                f"{asked.named(key)} is {str(value).lower()} but train.recompute is "
                f"{train.recompute}: set the latter to full, or remove the former"
            )
    divided, tensor = f"{block}.partition_activations", parallel.tensor_model_parallel_size
    if divided in enabled and tensor == 1:
        raise ValueError(
            f"{asked.named(divided)} is true but parallel.tensor_model_parallel_size is 1: there "
            "are no ranks to divide activations, remove the former"
        )
    if divided in enabled and parallel.sequence_parallel:
        raise ValueError(
            f"{asked.named(divided)} is true but parallel.sequence_parallel is true, with which "
            "tensor-parallel ranks keep a part of each layer's input already: remove the former"
        )
    buffer = f"{block}.contiguous_memory_optimization"
    for needed in (divided, f"{block}.number_checkpoints"):
        if buffer in enabled and needed not in enabled:
            raise ValueError(
                f"{asked.named(buffer)} is true without {needed}: give both, or neither"
            )


def _check_scale(scale: LossScaleConfig, asked: UserSettings) -> None:
    """Check the loss scale against DeepSpeed's limits.

    DeepSpeed scales losses only with ZeRO stages 1 to 3, from an initial power of two down to an
    integer minimum.
    """
    if math.frexp(scale.initial)[0] != 0.5 or scale.initial < 1:
        raise ValueError(
            f"optim.loss_scale.initial is {scale.initial:g} but engine is deepspeed, whose first "
            f"loss scale is a power of two: use {2.0 ** max(0, round(math.log2(scale.initial))):g}"
        )
    if scale.minimum != int(scale.minimum):
        raise ValueError(
            f"optim.loss_scale.minimum is {scale.minimum:g} but engine is deepspeed, whose "
            f"smallest loss scale is an integer: use {max(1, round(scale.minimum))}"
        )
    if asked.stage == 0:
        raise ValueError(
            f"train.precision is fp16 but {asked.named(_STAGE)} is 0, where DeepSpeed 0.19 "
            "divides gradients by a loss scale that it has not multiplied the loss by: use stage "
            "1, 2 or 3, bf16, or engine native"
        )


SAME = {
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_clipping": "optim.clip_grad",
    "communication_data_type": "parallel.grad_reduce_dtype",
    "optimizer.params.lr": "optim.lr",
    "optimizer.params.eps": "optim.adam_eps",
    "optimizer.params.weight_decay": "optim.weight_decay",
    "optimizer.params.max_grad_norm": "optim.clip_grad",
}
"""Keys of the JSON and the values of the configuration that they must equal."""
SAME_IN_FP16 = {key: f"optim.loss_scale.{field}" for field, key in LOSS_SCALE.items()}
"""Like SAME, for keys that apply only with precision fp16."""
_COMPARED = (
    *SAME,
    "gradient_accumulation_steps",
    "fp16.",
    "bf16.enabled",
    "optimizer.",
    "scheduler.",
)


def is_compared(key: str) -> bool:
    """Return True for a key that must agree with the configuration."""
    return key.startswith(_COMPARED)


def check_agreement(
    config: "RunConfig", asked: UserSettings, data_parallel_size: int | None
) -> None:
    """Raise ValueError for the first value of the JSON that contradicts the configuration."""
    for key, name in SAME.items():
        _same(asked, key, name, attrgetter(name)(config))
    _check_accumulation(config.train, asked, data_parallel_size)
    _check_precision(config.train.precision, asked)
    if config.train.precision == "fp16":
        _check_loss_scale(config, asked)
    _check_optimizer(config.optim, config.deepspeed.cpu_adam, asked)
    if "scheduler.type" in asked.values:
        _check_scheduler(config, asked)


def _same(
    asked: UserSettings, key: str, name: str, configured: Any, *, default: Any = None
) -> None:
    """Raise ValueError unless a key is absent or equals the value `name` of the configuration.

    `default` is DeepSpeed's value for an absent key; None accepts an absent key.
    """
    value = asked.values.get(key, None if key in asked.autos else default)
    if value is None or value == configured:
        return
    if (
        isinstance(value, float)
        and isinstance(configured, float)
        and math.isclose(value, configured, rel_tol=1e-9)
    ):
        return
    absent = "" if key in asked.values else " by DeepSpeed's default"
    raise ValueError(
        f"{key} of deepspeed.config is {value}{absent} but {name} is {configured}: change one of "
        'them, or say "auto" in the JSON'
    )


def _check_accumulation(
    train: TrainConfig, asked: UserSettings, data_parallel_size: int | None
) -> None:
    steps = asked.values.get("gradient_accumulation_steps")
    if steps is None:
        return
    name, rampup = "gradient_accumulation_steps of deepspeed.config", train.rampup_batch_size
    if rampup is not None:
        raise ValueError(
            f"{name} is {steps} but train.rampup_batch_size lets the batch grow from "
            f'{rampup.start} to {train.global_batch_size}: say "auto" in the JSON, or remove '
            "train.rampup_batch_size"
        )
    ranks = f" x {data_parallel_size} data-parallel ranks" if data_parallel_size is not None else ""
    per_step = train.micro_batch_size * steps * (data_parallel_size or 1)
    if train.global_batch_size % per_step or (ranks and train.global_batch_size != per_step):
        raise ValueError(
            f"{name} is {steps}, x train.micro_batch_size {train.micro_batch_size}{ranks} = "
            f"{per_step}, but train.global_batch_size is {train.global_batch_size}: change one of "
            'them, or say "auto" in the JSON'
        )


def _check_precision(precision: str, asked: UserSettings) -> None:
    enabled = {name: asked.values.get(f"{name}.enabled") for name in ("fp16", "bf16")}
    if all(enabled.values()):
        raise ValueError(
            "fp16.enabled and bf16.enabled of deepspeed.config are both true: keep one of them"
        )
    for name, on in enabled.items():
        # auto can resolve to bf16, but not to fp16.
        others = (name, "auto") if name == "bf16" else (name,)
        fits = precision == name if on else precision not in others
        if on is not None and not fits:
            advice = f"set the latter to {name}" if on else "say fp32, bf16 or fp16 there"
            raise ValueError(
                f"{name}.enabled of deepspeed.config is {str(on).lower()} but train.precision is "
                f'{precision}: {advice}, or say "auto" in the JSON'
            )


def _check_loss_scale(config: "RunConfig", asked: UserSettings) -> None:
    static = asked.values.get("fp16.loss_scale")
    if static:
        raise ValueError(
            f"fp16.loss_scale of deepspeed.config is {static}, one scale for the whole run, but "
            f"optim.loss_scale.initial is {config.optim.loss_scale.initial}, from which the scale "
            "moves: set the former to 0"
        )
    for key, name in SAME_IN_FP16.items():
        _same(asked, key, name, attrgetter(name)(config))
    power, initial = asked.values.get("fp16.initial_scale_power"), config.optim.loss_scale.initial
    if power is not None and power != math.log2(initial):
        raise ValueError(
            f"fp16.initial_scale_power of deepspeed.config is {power}, a first scale of "
            f"2^{power}, but optim.loss_scale.initial is {initial:g}: change one of them, or say "
            '"auto" in the JSON'
        )
    if asked.values.get("fp16.consecutive_hysteresis"):
        raise ValueError(
            "fp16.consecutive_hysteresis of deepspeed.config is true but "
            f"optim.loss_scale.hysteresis {config.optim.loss_scale.hysteresis} counts overflows "
            "since the scale last grew: set the former to false"
        )


def _check_optimizer(optim: OptimConfig, cpu_adam: str, asked: UserSettings) -> None:
    values = asked.values
    betas = (optim.adam_beta1, optim.adam_beta2)
    if values.get("optimizer.params.betas", betas) != betas:
        raise ValueError(
            "optimizer.params.betas of deepspeed.config is "
            f"{list(values['optimizer.params.betas'])} but optim.adam_beta1 and optim.adam_beta2 "
            f'are {list(betas)}: change one of them, or say "auto" in the JSON'
        )
    if values.get("optimizer.params.adam_w_mode") is False:
        raise ValueError(
            "optimizer.params.adam_w_mode of deepspeed.config is false, Adam with weight decay "
            f"in the gradient, but optim.weight_decay {optim.weight_decay} is decoupled as in "
            "AdamW: set the former to true"
        )
    style = optim.weight_decay_incr_style
    if "optimizer.params.weight_decay" in values and style != "constant":
        raise ValueError(
            "optimizer.params.weight_decay of deepspeed.config is "
            f"{values['optimizer.params.weight_decay']} but optim.weight_decay_incr_style is "
            f'{style}, which changes it: say "auto" in the JSON, or set the latter to constant'
        )
    offloaded = asked.device("offload_optimizer") != "none"
    for key, expected in (
        ("optimizer.params.torch_adam", "torch"),
        ("zero_force_ds_cpu_optimizer", "deepspeed"),
    ):
        if offloaded and values.get(key) and cpu_adam != expected:
            raise ValueError(
                f"{key} of deepspeed.config is true and the optimizer is offloaded but "
                f"deepspeed.cpu_adam is {cpu_adam}: set the latter to {expected}, or remove the "
                "former"
            )


_STYLES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
"""Equivalent optim.lr_decay_style of each scheduler."""
_SCHEDULE = (
    ("warmup_num_steps", "optim.lr_warmup_iters"),
    ("warmup_max_lr", "optim.lr"),
    ("total_num_steps", "optim.lr_decay_iters"),
    ("cos_min_ratio", "optim.min_lr / optim.lr"),
)
_WARM_UP = (
    ("warmup_type", "optim.lr_warmup_style"),
    ("warmup_min_lr", "optim.lr_warmup_init"),
    ("warmup_min_ratio", "optim.lr_warmup_init / optim.lr"),
)
"""Scheduler parameters and their names in the configuration; used only with a warm-up."""


def _check_scheduler(config: "RunConfig", asked: UserSettings) -> None:
    """Compare the scheduler with the configuration, using DeepSpeed's defaults for absent keys."""
    kind, optim = asked.values["scheduler.type"], config.optim
    style, warms_up = _STYLES[kind], config.lr_warmup_iters > 0
    if optim.lr_decay_style != style:
        raise ValueError(
            f"scheduler.type of deepspeed.config is {kind} but optim.lr_decay_style is "
            f"{optim.lr_decay_style}: set the latter to {style}, or remove scheduler, and optim "
            "describes the schedule"
        )
    resolved = {
        "optim.lr_warmup_iters": config.lr_warmup_iters,
        "optim.lr_decay_iters": config.lr_decay_iters,
        "optim.min_lr / optim.lr": optim.min_lr / optim.lr,
        "optim.lr_warmup_init / optim.lr": optim.lr_warmup_init / optim.lr,
    }
    defaults = pretraining_keys().definitions.schedulers[kind]
    floor = (("warmup_min_lr", "optim.min_lr"),) if kind == "WarmupDecayLR" else ()
    for parameter, name in (*_SCHEDULE, *floor, *(_WARM_UP if warms_up else ())):
        if parameter in defaults:
            configured = resolved[name] if name in resolved else attrgetter(name)(config)
            key = f"scheduler.params.{parameter}"
            _same(asked, key, name, configured, default=defaults[parameter])
    if floor and warms_up and optim.lr_warmup_init != optim.min_lr:
        raise ValueError(
            "scheduler.type of deepspeed.config is WarmupDecayLR, which starts and ends at one "
            f"rate, but optim.lr_warmup_init is {optim.lr_warmup_init} and optim.min_lr "
            f"{optim.min_lr}: set both to one value"
        )
