"""The part of a checkpoint that a rank writes, and the host memory that it is copied into."""

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from megacore.checkpoint.collective import RankGroup
from megacore.checkpoint.shard import Tensors, TensorShard, pieces_of
from megacore.errors import CheckpointError

Key = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A rectangle of a tensor: global name, position of its first element, shape."""

_ALIGNMENT = 64
_LARGE = 1 << 15
"""Elements beyond which torch copies with all threads, which wait longer than they copy."""
_CHUNK = 16 << 20
_THREADS = 4
"""That copy at most; they share the memory's bandwidth."""


class Shares:
    """Which rank writes what, decided again only when some rank's tensors have another form."""

    def __init__(self, ranks: RankGroup) -> None:
        self.total_bytes = 0
        """Of all ranks, each byte counted once."""
        self._ranks = ranks
        self._form: list[tuple[Key, torch.dtype, str]] | None = None
        self._own: frozenset[Key] = frozenset()

    def differ(self, tensors: Tensors) -> bool:
        """Return True if this rank's tensors have another form than when the ranks last decided."""
        return memory_form(rectangles_of(tensors)) != self._form

    def decide(self, tensors: Tensors) -> None:
        """Share out what the ranks hold. Collective."""
        pieces = rectangles_of(tensors)
        held = {key: piece.nbytes for key, piece in pieces.items()}
        everyones = self._ranks.everywhere(lambda: held)
        self._own = shared_out(everyones)[self._ranks.rank]
        self._form = memory_form(pieces)
        self.total_bytes = sum(
            {key: size for one in everyones for key, size in one.items()}.values()
        )

    def own(self, tensors: Tensors) -> dict[str, Tensor | TensorShard]:
        """Return those of `tensors`, and of their rectangles, that this rank writes."""
        selected: dict[str, Tensor | TensorShard] = {}
        for name, tensor in tensors.items():
            pieces = {
                at: piece
                for at, piece in pieces_of(tensor).items()
                if _key(name, at, piece) in self._own
            }
            if pieces:
                selected[name] = _with_pieces(tensor, pieces)
        return selected


def rectangles_of(tensors: Tensors) -> dict[Key, Tensor]:
    """Return every rectangle that a rank holds."""
    return {
        _key(name, offsets, piece): piece
        for name, tensor in tensors.items()
        for offsets, piece in pieces_of(tensor).items()
    }


def memory_form(pieces: Mapping[Key, Tensor]) -> list[tuple[Key, torch.dtype, str]]:
    """Return what the memory for a copy of `pieces` depends on."""
    return [(key, piece.dtype, piece.device.type) for key, piece in pieces.items()]


def _key(name: str, offsets: torch.Size, piece: Tensor) -> Key:
    return name, tuple(offsets), tuple(piece.shape)


def _with_pieces(
    tensor: Tensor | TensorShard, pieces: dict[torch.Size, Tensor]
) -> Tensor | TensorShard:
    """Return the same tensor with other pieces."""
    if isinstance(tensor, TensorShard):
        return TensorShard(tensor.shape, tensor.dtype, pieces)
    (whole,) = pieces.values()
    return whole


def shared_out(held: Sequence[Mapping[Key, int]]) -> list[frozenset[Key]]:
    """Return what each rank writes: all that only it holds, the rest so that bytes are even.

    Args:
        held: bytes of what each rank holds.
    """
    holders: dict[Key, list[int]] = {}
    sizes: dict[Key, int] = {}
    for rank, pieces in enumerate(held):
        for key, size in pieces.items():
            holders.setdefault(key, []).append(rank)
            sizes[key] = size
    load = [0] * len(held)
    own: list[set[Key]] = [set() for _ in held]
    # What only one rank can write comes first, then the largest; small ones even it out.
    for key in sorted(holders, key=lambda key: (len(holders[key]) > 1, -sizes[key], key)):
        rank = min(holders[key], key=lambda rank: (load[rank], rank))
        load[rank] += sizes[key]
        own[rank].add(key)
    return [frozenset(keys) for keys in own]


class HostBuffers:
    """Host memory for one rank's share, kept while the tensors keep their form.

    One block: page-locked if a tensor lies on a CUDA device, so that copies from there need not
    wait for each other.
    """

    def __init__(self) -> None:
        self._form: list[tuple[Key, torch.dtype, str]] = []
        self._buffers: dict[Key, Tensor] = {}
        self._pinned: int | None = None

    def copy(self, tensors: Tensors) -> dict[str, Tensor | TensorShard]:
        """Copy the tensors into host memory; the copies are valid until the next copy.

        Raises CheckpointError without enough memory.
        """
        self.fit(tensors)
        _copy(
            [(self._buffers[key], piece.detach()) for key, piece in rectangles_of(tensors).items()]
        )
        return {
            name: _with_pieces(
                tensor,
                {
                    at: self._buffers[_key(name, at, piece)]
                    for at, piece in pieces_of(tensor).items()
                },
            )
            for name, tensor in tensors.items()
        }

    def fit(self, tensors: Tensors) -> None:
        """Allocate for tensors of this form, if that is not done.

        Raises CheckpointError without enough memory.
        """
        pieces = rectangles_of(tensors)
        form = memory_form(pieces)
        if form != self._form:
            self.free()
            self._allocate(pieces)
            self._form = form

    def free(self) -> None:
        """Give the memory back, once nobody uses the copies any more."""
        if self._pinned is not None:
            _cuda_runtime().cudaHostUnregister(self._pinned)
        self._pinned, self._form, self._buffers = None, [], {}

    def _allocate(self, pieces: Mapping[Key, Tensor]) -> None:
        """Allocate a storage for each tensor: torch saves the whole storage of a tensor."""
        size = sum(_aligned(piece.nbytes) for piece in pieces.values())
        try:
            memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise CheckpointError(_too_little(size, error.strerror or str(error))) from error
        if any(piece.is_cuda for piece in pieces.values()):
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            code = int(_cuda_runtime().cudaHostRegister(address, len(memory), 0))
            if code != 0:
                raise CheckpointError(
                    _too_little(size, f"CUDA error {code} while its pages were locked")
                )
            self._pinned = address
        position = 0
        for key, piece in pieces.items():
            if piece.numel() == 0:
                self._buffers[key] = torch.empty(piece.shape, dtype=piece.dtype)
                continue
            flat = torch.frombuffer(memory, dtype=piece.dtype, count=piece.numel(), offset=position)
            self._buffers[key] = flat.view(piece.shape)
            position += _aligned(piece.nbytes)


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _too_little(size: int, reason: str) -> str:
    return (
        f"there is no host memory for {size / 2**20:,.0f} MiB of this rank's share of a "
        f"checkpoint ({reason}): set checkpoint.asynchronous to false"
    )


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Fill the first of each pair from the second, and wait until it is done."""
    large: list[tuple[Tensor, Tensor]] = []
    others: list[tuple[Tensor, Tensor]] = []
    for target, source in pairs:
        plain = source.device.type == "cpu" and source.is_contiguous() and source.numel() >= _LARGE
        (large if plain else others).append((target, source))
    with torch.no_grad():  # those on a device are on their way while the large ones are copied here
        for target, source in others:
            target.copy_(source, non_blocking=True)
    _copy_memory(large)
    for device in {source.device for _, source in others if source.is_cuda}:
        torch.cuda.synchronize(device)


def _copy_memory(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy byte for byte on a few threads; unlike torch, the C library passes the caches by."""
    chunks = [
        (target.data_ptr() + first, source.data_ptr() + first, min(_CHUNK, source.nbytes - first))
        for target, source in pairs
        for first in range(0, source.nbytes, _CHUNK)
    ]

    def move(part: list[tuple[int, int, int]]) -> None:
        for target, source, count in part:
            ctypes.memmove(target, source, count)

    threads = min(_THREADS, torch.get_num_threads(), len(chunks))
    if threads <= 1:
        move(chunks)
        return
    with ThreadPoolExecutor(threads, "checkpoint-copy") as pool:
        for _ in pool.map(move, [chunks[number::threads] for number in range(threads)]):
            pass
