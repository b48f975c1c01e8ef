"""What DeepSpeed is told beside the rest of the configuration (engine deepspeed)."""

from typing import Any, Literal

from megacore.config.base import Section, unkeyed

OffloadDevice = Literal["none", "cpu", "nvme"]


class DeepSpeedConfig(Section):
    """ZeRO (Rajbhandari et al. 2020), offload (Ren et al. 2021) and buckets of the engine deepspeed.

    Sizes are in elements, as in DeepSpeed's own files; null leaves a value to DeepSpeed. With engine native all
    of it is left alone, so that one value changes the engine.
    """

    config: str | dict[str, Any] | None = unkeyed(None)
    """DeepSpeed's own JSON: a path, or its content; it takes the place of the fields below up to cpu_checkpointing,
    which fill what it leaves to "auto"."""
    zero_stage: Literal[0, 1, 2, 3] | None = unkeyed(None)
    """What the replicas divide: 1 the optimizer's state, 2 gradients too, 3 weights too; null means 1 with
    parallel.use_distributed_optimizer, else 0."""
    offload_optimizer: OffloadDevice = unkeyed("none")
    """Where the optimizer's state and its arithmetic go, with ZeRO stage 1 to 3; nvme with stage 3 alone."""
    offload_param: OffloadDevice = unkeyed("none")
    """Where weights lie while they are not used, with ZeRO stage 3."""
    nvme_path: str | None = unkeyed(None, min_length=1)
    """Directory on a local NVMe disk for what is offloaded there."""
    pin_memory: bool = unkeyed(True)
    """Whether what is offloaded to the CPU lies in page-locked memory; without a GPU nothing is locked."""
    overlap_comm: bool | None = unkeyed(None)
    """Whether gradients travel while backward runs; null means with stage 3 alone."""
    reduce_bucket_size: int | None = unkeyed(None, gt=0)
    """Gradients that travel at a time; null means parallel.grad_reduce_bucket_mb."""
    allgather_bucket_size: int | None = unkeyed(None, gt=0)
    """Updated weights that travel at a time, with ZeRO stage 1 and 2."""
    sub_group_size: int | None = unkeyed(None, gt=0)
    """Weights that are updated at a time, with ZeRO stage 3."""
    stage3_prefetch_bucket_size: int | None = unkeyed(None, ge=0)
    """Weights that are gathered ahead of their use."""
    stage3_param_persistence_threshold: int | None = unkeyed(None, ge=0)
    """Parameters with fewer elements are not divided."""
    stage3_max_live_parameters: int | None = unkeyed(None, ge=0)
    """Gathered weights that a rank holds at most."""
    stage3_max_reuse_distance: int | None = unkeyed(None, ge=0)
    """Weights that are used again within so many others stay gathered."""
    partition_activations: bool = unkeyed(False)
    """Whether tensor-parallel ranks divide what full recomputation keeps of each layer."""
    cpu_checkpointing: bool = unkeyed(False)
    """Whether what full recomputation keeps lies in main memory."""
    cpu_adam: Literal["auto", "deepspeed", "torch"] = unkeyed("auto")
    """Adam of an offloaded optimizer: DeepSpeedCPUAdam, which is compiled once before the training, or torch's; auto
    takes DeepSpeed's where it builds."""
    build_timeout: float = unkeyed(600.0, gt=0)
    """Seconds in which each of DeepSpeed's operators must be compiled."""
