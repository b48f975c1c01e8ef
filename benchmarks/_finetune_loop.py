"""One rank of a fine-tuning written by hand, in the style of Accelerate's tutorial.

It reads the same job file as a real fine-tuning.

    python -m benchmarks._finetune_loop --config run.json
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from megacore.finetune.distribution import training_arguments
from megacore.jobs.finetune import FinetuneJob
from megacore.ranks.process import set_up_arithmetic

RESULT = "by-hand.json"
"""Name of the file in the run directory with the seconds of each epoch."""


def collator(tokenizer: Any, kind: str) -> Any:
    """Return the data collator of the task."""
    from transformers import DataCollatorForLanguageModeling, DataCollatorWithPadding

    if kind == "causal_lm":
        return DataCollatorForLanguageModeling(tokenizer, mlm=False)
    return DataCollatorWithPadding(tokenizer)


def main() -> None:
    """Train as many epochs as the job requests, and write the seconds of each."""
    import accelerate
    import transformers
    from datasets import load_from_disk

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    job = FinetuneJob.read(parser.parse_args().config)
    set_up_arithmetic(job.threads_per_rank)
    if job.ranks > 1:
        dist.init_process_group("gloo")
    config, train = job.config, job.config.train
    kind = config.task.kind
    rows = load_from_disk(str(Path(job.examples_directory, "train")))
    source = Path(job.pretrained_directory, "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    loader: Any = DataLoader(
        rows, batch_size=train.micro_batch_size, shuffle=True, collate_fn=collator(tokenizer, kind)
    )
    steps = len(loader) // job.ranks * train.num_epochs
    # Only sets up DeepSpeed on CPUs; none of it runs in the loop.
    arguments = training_arguments(
        config,
        precision="fp32",
        device=torch.device("cpu"),
        total_steps=steps,
        directory=Path(job.run_directory),
    )
    accelerator = accelerate.Accelerator(
        cpu=arguments.use_cpu and arguments.deepspeed_plugin is None,
        deepspeed_plugin=arguments.deepspeed_plugin,
    )
    head = "CausalLM" if kind == "causal_lm" else "SequenceClassification"
    torch.manual_seed(config.seed)
    model: Any = getattr(transformers, f"AutoModelFor{head}").from_pretrained(source)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=config.optim.lr)
    scheduler: Any = transformers.get_scheduler(
        "linear", optimizer, num_warmup_steps=0, num_training_steps=steps
    )
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    seconds = []
    for _ in range(train.num_epochs):
        model.train()
        total = 0.0
        start = time.perf_counter()
        for batch in loader:
            loss = model(**batch).loss
            total += float(loss.detach())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), config.optim.clip_grad)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    if accelerator.is_main_process:
        Path(job.run_directory, RESULT).write_text(
            json.dumps({"seconds": seconds, "loss": total / len(loader)})
        )
    os._exit(0)


if __name__ == "__main__":
    main()
