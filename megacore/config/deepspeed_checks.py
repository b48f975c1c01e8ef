"""What DeepSpeed is asked for, checked against itself and the rest of the configuration."""

import math
from typing import TYPE_CHECKING

from megacore.config.deepspeed_agree import check_agreement
from megacore.foreign.deepspeed import Asked, asked_of

if TYPE_CHECKING:
    from megacore.config.run import RunConfig

_STAGE = "zero_optimization.stage"
_STAGE_3_ONLY = (
    "sub_group_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_use_all_reduce_for_fetch_params",
    "stage3_allgather_sequential",
)


def check_deepspeed(config: "RunConfig", data_parallel_size: int | None) -> None:
    """Raise ValueError for what the engine deepspeed cannot do as it is asked; of the engine native nothing is asked.

    Args:
        config: the run.
        data_parallel_size: None where it is not known yet.
    """
    if config.engine == "native":
        return
    asked = asked_of(config)
    _check_stage(config, asked)
    _check_offload(config, asked)
    _check_recompute(config, asked)
    if config.train.precision != "auto":
        accumulation_type(asked, config.train.precision)
    if asked.in_file:
        check_agreement(config, asked, data_parallel_size)
    if config.train.precision == "fp16":
        _check_scale(config, asked)


def accumulation_type(asked: Asked, precision: str) -> str:
    """Type in which the gradients of micro batches add up: fp32 where DeepSpeed has it, which stage 0 has not.

    Raises ValueError when the JSON asks for another one than can be.
    """
    best = "fp32" if asked.stage > 0 else precision
    wanted = str(asked.values.get("data_types.grad_accum_dtype", best))
    if wanted not in (best, precision):
        raise ValueError(
            f"data_types.grad_accum_dtype of deepspeed.config is {wanted} but with ZeRO stage {asked.stage} and "
            f"precision {precision} gradients add up in {' or '.join(dict.fromkeys((best, precision)))}: use that, or "
            "ZeRO stage 1 to 3"
        )
    return wanted


def _check_stage(config: "RunConfig", asked: Asked) -> None:
    stage = asked.stage
    if stage == 0 and config.parallel.use_distributed_optimizer:
        raise ValueError(
            f"{asked.named(_STAGE)} is 0 but parallel.use_distributed_optimizer is true, which is stage 1: change one "
            "of them"
        )
    for name in _STAGE_3_ONLY if stage < 3 else ():
        key = f"zero_optimization.{name}"
        if key in asked.values:
            raise ValueError(
                f"{asked.named(key)} is {str(asked.values[key]).lower()} but {asked.named(_STAGE)} is {stage}, and "
                "only stage 3 divides weights: set it to 3, or remove the former"
            )
    _check_buckets(asked)


def _check_buckets(asked: Asked) -> None:
    name = "zero_optimization.allgather_bucket_size"
    size = asked.values.get(name)
    if size is not None and asked.stage == 3:
        raise ValueError(
            f"{asked.named(name)} is {size} but {asked.named(_STAGE)} is 3, where weights are gathered as they are "
            "used: remove the former"
        )
    if size is not None and size % 2:
        raise ValueError(
            f"{asked.named(name)} is {size}, which is odd: DeepSpeed takes elements in pairs, use {size + 1}"
        )
    for name in ("overlap_comm", "reduce_bucket_size", "allgather_bucket_size"):
        key = f"zero_optimization.{name}"
        if asked.stage == 0 and not asked.in_file and key in asked.values:
            raise ValueError(
                f"{asked.named(key)} is {str(asked.values[key]).lower()} but {asked.named(_STAGE)} is 0, which has no "
                "such buckets: remove the former, or choose stage 1, 2 or 3"
            )


def _check_offload(config: "RunConfig", asked: Asked) -> None:
    devices = {what: asked.device(what) for what in ("offload_optimizer", "offload_param")}
    for what, device in devices.items():
        key, least = f"zero_optimization.{what}.device", 3 if what == "offload_param" or device == "nvme" else 1
        if device != "none" and asked.stage < least:
            raise ValueError(
                f"{asked.named(key)} is {device} but {asked.named(_STAGE)} is {asked.stage}: it needs stage "
                f"{'3' if least == 3 else '1, 2 or 3'}"
            )
        path = f"zero_optimization.{what}.nvme_path"
        if device == "nvme" and path not in asked.values:
            raise ValueError(
                f"{asked.named(key)} is nvme but {asked.named(path)} is missing: name a directory on a local disk"
            )
    section = config.deepspeed
    if section.nvme_path is not None and "nvme" not in devices.values():
        raise ValueError(
            f"deepspeed.nvme_path is {section.nvme_path} but nothing is offloaded to nvme: remove it, or set "
            "deepspeed.offload_optimizer or deepspeed.offload_param to nvme"
        )
    if not section.pin_memory and not asked.in_file and set(devices.values()) == {"none"}:
        raise ValueError("deepspeed.pin_memory is false but nothing is offloaded: remove it")
    if section.cpu_adam != "auto" and devices["offload_optimizer"] == "none":
        raise ValueError(
            f"deepspeed.cpu_adam is {section.cpu_adam} but the optimizer is not offloaded: remove it, or set "
            "deepspeed.offload_optimizer to cpu"
        )
    disk = sorted(key for key in asked.values if key.startswith("aio."))
    if disk and "nvme" not in devices.values():
        raise ValueError(
            f"{asked.named(disk[0])} is {asked.values[disk[0]]} but nothing is offloaded to nvme: remove the block aio"
        )


def _check_recompute(config: "RunConfig", asked: Asked) -> None:
    block = "activation_checkpointing"
    wanted = {key: value for key, value in asked.values.items() if key.startswith(block) and value}
    for key, value in wanted.items():
        if config.train.recompute != "full":
            raise ValueError(
                f"{asked.named(key)} is {str(value).lower()} but train.recompute is {config.train.recompute}: set the "
                "latter to full, or remove the former"
            )
    divided, tensor = f"{block}.partition_activations", config.parallel.tensor_model_parallel_size
    if divided in wanted and tensor == 1:
        raise ValueError(
            f"{asked.named(divided)} is true but parallel.tensor_model_parallel_size is 1: there are no ranks to "
            "divide activations, remove the former"
        )
    if divided in wanted and config.parallel.sequence_parallel:
        raise ValueError(
            f"{asked.named(divided)} is true but parallel.sequence_parallel is true, with which tensor-parallel ranks "
            "keep a part of each layer's input already: remove the former"
        )
    buffer = f"{block}.contiguous_memory_optimization"
    for needed in (divided, f"{block}.number_checkpoints"):
        if buffer in wanted and needed not in wanted:
            raise ValueError(f"{asked.named(buffer)} is true without {needed}: give both, or neither")


def _check_scale(config: "RunConfig", asked: Asked) -> None:
    """DeepSpeed scales losses with ZeRO alone, from a power of two on and down to an integer."""
    scale = config.optim.loss_scale
    if math.frexp(scale.initial)[0] != 0.5 or scale.initial < 1:
        raise ValueError(
            f"optim.loss_scale.initial is {scale.initial:g} but engine is deepspeed, whose first loss scale is a power "
            f"of two: use {2.0 ** max(0, round(math.log2(scale.initial))):g}"
        )
    if scale.minimum != int(scale.minimum):
        raise ValueError(
            f"optim.loss_scale.minimum is {scale.minimum:g} but engine is deepspeed, whose least loss scale is an "
            f"integer: use {max(1, round(scale.minimum))}"
        )
    if asked.stage == 0:
        raise ValueError(
            f"train.precision is fp16 but {asked.named(_STAGE)} is 0, where DeepSpeed 0.19 divides gradients by a loss "
            "scale that it has not multiplied the loss by: use stage 1, 2 or 3, bf16, or engine native"
        )
