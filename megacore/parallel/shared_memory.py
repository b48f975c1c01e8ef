"""Memory that the ranks of one host share, so that their activations do not go through sockets.

DeepSpeed and vLLM sum activations on CPUs in this way (`csrc/cpu/comm/shm.cpp` and `csrc/cpu/shm.cpp` there): a rank
writes what it gives into its own slot, tells the others by a message, and reads their slots.
"""

import mmap
import os
import secrets
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_TURNS = 2
"""Slots of each rank, used in turn: while one collective is read the next one is written."""
_MIB = 1 << 20
_SECRET = 8
"""Bytes at the end of the file by which the others know it: another machine may have a process of that number."""


class SharedMemory:
    """Slots of the ranks of one group, which grow with what is put there. Where the ranks share no memory it says so.

    A slot is written again two collectives later. By then every rank has read it, because each ends a collective
    before it begins the next (`busy` until then), and because it began the one between.
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
        """Write `x` and return where every rank writes its own, to be read once all have told that they did.

        Every rank calls it alike, with a tensor of the same shape. None means that there is no room: the collective
        has to go another way.
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
        """Replace the slots by larger ones, in a file without a name that the first rank makes and the others open.

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
        memory = _open(process, opened, expected, length)
        everywhere = torch.tensor(memory is not None, dtype=torch.uint8)
        dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=self._group)
        if self._rank == 0:
            os.close(descriptor)
        self._possible = bool(everywhere)
        if memory is not None and self._possible:
            slots = torch.frombuffer(memory, dtype=torch.uint8, count=length - _SECRET)
            self._slots = slots.view(_TURNS, self._size, capacity)
        return self._possible


def _open(process: int, descriptor: int, secret: int, length: int) -> mmap.mmap | None:
    """The file that is open in another process; None where that is none of this machine's or out of reach."""
    try:
        with open(f"/proc/{process}/fd/{descriptor}", "r+b") as file:
            memory = mmap.mmap(file.fileno(), length)
    except (OSError, ValueError):
        return None
    return memory if memory[length - _SECRET :] == secret.to_bytes(_SECRET, "little") else None
