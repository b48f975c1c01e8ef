"""The Accelerator of a fine-tuning: what the ranks divide, in which precision they compute, and nothing by accident."""

import importlib.util
import logging
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megacore.config.finetune import FinetuneConfig
from megacore.engine.deepspeed_join import join_ranks
from megacore.engine.deepspeed_setup import import_deepspeed
from megacore.errors import ConfigError, LaunchError
from megacore.finetune.deepspeed_json import deepspeed_json

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
