"""The largest micro batch of each distribution, and one epoch at that size.

Every probe has fresh ranks.
"""

import importlib.util
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacore.artifact.files import read_json
from megacore.config.finetune import Distribution, FinetuneConfig
from megacore.config.hostfile import hosts_of, local_slots
from megacore.config.load import parse_finetune_config
from megacore.errors import ConfigError, MemoryExhaustedError, RankLostError
from megacore.finetune.batch_size import Answer, Fits, Found, TooLarge, largest_batch
from megacore.finetune.resolve import resolve_ranks
from megacore.hardware import Hardware, memory_info
from megacore.jobs.finetune import FinetuneJob, ProbeJob
from megacore.ranks.finetune_probe import MODULE
from megacore.ranks.finetune_stages import finetune, run_ranks
from megacore.ranks.stages import attempt_log, nothing

FIND_BATCH_SIZE_VERSION = 1
FREE_SHARE = 0.8
"""Of the main memory that is free: what the ranks of a machine without a GPU may take together."""

_SEARCHED = ("train_batch_size", "train_micro_batch_size_per_gpu")
"""What DeepSpeed's JSON may say of the batch."""
_ABORTS = ("std::bad_alloc", "Thread creation failed: Resource temporarily unavailable")
"""What C++ and OpenMP write when they end a process because memory is denied to them."""


@dataclass(frozen=True)
class Watch:
    """Who is told what happens."""

    on_poll: Callable[[], None] = nothing
    """Called a few times a second."""
    on_start: Callable[[Path], None] = lambda log: None
    """Called before ranks are started, with the file that their output goes to."""
    on_answer: Callable[[int, Answer], None] = lambda batch, answer: None
    """Called after each probe."""


def method_config(config: FinetuneConfig, method: Distribution, batch: int) -> FinetuneConfig:
    """The configuration of one epoch with a distribution and a micro batch.

    A DeepSpeed JSON is for one stage of ZeRO: it is kept for the method that the configuration has
    already, its batch left open; the other methods have the project's own settings.

    Raises:
        ConfigError: the rest of the configuration does not go with them.
    """
    settings = config.launch.deepspeed_config if method == config.launch.distributed else None
    if isinstance(settings, dict):
        settings = settings | {name: "auto" for name in _SEARCHED if name in settings}
    values = config.model_dump()
    values["launch"] |= {
        "distributed": method,
        "deepspeed_config": settings,
        "accelerate_config": None,
    }
    values["train"] |= {
        "micro_batch_size": batch,
        "num_epochs": 1,
        "max_steps": None,
        "exit_duration_minutes": None,
    }
    return parse_finetune_config(values, origin=f"{config.name} with launch.distributed={method}")


def check_methods(config: FinetuneConfig, hardware: Hardware) -> None:
    """Refuse what cannot be compared here, before anything runs.

    Raises:
        ConfigError: DeepSpeed is not installed, the configuration does not go with a method, or the
            memory limit is beyond the memory that there is.
    """
    for method in config.find_batch_size.methods:
        if method.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
            raise ConfigError(
                f"find_batch_size.methods has {method}, which is DeepSpeed's, and deepspeed is not "
                "installed: pip install megacore[deepspeed], or set find_batch_size.methods to "
                "[ddp]"
            )
        method_config(config, method, config.train.micro_batch_size)
    memory_limit_of(config, resolve_ranks(config, hardware)[0], hardware)


def memory_limit_of(config: FinetuneConfig, ranks: int, hardware: Hardware) -> int | None:
    """Bytes that each rank may have; None where its GPU says so.

    Raises:
        ConfigError: the limit that is asked for is more than the memory that there is.
    """
    asked = config.find_batch_size.memory_limit_gb
    device = min(gpu.memory for gpu in hardware.gpus) if hardware.gpus else hardware.memory
    if asked is not None and asked * 1e9 > device:
        raise ConfigError(
            f"find_batch_size.memory_limit_gb is {asked:g} and "
            f"{'a GPU' if hardware.gpus else 'this machine'} has {device / 1e9:.1f} GB: lower it, "
            "or leave it out"
        )
    if asked is not None:
        return round(asked * 1e9)
    if hardware.gpus:
        return None
    free = min(memory_info()["MemAvailable"], hardware.memory)
    return round(FREE_SHARE * free / _ranks_here(config, ranks))


def _ranks_here(config: FinetuneConfig, ranks: int) -> int:
    """Ranks of this machine; one that only starts the others is taken to be like them."""
    launch = config.launch
    if launch.kind in ("slurm", "kubernetes"):
        return ranks // (launch.node_range or (1, 1))[1]
    hosts = hosts_of(launch)
    return (local_slots(hosts) or max(hosts.values())) if hosts else ranks


def compare(
    config: FinetuneConfig,
    method: Distribution,
    pretrained_directory: str,
    examples_directory: str,
    *,
    samples: int,
    scratch: Path,
    watch: Watch = Watch(),
) -> dict[str, Any]:
    """One method's row of the table: its largest micro batch, and the result of an epoch with it.

    That the epoch runs out of memory all the same (its evaluation may) is an answer, too.

    Args:
        config: the fine-tuning.
        method: its distribution here.
        pretrained_directory: artifact of the stage `pretrained`.
        examples_directory: artifact of the stage `examples`.
        samples: of its training split.
        scratch: an empty directory for all that is run.
        watch: who is told.

    Raises the typed error of a rank that failed for another reason than memory.
    """
    hardware = Hardware.detect()
    ranks, threads = resolve_ranks(config, hardware)
    memory_limit = memory_limit_of(config, ranks, hardware)
    limit = min(config.find_batch_size.max_batch, math.ceil(samples / ranks))
    job = FinetuneJob(
        config=method_config(config, method, config.train.micro_batch_size),
        pretrained_directory=pretrained_directory,
        examples_directory=examples_directory,
        run_directory=str(scratch),
        exit_directory=str(scratch / "exit"),
        ranks=ranks,
        threads_per_rank=threads,
    )
    found = find_batch(job, limit=limit, memory_limit=memory_limit, scratch=scratch, watch=watch)
    epoch, failure = None, None
    if found.batch:
        try:
            epoch = measure_epoch(job, found.batch, scratch, watch)
        except MemoryExhaustedError as error:
            failure = str(error)
    return {
        "method": method,
        "ranks": ranks,
        "precision": hardware.resolve_precision(config.train.precision),
        "samples": samples,
        "memory_limit": memory_limit,
        "limit": limit,
        "batch": found.batch,
        "peak_memory": found.peak_memory,
        "reason": found.reason,
        "tried": {str(batch): vars(answer) for batch, answer in found.tried.items()},
        "epoch": epoch,
        "epoch_failure": failure,
    }


def find_batch(
    job: FinetuneJob,
    *,
    limit: int,
    memory_limit: int | None,
    scratch: Path,
    watch: Watch = Watch(),
) -> Found:
    """The largest micro batch of the job's distribution that fits, searched from the job's own on.

    Args:
        job: the fine-tuning; nothing is written to its run directory.
        limit: the largest micro batch that is tried.
        memory_limit: bytes that each rank may have; None means what its GPU has.
        scratch: directory for a folder of each probe.
        watch: who is told.

    Raises the typed error of a probe that failed for another reason than memory.
    """

    def probe(batch: int) -> Answer:
        folder = scratch / f"probe-{batch:05d}"
        answer = try_batch(_in_folder(job, folder, batch), memory_limit, folder, watch)
        watch.on_answer(batch, answer)
        return answer

    return largest_batch(probe, limit=limit, start=job.config.train.micro_batch_size)


def try_batch(job: FinetuneJob, memory_limit: int | None, folder: Path, watch: Watch) -> Answer:
    """Whether the job's micro batch fits, found out by new ranks.

    After one that did not, DeepSpeed's are unreliable.

    Args:
        job: the fine-tuning with this micro batch.
        memory_limit: bytes that each rank may have; None means what its GPU has.
        folder: an empty directory for the job file, the log and the result.
        watch: who is told.

    Raises the typed error of the rank that failed first for another reason than memory.
    """
    output, log, job_file = folder / "result.json", folder / "probe.log", folder / "job.json"
    steps = job.config.find_batch_size.steps
    probed = ProbeJob(**dict(job), output=str(output), steps=steps, memory_limit=memory_limit)
    probed.write(job_file)
    watch.on_start(log)
    try:
        run_ranks(probed, MODULE, job_file, log, watch.on_poll)
    except MemoryExhaustedError as error:
        return TooLarge(str(error))
    except RankLostError as error:
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        if (said := next((phrase for phrase in _ABORTS if phrase in text), None)) is None:
            raise
        return TooLarge(f"{said}: {error}")
    return Fits(int(read_json(output)["peak_memory"]))


def measure_epoch(
    job: FinetuneJob, batch: int, scratch: Path, watch: Watch = Watch()
) -> dict[str, Any]:
    """The result of the real fine-tuning with a micro batch, of one epoch as configured.

    Args:
        job: the fine-tuning.
        batch: samples per rank and forward pass.
        scratch: directory for the folder `epoch`, whose weights are removed again.
        watch: who is told.

    Raises the typed error of the rank that failed first.
    """
    folder = scratch / "epoch"
    measured = _in_folder(job, folder, batch)
    watch.on_start(attempt_log(measured))
    finetune(measured, watch.on_poll)
    result: dict[str, Any] = read_json(folder / "result.json")
    for name in ("checkpoints", "best"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return result


def _in_folder(job: FinetuneJob, folder: Path, batch: int) -> FinetuneJob:
    """The job with a micro batch, in a directory of its own, which is made."""
    folder.mkdir(parents=True)
    train = job.config.train.model_copy(update={"micro_batch_size": batch})
    places = {"run_directory": str(folder), "exit_directory": str(folder / "exit")}
    return job.model_copy(
        update={"config": job.config.model_copy(update={"train": train}), **places}
    )
