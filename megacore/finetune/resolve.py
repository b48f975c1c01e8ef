"""Number of processes and length of a fine-tuning; imports no torch."""

import math
from dataclasses import dataclass

from megacore.config.finetune import DISTRIBUTIONS, FinetuneConfig, FinetuneTrainConfig
from megacore.errors import ConfigError
from megacore.foreign.accelerate import asks_for_cpu
from megacore.hardware import Hardware
from megacore.plan.layouts import launched_ranks


def resolve_ranks(config: FinetuneConfig, hardware: Hardware) -> tuple[int, int]:
    """Return the number of ranks of the job and the CPU threads of each.

    `launch.nproc_per_node: auto` means the hostfile's slots, otherwise one rank per GPU, otherwise
    one rank.

    Raises:
        ParallelLayoutError: there are more ranks than GPUs.
        ConfigError: the hostfile cannot be used, the number of ranks is unknown on a scheduler's
            hosts, or Accelerate's YAML asks for CPUs although GPUs are visible.
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
    """Length of a run."""

    batches_per_epoch: int
    """Forward passes of each rank per epoch; the last batches are filled up with the epoch's
    first samples."""
    steps_per_epoch: int
    """Optimizer steps per epoch; the last step may have fewer forward passes than the others."""
    total_steps: int
    """Optimizer steps of the whole run."""

    @classmethod
    def of(cls, train: FinetuneTrainConfig, samples: int, ranks: int) -> "Schedule":
        """Return the schedule for a training split of `samples` (at least one) on `ranks`."""
        batches = math.ceil(math.ceil(samples / train.micro_batch_size) / ranks)
        steps = math.ceil(batches / train.gradient_accumulation_steps)
        return cls(batches, steps, train.max_steps or steps * train.num_epochs)

    @property
    def epochs(self) -> int:
        """Number of passes over the training split, including an incomplete last pass."""
        return math.ceil(self.total_steps / self.steps_per_epoch)


def check_warmup(config: FinetuneConfig, schedule: Schedule) -> None:
    """Raise ConfigError if the run ends before its learning rate has reached the peak."""
    warmup, total = config.optim.warmup_steps, schedule.total_steps
    if warmup >= total:
        raise ConfigError(
            f"optim.warmup_steps {warmup} does not end before the {total} steps of "
            f"{schedule.epochs} epochs, so that the learning rate never reaches optim.lr "
            f"{config.optim.lr:g}: set it below {total}, or raise train.num_epochs"
        )


def memory_advice(config: FinetuneConfig) -> str:
    """Return the settings that save memory, the least costly first."""
    train, distributed = config.train, config.launch.distributed
    advice = []
    if train.micro_batch_size > 1:
        half, odd = divmod(train.micro_batch_size, 2)
        equal = (
            f"; {half} with train.gradient_accumulation_steps "
            f"{2 * train.gradient_accumulation_steps} learns as much per step"
        )
        advice.append(
            f"lower train.micro_batch_size (now {train.micro_batch_size}{'' if odd else equal})"
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
