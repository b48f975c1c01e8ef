"""Memory that the CPU ranks of one host share, so that their data does not go through sockets.

As in DeepSpeed and vLLM on CPUs (`csrc/cpu/comm/shm.cpp` and `csrc/cpu/shm.cpp` there), a rank
writes its data into a slot of its own and notifies the others, which read it, by a message of gloo.
The memory is an anonymous file, which the kernel removes when the last process that has it open
ends, even by a crash.
"""

import mmap
import os
import platform
import secrets
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

_TURNS = 2
"""Slots of each rank, used in turn: one collective may be written while the last is still read."""
_MIB = 1 << 20
_SECRET = 8
"""Number of bytes at the end of the file that identify it: on another host, the same process id may
belong to another process."""
_NO_SLOT = -1
ADDRESS = 6
"""Numbers of a message's address: four of its file, the bytes of a slot, and the slot."""


class SharedMemory:
    """Memory slots of the ranks of one group, which grow with the data.

    If the ranks cannot share memory, `put` returns None. A slot is written again two collectives
    later. By then every rank has read it, because every rank has started the collective in between,
    and a rank ends one collective before it starts the next (`busy` is True until then).
    """

    def __init__(
        self, group: dist.ProcessGroup, rank: int, size: int, piece: int | None = None
    ) -> None:
        """Create the slots without allocating memory.

        With a `piece`, the memory is for sums, which are made in pieces of as many bytes when they
        are waited for.
        """
        self.piece = piece
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
        if not size:
            return None
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

    def is_possible(self) -> bool:
        """Return True if the ranks can share memory. Collective."""
        return self._possible and self._grow(1)

    def _grow(self, size: int) -> bool:
        """Replace the slots by larger ones. Collective.

        The first rank creates the file and the others open it.
        """
        capacity = -(-size // _MIB) * _MIB
        length = _TURNS * self._size * capacity + _SECRET
        secret, descriptor = secrets.randbits(62), -1
        if self._rank == 0:
            with suppress(OSError):  # the others then find no file
                descriptor = _create_file(secret, length)
        file_id = torch.tensor([os.getpid(), descriptor, secret])
        dist.broadcast(file_id, group=self._group, group_src=0)
        process, opened, expected = file_id.tolist()
        memory = _map_file(process, opened, expected, length)
        mapped = torch.tensor(memory is not None, dtype=torch.uint8)
        dist.all_reduce(mapped, dist.ReduceOp.MIN, group=self._group)
        if descriptor >= 0:
            os.close(descriptor)
        self._possible = bool(mapped)
        if memory is not None and self._possible:
            slots = torch.frombuffer(memory, dtype=torch.uint8, count=length - _SECRET)
            self._slots = slots.view(_TURNS, self._size, capacity)
        return self._possible


@dataclass(frozen=True)
class _Slots:
    """File with slots for the messages from one rank to another.

    The first bytes are flags, one for each slot: 1 from the write until the read.
    """

    memory: mmap.mmap
    count: int
    capacity: int
    """Bytes of a slot."""
    identity: tuple[int, ...] = ()
    """Process, descriptor, secret and length, by which the receiver maps the file."""

    def tensor(self, slot: int, like: Tensor) -> Tensor:
        """Return a slot in the type and shape of `like`."""
        start = _MIB + slot * self.capacity
        data = torch.frombuffer(self.memory, dtype=like.dtype, count=like.numel(), offset=start)
        return data.view(like.shape)


class MessageMemory:
    """Slots for the messages from each rank of a group to each other, which grow with the messages.

    The sender writes a message into a free slot (`put`) and sends its address, small and through
    gloo. The receiver copies the message (`take`) and frees the slot. The flag that frees a slot
    follows the reads before it on x86 only; on other processors `supported` is False.
    """

    def __init__(self, count: int) -> None:
        """Use `count` slots from each rank to each other, of which none is allocated yet."""
        self._count = count
        self._outgoing: dict[int, _Slots] = {}
        self._incoming: dict[int, _Slots] = {}

    @staticmethod
    def supported() -> bool:
        """Return True if this host has anonymous files, and a processor that keeps the order."""
        return hasattr(os, "memfd_create") and platform.machine() in ("x86_64", "AMD64")

    def put(self, destination: int, x: Tensor) -> Tensor | None:
        """Write the contiguous `x` into a slot and return its address, int64 [6].

        Returns None if no slot is free; the message must then be sent in another way.
        """
        slots = self._outgoing.get(destination)
        flags = slots.memory[: self._count] if slots else b""
        size = x.numel() * x.element_size()
        if not size:
            return None
        if slots is None or slots.capacity < size:
            if any(flags):
                return None  # the receiver has yet to map the present file
            try:
                slots, flags = self._create(destination, size), bytes(self._count)
            except OSError:  # no memory or descriptor is left
                return None
        slot = flags.find(0)
        if slot == _NO_SLOT:
            return None
        slots.tensor(slot, x).copy_(x)
        slots.memory[slot] = 1
        return torch.tensor([*slots.identity, slots.capacity, slot])

    def take(self, source: int, address: Tensor, out: Tensor) -> bool:
        """Copy the message at `address` to `out`; return False if it is sent in another way."""
        *identity, capacity, slot = address.tolist()
        if slot == _NO_SLOT:
            return False
        slots = self._incoming.get(source)
        if slots is None or slots.identity != tuple(identity):
            memory = _map_file(*identity)
            assert memory is not None, "the ranks could share memory when the mesh was built"
            slots = _Slots(memory, self._count, capacity, tuple(identity))
            self._incoming[source] = slots
        out.copy_(slots.tensor(slot, out))
        slots.memory[slot] = 0
        return True

    def no_address(self) -> Tensor:
        """Return the address of a message that is sent in another way."""
        return torch.full((ADDRESS,), _NO_SLOT)

    def _create(self, destination: int, size: int) -> _Slots:
        """Replace the slots for a rank, all free, by larger ones."""
        capacity = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        length, secret = _MIB + self._count * capacity + _SECRET, secrets.randbits(62)
        descriptor = _create_file(secret, length)  # open, for the receiver, as long as the slots
        identity = (os.getpid(), descriptor, secret, length)
        try:
            memory = mmap.mmap(descriptor, length)
        except OSError:
            os.close(descriptor)
            raise
        slots = _Slots(memory, self._count, capacity, identity)
        weakref.finalize(slots, _close_if_read, descriptor, slots.memory, self._count)
        self._outgoing[destination] = slots
        return slots


def _close_if_read(descriptor: int, memory: mmap.mmap, count: int) -> None:
    """Close the file of a sender's slots, unless the receiver has yet to read one of them.

    It may not have mapped the file yet. Such a file stays until this process ends.
    """
    if not any(memory[:count]):
        os.close(descriptor)


def _create_file(secret: int, length: int) -> int:
    """Create an anonymous file that ends with the secret; return its descriptor.

    Raises OSError if the system refuses it.
    """
    descriptor = os.memfd_create("megacore")
    try:
        os.truncate(descriptor, length)
        os.pwrite(descriptor, secret.to_bytes(_SECRET, "little"), length - _SECRET)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


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
