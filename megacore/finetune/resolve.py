"""How many processes a fine-tuning has; imports no torch."""

import math
from dataclasses import dataclass

from megacore.config.finetune import DISTRIBUTIONS, FinetuneConfig, FinetuneTrainConfig
from megacore.errors import ConfigError
from megacore.foreign.accelerate import asks_for_cpu
from megacore.hardware import Hardware
from megacore.plan.layouts import launched_ranks


def resolve_ranks(config: FinetuneConfig, hardware: Hardware) -> tuple[int, int]:
    """Ranks of the job and CPU threads of each.

    `launch.nproc_per_node: auto` means the hostfile's slots, else one rank per GPU, else one.

    Raises:
        ParallelLayoutError: there are more ranks than GPUs.
        ConfigError: the hostfile cannot be used, a scheduler's machines have no number of ranks, or
            Accelerate's YAML asks for CPUs where GPUs are visible.
    """
    accelerate = config.launch.accelerate_config
    if hardware.gpus and isinstance(accelerate, dict) and asks_for_cpu(accelerate):
        raise ConfigError(
            f"launch.accelerate_config asks for CPUs, and ranks take the {len(hardware.gpus)} GPUs "
            "that are visible: set CUDA_VISIBLE_DEVICES to -1, or use_cpu to false and "
            "distributed_type to another one than MULTI_CPU"
        )
    return launched_ranks(config.launch, hardware)


@dataclass(frozen=True)
class Schedule:
    """The run's length."""

    batches_per_epoch: int
    """Forward passes of each rank; the last ones of an epoch are filled up with its first
    samples."""
    steps_per_epoch: int
    """Optimizer steps; the last one may be of fewer forward passes than the others."""
    total_steps: int
    """Optimizer steps of the whole run."""

    @classmethod
    def of(cls, train: FinetuneTrainConfig, samples: int, ranks: int) -> "Schedule":
        """The course of a training split of `samples` (at least one) on `ranks`."""
        batches = math.ceil(math.ceil(samples / train.micro_batch_size) / ranks)
        steps = math.ceil(batches / train.gradient_accumulation_steps)
        return cls(batches, steps, train.max_steps or steps * train.num_epochs)

    @property
    def epochs(self) -> int:
        """Passes over the training split, a last one that is cut short included."""
        return math.ceil(self.total_steps / self.steps_per_epoch)


def memory_advice(config: FinetuneConfig) -> str:
    """What to change, what costs least first."""
    train, distributed = config.train, config.launch.distributed
    advice = []
    if train.micro_batch_size > 1:
        half = train.micro_batch_size // 2
        advice.append(
            f"lower train.micro_batch_size (now {train.micro_batch_size}; {half} with "
            f"train.gradient_accumulation_steps {2 * train.gradient_accumulation_steps} learns as "
            "much per step)"
        )
    if not train.gradient_checkpointing:
        advice.append("set train.gradient_checkpointing to true")
    further = (
        DISTRIBUTIONS[DISTRIBUTIONS.index(distributed) + 1 :]
        if distributed in DISTRIBUTIONS
        else ()
    )
    if further:
        advice.append(f"set launch.distributed (now {distributed}) to {' or '.join(further)}")
    if train.eval_batch_size > 1:
        advice.append(
            f"lower train.eval_batch_size (now {train.eval_batch_size}) if it was an evaluation"
        )
    return f"{'; '.join([*advice, '--find-batch-size tells what fits'])}"
