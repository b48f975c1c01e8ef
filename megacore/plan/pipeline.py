"""Plan of a pipeline: content, memory, busy time and idle time of each stage."""

from dataclasses import dataclass

from rich.table import Table

from megacore.config.deepspeed import zero_of
from megacore.config.hostfile import hosts_of
from megacore.config.layouts import refused
from megacore.config.run import RunConfig
from megacore.errors import ParallelLayoutError
from megacore.hardware import Hardware
from megacore.parallel.rank_layout import RankLayout
from megacore.pipeline_parallel.partition import ModelChunk, chunks_of
from megacore.pipeline_parallel.schedules import Timeline, max_in_flight
from megacore.plan.advice import Deployment, lighter_recompute
from megacore.plan.layouts import layout_of, ranks_per_host
from megacore.plan.machine import Machine
from megacore.plan.memory import GIB, MemoryEstimate, engine_name, estimate_stages
from megacore.plan.throughput import RunTime, planned_iteration, predict_run

_FASTER = 0.98
"""Share of the predicted time below which delayed weight gradients are worth a sentence."""
_MOST_PASSES = 50_000
"""Most forward passes of a simulated step: more take longer than a user waits."""


@dataclass(frozen=True)
class PipelinePlan:
    """Plan of one optimizer step of a configuration."""

    config: RunConfig
    layout: RankLayout
    micro_batches: int
    """Number of micro batches of one step on each data-parallel rank (m)."""
    chunks: tuple[ModelChunk, ...]
    """Chunks in the order of the model."""
    memory: tuple[MemoryEstimate, ...]
    """Estimated memory of a rank of each stage."""
    timeline: Timeline
    """Simulated passes of a step, in seconds."""
    time: RunTime
    """Predicted duration of an iteration and of the run."""
    lighter: str | None
    """Sentence about a lighter recomputation that fits into this host's GPUs; None if there is
    none."""
    faster: str | None
    """Sentence about delayed weight gradients; None if they are not faster, or not possible."""

    @property
    def name(self) -> str:
        """Names of the configuration and the schedule."""
        kind = "GPipe" if self.config.parallel.pipeline_schedule == "gpipe" else "1F1B"
        interleaved = "interleaved " if self.timeline.chunks > 1 else ""
        delayed = ", weight gradients delayed" if self.timeline.delayed else ""
        return f"{self.config.name}, {interleaved}{kind}{delayed}"

    def summary(self) -> str:
        """Return two lines with the layout and the bubble."""
        train, layout = self.config.train, self.layout
        context = f" x context {layout.context}" if layout.context > 1 else ""
        engine = (
            ""
            if self.config.engine == "native"
            else f"; {engine_name(self.config.engine, zero_of(self.config))}"
        )
        return (
            f"tensor {layout.tensor}{context} x pipeline {layout.pipeline} x data {layout.data} = "
            f"{layout.world_size} rank{'s' if layout.world_size > 1 else ''}; {self.micro_batches} "
            f"micro batch{'es' if self.micro_batches > 1 else ''} of {train.micro_batch_size} on "
            f"each replica, {train.global_batch_size} samples per step{engine}\n"
            f"{self.name}: bubble {self.timeline.bubble_fraction:.1%} of the compute time, "
            f"{self.timeline.equal_bubble:.1%} if all chunks cost the same"
        )

    def table(self) -> Table:
        """Return a table with a row per pipeline stage."""
        table = Table()
        chunks = self.timeline.chunks
        layers = (
            ["layers"] if chunks == 1 else [f"layers of chunk {chunk}" for chunk in range(chunks)]
        )
        offloaded = [
            name
            for name in ("host", "nvme")
            if any(getattr(memory, name) for memory in self.memory)
        ]
        for column in (
            *("stage", *layers, "parameters", "memory"),
            *(*offloaded, "passes in flight", "busy"),
        ):
            table.add_column(column, justify="left" if column in layers else "right")
        stages = self.layout.pipeline
        for stage, memory in enumerate(self.memory):
            passes = [span.work for span in self.timeline.spans[stage]]
            table.add_row(
                str(stage),
                *(_content(chunk) for chunk in self.chunks[stage::stages]),
                f"{memory.parameters / 1e6:,.1f} M",
                f"{memory.total / GIB:,.1f} GiB",
                *(f"{getattr(memory, name) / GIB:,.1f} GiB" for name in offloaded),
                str(max_in_flight(passes)),
                f"{self.timeline.busy[stage] / self.timeline.makespan:.1%}",
            )
        return table


def plan_pipeline(
    config: RunConfig, vocab_size: int, hardware: Hardware, machine: Machine | None = None
) -> PipelinePlan:
    """Divide a configuration's model and batch, and simulate a step.

    The number of ranks is that of the hostfile or `launch.nproc_per_node`, even if this host cannot
    run as many. For auto it is the number of GPUs, or that of one replica without GPUs. The hosts
    of a `machine` are used completely; None means that of `hardware`, which determines device and
    precision of the memory estimate.

    Raises:
        ConfigError: the hardware file is missing or wrong, or has no rate for the precision.
        ParallelLayoutError: model, batch and ranks cannot be divided, or a step is too long.
    """
    parallel, train = config.parallel, config.train
    stages = parallel.pipeline_model_parallel_size
    ranks = config.launch.nproc_per_node
    if hosts := hosts_of(config.launch):
        ranks = sum(hosts.values())
    elif config.launch.has_scheduler and ranks != "auto":
        ranks *= (config.launch.node_range or (1, 1))[1]
    elif ranks == "auto":
        ranks = len(hardware.gpus) or parallel.ranks_per_replica
    layout = layout_of(config, ranks, vocab_size)
    micro_batches = train.global_batch_size // (train.micro_batch_size * layout.data)
    passes = micro_batches * stages * parallel.virtual_pipeline_model_parallel_size
    if passes > _MOST_PASSES:
        raise ParallelLayoutError(
            f"train.global_batch_size {train.global_batch_size} is {micro_batches:,} micro batches "
            f"of {train.micro_batch_size} on each replica, in {passes:,} passes: a plan takes at "
            f"most {_MOST_PASSES:,}; raise train.micro_batch_size or add replicas"
        )
    whole = machine is not None and machine.device == "cuda"
    together = None if whole else ranks_per_host(config.launch, ranks)
    threads = config.launch.threads_per_rank or max(1, hardware.cores // (together or ranks))
    iteration = planned_iteration(config, vocab_size, hardware, layout, threads, machine, together)
    precision = hardware.resolve_precision(train.precision)
    lighter = None
    if gpus := hardware.gpus:
        host = hardware.memory // (together or len(gpus))
        deployment = Deployment(ranks, vocab_size, precision, hardware.device_type, host)
        lighter = lighter_recompute(config, deployment, min(gpu.memory for gpu in gpus))
    time, delayed = predict_run(iteration), _delayed(config, layout)
    faster = None
    if delayed is not None:
        other = iteration.with_layout(delayed, layout)
        seconds = other.predict().seconds
        if seconds < _FASTER * time.iteration.seconds:
            memory = estimate_stages(
                delayed, vocab_size, precision, hardware.device_type, layout.data
            )
            faster = (
                "parallel.delay_weight_gradients true is faster: an iteration of about "
                f"{seconds:.4g} s, and up to {max(each.total for each in memory) / GIB:,.1f} GiB "
                "per rank"
            )
    return PipelinePlan(
        config,
        layout,
        micro_batches,
        tuple(chunks_of(config, vocab_size)),
        estimate_stages(config, vocab_size, precision, hardware.device_type, layout.data),
        iteration.timeline(),
        time,
        lighter,
        faster,
    )


def _delayed(config: RunConfig, layout: RankLayout) -> RunConfig | None:
    """Return the configuration with delayed weight gradients; None if that is set or refused."""
    parallel = config.parallel
    if parallel.delay_weight_gradients:
        return None
    section = parallel.model_copy(update={"delay_weight_gradients": True})
    changed = config.model_copy(update={"parallel": section})
    return None if refused(changed, layout) else changed


def _content(chunk: ModelChunk) -> str:
    """Return the content of a chunk as text, such as `embedding, 0-3`."""
    encoder, decoder = _numbers(chunk.layers), _numbers(chunk.decoder_layers)
    parts = [encoder] if encoder else []
    if decoder:
        parts = [
            *(f"encoder {part}" for part in parts),
            *["embedding"] * (not chunk.has_embedding and chunk.has_decoder_embedding),
            f"decoder {decoder}",
        ]
    return ", ".join([*["embedding"] * chunk.has_embedding, *parts, *["head"] * chunk.has_head])


def _numbers(layers: range) -> str:
    """Return layer numbers as text, such as `0-3`; empty if there are none."""
    if not layers:
        return ""
    return str(layers.start) if len(layers) == 1 else f"{layers.start}-{layers.stop - 1}"
