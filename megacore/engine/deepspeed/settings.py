"""DeepSpeed's JSON settings, generated from the configuration."""

import importlib.util
import math
import sys
from typing import TYPE_CHECKING, Any

from megacore.config.deepspeed import UserSettings, user_settings_of
from megacore.config.deepspeed_checks import accumulation_type, check_deepspeed, is_compared
from megacore.errors import ConfigError
from megacore.foreign.files import nested

if TYPE_CHECKING:
    from megacore.config.optim import LossScaleConfig
    from megacore.config.parallel import ParallelConfig
    from megacore.config.run import RunConfig
    from megacore.config.train import TrainConfig

NEVER = sys.maxsize
"""Steps between DeepSpeed's log lines that disable them; its pipeline engine requires a value."""
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
"""Package that each of DeepSpeed's monitors needs."""


def deepspeed_settings(
    config: "RunConfig", *, precision: str, device_type: str, data_parallel_size: int
) -> dict[str, Any]:
    """Return the settings for `deepspeed.initialize(config=...)`.

    They contain no "auto", no optimizer and no scheduler.

    Args:
        config: configuration of the run.
        precision: fp32, bf16 or fp16, resolved.
        device_type: cuda or cpu; on a CPU no memory is page-locked.
        data_parallel_size: number of model replicas.

    Raises:
        ConfigError: the user's JSON contradicts the configuration, or requests something impossible
            here.
    """
    try:
        check_deepspeed(config, data_parallel_size)
        user_settings = user_settings_of(config)
        accumulation = accumulation_type(user_settings, precision)
        _check_monitors(user_settings)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    passed = {key: value for key, value in user_settings.values.items() if not is_compared(key)}
    return nested(
        {
            "steps_per_print": NEVER,
            "zero_allow_untested_optimizer": True,
            # deepspeed.cpu_adam selects the Adam of an offloaded optimizer.
            "zero_force_ds_cpu_optimizer": False,
            **_buckets(config.parallel, user_settings),
            **_without_idle_blocks(passed, user_settings, device_type),
            **_batch(config.train, data_parallel_size),
            **_precision(config.optim.loss_scale, precision),
            "data_types.grad_accum_dtype": accumulation,
            "communication_data_type": config.parallel.grad_reduce_dtype,
            "gradient_clipping": config.optim.clip_grad,
        }
    )


def _buckets(parallel: "ParallelConfig", user_settings: UserSettings) -> dict[str, int]:
    """Return the gradient bucket size of the configuration's section.

    If a user's JSON omits it, DeepSpeed's default applies.
    """
    if user_settings.in_file:
        return {}
    bucket = int(parallel.grad_reduce_bucket_mb * 2**20 / 4)
    return {"zero_optimization.reduce_bucket_size": bucket}


def _batch(train: "TrainConfig", data_parallel_size: int) -> dict[str, int]:
    """Return the batch settings of the full global batch, which a ramp-up reaches at its end."""
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


def _without_idle_blocks(
    passed: dict[str, Any], user_settings: UserSettings, device_type: str
) -> dict[str, Any]:
    """Return the settings without the blocks of an unused offload."""
    settings = dict(passed)
    for target in ("offload_optimizer", "offload_param"):
        block = f"zero_optimization.{target}"
        if user_settings.device(target) == "none":
            settings = {
                key: value for key, value in settings.items() if not key.startswith(f"{block}.")
            }
        elif device_type == "cpu":
            settings[f"{block}.pin_memory"] = False
    return settings


def is_installed(package: str) -> bool:
    """Return True if a package can be imported."""
    return importlib.util.find_spec(package) is not None


def _check_monitors(user_settings: UserSettings) -> None:
    """Raise ValueError for a monitor whose package is not installed.

    DeepSpeed would otherwise end every rank on its import.
    """
    for name, package in _PACKAGES.items():
        if user_settings.values.get(f"{name}.enabled") and not is_installed(package):
            raise ValueError(
                f"{name}.enabled of deepspeed.config is true but the package {package} is not "
                "installed: install it, or set the former to false"
            )
