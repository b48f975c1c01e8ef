"""The one description of who works with whom: built at launch, passed explicitly, global nowhere.

The ranks of one host may share memory, so that their activations do not go through sockets. As in
DeepSpeed and vLLM on CPUs (`csrc/cpu/comm/shm.cpp` and `csrc/cpu/shm.cpp` there) a rank writes what
it gives into its own slot, tells the others by a message, and reads their slots.
"""

import mmap
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from megacore.errors import ParallelLayoutError
from megacore.observe.timers import Timers
from megacore.parallel.rank_layout import AXES, RankLayout

CHANNELS = 4
"""Forward and backward messages, from even and from odd stages."""
_TURNS = 2
"""Slots of each rank, used in turn: while one collective is read the next one is written."""
_MIB = 1 << 20
_SECRET = 8
"""Bytes at the end of the file by which the others know it: another machine may have a process of
that number."""


@dataclass(frozen=True)
class ParallelGroup:
    """This rank's place among the ranks that share one kind of work."""

    group: dist.ProcessGroup | None = None
    """The process group; None when this rank works alone, and then nothing is communicated."""
    rank: int = 0
    """This rank's number within the group."""
    size: int = 1
    """Ranks in the group."""
    name: str = "alone"
    """What the group's communication is called in the step timer."""
    timers: Timers | None = field(default=None, compare=False)
    """Take the time that this rank waits for the group's communication; None takes none."""
    shared: "SharedMemory | None" = field(default=None, compare=False)
    """Memory through which the ranks may communicate; None is none."""


ALONE = ParallelGroup()
"""A group of one."""


@dataclass(frozen=True)
class ProcessMesh:
    """This rank's groups along each axis of the layout (dp x pp x tp)."""

    layout: RankLayout = field(default_factory=RankLayout)
    """Sizes of the axes."""
    rank: int = 0
    """This process's number in the world."""
    data_parallel: ParallelGroup = ALONE
    """Ranks that hold the same weights and see other samples."""
    pipeline_parallel: ParallelGroup = ALONE
    """Ranks that hold the other stages of this replica."""
    tensor_parallel: ParallelGroup = ALONE
    """Ranks that hold the other parts of the same layers."""
    model_parallel: ParallelGroup = ALONE
    """Ranks that hold the other parts of this replica: pipeline x tensor."""
    copies: Mapping[tuple[int, ...], ParallelGroup] = field(default_factory=dict)
    """Groups of pipeline stages that hold the same parameters, as tied embeddings, by the stages;
    those that this rank belongs to."""
    channels: tuple[dist.ProcessGroup, ...] = ()
    """Four groups over the pipeline's ranks, for messages whose order must not depend on each
    other's (see `pipeline_parallel.executor`); all the same where the back end matches messages by
    tag."""
    timers: Timers | None = field(default=None, compare=False)
    """Take the time of each phase of this rank's work; None takes none."""

    @classmethod
    def serial(cls) -> "ProcessMesh":
        """One process that works alone; needs no process group."""
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
        """This process's mesh; every rank of the default process group calls it.

        Args:
            layout: sizes of the axes; their product is the number of processes.
            shared_stages: sets of pipeline stages that hold the same parameters, in one order on
                all ranks (see `pipeline_parallel.partition`).
            device_type: "cpu" (gloo) or "cuda" (NCCL).
            timers: take the time that this rank waits for others, by group.

        Raises:
            ParallelLayoutError: the layout has another number of ranks than the default process
                group.
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
            else ALONE
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
        """Tell the rank's heartbeat, if it has one, what this rank does now.

        The iteration is told where it is given.
        """
        if self.timers is not None:
            self.timers.beat(phase, iteration)

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank's pipeline stage takes the tokens."""
        return self.pipeline_parallel.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank's pipeline stage computes the losses."""
        return self.pipeline_parallel.rank == self.pipeline_parallel.size - 1


def _group(members: list[list[int]], name: str, timers: Timers | None) -> ParallelGroup:
    """This rank's group of a list that every rank passes alike; alone when it is in none."""
    own = ALONE
    for ranks in members:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            own = ParallelGroup(group, ranks.index(dist.get_rank()), len(ranks), name, timers)
    return own


def _copies(
    layout: RankLayout, shared_stages: Sequence[tuple[int, ...]], timers: Timers | None
) -> dict[tuple[int, ...], ParallelGroup]:
    """This rank's groups among those of `shared_stages`.

    All ranks make all of them, in one order.
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
    """The group with shared memory, where all its ranks are on one host."""
    return (
        replace(group, shared=SharedMemory(group.group, group.rank, group.size))
        if group.group
        else group
    )


def _channels(layout: RankLayout, device_type: str) -> tuple[dist.ProcessGroup, ...]:
    """Gloo matches messages by tag, so one group serves.

    NCCL takes them in order, so each channel has its own.
    """
    count = 1 if device_type == "cpu" else CHANNELS
    members = layout.groups("pipeline")
    groups = [_group(members, "pipeline", None).group for _ in range(count)]
    found = tuple(group for group in groups if group is not None)
    if device_type != "cpu":
        _open_channels(found, layout, torch.device(device_type, torch.cuda.current_device()))
    return found * (CHANNELS // len(found))


def _open_channels(
    channels: tuple[dist.ProcessGroup, ...], layout: RankLayout, device: torch.device
) -> None:
    """Let every pair of neighbours meet once, in one order.

    NCCL's first message of a pair waits for both sides.
    """
    own = layout.coordinate(dist.get_rank()).pipeline
    token = torch.zeros(1, device=device)
    for number, group in enumerate(channels):
        step = 1 if number < CHANNELS // 2 else -1
        for source in range(number % 2, layout.pipeline, 2):
            destination = (source + step) % layout.pipeline
            if own == source:
                dist.send(token, group=group, group_dst=destination)
            elif own == destination:
                dist.recv(token, group=group, group_src=source)


class SharedMemory:
    """Slots of the ranks of one group, which grow with what is put there.

    Where the ranks share no memory it says so.

    A slot is written again two collectives later. By then every rank has read it, because each ends
    a collective before it begins the next (`busy` until then), and because it began the one
    between.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        """Nothing is allocated yet."""
        self._group, self._rank, self._size = group, rank, size
        self._slots = torch.empty(_TURNS, size, 0, dtype=torch.uint8)
        self._turn = 0
        self._possible = hasattr(os, "memfd_create")
        self.busy = False
        """Whether the last collective is still to be read by this rank."""

    def put(self, x: Tensor) -> Sequence[Tensor] | None:
        """Write `x` and return where every rank writes its own.

        It is to be read once all have told that they did.

        Every rank calls it alike, with a tensor of the same shape. None means that there is no
        room: the collective has to go another way.
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
        """This rank has read what was put last."""
        self.busy = False

    def _grow(self, size: int) -> bool:
        """Replace the slots by larger ones, in a file without a name.

        The first rank makes it and the others open it.

        Collective. The file is gone when the last process that has it open ends, however that ends.
        """
        capacity = -(-size // _MIB) * _MIB
        length = _TURNS * self._size * capacity + _SECRET
        secret, descriptor = secrets.randbits(62), -1
        if self._rank == 0:
            descriptor = os.memfd_create("megacore")
            os.truncate(descriptor, length)
            os.pwrite(descriptor, secret.to_bytes(_SECRET, "little"), length - _SECRET)
        where = torch.tensor([os.getpid(), descriptor, secret])
        dist.broadcast(where, group=self._group, group_src=0)
        process, opened, expected = where.tolist()
        memory = _map_file(process, opened, expected, length)
        everywhere = torch.tensor(memory is not None, dtype=torch.uint8)
        dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=self._group)
        if self._rank == 0:
            os.close(descriptor)
        self._possible = bool(everywhere)
        if memory is not None and self._possible:
            slots = torch.frombuffer(memory, dtype=torch.uint8, count=length - _SECRET)
            self._slots = slots.view(_TURNS, self._size, capacity)
        return self._possible


def _map_file(process: int, descriptor: int, secret: int, length: int) -> mmap.mmap | None:
    """Map the file that is open in another process.

    Return None where that is none of this machine's or out of reach.
    """
    try:
        with open(f"/proc/{process}/fd/{descriptor}", "r+b") as file:
            memory = mmap.mmap(file.fileno(), length)
    except (OSError, ValueError):
        return None
    return memory if memory[length - _SECRET :] == secret.to_bytes(_SECRET, "little") else None
