"""Process groups of a layout, built at launch and passed explicitly; there is no global state."""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megacore.errors import ParallelLayoutError
from megacore.observe.timers import Timers
from megacore.parallel.gradient_memory import GRADIENT_PIECE, sums_in_memory
from megacore.parallel.rank_layout import AXES, RankLayout
from megacore.parallel.shared_memory import MessageMemory, SharedMemory

CHANNELS = 4
"""Number of channels: one for each direction, from even and from odd stages."""
_CUDA_QUEUES = 8
"""Number of hardware queues that CUDA uses by default; at most 32."""
_OTHER_STREAMS = 4
"""Streams besides those of the mesh: NCCL's own for setup, a profiler's, DeepSpeed's copies."""


@dataclass(frozen=True)
class ParallelGroup:
    """Group of ranks that share one kind of work, and this rank's position in it."""

    group: dist.ProcessGroup | None = None
    """Process group; None if this is the only rank, which then communicates nothing."""
    rank: int = 0
    """This rank's number within the group."""
    size: int = 1
    """Number of ranks in the group."""
    name: str = "alone"
    """Name of the group's communication in the step timer."""
    timers: Timers | None = field(default=None, compare=False)
    """Timers of the time that this rank waits for the group's communication; None measures
    nothing."""
    shared: SharedMemory | None = field(default=None, compare=False)
    """Memory through which the ranks can communicate; None if there is none."""
    key: int = field(init=False, compare=False)
    """Number of this object in the process, by which operators in compiled graphs name it."""

    def __post_init__(self) -> None:
        """Give the object a key."""
        object.__setattr__(self, "key", next(_KEYS))
        _GROUPS[self.key] = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Give a copy a key of its own."""
        self.__dict__.update(state)
        self.__post_init__()


_KEYS = itertools.count()
_GROUPS: WeakValueDictionary[int, ParallelGroup] = WeakValueDictionary()


def group_of(key: int) -> ParallelGroup:
    """Return the group with this `key`."""
    return _GROUPS[key]


SINGLE_RANK = ParallelGroup()
"""Group of one rank."""


@dataclass(frozen=True)
class ProcessMesh:
    """This rank's groups along each axis of the layout (dp x pp x cp x tp)."""

    layout: RankLayout = field(default_factory=RankLayout)
    """Sizes of the axes."""
    rank: int = 0
    """This process's rank among all processes."""
    data_parallel: ParallelGroup = SINGLE_RANK
    """Ranks with the same weights and other samples."""
    context_parallel: ParallelGroup = SINGLE_RANK
    """Ranks with the same weights and the other parts of the same sequences."""
    data_context_parallel: ParallelGroup = SINGLE_RANK
    """Ranks with the same weights, which sum their gradients: data x context."""
    pipeline_parallel: ParallelGroup = SINGLE_RANK
    """Ranks with the other stages of this replica."""
    tensor_parallel: ParallelGroup = SINGLE_RANK
    """Ranks with the other parts of the same layers."""
    model_parallel: ParallelGroup = SINGLE_RANK
    """Ranks with the other parts of this replica: pipeline x tensor."""
    copies: Mapping[tuple[int, ...], ParallelGroup] = field(default_factory=dict)
    """This rank's groups of pipeline stages that share parameters, such as tied embeddings, by the
    stages."""
    channels: tuple[dist.ProcessGroup, ...] = ()
    """Four groups over the pipeline's ranks, for messages whose order must be independent (see
    `pipeline_parallel.executor`). If the back end matches messages by tag, all four are the same
    group."""
    messages: MessageMemory | None = field(default=None, compare=False)
    """Memory through which the pipeline's ranks can send messages; None if there is none."""
    timers: Timers | None = field(default=None, compare=False)
    """Timers of the phases of this rank's work; None measures nothing."""

    @classmethod
    def serial(cls) -> "ProcessMesh":
        """Return the mesh of a single process; needs no process group."""
        return cls()

    @classmethod
    def build(
        cls,
        layout: RankLayout,
        *,
        shared_stages: Sequence[tuple[int, ...]] = (),
        device_type: str = "cpu",
        timers: Timers | None = None,
    ) -> "ProcessMesh":
        """Build this process's mesh; every rank of the default process group must call it.

        Args:
            layout: sizes of the axes; their product is the number of processes.
            shared_stages: sets of pipeline stages that share parameters, in the same order on all
                ranks (see `pipeline_parallel.partition`).
            device_type: "cpu" (gloo) or "cuda" (NCCL).
            timers: timers of the time that this rank waits for others, by group.

        Raises:
            ParallelLayoutError: the number of ranks in the layout differs from that in the default
                process group.
        """
        if layout.world_size != dist.get_world_size():
            raise ParallelLayoutError(
                f"the layout data {layout.data} x pipeline {layout.pipeline} x tensor "
                f"{layout.tensor}{f' x context {layout.context}' if layout.context > 1 else ''} "
                f"needs {layout.world_size} ranks, {dist.get_world_size()} were "
                f"started: start {layout.world_size}"
            )
        axes = dict.fromkeys(AXES, SINGLE_RANK)
        # A gloo group has a thread that wakes up 100 times a second: none is made for one rank.
        sizes = {axis: size for axis, size in zip(AXES, layout.shape, strict=True) if size > 1}
        if sizes:
            mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
            axes |= {
                axis: ParallelGroup(
                    mesh.get_group(axis), mesh.get_local_rank(axis), size, axis, timers
                )
                for axis, size in sizes.items()
            }
        # A separate group: gradients are summed while attention gathers keys and values.
        replicas = (
            _group(layout.groups("data", "context"), "data", timers)
            if layout.context > 1
            else axes["data"]
        )
        pipeline, cpu = layout.pipeline > 1, device_type == "cpu"
        if cpu:
            axes["tensor"] = _with_memory(axes["tensor"])
            axes["context"] = _with_memory(axes["context"])
            replicas = _with_memory(replicas, GRADIENT_PIECE)
        copies = _copies(layout, shared_stages, timers)
        channels = _channels(layout, device_type) if pipeline else ()
        return cls(
            layout=layout,
            rank=dist.get_rank(),
            data_parallel=axes["data"] if layout.context > 1 else replicas,
            context_parallel=axes["context"],
            data_context_parallel=replicas,
            pipeline_parallel=axes["pipeline"],
            tensor_parallel=axes["tensor"],
            model_parallel=_group(layout.groups("pipeline", "tensor"), "model", timers)
            if pipeline and layout.tensor > 1
            else axes["pipeline" if pipeline else "tensor"],
            copies={stages: _with_memory(group, GRADIENT_PIECE) for stages, group in copies.items()}
            if cpu
            else copies,
            channels=channels,
            messages=_message_memory(axes["pipeline"]) if cpu and pipeline else None,
            timers=timers,
        )

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.layout.world_size

    def time(self, phase: str) -> AbstractContextManager[None]:
        """Add the time of the body to `phase`."""
        return nullcontext() if self.timers is None else self.timers(phase)

    def beat(self, phase: str, iteration: int | None = None) -> None:
        """Report this rank's current phase, and iteration if given, to its heartbeat, if any."""
        if self.timers is not None:
            self.timers.beat(phase, iteration)

    @property
    def is_first_stage(self) -> bool:
        """True if this rank's pipeline stage takes the tokens."""
        return self.pipeline_parallel.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True if this rank's pipeline stage computes the losses."""
        return self.pipeline_parallel.rank == self.pipeline_parallel.size - 1


def gpu_queues(layout: RankLayout, shared_stages: Sequence[tuple[int, ...]]) -> int:
    """Return the number of hardware queues with which a rank's CUDA streams share none.

    The computation has one stream, and NCCL has one for each group. In the channels it has one for
    each pair of ranks: a rank has as many pairs as there are channels, or fewer.

    Args:
        layout: sizes of the axes.
        shared_stages: sets of pipeline stages that share parameters.
    """
    pipeline = layout.pipeline > 1
    groups = 1 + sum(size > 1 for size in layout.shape) + (pipeline and layout.tensor > 1)
    groups += layout.context > 1  # the sum of gradients, over data x context
    if pipeline:
        groups += CHANNELS + max(
            sum(stage in stages for stages in shared_stages) for stage in range(layout.pipeline)
        )
    return max(_CUDA_QUEUES, 1 + groups + _OTHER_STREAMS)


def _group(members: list[list[int]], name: str, timers: Timers | None) -> ParallelGroup:
    """Create the listed groups, in the same order on every rank; return this rank's group.

    It is SINGLE_RANK for a rank that is in none of them.
    """
    local_group = SINGLE_RANK
    for ranks in members:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            local_group = ParallelGroup(
                group, ranks.index(dist.get_rank()), len(ranks), name, timers
            )
    return local_group


def _copies(
    layout: RankLayout, shared_stages: Sequence[tuple[int, ...]], timers: Timers | None
) -> dict[tuple[int, ...], ParallelGroup]:
    """Return this rank's groups among those of `shared_stages`.

    All ranks create all groups, in the same order.
    """
    pipelines = layout.groups("pipeline")
    groups = {
        stages: _group(
            [[ranks[stage] for stage in stages] for ranks in pipelines], "embedding", timers
        )
        for stages in shared_stages
    }
    return {stages: group for stages, group in groups.items() if group.size > 1}


def _with_memory(group: ParallelGroup, piece: int | None = None) -> ParallelGroup:
    """Return the group with shared memory, which works if all its ranks are on one host.

    With a `piece`, the memory is for gradients, and not for groups of many ranks. Their sums are
    not started before they are waited for, so ranks that cannot share memory have none. Collective.
    """
    if group.group is None or (piece and not sums_in_memory(group.size)):
        return group
    memory = SharedMemory(group.group, group.rank, group.size, piece)
    return group if piece and not memory.is_possible() else replace(group, shared=memory)


def _message_memory(pipeline: ParallelGroup) -> MessageMemory | None:
    """Return memory for the messages of a pipeline, if all its ranks can share memory. Collective.

    A stage has at most about 2 pp unread messages for another (see `pipeline_parallel.schedules`);
    more are sent through gloo.
    """
    assert pipeline.group is not None
    possible = SharedMemory(pipeline.group, pipeline.rank, pipeline.size).is_possible()
    return MessageMemory(2 * pipeline.size) if possible and MessageMemory.supported() else None


def _channels(layout: RankLayout, device_type: str) -> tuple[dist.ProcessGroup, ...]:
    """Create the channels of this rank's pipeline.

    gloo matches messages by tag, so one group is enough. NCCL takes messages in order, so each
    channel needs a separate group.
    """
    count = 1 if device_type == "cpu" else CHANNELS
    members = layout.groups("pipeline")
    groups = [_group(members, "pipeline", None).group for _ in range(count)]
    channels = tuple(group for group in groups if group is not None)
    if device_type != "cpu":
        _open_channels(channels, layout, torch.device(device_type, torch.cuda.current_device()))
    return channels * (CHANNELS // len(channels))


def _open_channels(
    channels: tuple[dist.ProcessGroup, ...], layout: RankLayout, device: torch.device
) -> None:
    """Exchange one message between every pair of neighbours, in the same order on all ranks.

    NCCL's first message between two ranks waits until both take part.
    """
    local_stage = layout.coordinate(dist.get_rank()).pipeline
    token = torch.zeros(1, device=device)
    for number, group in enumerate(channels):
        step = 1 if number < CHANNELS // 2 else -1
        for source in range(number % 2, layout.pipeline, 2):
            destination = (source + step) % layout.pipeline
            if local_stage == source:
                dist.send(token, group=group, group_dst=destination)
            elif local_stage == destination:
                dist.recv(token, group=group, group_src=source)
