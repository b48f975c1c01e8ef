"""Whether a user's DeepSpeed JSON says the same as the rest of the configuration."""

import math
from collections.abc import Callable, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

from megacore.foreign.deepspeed import Asked

if TYPE_CHECKING:
    from megacore.config.run import RunConfig

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
"""Keys of the JSON, and the values of the configuration that they must equal."""
SAME_IN_FP16 = {
    "fp16.loss_scale_window": "optim.loss_scale.window",
    "fp16.hysteresis": "optim.loss_scale.hysteresis",
    "fp16.min_loss_scale": "optim.loss_scale.minimum",
}
"""The same for what counts with precision fp16 alone."""


def check_agreement(config: "RunConfig", asked: Asked, data_parallel_size: int | None) -> None:
    """Raise ValueError for the first value of the JSON that the configuration contradicts, with both.

    Args:
        config: the run.
        asked: its JSON, read.
        data_parallel_size: None where it is not known yet.
    """
    for key, name in SAME.items():
        _same(asked, key, name, _value(config, name))
    _check_accumulation(config, asked, data_parallel_size)
    _check_precision(config, asked)
    if config.train.precision == "fp16":
        _check_loss_scale(config, asked)
    _check_optimizer(config, asked)
    if "scheduler.type" in asked.values:
        _SCHEDULERS[asked.values["scheduler.type"]](config, asked)


def _value(config: "RunConfig", name: str) -> Any:
    return reduce(getattr, name.split("."), config)


def _same(asked: Asked, key: str, name: str, ours: Any, *, default: Any = None) -> None:
    """Raise ValueError unless a key is absent or says what the configuration does.

    Args:
        asked: the JSON.
        key: of the JSON.
        name: of the configuration.
        ours: its value there.
        default: what DeepSpeed takes when the key is absent; None where nothing follows from that.
    """
    value = asked.values.get(key, None if key in asked.autos else default)
    if value is None or value == ours:
        return
    if isinstance(value, float) and isinstance(ours, float) and math.isclose(value, ours, rel_tol=1e-9):
        return
    absent = "" if key in asked.values else " by DeepSpeed's default"
    raise ValueError(
        f'{key} of deepspeed.config is {value}{absent} but {name} is {ours}: change one of them, or say "auto" in the '
        "JSON"
    )


def _check_accumulation(config: "RunConfig", asked: Asked, data_parallel_size: int | None) -> None:
    steps, train = asked.values.get("gradient_accumulation_steps"), config.train
    if steps is None:
        return
    name, rampup = "gradient_accumulation_steps of deepspeed.config", train.rampup_batch_size
    if rampup is not None:
        raise ValueError(
            f"{name} is {steps} but train.rampup_batch_size lets the batch grow from {rampup.start} to "
            f'{train.global_batch_size}: say "auto" in the JSON, or remove train.rampup_batch_size'
        )
    ranks = f" x {data_parallel_size} data-parallel ranks" if data_parallel_size is not None else ""
    per_step = train.micro_batch_size * steps * (data_parallel_size or 1)
    if train.global_batch_size % per_step or (ranks and train.global_batch_size != per_step):
        raise ValueError(
            f"{name} is {steps}, x train.micro_batch_size {train.micro_batch_size}{ranks} = {per_step}, but "
            f'train.global_batch_size is {train.global_batch_size}: change one of them, or say "auto" in the JSON'
        )


def _check_precision(config: "RunConfig", asked: Asked) -> None:
    ours = config.train.precision
    enabled = {name: asked.values.get(f"{name}.enabled") for name in ("fp16", "bf16")}
    if all(enabled.values()):
        raise ValueError("fp16.enabled and bf16.enabled of deepspeed.config are both true: keep one of them")
    for name, on in enabled.items():
        # auto never becomes fp16, but may become bf16.
        fits = ours == name if on else ours not in ((name, "auto") if name == "bf16" else (name,))
        if on is not None and not fits:
            advice = f"set the latter to {name}" if on else "say fp32, bf16 or fp16 there"
            raise ValueError(
                f"{name}.enabled of deepspeed.config is {str(on).lower()} but train.precision is {ours}: {advice}, or "
                'say "auto" in the JSON'
            )


def _check_loss_scale(config: "RunConfig", asked: Asked) -> None:
    static = asked.values.get("fp16.loss_scale")
    if static:
        raise ValueError(
            f"fp16.loss_scale of deepspeed.config is {static}, one scale for the whole run, but "
            f"optim.loss_scale.initial is {config.optim.loss_scale.initial}, from which the scale moves: set the "
            "former to 0"
        )
    for key, name in SAME_IN_FP16.items():
        _same(asked, key, name, _value(config, name))
    power, initial = asked.values.get("fp16.initial_scale_power"), config.optim.loss_scale.initial
    if power is not None and power != math.log2(initial):
        raise ValueError(
            f"fp16.initial_scale_power of deepspeed.config is {power}, a first scale of 2^{power}, but "
            f'optim.loss_scale.initial is {initial:g}: change one of them, or say "auto" in the JSON'
        )
    if asked.values.get("fp16.consecutive_hysteresis"):
        raise ValueError(
            "fp16.consecutive_hysteresis of deepspeed.config is true but optim.loss_scale.hysteresis "
            f"{config.optim.loss_scale.hysteresis} counts overflows since the scale last grew: set the former to false"
        )


def _check_optimizer(config: "RunConfig", asked: Asked) -> None:
    values, optim = asked.values, config.optim
    betas = (optim.adam_beta1, optim.adam_beta2)
    if values.get("optimizer.params.betas", betas) != betas:
        raise ValueError(
            f"optimizer.params.betas of deepspeed.config is {list(values['optimizer.params.betas'])} but "
            f'optim.adam_beta1 and optim.adam_beta2 are {list(betas)}: change one of them, or say "auto" in the JSON'
        )
    if values.get("optimizer.params.adam_w_mode") is False:
        raise ValueError(
            "optimizer.params.adam_w_mode of deepspeed.config is false, Adam with weight decay in the gradient, but "
            f"optim.weight_decay {optim.weight_decay} is decoupled as in AdamW: set the former to true"
        )
    style = optim.weight_decay_incr_style
    if "optimizer.params.weight_decay" in values and style != "constant":
        raise ValueError(
            f"optimizer.params.weight_decay of deepspeed.config is {values['optimizer.params.weight_decay']} but "
            f'optim.weight_decay_incr_style is {style}, which changes it: say "auto" in the JSON, or set the latter to '
            "constant"
        )
    offloaded, adam = asked.device("offload_optimizer") != "none", config.deepspeed.cpu_adam
    for key, wanted in (("optimizer.params.torch_adam", "torch"), ("zero_force_ds_cpu_optimizer", "deepspeed")):
        if offloaded and values.get(key) and adam != wanted:
            raise ValueError(
                f"{key} of deepspeed.config is true and the optimizer is offloaded but deepspeed.cpu_adam is {adam}: "
                f"set the latter to {wanted}, or remove the former"
            )


def _check_style(config: "RunConfig", kind: str, style: str) -> None:
    if config.optim.lr_decay_style != style:
        raise ValueError(
            f"scheduler.type of deepspeed.config is {kind} but optim.lr_decay_style is {config.optim.lr_decay_style}: "
            f"set the latter to {style}, or remove scheduler, and optim describes the schedule"
        )


def _check_warmup(config: "RunConfig", asked: Asked) -> None:
    _same(asked, "scheduler.params.warmup_num_steps", "optim.lr_warmup_iters", config.lr_warmup_iters, default=1000)
    if config.lr_warmup_iters > 0:
        _same(
            asked,
            "scheduler.params.warmup_type",
            "optim.lr_warmup_style",
            config.optim.lr_warmup_style,
            default="log",
        )


def _check_constant(config: "RunConfig", asked: Asked) -> None:
    """WarmupLR: from warmup_min_lr to the rate, where it stays."""
    _check_style(config, "WarmupLR", "constant")
    _check_warmup(config, asked)
    _same(asked, "scheduler.params.warmup_max_lr", "optim.lr", config.optim.lr)
    if config.lr_warmup_iters > 0:
        _same(asked, "scheduler.params.warmup_min_lr", "optim.lr_warmup_init", config.optim.lr_warmup_init, default=0.0)


def _check_linear(config: "RunConfig", asked: Asked) -> None:
    """WarmupDecayLR: from warmup_min_lr to warmup_max_lr and back to warmup_min_lr."""
    _check_style(config, "WarmupDecayLR", "linear")
    _check_warmup(config, asked)
    optim, floor = config.optim, "scheduler.params.warmup_min_lr"
    _same(asked, "scheduler.params.warmup_max_lr", "optim.lr", optim.lr, default=1e-3)
    _same(asked, "scheduler.params.total_num_steps", "optim.lr_decay_iters", config.lr_decay_iters)
    _same(asked, floor, "optim.min_lr", optim.min_lr, default=0.0)
    if config.lr_warmup_iters > 0:
        _same(asked, floor, "optim.lr_warmup_init", optim.lr_warmup_init, default=0.0)
        if optim.lr_warmup_init != optim.min_lr:
            raise ValueError(
                f"scheduler.type of deepspeed.config is WarmupDecayLR, which starts and ends at one rate, but "
                f"optim.lr_warmup_init is {optim.lr_warmup_init} and optim.min_lr {optim.min_lr}: set both to one value"
            )


def _check_cosine(config: "RunConfig", asked: Asked) -> None:
    """WarmupCosineLR: shares of the optimizer's rate."""
    _check_style(config, "WarmupCosineLR", "cosine")
    _check_warmup(config, asked)
    optim = config.optim
    _same(asked, "scheduler.params.total_num_steps", "optim.lr_decay_iters", config.lr_decay_iters)
    ratio = "scheduler.params.cos_min_ratio"
    _same(asked, ratio, "optim.min_lr / optim.lr", optim.min_lr / optim.lr, default=1e-4)
    if config.lr_warmup_iters > 0:
        first = "scheduler.params.warmup_min_ratio"
        _same(asked, first, "optim.lr_warmup_init / optim.lr", optim.lr_warmup_init / optim.lr, default=0.0)


_SCHEDULERS: Mapping[str, Callable[["RunConfig", Asked], None]] = {
    "WarmupLR": _check_constant,
    "WarmupDecayLR": _check_linear,
    "WarmupCosineLR": _check_cosine,
}
