"""Can this configuration run on this machine, and what will it cost: said before anything starts."""

from dataclasses import dataclass

from megacore.config.run import RunConfig
from megacore.errors import ConfigError, ParallelLayoutError
from megacore.observe.tensorboard import check_tensorboard
from megacore.parallel.rank_layout import RankLayout
from megacore.plan.hardware import Gpu, Hardware
from megacore.plan.layouts import layout_of
from megacore.plan.memory import GIB, MemoryEstimate, estimate_memory
from megacore.plan.parameters import parameter_count
from megacore.plan.throughput import assumed_flops_per_second, training_days
from megacore.plan.vocabulary import is_on_the_hub

__all__ = ["Gpu", "Hardware", "Report", "preflight", "resolve_launch"]

CPU_DAYS_LIMIT = 7.0
"""A run that is expected to take longer on CPUs was meant for GPUs, unless launch.allow_cpu says otherwise."""


@dataclass(frozen=True)
class Report:
    """What a run is expected to need."""

    parameters: int
    """Of the whole model."""
    layout: RankLayout
    threads_per_rank: int
    device_type: str
    precision: str
    memory: MemoryEstimate
    """Of one rank of the pipeline stage that needs most."""
    memory_available: int
    """Bytes of one GPU, or of main memory divided by the ranks."""
    days: float
    """The pipeline's bubble included."""
    flops_per_second: float
    """Assumed, all ranks together."""

    @property
    def ranks(self) -> int:
        """Processes on this machine."""
        return self.layout.world_size

    def summary(self) -> str:
        """One line with every number."""
        where = "GPU" if self.device_type == "cuda" else "CPU"
        threads = "" if self.device_type == "cuda" else f" x {self.threads_per_rank} threads"
        axes = self.layout
        divided = f" (tensor {axes.tensor} x pipeline {axes.pipeline} x data {axes.data})"
        return (
            f"{self.parameters / 1e6:.1f} M parameters on {self.ranks} {where} rank{'s' if self.ranks > 1 else ''}"
            f"{threads}{divided if axes.data < self.ranks else ''} in {self.precision}: "
            f"about {_gib(self.memory.total)} of {_gib(self.memory_available)} per rank, "
            f"{_duration(self.days)} at an assumed {self.flops_per_second / 1e12:.3g} TFLOP/s"
        )


def preflight(config: RunConfig, vocab_size: int, hardware: Hardware) -> Report:
    """Estimate memory and time; refuse what this machine lacks.

    Raises ParallelLayoutError when ranks do not fit together with the model, its batch or the GPUs, and ConfigError
    when TensorBoard is asked for and not installed, when fp16 is asked for without a GPU, when memory does not
    suffice, or when CPUs would need more than CPU_DAYS_LIMIT days; `launch.allow_cpu: true` permits fp16 and any time
    on CPUs.
    """
    known = not is_on_the_hub(config.data.tokenizer)
    ranks, threads = resolve_launch(config, hardware, vocab_size if known else None)
    layout = layout_of(config, ranks)
    precision = hardware.resolve_precision(config.train.precision)
    rate = assumed_flops_per_second(hardware, precision, ranks, threads)
    report = Report(
        parameters=parameter_count(config, vocab_size),
        layout=layout,
        threads_per_rank=threads,
        device_type=hardware.device_type,
        precision=precision,
        memory=estimate_memory(config, vocab_size, precision, hardware.device_type, layout.data),
        memory_available=min(gpu.memory for gpu in hardware.gpus) if hardware.gpus else hardware.memory // ranks,
        days=training_days(config, vocab_size, rate, layout.data),
        flops_per_second=rate,
    )
    if config.tracking.tensorboard:
        check_tensorboard()
    if not hardware.gpus and not config.launch.allow_cpu:
        _check_meant_for_cpu(config, report)
    _check_memory(config, report)
    return report


def resolve_launch(config: RunConfig, hardware: Hardware, vocab_size: int | None = None) -> tuple[int, int]:
    """Ranks of this machine and CPU threads of each; `vocab_size` is the tokenizer's, None where it is not known yet.

    Raises ParallelLayoutError when there are more ranks than GPUs, or they cannot share the model and its batch.
    """
    launch, parallel = config.launch, config.parallel
    replica = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    ranks = (len(hardware.gpus) or replica) if launch.nproc_per_node == "auto" else launch.nproc_per_node
    if hardware.gpus and ranks > len(hardware.gpus):
        raise ParallelLayoutError(
            f"launch.nproc_per_node is {ranks} and this machine has {len(hardware.gpus)} visible "
            f"GPU{'s' if len(hardware.gpus) > 1 else ''}: set it to {len(hardware.gpus)} or to auto"
        )
    layout_of(config, ranks, vocab_size)
    return ranks, launch.threads_per_rank or max(1, hardware.cores // ranks)


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
    train, parallel = config.train, config.parallel
    advice = [f"lower train.micro_batch_size ({train.micro_batch_size})"]
    if train.recompute != "full" or train.recompute_num_layers is not None:
        advice.append("set train.recompute to full for all layers")
    if report.layout.data > 1 and not parallel.use_distributed_optimizer:
        advice.append("set parallel.use_distributed_optimizer to true")
    if report.layout.data > 1 and report.device_type == "cuda":
        advice.append(
            f"raise parallel.tensor_model_parallel_size ({parallel.tensor_model_parallel_size}) or "
            f"parallel.pipeline_model_parallel_size ({parallel.pipeline_model_parallel_size})"
        )
    if report.device_type == "cpu" and report.layout.data > 1:
        advice.append(f"lower launch.nproc_per_node ({report.ranks})")
    raise ConfigError(
        f"{config.name} needs about {_gib(report.memory.total)} of memory per rank "
        f"({_gib(report.memory.activations + report.memory.logits)} of it for activations) and this machine has "
        f"{_gib(report.memory_available)} per rank: {', or '.join(advice)}"
    )


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"


def _duration(days: float) -> str:
    if days >= 1:
        return f"{days:,.1f} days" if days < 100 else f"{days:,.0f} days"
    minutes = days * 24 * 60
    return f"{minutes / 60:.1f} hours" if minutes >= 60 else f"{minutes:.1f} minutes"
