"""What helps a fine-tuning that runs out of memory; imports no torch."""

from megacore.config.finetune import DISTRIBUTIONS, FinetuneConfig


def memory_advice(config: FinetuneConfig) -> str:
    """What to change, what costs least first."""
    train, distributed = config.train, config.launch.distributed
    advice = []
    if train.micro_batch_size > 1:
        half = train.micro_batch_size // 2
        advice.append(
            f"lower train.micro_batch_size (now {train.micro_batch_size}; {half} with "
            f"train.gradient_accumulation_steps {2 * train.gradient_accumulation_steps} learns as much per step)"
        )
    if not train.gradient_checkpointing:
        advice.append("set train.gradient_checkpointing to true")
    further = DISTRIBUTIONS[DISTRIBUTIONS.index(distributed) + 1 :]
    if further:
        advice.append(f"set launch.distributed (now {distributed}) to {' or '.join(further)}")
    if train.eval_batch_size > 1:
        advice.append(f"lower train.eval_batch_size (now {train.eval_batch_size}) if it was an evaluation")
    return f"{'; '.join([*advice, '--find-batch-size tells what fits'])}"
