"""The settings that DeepSpeed is given: its own JSON, written from the configuration."""

import importlib.util
import math
import sys
from typing import TYPE_CHECKING, Any

from megacore.config.deepspeed import Asked, asked_of
from megacore.config.deepspeed_checks import accumulation_type, check_deepspeed, is_compared
from megacore.errors import ConfigError
from megacore.foreign.deepspeed_keys import PACKAGES
from megacore.foreign.files import nested

if TYPE_CHECKING:
    from megacore.config.optim import LossScaleConfig
    from megacore.config.parallel import ParallelConfig
    from megacore.config.run import RunConfig
    from megacore.config.train import TrainConfig

NEVER = sys.maxsize
"""Steps between DeepSpeed's own log lines, which its pipeline engine must be told."""


def deepspeed_settings(
    config: "RunConfig", *, precision: str, device_type: str, data_parallel_size: int
) -> dict[str, Any]:
    """Everything for `deepspeed.initialize(config=...)`.

    There is no "auto" left, no optimizer and no scheduler.

    Args:
        config: the run.
        precision: fp32, bf16 or fp16, resolved.
        device_type: cuda or cpu; on a CPU nothing is page-locked.
        data_parallel_size: replicas of the model.

    Raises:
        ConfigError: the user's JSON contradicts the configuration, or asks for what cannot be done
            here.
    """
    try:
        check_deepspeed(config, data_parallel_size)
        asked = asked_of(config)
        accumulation = accumulation_type(asked, precision)
        _check_monitors(asked)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    passed = {key: value for key, value in asked.values.items() if not is_compared(key)}
    return nested(
        {
            "steps_per_print": NEVER,
            "zero_allow_untested_optimizer": True,
            # Which Adam an offloaded optimizer has is decided by deepspeed.cpu_adam.
            "zero_force_ds_cpu_optimizer": False,
            **_buckets(config.parallel, asked),
            **_without_idle_blocks(passed, asked, device_type),
            **_batch(config.train, data_parallel_size),
            **_precision(config.optim.loss_scale, precision),
            "data_types.grad_accum_dtype": accumulation,
            "communication_data_type": config.parallel.grad_reduce_dtype,
            "gradient_clipping": config.optim.clip_grad,
        }
    )


def _buckets(parallel: "ParallelConfig", asked: Asked) -> dict[str, int]:
    """The section's bucket of gradients.

    Where a JSON leaves it out, DeepSpeed has a default of its own.
    """
    if asked.in_file:
        return {}
    bucket = int(parallel.grad_reduce_bucket_mb * 2**20 / 4)
    return {"zero_optimization.reduce_bucket_size": bucket}


def _batch(train: "TrainConfig", data_parallel_size: int) -> dict[str, int]:
    """Of the whole global batch, which a ramp-up reaches at its end."""
    total, micro = train.global_batch_size, train.micro_batch_size
    return {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": total // (micro * data_parallel_size),
    }


def _precision(scale: "LossScaleConfig", precision: str) -> dict[str, Any]:
    if precision != "fp16":
        return {"fp16.enabled": False, "bf16.enabled": precision == "bf16"}
    return {
        "bf16.enabled": False,
        "fp16.enabled": True,
        "fp16.loss_scale": 0,
        "fp16.initial_scale_power": round(math.log2(scale.initial)),
        "fp16.loss_scale_window": scale.window,
        "fp16.hysteresis": scale.hysteresis,
        "fp16.consecutive_hysteresis": False,
        "fp16.min_loss_scale": int(scale.minimum),
    }


def _without_idle_blocks(passed: dict[str, Any], asked: Asked, device_type: str) -> dict[str, Any]:
    """What is passed on, without the blocks of an offload that there is none of."""
    kept = dict(passed)
    for what in ("offload_optimizer", "offload_param"):
        block = f"zero_optimization.{what}"
        if asked.device(what) == "none":
            kept = {key: value for key, value in kept.items() if not key.startswith(f"{block}.")}
        elif device_type == "cpu":
            kept[f"{block}.pin_memory"] = False
    return kept


def is_installed(package: str) -> bool:
    """Whether a package could be imported."""
    return importlib.util.find_spec(package) is not None


def _check_monitors(asked: Asked) -> None:
    """Raise ValueError for a monitor whose package is not there.

    DeepSpeed would end every rank on its import.
    """
    for name, package in PACKAGES.items():
        if asked.values.get(f"{name}.enabled") and not is_installed(package):
            raise ValueError(
                f"{name}.enabled of deepspeed.config is true but the package {package} is not "
                "installed: install it, or set the former to false"
            )
