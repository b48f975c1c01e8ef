"""Entry point of the ranks of a pretraining, with or without torchrun.

python -m megacore.ranks.pretrain --config run.json
"""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megacore.jobs.run import TrainJob
from megacore.ranks.rank import imports, run_rank

if TYPE_CHECKING:
    from megacore.train.loop import Datasets


def pretrain(job: TrainJob) -> None:
    """Train on this rank until `train.train_iters`, from the run's newest complete checkpoint.

    Raises:
        ConfigError: the job cannot run as configured on this host.
        DataFormatError: tokens or index maps are missing or damaged.
        LeakError: the attention lets a document see another one.
        LaunchError: a DeepSpeed operator that the configuration requires is not built.
        TrainingStoppedError: the run was stopped early on request, after it saved a checkpoint.
        TrainingError: a loss is not finite, or memory is insufficient.
        CheckpointError: the newest checkpoint, or the pretrained one, is of another model or
            damaged.
        WorkspaceError: the run directory cannot be written.
    """
    with imports():
        from megacore.checkpoint.collective import RankGroup
        from megacore.engine.build import build_engine
        from megacore.hardware import resolve_precision
        from megacore.kernels.choice import summary
        from megacore.kernels.matmul import measured_tflops
        from megacore.observe.flops import Peaks
        from megacore.observe.logging import (
            configure_logging,
            datetime_line,
            logger,
            setup_lines,
        )
        from megacore.observe.recorder import Recorder
        from megacore.observe.timers import SetupTimes
        from megacore.ranks.process import joined
        from megacore.train.loop import Trainer
        from megacore.train.memory import memory_errors
        from megacore.train.state import TrainState

    started = time.monotonic()
    config, run_directory = job.config, Path(job.run_directory)
    with joined(job) as (mesh, device):
        configure_logging(mesh.rank)
        precision = resolve_precision(job.precision or config.train.precision, device.type)
        # before the model takes the GPU's memory
        measured = measured_tflops(precision, device=device)
        peaks = Peaks.of(device, precision, measured, tf32=config.train.tf32)
        compiled_adam = False
        if config.engine == "deepspeed":
            from megacore.engine.deepspeed.operators import load_operators

            compiled_adam = "cpu_adam" in load_operators(config)
        times = SetupTimes()
        with (
            times("model-and-optimizer-setup"),
            memory_errors(config, mesh.rank, TrainState(), vocab_size=job.vocab_size),
        ):
            engine = build_engine(
                config,
                job.vocab_size,
                mesh,
                special_tokens=job.special_tokens,
                device=device,
                precision=precision,
                compiled_adam=compiled_adam,
            )
        logger.info(datetime_line("after model, optimizer, and learning rate scheduler are built"))
        logger.info("kernels: %s", summary(engine.kernels))
        logger.info(peaks.description)
        if config.data.reset_attention_mask:
            logger.info(engine.check_documents(config.data.seq_length))
        with times("train/valid/test-data-iterators-setup"):
            data = _datasets(job)
        logger.info(datetime_line("after dataloaders are built"))
        ranks = RankGroup(None).everywhere(lambda: dict(times))
        logger.info(setup_lines(ranks))
        board = config.tracking.tensorboard
        with Recorder(
            run_directory, attempt=job.attempt, rank=mesh.rank, tensorboard=board
        ) as recorder:
            trainer = Trainer(
                config,
                engine,
                mesh,
                data,
                recorder,
                run_directory,
                spec=job.spec,
                peaks=peaks,
                started=started,
                planned_samples=job.planned_samples,
                origins=partial(_documents, job),
            )
            trainer.run()


def _datasets(job: TrainJob) -> "Datasets":
    """Open the samples of training and validation, and one pass of validation for perplexities."""
    from megacore.data.build import open_split
    from megacore.data.one_epoch import one_epoch
    from megacore.train.loop import Datasets

    train, valid = (
        open_split(
            job.token_prefixes,
            job.index_directory,
            name,
            job.config,
            tokenizer_directory=job.tokenizer_directory,
        )
        for name in ("train", "valid")
    )
    valid_pass = one_epoch(
        job.token_prefixes,
        job.index_directory,
        "valid",
        job.config,
        Path(job.exit_directory),
        tokenizer_directory=job.tokenizer_directory,
    )
    return Datasets(train, valid, valid_pass)


def _documents(job: TrainJob, samples: Sequence[int]) -> str:
    """Describe the documents of training samples in one clause."""
    from megacore.inspect.report import describe_samples  # only a run that ends needs it

    return describe_samples(Path(job.index_directory), samples)


if __name__ == "__main__":
    run_rank(TrainJob, pretrain)
