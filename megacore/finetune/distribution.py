"""The Accelerator of a fine-tuning: what the ranks divide, in which precision they compute, and nothing by accident."""

import copy
import importlib.util
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megacore.config.finetune import FinetuneConfig
from megacore.engine.deepspeed_join import join_ranks
from megacore.engine.deepspeed_setup import import_deepspeed
from megacore.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    from accelerate import Accelerator

MIXED_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
"""Accelerate's words for ours."""


def check_precision(config: FinetuneConfig, precision: str, device_type: str) -> None:
    """Raise ConfigError for a compute type that this machine has not; `precision` is resolved."""
    if precision == "fp16" and device_type != "cuda":
        raise ConfigError(
            f"train.precision is fp16, which needs a GPU, and this machine has none to fine-tune {config.name} on: set "
            "train.precision to auto"
        )


def build_accelerator(
    config: FinetuneConfig, *, precision: str, device: torch.device, total_steps: int
) -> "Accelerator":
    """The Accelerator for `launch.distributed` among the ranks that have joined, proven to be that and nothing else.

    With ZeRO-3 a model that is read by `from_pretrained` from here on, while this object lives, is divided among the
    ranks as it is read, so that no rank need hold all of it.

    Args:
        config: the fine-tuning.
        precision: fp32, bf16 or fp16, resolved.
        device: this rank's.
        total_steps: optimizer steps of the whole run.

    Raises:
        ConfigError: fp16 without a GPU, or a DeepSpeed JSON that contradicts the configuration.
        LaunchError: Accelerate came to another kind of distribution.
    """
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, DistributedType

    check_precision(config, precision, device.type)
    if importlib.util.find_spec("deepspeed") is not None:
        import_deepspeed()  # transformers and Accelerate import it where it is installed, and not as quietly
    _forget()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    arguments: dict[str, Any] = {"cpu": device.type == "cpu", "kwargs_handlers": [_ddp_arguments()]}
    if config.launch.distributed == "ddp":
        if not dist.is_initialized():
            os.environ.pop("LOCAL_RANK", None)  # else Accelerate makes a group of its own, on GPUs of NCCL alone
    else:
        if importlib.util.find_spec("deepspeed") is None:
            raise ConfigError(
                f"launch.distributed is {config.launch.distributed}, which needs DeepSpeed, and that is not installed: "
                "pip install megacore[deepspeed], or set launch.distributed to ddp"
            )
        settings = deepspeed_json(
            config, precision=precision, device_type=device.type, ranks=ranks, total_steps=total_steps
        )
        arguments = _deepspeed_arguments(settings, device)
        ranks = dist.get_world_size()
    accelerator = Accelerator(
        mixed_precision=MIXED_PRECISION[precision],
        gradient_accumulation_steps=config.train.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=config.seed),
        step_scheduler_with_optimizer=False,
        **arguments,
    )
    wanted = {DistributedType.DEEPSPEED}
    if config.launch.distributed == "ddp":
        several = DistributedType.MULTI_GPU if device.type == "cuda" else DistributedType.MULTI_CPU
        wanted = {several} if ranks > 1 else {DistributedType.NO, several}
    if accelerator.distributed_type not in wanted or accelerator.num_processes != ranks:
        raise LaunchError(
            f"launch.distributed is {config.launch.distributed} on {ranks} ranks and Accelerate came to "
            f"{accelerator.distributed_type.value} on {accelerator.num_processes}: unset environment variables of "
            "other launchers"
        )
    return accelerator


def _ddp_arguments() -> Any:
    """Let DDP look for weights that a loss does not depend on, as XLNet's for masks, and not wait for their gradients.

    Where it finds none, a line in the log says so.
    """
    from accelerate.utils import DistributedDataParallelKwargs

    return DistributedDataParallelKwargs(find_unused_parameters=True)


def _deepspeed_arguments(settings: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """For the Accelerator, once DeepSpeed knows the ranks: it looks at the environment, and on CPUs at little else."""
    from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    if device.type == "cpu":
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        os.environ["DS_ACCELERATOR"] = "cpu"
    join_ranks()
    backend = "nccl" if device.type == "cuda" else "gloo"
    return {
        "cpu": False,  # else Accelerate takes no notice of the plugin
        "deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=settings),
        "kwargs_handlers": [InitProcessGroupKwargs(backend=backend)],
    }


def _forget() -> None:
    """Clear what another launcher, or another Accelerator of this process, has left: there is one at a time."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]
    logging.getLogger("accelerate").setLevel(logging.ERROR)


STAGES = {"zero2": 2, "zero3": 3, "zero3-offload": 3}
"""ZeRO stage by `launch.distributed`."""
_SETTING = "launch.deepspeed_config"
_AUTO = "auto"
_BY_HIDDEN_SIZE = frozenset(
    f"zero_optimization.{name}"
    for name in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
)
"""What Accelerate fills in, since it depends on the model's hidden size."""
_ADAMS = ("adam", "adamw")
_BUCKET = int(25 * 2**20 / 4)
"""Numbers that travel at a time: 25 MiB of fp32, as DDP's. DeepSpeed's default takes 2 GB, however small the model."""


def deepspeed_json(
    config: FinetuneConfig, *, precision: str, device_type: str, ranks: int, total_steps: int
) -> dict[str, Any]:
    """Everything that DeepSpeed's engine is made with; of `auto` only what depends on the model's size is left.

    Args:
        config: the fine-tuning; its `launch.deepspeed_config` is an object by now, or None.
        precision: fp32, bf16 or fp16, resolved.
        device_type: cuda or cpu; on a CPU nothing is page-locked.
        ranks: of the job.
        total_steps: optimizer steps of the whole run, with which a learning rate schedule in the JSON ends.

    Raises:
        ConfigError: the JSON contradicts the configuration, or holds an `auto` that nothing fills.
    """
    given = config.launch.deepspeed_config
    if isinstance(given, str):
        raise ConfigError(f"{_SETTING} is {given!r}, a path: its content is what ranks take")
    values: dict[str, Any] = copy.deepcopy(given) if given is not None else {}
    _fill(values, _filled_in(config, precision, ranks, total_steps))
    _set_arithmetic(values, precision)
    _set_zero(values, config, device_type)
    _set_optimizer(values)
    _check(values, config, ranks)
    left = [name for name, value in _leaves(values) if value == _AUTO and name not in _BY_HIDDEN_SIZE]
    if left:
        raise ConfigError(f'{left[0]} of {_SETTING} is "auto", which nothing here fills in: give it a value')
    return values


def _filled_in(config: FinetuneConfig, precision: str, ranks: int, total_steps: int) -> dict[str, Any]:
    """What each `auto` stands for, by its dotted name."""
    train, optim = config.train, config.optim
    return {
        "train_micro_batch_size_per_gpu": train.micro_batch_size,
        "gradient_accumulation_steps": train.gradient_accumulation_steps,
        "train_batch_size": train.micro_batch_size * train.gradient_accumulation_steps * ranks,
        "gradient_clipping": optim.clip_grad,
        "fp16.enabled": precision == "fp16",
        "bf16.enabled": precision == "bf16",
        "fp16.loss_scale": 0,
        "fp16.initial_scale_power": 16,
        "zero_optimization.stage": STAGES[config.launch.distributed],
        "zero_optimization.offload_optimizer.device": _offload(config),
        "zero_optimization.offload_param.device": _offload(config),
        "optimizer.params.lr": optim.lr,
        "optimizer.params.betas": [optim.adam_beta1, optim.adam_beta2],
        "optimizer.params.eps": optim.adam_eps,
        "optimizer.params.weight_decay": optim.weight_decay,
        "optimizer.params.torch_adam": True,
        "optimizer.params.adam_w_mode": True,
        "scheduler.params.warmup_min_lr": 0.0,
        "scheduler.params.warmup_max_lr": optim.lr,
        # DeepSpeed takes no warm-up of 0 steps; of one step the first rate is the peak, too.
        "scheduler.params.warmup_num_steps": max(1, optim.warmup_steps),
        "scheduler.params.total_num_steps": total_steps,
    }


def _offload(config: FinetuneConfig) -> str:
    return "cpu" if config.launch.distributed == "zero3-offload" else "none"


def _fill(values: dict[str, Any], filled: dict[str, Any], prefix: str = "") -> None:
    for key, value in values.items():
        if isinstance(value, dict):
            _fill(value, filled, f"{prefix}{key}.")
        elif value == _AUTO and f"{prefix}{key}" in filled:
            values[key] = filled[f"{prefix}{key}"]
    if not prefix:
        for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"):
            values.setdefault(key, filled[key])
        values.setdefault("train_batch_size", filled["train_batch_size"])


def _set_arithmetic(values: dict[str, Any], precision: str) -> None:
    """fp16 with DeepSpeed's dynamic loss scale, bf16, or neither."""
    for name in ("fp16", "bf16"):
        block = values.setdefault(name, {})
        enabled = block.setdefault("enabled", precision == name)
        if enabled != (precision == name):
            raise ConfigError(
                f"{name}.enabled of {_SETTING} is {str(enabled).lower()} and train.precision is {precision}: set the "
                f'former to "auto", or train.precision to {name if enabled else "auto"}'
            )
    if precision == "fp16":
        values["fp16"].setdefault("auto_cast", True)


def _set_zero(values: dict[str, Any], config: FinetuneConfig, device_type: str) -> None:
    """Stage and offload of `launch.distributed`; nothing is compiled for an offloaded Adam, torch's updates it."""
    zero = values.setdefault("zero_optimization", {})
    stage = zero.setdefault("stage", STAGES[config.launch.distributed])
    zero["stage3_gather_16bit_weights_on_model_save"] = stage == 3
    if config.launch.deepspeed_config is None:
        blocks = {"offload_optimizer": _offload(config)} | ({"offload_param": _offload(config)} if stage == 3 else {})
        for name, device in blocks.items():
            zero[name] = {"device": device}
        zero |= dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), _BUCKET)
    for name in ("offload_optimizer", "offload_param"):
        if zero.get(name, {}).get("device", "none") == "none":
            zero.pop(name, None)
        else:
            zero[name]["pin_memory"] = device_type == "cuda" and zero[name].get("pin_memory", True)
    values["zero_allow_untested_optimizer"] = True
    values["zero_force_ds_cpu_optimizer"] = False


def _set_optimizer(values: dict[str, Any]) -> None:
    """Let torch's Adam stand for DeepSpeed's compiled ones: they make the same update, and ranks compile nothing."""
    optimizer = values.get("optimizer")
    if optimizer is None or str(optimizer.get("type", "")).lower() not in _ADAMS:
        return
    parameters = optimizer.setdefault("params", {})
    if parameters.setdefault("torch_adam", True) is not True:
        raise ConfigError(
            f"optimizer.params.torch_adam of {_SETTING} is false: DeepSpeed's own Adam would be compiled in every "
            "rank, which is not done here; leave it out, torch's Adam makes the same update"
        )


def _check(values: dict[str, Any], config: FinetuneConfig, ranks: int) -> None:
    """Refuse what would run otherwise than the configuration says, both sides named."""
    stage = values["zero_optimization"]["stage"]
    if stage != STAGES[config.launch.distributed]:
        raise ConfigError(
            f"zero_optimization.stage of {_SETTING} is {stage} and launch.distributed is {config.launch.distributed}: "
            "make them agree"
        )
    train = config.train
    ours = {
        "train_micro_batch_size_per_gpu": ("train.micro_batch_size", train.micro_batch_size),
        "gradient_accumulation_steps": ("train.gradient_accumulation_steps", train.gradient_accumulation_steps),
        "train_batch_size": (
            f"train.micro_batch_size x train.gradient_accumulation_steps x {ranks} ranks",
            train.micro_batch_size * train.gradient_accumulation_steps * ranks,
        ),
        "gradient_clipping": ("optim.clip_grad", config.optim.clip_grad),
    }
    for name, (setting, value) in ours.items():
        if values[name] != value:
            raise ConfigError(
                f'{name} of {_SETTING} is {values[name]} and {setting} is {value}: set the former to "auto"'
            )


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
