"""Process groups of a layout, built at launch and passed explicitly; there is no global state.

The ranks of one host may share memory, so that their activations do not go through sockets. As in
DeepSpeed and vLLM on CPUs (`csrc/cpu/comm/shm.cpp` and `csrc/cpu/shm.cpp` there), a rank writes its
data into its own slot, notifies the others by a message, and reads their slots.
"""

import itertools
import mmap
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from megacore.errors import ParallelLayoutError
from megacore.observe.timers import Timers
from megacore.parallel.rank_layout import AXES, RankLayout

CHANNELS = 4
"""Number of channels: one for each direction, from even and from odd stages."""
_CUDA_QUEUES = 8
"""Number of hardware queues that CUDA uses by default; at most 32."""
_OTHER_STREAMS = 4
"""Streams besides those of the mesh: NCCL's own for setup, a profiler's, DeepSpeed's copies."""
_TURNS = 2
"""Slots of each rank, used in turn: one collective may be written while the last is still read."""
_MIB = 1 << 20
_SECRET = 8
"""Number of bytes at the end of the file that identify it: on another host, the same process id may
belong to another process."""


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
    shared: "SharedMemory | None" = field(default=None, compare=False)
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
    """This rank's groups along each axis of the layout (dp x pp x tp)."""

    layout: RankLayout = field(default_factory=RankLayout)
    """Sizes of the axes."""
    rank: int = 0
    """This process's rank among all processes."""
    data_parallel: ParallelGroup = SINGLE_RANK
    """Ranks with the same weights and other samples."""
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
                f"{layout.tensor} needs {layout.world_size} ranks, {dist.get_world_size()} were "
                f"started: start {layout.world_size}"
            )
        mesh, rank = (
            init_device_mesh(device_type, layout.shape, mesh_dim_names=AXES),
            dist.get_rank(),
        )
        axes = {
            axis: ParallelGroup(mesh.get_group(axis), mesh.get_local_rank(axis), size, axis, timers)
            if size > 1
            else SINGLE_RANK
            for axis, size in zip(AXES, layout.shape, strict=True)
        }
        pipeline = layout.pipeline > 1
        return cls(
            layout=layout,
            rank=rank,
            data_parallel=axes["data"],
            pipeline_parallel=axes["pipeline"],
            tensor_parallel=_with_memory(axes["tensor"])
            if device_type == "cpu"
            else axes["tensor"],
            model_parallel=_group(layout.groups("pipeline", "tensor"), "model", timers)
            if pipeline and layout.tensor > 1
            else axes["pipeline" if pipeline else "tensor"],
            copies=_copies(layout, shared_stages, timers),
            channels=_channels(layout, device_type) if pipeline else (),
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

    The computation has one stream, and NCCL has one for each group. A rank uses each channel in one
    direction and with one neighbour (see `Message.channel`), so a channel is one stream too.

    Args:
        layout: sizes of the axes.
        shared_stages: sets of pipeline stages that share parameters.
    """
    pipeline, axes = layout.pipeline > 1, (layout.data, layout.pipeline, layout.tensor)
    groups = 1 + sum(size > 1 for size in axes) + (pipeline and layout.tensor > 1)
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


def _with_memory(group: ParallelGroup) -> ParallelGroup:
    """Return the group with shared memory, which works if all its ranks are on one host."""
    return (
        replace(group, shared=SharedMemory(group.group, group.rank, group.size))
        if group.group
        else group
    )


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


class SharedMemory:
    """Memory slots of the ranks of one group, which grow with the data.

    If the ranks cannot share memory, `put` returns None. A slot is written again two collectives
    later. By then every rank has read it, because every rank has started the collective in between,
    and a rank ends one collective before it starts the next (`busy` is True until then).
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        """Create the slots without allocating memory."""
        self._group, self._rank, self._size = group, rank, size
        self._slots = torch.empty(_TURNS, size, 0, dtype=torch.uint8)
        self._turn = 0
        self._possible = hasattr(os, "memfd_create")
        self.busy = False
        """True if this rank has yet to read the last collective."""

    def put(self, x: Tensor) -> Sequence[Tensor] | None:
        """Write `x` into this rank's slot and return the slots of all ranks.

        They may be read once all ranks have notified each other. Every rank must call this with a
        tensor of the same shape. Returns None if the slots are busy or the ranks cannot share
        memory; the collective must then send messages instead.
        """
        if self.busy or not self._possible:
            return None
        size = x.numel() * x.element_size()
        if size > self._slots.shape[-1] and not self._grow(size):
            return None
        slots = self._slots[self._turn, :, :size].view(x.dtype).view(self._size, *x.shape)
        slots[self._rank].copy_(x)
        self._turn = (self._turn + 1) % _TURNS
        self.busy = True
        return slots.unbind(0)

    def done(self) -> None:
        """Release the slots: this rank has read the last collective."""
        self.busy = False

    def _grow(self, size: int) -> bool:
        """Replace the slots by larger ones, in an anonymous file. Collective.

        The first rank creates the file and the others open it. The kernel removes the file when the
        last process that has it open ends, even by a crash.
        """
        capacity = -(-size // _MIB) * _MIB
        length = _TURNS * self._size * capacity + _SECRET
        secret, descriptor = secrets.randbits(62), -1
        if self._rank == 0:
            descriptor = os.memfd_create("megacore")
            os.truncate(descriptor, length)
            os.pwrite(descriptor, secret.to_bytes(_SECRET, "little"), length - _SECRET)
        file_id = torch.tensor([os.getpid(), descriptor, secret])
        dist.broadcast(file_id, group=self._group, group_src=0)
        process, opened, expected = file_id.tolist()
        memory = _map_file(process, opened, expected, length)
        mapped = torch.tensor(memory is not None, dtype=torch.uint8)
        dist.all_reduce(mapped, dist.ReduceOp.MIN, group=self._group)
        if self._rank == 0:
            os.close(descriptor)
        self._possible = bool(mapped)
        if memory is not None and self._possible:
            slots = torch.frombuffer(memory, dtype=torch.uint8, count=length - _SECRET)
            self._slots = slots.view(_TURNS, self._size, capacity)
        return self._possible


def _map_file(process: int, descriptor: int, secret: int, length: int) -> mmap.mmap | None:
    """Map a file that is open in another process.

    Return None if the process is on another host or not accessible.
    """
    try:
        with open(f"/proc/{process}/fd/{descriptor}", "r+b") as file:
            memory = mmap.mmap(file.fileno(), length)
    except (OSError, ValueError):
        return None
    return memory if memory[length - _SECRET :] == secret.to_bytes(_SECRET, "little") else None
