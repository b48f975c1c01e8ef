"""Can this configuration run on this machine, and what will it cost: said before anything starts."""

import json
from dataclasses import dataclass
from pathlib import Path

from megacore.config.data import HfTokenizer, TrainBpeTokenizer
from megacore.config.run import RunConfig, check_data_parallel_size
from megacore.errors import ConfigError, ParallelLayoutError
from megacore.observe.tensorboard import check_tensorboard
from megacore.plan.hardware import Gpu, Hardware
from megacore.plan.memory import GIB, MemoryEstimate, estimate_memory, parameter_count
from megacore.plan.throughput import assumed_flops_per_second, training_days

__all__ = ["Gpu", "Hardware", "Report", "expected_vocab_size", "preflight", "resolve_launch"]

CPU_DAYS_LIMIT = 7.0
"""A run that is expected to take longer on CPUs was meant for GPUs, unless launch.allow_cpu says otherwise."""
HUB_VOCAB_SIZE = 50_257
"""Entries assumed for a tokenizer that is still to be downloaded: GPT-2's."""


@dataclass(frozen=True)
class Report:
    """What a run is expected to need."""

    parameters: int
    ranks: int
    threads_per_rank: int
    device_type: str
    precision: str
    memory: MemoryEstimate
    """Of one rank."""
    memory_available: int
    """Bytes of one GPU, or of main memory divided by the ranks."""
    days: float
    flops_per_second: float
    """Assumed, all ranks together."""

    def summary(self) -> str:
        """One line with every number."""
        where = "GPU" if self.device_type == "cuda" else "CPU"
        threads = "" if self.device_type == "cuda" else f" x {self.threads_per_rank} threads"
        return (
            f"{self.parameters / 1e6:.1f} M parameters on {self.ranks} {where} rank{'s' if self.ranks > 1 else ''}"
            f"{threads} in {self.precision}: "
            f"about {_gib(self.memory.total)} of {_gib(self.memory_available)} per rank, "
            f"{_duration(self.days)} at an assumed {self.flops_per_second / 1e12:.3g} TFLOP/s"
        )


def preflight(config: RunConfig, vocab_size: int, hardware: Hardware) -> Report:
    """Estimate memory and time; refuse what this machine lacks.

    Raises ParallelLayoutError when ranks and batch or GPUs do not fit together, and ConfigError when TensorBoard is
    asked for and not installed, when fp16 is asked for without a GPU, when memory does not suffice, or when CPUs
    would need more than CPU_DAYS_LIMIT days; `launch.allow_cpu: true` permits fp16 and any time on CPUs.
    """
    ranks, threads = resolve_launch(config, hardware)
    precision = hardware.resolve_precision(config.train.precision)
    rate = assumed_flops_per_second(hardware, precision, ranks, threads)
    report = Report(
        parameters=parameter_count(config, vocab_size),
        ranks=ranks,
        threads_per_rank=threads,
        device_type=hardware.device_type,
        precision=precision,
        memory=estimate_memory(config, vocab_size, precision, hardware.device_type),
        memory_available=min(gpu.memory for gpu in hardware.gpus) if hardware.gpus else hardware.memory // ranks,
        days=training_days(config, vocab_size, rate),
        flops_per_second=rate,
    )
    if config.tracking.tensorboard:
        check_tensorboard()
    if not hardware.gpus and not config.launch.allow_cpu:
        _check_meant_for_cpu(config, report)
    _check_memory(config, report)
    return report


def resolve_launch(config: RunConfig, hardware: Hardware) -> tuple[int, int]:
    """Ranks of this machine and CPU threads of each.

    Raises ParallelLayoutError when there are more ranks than GPUs, or they cannot share a batch evenly.
    """
    launch = config.launch
    ranks = (len(hardware.gpus) or 1) if launch.nproc_per_node == "auto" else launch.nproc_per_node
    if hardware.gpus and ranks > len(hardware.gpus):
        raise ParallelLayoutError(
            f"launch.nproc_per_node is {ranks} and this machine has {len(hardware.gpus)} visible "
            f"GPU{'s' if len(hardware.gpus) > 1 else ''}: set it to {len(hardware.gpus)} or to auto"
        )
    try:
        check_data_parallel_size(config.train, ranks)
    except ValueError as error:
        raise ParallelLayoutError(str(error)) from error
    return ranks, launch.threads_per_rank or max(1, hardware.cores // ranks)


def expected_vocab_size(config: RunConfig) -> int:
    """Entries of the vocabulary as far as they can be known before the tokenizer stage ran.

    A tokenizer that is on the hub counts as GPT-2's. Raises ConfigError for a vocabulary file that is missing or
    damaged.
    """
    choice = config.data.tokenizer
    if isinstance(choice, TrainBpeTokenizer):
        return choice.vocab_size
    if isinstance(choice, HfTokenizer):
        path = Path(choice.name)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            return HUB_VOCAB_SIZE
        return _entries(file, "data.tokenizer.name")
    if not Path(choice.merge_file).is_file():
        raise ConfigError(f"data.tokenizer.merge_file: {choice.merge_file} is no file: correct the path")
    return _entries(Path(choice.vocab_file), "data.tokenizer.vocab_file")


def _entries(file: Path, setting: str) -> int:
    """Entries in a vocab.json or a tokenizer.json."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting}: the vocabulary {file} cannot be read ({error}): correct the path") from error
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"{setting}: {file} holds no vocabulary: give a vocab.json or tokenizer.json")
    if "model" in content and isinstance(content["model"], dict):
        added = {token["content"] for token in content.get("added_tokens") or []}
        vocabulary = content["model"].get("vocab") or {}
        names = set(vocabulary) if isinstance(vocabulary, dict) else {entry[0] for entry in vocabulary}
        return len(names | added)
    return len(content)


def _check_meant_for_cpu(config: RunConfig, report: Report) -> None:
    needs = f"about {_gib(report.memory.total)} of memory per rank and {_duration(report.days)}"
    if report.precision == "fp16":
        raise ConfigError(
            f"train.precision is fp16, which needs a GPU, and this machine has none: for {config.name} its CPUs "
            f"would need {needs}: set train.precision to auto, or launch.allow_cpu to true to start it all the same"
        )
    if report.days > CPU_DAYS_LIMIT:
        raise ConfigError(
            f"{config.name} is sized for GPUs and this machine has none: its CPUs would need {needs}: lower "
            f"train.train_iters ({config.train.train_iters}) or the model, "
            "or set launch.allow_cpu to true to start it all the same"
        )


def _check_memory(config: RunConfig, report: Report) -> None:
    if report.memory.total <= report.memory_available:
        return
    advice = f"lower train.micro_batch_size ({config.train.micro_batch_size})"
    if config.train.recompute == "none":
        advice += " or set train.recompute to full"
    if report.device_type == "cpu" and report.ranks > 1:
        advice += f" or lower launch.nproc_per_node ({report.ranks})"
    raise ConfigError(
        f"{config.name} needs about {_gib(report.memory.total)} of memory per rank "
        f"({_gib(report.memory.activations + report.memory.logits)} of it for activations) and this machine has "
        f"{_gib(report.memory_available)} per rank: {advice}"
    )


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"


def _duration(days: float) -> str:
    if days >= 1:
        return f"{days:,.1f} days" if days < 100 else f"{days:,.0f} days"
    minutes = days * 24 * 60
    return f"{minutes / 60:.1f} hours" if minutes >= 60 else f"{minutes:.1f} minutes"
