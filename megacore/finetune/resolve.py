"""How many processes a fine-tuning has; imports no torch."""

from megacore.config.finetune import FinetuneConfig
from megacore.errors import ConfigError
from megacore.foreign.accelerate import asks_for_cpu
from megacore.plan.hardware import Hardware
from megacore.plan.ranks import launched_ranks


def resolve_ranks(config: FinetuneConfig, hardware: Hardware) -> tuple[int, int]:
    """Ranks of the job and CPU threads of each.

    `launch.nproc_per_node: auto` means the hostfile's slots, else one rank per GPU, else one.

    Raises:
        ParallelLayoutError: there are more ranks than GPUs.
        ConfigError: the hostfile cannot be used, a scheduler's machines have no number of ranks, or Accelerate's YAML
            asks for CPUs where GPUs are visible.
    """
    accelerate = config.launch.accelerate_config
    if hardware.gpus and isinstance(accelerate, dict) and asks_for_cpu(accelerate):
        raise ConfigError(
            f"launch.accelerate_config asks for CPUs, and ranks take the {len(hardware.gpus)} GPUs that are visible: "
            "set CUDA_VISIBLE_DEVICES to -1, or use_cpu to false and distributed_type to another one than MULTI_CPU"
        )
    return launched_ranks(config.launch, hardware)
