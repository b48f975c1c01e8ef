"""Part of a checkpoint that a rank writes, and its copy in host memory."""

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
"""Rectangle of a tensor: global name, position of its first element, shape."""

_ALIGNMENT = 64
_LARGE = 1 << 15
"""Number of elements above which torch copies with all threads, which takes longer for starting
them than for copying."""
_CHUNK = 16 << 20
_THREADS = 4
"""Maximum number of copying threads, which share the memory bandwidth."""


class Shares:
    """Division of the rectangles among the ranks.

    It is repeated only if some rank's tensors change form.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self.total_bytes = 0
        """Bytes of all ranks, each rectangle counted once."""
        self._ranks = ranks
        self._form: list[tuple[Key, torch.dtype, str]] | None = None
        self._own: frozenset[Key] = frozenset()

    def differ(self, tensors: Tensors) -> bool:
        """Return True if this rank's tensors have changed form since the last `decide`."""
        return memory_form(rectangles_of(tensors)) != self._form

    def decide(self, tensors: Tensors) -> None:
        """Divide the rectangles among the ranks. Collective."""
        pieces = rectangles_of(tensors)
        local_sizes = {key: piece.nbytes for key, piece in pieces.items()}
        all_sizes = self._ranks.everywhere(lambda: local_sizes)
        self._own = divide_rectangles(all_sizes)[self._ranks.rank]
        self._form = memory_form(pieces)
        self.total_bytes = sum(
            {key: size for sizes in all_sizes for key, size in sizes.items()}.values()
        )

    def own(self, tensors: Tensors) -> dict[str, Tensor | TensorShard]:
        """Return the tensors, and those of their rectangles, that this rank writes."""
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
    """Return every rectangle on this rank."""
    return {
        _key(name, offsets, piece): piece
        for name, tensor in tensors.items()
        for offsets, piece in pieces_of(tensor).items()
    }


def memory_form(pieces: Mapping[Key, Tensor]) -> list[tuple[Key, torch.dtype, str]]:
    """Return the properties of `pieces` that determine the memory for a copy."""
    return [(key, piece.dtype, piece.device.type) for key, piece in pieces.items()]


def _key(name: str, offsets: torch.Size, piece: Tensor) -> Key:
    return name, tuple(offsets), tuple(piece.shape)


def _with_pieces(
    tensor: Tensor | TensorShard, pieces: dict[torch.Size, Tensor]
) -> Tensor | TensorShard:
    """Return the same tensor with other pieces."""
    if isinstance(tensor, TensorShard):
        return TensorShard(tensor.shape, tensor.dtype, pieces)
    (piece,) = pieces.values()
    return piece


def divide_rectangles(sizes_by_rank: Sequence[Mapping[Key, int]]) -> list[frozenset[Key]]:
    """Return the rectangles that each rank writes, with bytes divided evenly.

    Args:
        sizes_by_rank: bytes of each rectangle on each rank.
    """
    holders: dict[Key, list[int]] = {}
    sizes: dict[Key, int] = {}
    for rank, pieces in enumerate(sizes_by_rank):
        for key, size in pieces.items():
            holders.setdefault(key, []).append(rank)
            sizes[key] = size
    load = [0] * len(sizes_by_rank)
    assigned: list[set[Key]] = [set() for _ in sizes_by_rank]
    # Rectangles that only one rank has come first, then the largest; small ones even out the load.
    for key in sorted(holders, key=lambda key: (len(holders[key]) > 1, -sizes[key], key)):
        rank = min(holders[key], key=lambda rank: (load[rank], rank))
        load[rank] += sizes[key]
        assigned[rank].add(key)
    return [frozenset(keys) for keys in assigned]


class HostBuffers:
    """Host memory for one rank's share, reused while the tensors keep their form.

    It is one block, page-locked if a tensor is on a CUDA device, so that copies from there run
    asynchronously.
    """

    def __init__(self) -> None:
        self._form: list[tuple[Key, torch.dtype, str]] = []
        self._buffers: dict[Key, Tensor] = {}
        self._pinned: int | None = None

    def copy(self, tensors: Tensors) -> dict[str, Tensor | TensorShard]:
        """Copy the tensors into host memory; the copies are valid until the next call.

        Raises CheckpointError if there is not enough memory.
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
        """Allocate memory for tensors of this form, unless it exists.

        Raises CheckpointError if there is not enough memory.
        """
        pieces = rectangles_of(tensors)
        form = memory_form(pieces)
        if form != self._form:
            self.free()
            self._allocate(pieces)
            self._form = form

    def free(self) -> None:
        """Release the memory; the copies must not be in use any more."""
        if self._pinned is not None:
            _cuda_runtime().cudaHostUnregister(self._pinned)
        self._pinned, self._form, self._buffers = None, [], {}

    def _allocate(self, pieces: Mapping[Key, Tensor]) -> None:
        """Allocate a separate storage for each tensor, since torch saves complete storages."""
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
        is_large = (
            source.device.type == "cpu" and source.is_contiguous() and source.numel() >= _LARGE
        )
        (large if is_large else others).append((target, source))
    with torch.no_grad():  # copies from a device run while the large tensors are copied here
        for target, source in others:
            target.copy_(source, non_blocking=True)
    _copy_memory(large)
    for device in {source.device for _, source in others if source.is_cuda}:
        torch.cuda.synchronize(device)


def _copy_memory(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy bytes on a few threads; unlike torch, the C library bypasses the caches."""
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
