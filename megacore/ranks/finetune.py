"""Entry point of the ranks of a fine-tuning, with or without a launcher.

python -m megacore.ranks.finetune --config run.json
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megacore.jobs.finetune import FinetuneJob
from megacore.observe.heartbeat import Heartbeat
from megacore.ranks.rank import OFFLINE, begin_heartbeat, run_rank

if TYPE_CHECKING:
    import torch

_QUIET = OFFLINE | {
    "HF_DATASETS_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
}
"""Variables that transformers and datasets read on import, so that no rank downloads anything."""


@contextmanager
def joined_ranks(job: FinetuneJob) -> "Iterator[tuple[int, torch.device, Heartbeat]]":
    """Join the job's other ranks and leave them when the body has succeeded.

    A rank that fails does not leave: it ends, and the others notice. The heartbeat's phases before
    the body are start, rendezvous and build. After the body they are leave and ended, or only ended
    if training was stopped on request.

    Yields:
        This rank's number, its device and its heartbeat.

    Raises:
        ParallelLayoutError: the number of started ranks differs from the job's.
        WorkspaceError: the heartbeat cannot be written.
    """
    os.environ.update(_QUIET)
    import torch.distributed as dist

    from megacore.observe.logging import configure_logging
    from megacore.ranks.process import (
        choose_device,
        join_group,
        leaving,
        set_up_arithmetic,
        started_ranks,
    )

    world_size = started_ranks(job)
    heartbeat = begin_heartbeat(job)
    set_up_arithmetic(job.threads_per_rank)
    device = choose_device()
    if world_size > 1:
        heartbeat.beat("rendezvous")
        join_group(device, bound=not job.config.launch.distributed.startswith("zero"))
    rank = dist.get_rank() if world_size > 1 else 0
    configure_logging(rank)
    heartbeat.beat("build")
    with leaving(heartbeat):
        yield rank, device, heartbeat


def finetune(job: FinetuneJob) -> None:
    """Fine-tune on this rank to the last step, from the run's newest complete checkpoint.

    Raises:
        ConfigError: the job cannot run as configured on this host, or with this model.
        DataFormatError: a split has no sample.
        LaunchError: Accelerate chose another kind of distribution than the configured one.
        TrainingStoppedError: the run was stopped early on request, after it saved a checkpoint.
        TrainingError: a loss is not finite, or memory is insufficient.
        CheckpointError: the checkpoint to resume from is of another number of ranks.
        WorkspaceError: the run directory cannot be written.
    """
    started = time.monotonic()
    with joined_ranks(job) as (rank, device, heartbeat):
        from megacore.finetune.run import Finetuner, finetune_memory_errors
        from megacore.finetune.task import build_task
        from megacore.finetune.trainer import prepare
        from megacore.hardware import resolve_precision
        from megacore.observe.recorder import Recorder

        config, run_directory = job.config, Path(job.run_directory)
        precision = resolve_precision(job.precision or config.train.precision, device.type)
        with finetune_memory_errors(config, rank):
            task = build_task(config, Path(job.examples_directory), Path(job.pretrained_directory))
            trainer = prepare(
                config, task, precision=precision, device=device, directory=run_directory
            )
        with Recorder(run_directory, attempt=job.attempt, rank=rank, tensorboard=False) as recorder:
            Finetuner(
                config, task, trainer, recorder, run_directory, heartbeat=heartbeat, started=started
            ).run()


if __name__ == "__main__":
    run_rank(FinetuneJob, finetune)
