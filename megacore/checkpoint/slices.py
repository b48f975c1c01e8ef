"""Reading slices of tensors from a checkpoint's files straight into the tensors that want them."""

import ctypes
import io
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from megacore.errors import CheckpointError

_CHUNK = 32 << 20
"""Bytes that are read at once where a tensor's memory cannot be read into."""
_THREADS = 4
"""That read at most; a disk is not faster with more."""


def read_slices(
    directory: Path, items: Sequence[ReadItem], storage: Mapping[Any, _StorageInfo], planner: LoadPlanner
) -> None:
    """Fill the tensors that `planner` names for `items`, several at once.

    The archive around each saved slice is read by torch with `weights_only`, without its data; they follow from the
    file into the tensor's own memory. Raises CheckpointError, or what torch raises, for a damaged or foreign file.
    """
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for item in items:
            name = storage[item.storage_index].relative_path
            if name not in files:
                files[name] = stack.enter_context(open(directory / name, "rb", buffering=0))

        def read(item: ReadItem) -> None:
            if item.type is not LoadItemType.TENSOR:
                raise CheckpointError(f"{item.storage_index.fqn} is no tensor")
            info = storage[item.storage_index]
            target = planner.resolve_tensor(item).detach()
            _read(files[info.relative_path].fileno(), info, item, target)
            planner.commit_tensor(item, target)

        threads = min(_THREADS, torch.get_num_threads(), len(items))
        if threads <= 1:
            for item in items:
                read(item)
            return
        with ThreadPoolExecutor(threads, "checkpoint-read") as pool:
            for _ in pool.map(read, items):
                pass


def _read(descriptor: int, info: _StorageInfo, item: ReadItem, target: Tensor) -> None:
    """Fill `target` from the part of a saved slice that `item` describes."""
    whole, start = _saved(descriptor, info)
    part = narrow_tensor_by_index(whole, item.storage_offsets, item.lengths)
    if part.shape != target.shape or part.dtype != target.dtype:
        raise CheckpointError(
            f"{info.relative_path} holds {list(part.shape)} {part.dtype} of {item.storage_index.fqn}, and its metadata "
            f"says {list(target.shape)} {target.dtype}"
        )
    if part.numel() == 0:
        return
    itemsize = part.element_size()
    start += int(part.storage_offset()) * itemsize
    if not part.is_contiguous():
        # Its elements lie apart: what lies between them is read with them.
        span = 1 + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
        scratch = torch.empty(span, dtype=part.dtype)
        _pread(descriptor, scratch, start, info.relative_path)
        target.copy_(scratch.as_strided(part.shape, part.stride()))
        return
    if not target.is_contiguous():
        scratch = torch.empty(part.shape, dtype=part.dtype)
        _pread(descriptor, scratch, start, info.relative_path)
        target.copy_(scratch)
    elif target.device.type == "cpu":
        _pread(descriptor, target, start, info.relative_path)
    else:
        flat, scratch = target.view(-1), torch.empty(min(_CHUNK // itemsize, part.numel()), dtype=part.dtype)
        for first in range(0, part.numel(), len(scratch)):
            chunk = flat[first : first + len(scratch)]
            _pread(descriptor, scratch[: len(chunk)], start + first * itemsize, info.relative_path)
            chunk.copy_(scratch[: len(chunk)])


def _saved(descriptor: int, info: _StorageInfo) -> tuple[Tensor, int]:
    """A saved slice without its data, and where these begin in the file."""
    window = cast(IO[bytes], _Window(descriptor, info.offset, info.length))
    tensor = torch.load(window, map_location="meta", weights_only=True)
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        raise CheckpointError(f"{info.relative_path} holds {type(tensor).__name__} where a tensor belongs")
    data = tensor.untyped_storage()
    offset = getattr(data, "_checkpoint_offset", None)
    held = min(info.length, os.fstat(descriptor).st_size - info.offset)
    if offset is None or offset + data.nbytes() > held:
        raise CheckpointError(f"{info.relative_path} does not hold the data of a slice that it describes")
    return tensor, info.offset + int(offset)


class _Window(io.RawIOBase):
    """A range of a file with a position of its own, so that threads can share the file."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._offset = offset
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        wanted = min(len(buffer), max(0, self._length - self._position))
        count = os.preadv(self._descriptor, [memoryview(buffer)[:wanted]], self._offset + self._position)
        self._position += count
        return count


def _pread(descriptor: int, target: Tensor, offset: int, name: str) -> None:
    """Read the file into the memory of a contiguous CPU tensor."""
    memory = memoryview((ctypes.c_char * target.nbytes).from_address(target.data_ptr())).cast("B")
    done = 0
    while done < len(memory):
        count = os.preadv(descriptor, [memory[done : done + _CHUNK]], offset + done)
        if count == 0:
            raise CheckpointError(f"{name} ends before the data that its metadata names")
        done += count
