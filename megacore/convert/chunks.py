"""Reading a checkpoint's chunks in small blocks, straight from the records that torch.save wrote.

torch's own reader makes a whole chunk and copies it into the whole tensor, which takes twice the memory. A chunk is a
zip archive inside a rank's file, whose values are stored as they are: they can be read from their place. What is read
of the archive's pickle is which record that is and in which order its values are; it can call nothing.
"""

import math
import pickle
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

_BLOCK = 1 << 20
"""Bytes that are read at a time."""
_LOCAL_HEADER = 30
_NAME_LENGTH, _EXTRA_LENGTH = slice(26, 28), slice(28, 30)


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a whole tensor, and the archive that holds it."""

    offsets: tuple[int, ...]
    """Position of its first element in the whole."""
    sizes: tuple[int, ...]
    file: Path
    start: int
    """Of the archive, in bytes."""
    length: int
    """Of the archive, in bytes."""


def read_into(target: Tensor, chunk: Chunk, dtype: torch.dtype) -> bool:
    """Copy a chunk of values of `dtype` into its place in the whole tensor `target`, of any type.

    False, and nothing changed, when the archive is of another form than torch.save gives a plain tensor: compressed,
    or not in row-major order. Raises OSError.
    """
    with open(chunk.file, "rb") as file:
        place = _place_of_values(file, chunk, dtype)
        if place is None:
            return False
        file.seek(place)
        rectangle = target
        for dimension, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            rectangle = rectangle.narrow(dimension, offset, size)
        rows = rectangle if rectangle.dim() else rectangle[None]
        row_bytes = dtype.itemsize * math.prod(chunk.sizes[1:])
        for block in torch.split(rows, max(1, _BLOCK // max(1, row_bytes))):
            buffer = bytearray(block.numel() * dtype.itemsize)
            if file.readinto(buffer) != len(buffer):
                raise OSError(f"{chunk.file} ends before its values do")
            if buffer:
                block.copy_(torch.frombuffer(buffer, dtype=dtype).view(block.shape))
    return True


def _place_of_values(file: IO[bytes], chunk: Chunk, dtype: torch.dtype) -> int | None:
    """Where in `file` the chunk's values begin; None when they are not plainly there."""
    view = _Slice(file, chunk.start, chunk.length)
    try:
        with zipfile.ZipFile(view) as archive:
            names = {name.partition("/")[2]: name for name in archive.namelist()}
            order = archive.read(names["byteorder"]) if "byteorder" in names else b"little"
            saved = _TensorUnpickler(archive.open(names["data.pkl"])).load()
            if not isinstance(saved, _Saved) or order != b"little" or not saved.is_plain(chunk.sizes):
                return None
            record = archive.getinfo(names[f"data/{saved.key}"])
    except (zipfile.BadZipFile, pickle.UnpicklingError, KeyError, ValueError, EOFError, AttributeError):
        return None
    if record.compress_type != zipfile.ZIP_STORED or record.file_size < math.prod(chunk.sizes) * dtype.itemsize:
        return None
    start = chunk.start + record.header_offset
    file.seek(start)
    header = file.read(_LOCAL_HEADER)
    name, extra = (int.from_bytes(header[part], "little") for part in (_NAME_LENGTH, _EXTRA_LENGTH))
    return start + _LOCAL_HEADER + name + extra


class _Saved(NamedTuple):
    """What a pickle says of a tensor."""

    key: str
    """Name of the record."""
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def is_plain(self, sizes: Sequence[int]) -> bool:
        """Whether the record holds a tensor of `sizes` in row-major order, from its beginning."""
        in_order = torch.empty_strided(self.sizes, self.strides, device="meta").is_contiguous()
        return self.offset == 0 and self.sizes == tuple(sizes) and in_order


class _TensorUnpickler(pickle.Unpickler):
    """Knows the one function that torch.save names for a tensor, which here makes a record."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _saved
        if module == "torch" and name.endswith("Storage"):
            return name
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _saved(storage: Any, offset: Any, sizes: Any, strides: Any, *_rest: Any) -> _Saved:
    return _Saved(str(storage[2]), int(offset), tuple(sizes), tuple(strides))


class _Slice:
    """A part of a file as a file, for reading."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length = file, start, length
        self._position = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + {0: 0, 1: self._position, 2: self._length}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._position)
        self._file.seek(self._start + self._position)
        data = self._file.read(left if size < 0 else min(size, left))
        self._position += len(data)
        return data
