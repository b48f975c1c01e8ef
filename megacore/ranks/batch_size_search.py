"""Search for the largest micro batch of each distribution, and one epoch at that size.

The search doubles the micro batch, then bisects. Every probe runs on new ranks.
"""

import importlib.util
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacore.artifact.files import read_object
from megacore.cluster.hosts.hardware import hardware_of
from megacore.config.finetune import Distribution, FinetuneConfig
from megacore.config.hostfile import hosts_of, local_slots
from megacore.config.load import parse_finetune_config
from megacore.errors import ConfigError, MemoryExhaustedError, RankLostError
from megacore.finetune.resolve import resolve_ranks
from megacore.hardware import Hardware, memory_info
from megacore.jobs.finetune import FinetuneJob, ProbeJob
from megacore.paths import exists
from megacore.ranks.stages import finetune, nothing, run_ranks


@dataclass(frozen=True)
class Fits:
    """Answer of a probe: the micro batch fits."""

    peak_memory: int
    """Peak memory in bytes of the rank that used the most."""


@dataclass(frozen=True)
class TooLarge:
    """Answer of a probe: memory does not suffice for the micro batch."""

    reason: str
    """Message of the rank that ran out of memory, as one sentence."""


Answer = Fits | TooLarge
Probe = Callable[[int], Answer]
"""Function that tries a micro batch; failures other than lack of memory are raised."""


@dataclass(frozen=True)
class Found:
    """Result of a search."""

    batch: int
    """Largest micro batch that fits; 0 if not even 1 fits."""
    tried: dict[int, Answer]
    """Answer of each probe, in the order of the probes."""

    @property
    def peak_memory(self) -> int | None:
        """Peak memory in bytes of the rank that used the most at `batch`; None if nothing fits."""
        answer = self.tried.get(self.batch)
        return answer.peak_memory if isinstance(answer, Fits) else None

    @property
    def reason(self) -> str | None:
        """Reason why `batch` + 1 does not fit; None if the limit ended the search."""
        answer = self.tried.get(self.batch + 1)
        return answer.reason if isinstance(answer, TooLarge) else None


def largest_batch(probe: Probe, *, limit: int, start: int = 1) -> Found:
    """Find the largest micro batch from 1 to `limit` that fits.

    The search assumes that memory grows with the batch: every micro batch smaller than a fitting
    one fits, too. It doubles the batch from `start`, or `limit` if that is less, until one is too
    large, then bisects between the largest that fits (or 0) and the smallest that does not. It
    takes at most 2 + 2 log2(limit) probes, each of another batch, and fewer the nearer `start` is
    to the result. Raises the errors of `probe`.
    """
    assert limit >= 1, limit
    assert start >= 1, start
    tried: dict[int, Answer] = {}
    fitting, too_large, batch = 0, limit + 1, min(start, limit)
    while too_large - fitting > 1:
        tried[batch] = probe(batch)
        if isinstance(tried[batch], Fits):
            fitting = batch
        else:
            too_large = batch
        doubling = too_large > limit
        batch = min(2 * fitting, limit) if doubling else (fitting + too_large) // 2
    return Found(fitting, tried)


def table_rows(reports: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the table with one row for each method, and a dash for missing figures."""
    epochs = [report["epoch"] for report in reports if report["epoch"] is not None]
    names = dict.fromkeys(name for epoch in epochs for name in epoch["metrics"] if name != "loss")
    rows = []
    for report in reports:
        epoch, peak = report["epoch"], report["peak_memory"]
        metrics = {} if epoch is None else epoch["metrics"]
        rows.append(
            {
                "method": report["method"],
                "largest batch per rank": str(report["batch"] or "-"),
                "peak memory of a rank (GB)": "-" if peak is None else gigabytes(peak),
                "time per epoch (s)": "-" if epoch is None else f"{train_seconds(epoch):.1f}",
                "evaluation (s)": "-" if epoch is None else f"{epoch['evaluation_seconds']:.1f}",
            }
            | {name: f"{metrics[name]:.4f}" if name in metrics else "-" for name in names}
        )
    return rows


def as_markdown(rows: Sequence[dict[str, str]]) -> str:
    """Format the rows as a Markdown table; all columns but the first are right-aligned."""
    lines = [
        list(rows[0]),
        ["---"] + ["---:"] * (len(rows[0]) - 1),
        *([*row.values()] for row in rows),
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def notes(reports: Sequence[dict[str, Any]]) -> str:
    """Return the text below the table: conditions, reasons for the limits, best settings."""
    first, lines = reports[0], [""]
    limits = [report["memory_limit"] for report in reports if report["memory_limit"] is not None]
    room = "95 % of each GPU" if not limits else f"{gigabytes(min(limits))} GB of memory each"
    ranks = f"{first['ranks']} rank{'s' if first['ranks'] > 1 else ''}"
    lines.append(
        f"{ranks} in {first['precision']}, {room}; epochs of {first['samples']:,} samples."
    )
    lines += ["", *(f"- {report['method']}: {_end(report)}" for report in reports)]
    timed = [report for report in reports if report["epoch"] is not None]
    if timed:
        best = min(timed, key=lambda report: train_seconds(report["epoch"]))
        lines += [
            "",
            (
                f"The shortest epoch: `launch.distributed={best['method']} "
                f"train.micro_batch_size={best['batch']}`."
            ),
        ]
    return "\n".join(lines) + "\n"


def _end(report: dict[str, Any]) -> str:
    """Return the reason why there is no larger micro batch, or no epoch, as one clause."""
    batch = report["batch"]
    if report["epoch_failure"] is not None:
        return f"{batch} fits for some steps, and the epoch did not: {report['epoch_failure']}"
    if report["reason"] is None:
        return (
            f"{batch} is the most that was tried (the samples of a rank, or "
            "find_batch_size.max_batch)"
        )
    return f"{batch + 1} does not fit: {report['reason']}"


def train_seconds(epoch: dict[str, Any]) -> float:
    """Return the training time of the single epoch in a fine-tuning's result."""
    return float(epoch["train_seconds_per_epoch"])


def gigabytes(count: int) -> str:
    """Format a number of bytes in GB, without the unit."""
    return f"{count / 1e9:.2f}"


FIND_BATCH_SIZE_VERSION = 1
FREE_SHARE = 0.8
"""Share of the free host memory that the ranks of a host without a GPU may use together."""

_SEARCHED = ("train_batch_size", "train_micro_batch_size_per_gpu")
"""Settings of the batch in DeepSpeed's JSON."""
_ABORTS = ("std::bad_alloc", "Thread creation failed: Resource temporarily unavailable")
"""Messages of C++ and OpenMP when a failed allocation ends the process."""


@dataclass(frozen=True)
class Watch:
    """Callbacks of a search."""

    on_poll: Callable[[], None] = nothing
    """Callback a few times a second."""
    on_start: Callable[[Path], None] = lambda log: None
    """Callback before each start of ranks, with the path of their log."""
    on_answer: Callable[[int, Answer], None] = lambda batch, answer: None
    """Callback after each probe, with the micro batch and the answer."""


def method_config(config: FinetuneConfig, method: Distribution, batch: int) -> FinetuneConfig:
    """Return the configuration of one epoch with a distribution and a micro batch.

    A DeepSpeed JSON is written for one stage of ZeRO. It is therefore used only with the method
    that is configured already, with its batch sizes set to "auto". The other methods use megacore's
    settings.

    Raises:
        ConfigError: the rest of the configuration is incompatible with these values.
    """
    settings = config.launch.deepspeed_config if method == config.launch.distributed else None
    if isinstance(settings, dict):
        settings = settings | {name: "auto" for name in _SEARCHED if name in settings}
    # Accelerate's file says how FSDP shards; of the other methods it has nothing to add.
    fsdp = method == config.launch.distributed == "fsdp"
    values = config.model_dump()
    values["launch"] |= {
        "distributed": method,
        "deepspeed_config": settings,
        "accelerate_config": values["launch"]["accelerate_config"] if fsdp else None,
    }
    values["train"] |= {
        "micro_batch_size": batch,
        "num_epochs": 1,
        "max_steps": None,
        "exit_duration_minutes": None,
    }
    return parse_finetune_config(values, origin=f"{config.name} with launch.distributed={method}")


def check_methods(config: FinetuneConfig, hardware: Hardware) -> None:
    """Refuse methods that cannot run here, before any rank starts.

    Raises:
        ConfigError: DeepSpeed is not installed, the configuration is incompatible with a method,
            or the memory limit exceeds the available memory.
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
    """Return the memory limit of each rank in bytes; None means the memory of its GPU.

    The memory of a scheduler's GPUs is unknown if this host has none.

    Raises:
        ConfigError: the configured limit exceeds the available memory.
    """
    limit_gb = config.find_batch_size.memory_limit_gb
    if config.launch.requests_gpus and not hardware.gpus:
        return None if limit_gb is None else round(limit_gb * 1e9)
    device = min(gpu.memory for gpu in hardware.gpus) if hardware.gpus else hardware.memory
    if limit_gb is not None and limit_gb * 1e9 > device:
        raise ConfigError(
            f"find_batch_size.memory_limit_gb is {limit_gb:g} and "
            f"{'a GPU' if hardware.gpus else hardware.owner} has {device / 1e9:.1f} GB: lower it, "
            "or leave it out"
        )
    if limit_gb is not None:
        return round(limit_gb * 1e9)
    if hardware.gpus:
        return None
    free = hardware.memory
    if hardware.host is None:
        free = min(memory_info()["MemAvailable"], free)
    return round(FREE_SHARE * free / _ranks_here(config, ranks))


def _ranks_here(config: FinetuneConfig, ranks: int) -> int:
    """Return the number of ranks on this host.

    For a host that only starts the ranks of others, return the largest number of any host.
    """
    launch = config.launch
    if launch.has_scheduler:
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
    """Return the table row of one method: its largest micro batch and the result of an epoch.

    If the epoch still runs out of memory, for example in its evaluation, the row contains this
    failure. The directories are the artifacts of the stages `pretrained` and `examples`, `samples`
    is the number of training samples, and `scratch` an empty directory. Raises the typed error of a
    rank that failed for a reason other than memory.
    """
    hardware = hardware_of(config.launch)
    ranks, threads = resolve_ranks(config, hardware)
    memory_limit = memory_limit_of(config, ranks, hardware)
    limit = min(config.find_batch_size.max_batch, math.ceil(samples / ranks))
    precision = hardware.resolve_precision(config.train.precision)
    job = FinetuneJob(
        config=method_config(config, method, config.train.micro_batch_size),
        pretrained_directory=pretrained_directory,
        examples_directory=examples_directory,
        run_directory=str(scratch),
        exit_directory=str(scratch / "exit"),
        ranks=ranks,
        threads_per_rank=threads,
        precision=precision,
    )
    search = find_batch(job, limit=limit, memory_limit=memory_limit, scratch=scratch, watch=watch)
    epoch, failure = None, None
    if search.batch:
        try:
            epoch = measure_epoch(job, search.batch, scratch, watch)
        except MemoryExhaustedError as error:
            failure = str(error)
    return {
        "method": method,
        "ranks": ranks,
        "precision": precision,
        "samples": samples,
        "memory_limit": memory_limit,
        "limit": limit,
        "batch": search.batch,
        "peak_memory": search.peak_memory,
        "reason": search.reason,
        "tried": {str(batch): vars(answer) for batch, answer in search.tried.items()},
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
    """Search for the largest micro batch of the job's distribution that fits.

    The search starts with the job's configured micro batch and writes nothing to its run directory,
    but a folder per probe to `scratch`. Each rank has `memory_limit` bytes, None means the memory
    of its GPU. Raises the errors of `try_batch`.
    """

    def probe(batch: int) -> Answer:
        folder = scratch / f"probe-{batch:05d}"
        answer = try_batch(_in_folder(job, folder, batch), memory_limit, folder, watch)
        watch.on_answer(batch, answer)
        return answer

    return largest_batch(probe, limit=limit, start=job.config.train.micro_batch_size)


def try_batch(job: FinetuneJob, memory_limit: int | None, folder: Path, watch: Watch) -> Answer:
    """Try the job's micro batch on new ranks in an empty folder, and return whether it fits.

    Ranks are not reused, because DeepSpeed is unreliable after it has run out of memory. Raises the
    typed error of the rank that failed first for a reason other than memory.
    """
    output, log, job_file = folder / "result.json", folder / "probe.log", folder / "job.json"
    steps = job.config.find_batch_size.steps
    probed = ProbeJob(**dict(job), output=str(output), steps=steps, memory_limit=memory_limit)
    probed.write(job_file)
    watch.on_start(log)
    try:
        with _memory_errors(log):
            run_ranks(probed, "megacore.ranks.finetune_probe", job_file, log, watch.on_poll)
    except MemoryExhaustedError as error:
        return TooLarge(str(error))
    return Fits(int(read_object(output)["peak_memory"]))


@contextmanager
def _memory_errors(log: Path) -> Iterator[None]:
    """Raise MemoryExhaustedError for ranks lost in the body that a failed allocation aborted."""
    try:
        yield
    except RankLostError as error:
        text = log.read_text(encoding="utf-8", errors="replace") if exists(log) else ""
        if (abort := next((phrase for phrase in _ABORTS if phrase in text), None)) is None:
            raise
        raise MemoryExhaustedError(f"{abort}: {error}") from error


def measure_epoch(
    job: FinetuneJob, batch: int, scratch: Path, watch: Watch = Watch()
) -> dict[str, Any]:
    """Run the real fine-tuning of one epoch with a micro batch and return its result.

    Its weights, in the folder `epoch` of `scratch`, are removed afterwards. Raises the typed error
    of the rank that failed first.
    """
    folder = scratch / "epoch"
    measured = _in_folder(job, folder, batch)
    watch.on_start(measured.attempt_log)
    with _memory_errors(measured.attempt_log):
        finetune(measured, watch.on_poll)
    result = read_object(folder / "result.json")
    for name in ("checkpoints", "best"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return result


def _in_folder(job: FinetuneJob, folder: Path, batch: int) -> FinetuneJob:
    """Create `folder` and return the job that runs in it with the micro batch `batch`."""
    folder.mkdir(parents=True)
    train = job.config.train.model_copy(update={"micro_batch_size": batch})
    places = {"run_directory": str(folder), "exit_directory": str(folder / "exit")}
    return job.model_copy(
        update={"config": job.config.model_copy(update={"train": train}), **places}
    )
