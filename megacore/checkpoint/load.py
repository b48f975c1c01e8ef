"""Loading of checkpoints in place, without executing pickles.

Names, shapes and types are compared first. Each rank reads the data it needs independently, so
loading needs no process group and cannot deadlock.
"""

import ctypes
import io
import math
import os
import threading
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megacore.artifact.files import access_errors, regular, unreadable
from megacore.checkpoint.collective import RankGroup
from megacore.checkpoint.format import METADATA_NAME, read_state, reading
from megacore.checkpoint.metadata import SavedSlice, chunks_of, read_metadata
from megacore.checkpoint.shard import Tensors, pieces_of
from megacore.errors import CheckpointError, FileAccessError, listed, one_line

_BLOCK = 4 << 20
"""Bytes read at a time if the file cannot be read directly into a tensor's memory."""
_THREADS = 4
"""Maximum number of reading threads; a disk is not faster with more."""
_LOCAL_HEADER = 30
"""Bytes before the name of a record in a zip archive; the last four contain two lengths."""


class CheckpointReader:
    """Reader of a checkpoint's tensors; reads `.metadata` once, without executing it.

    With `foreign`, the checkpoint may be of another program, with objects in addition to tensors.

    Raises CheckpointError if it is not the metadata of a checkpoint of tensors.
    """

    def __init__(self, directory: Path, *, foreign: bool = False) -> None:
        self.directory = directory
        self.metadata = read_metadata(directory / METADATA_NAME, foreign=foreign)
        self.tensors: dict[str, TensorStorageMetadata] = {
            name: entry
            for name, entry in self.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        """Shape and dtype of every tensor, by global name."""
        self.objects: list[str] = [
            name for name in self.metadata.state_dict_metadata if name not in self.tensors
        ]
        """Names of the saved objects that are no tensors."""

    def place_of(self, name: str, offsets: torch.Size | None = None) -> SavedSlice:
        """Return the place of a tensor's rectangle at `offsets`, or of an object.

        Raises CheckpointError if the metadata names none, or one that ends after its file, and
        FileAccessError.
        """
        place: SavedSlice | None = self.metadata.storage_data.get(MetadataIndex(name, offsets))
        if place is None:
            raise CheckpointError(f"{self.directory} does not say where {name} is: use another")
        path = self.directory / place.relative_path
        try:
            size = regular(path).stat().st_size
        except OSError as error:
            raise unreadable(error, path) or CheckpointError(
                f"{path}, which holds {name}, cannot be read ({error.strerror}): use another "
                "checkpoint"
            ) from error
        if place.offset + place.length > size:
            raise CheckpointError(
                f"{path} ends before {name}, which its metadata names: use another checkpoint"
            )
        return place

    def read_object(self, name: str, most: int) -> bytes:
        """Return the bytes of a saved object of at most `most` bytes.

        Raises CheckpointError if it is missing or larger, and FileAccessError.
        """
        place = self.place_of(name)
        if place.length > most:
            raise CheckpointError(
                f"{self.directory} holds {place.length:,} bytes as {name}, over the limit of "
                f"{most:,}: use another checkpoint"
            )
        path = self.directory / place.relative_path
        with access_errors(path), open(path, "rb") as file:
            file.seek(place.offset)
            return file.read(place.length)

    def fill(self, tensors: Tensors, *, progress: Callable[[], None] | None = None) -> None:
        """Read the slices that belong to `tensors` into their memory, several in parallel.

        Values of another dtype are converted in small blocks. For each slice, torch parses the
        archive with `weights_only` and without the data; the data is then read directly from the
        file. `progress` is called after each slice, by one thread at a time. Raises CheckpointError
        for a damaged or foreign file, or slices that leave a part without values, and
        FileAccessError.
        """
        try:
            with access_errors(self.directory):
                self._fill(tensors, progress)
        except FileAccessError:
            raise
        except Exception as error:
            # Drop torch's advice to execute the file.
            reason = one_line(error).partition(". ")[0][:300]
            raise CheckpointError(
                f"{self.directory} cannot be read: {type(error).__name__}: {reason}: use another "
                "checkpoint"
            ) from error

    def _fill(self, tensors: Tensors, progress: Callable[[], None] | None) -> None:
        lock = threading.Lock()
        items = [
            item
            for name, tensor in tensors.items()
            for item in create_read_items_for_chunk_list(
                name, self.tensors[name], chunks_of(tensor)
            )
        ]
        self._check_covered(tensors, items)
        storage: dict[MetadataIndex, SavedSlice] = self.metadata.storage_data
        with ExitStack() as stack:
            files = {
                name: stack.enter_context(open(self.directory / name, "rb", buffering=0))
                for name in {storage[item.storage_index].relative_path for item in items}
            }

            def read(item: ReadItem) -> None:
                place, pieces = storage[item.storage_index], pieces_of(tensors[item.dest_index.fqn])
                assert item.dest_index.offset is not None, "every rectangle has a position"
                target = pieces[item.dest_index.offset].detach()
                target = _narrowed(target, item.dest_offsets, item.lengths)
                dtype = self.tensors[item.dest_index.fqn].properties.dtype
                _read(files[place.relative_path].fileno(), place, item, dtype, target)
                if progress is not None:
                    with lock:
                        progress()

            threads = min(_THREADS, torch.get_num_threads(), len(items))
            if threads <= 1:
                for item in items:
                    read(item)
                return
            with ThreadPoolExecutor(threads, "checkpoint-read") as pool:
                for _ in pool.map(read, items):
                    pass

    def _check_covered(self, tensors: Tensors, items: Sequence[ReadItem]) -> None:
        """Raise CheckpointError if the saved slices leave a part of a tensor without values."""
        missing = {
            name: sum(piece.numel() for piece in pieces_of(tensor).values())
            for name, tensor in tensors.items()
        }
        for item in items:
            missing[item.dest_index.fqn] -= math.prod(item.lengths)
        incomplete = [name for name, elements in missing.items() if elements > 0]
        if incomplete:
            raise CheckpointError(f"its slices do not cover {listed(incomplete)}")


def load_checkpoint(
    path: Path,
    tensors: Tensors,
    *,
    prefix: str = "",
    expected: Collection[str] | None = None,
    progress: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Fill `tensors` in place from the checkpoint in `path`; return the rest of its state.

    The files' hashes are not checked again: take `path` from `latest_complete`, or call
    `format.verify` first. The checkpoint cannot be deleted during the read; use `format.reading`
    around several reads that belong together.

    Args:
        path: checkpoint, written in any layout.
        tensors: this rank's tensors by global name, with the checkpoint's global shapes and dtypes;
            a TensorShard has its rectangles filled.
        prefix: common prefix of the names to load, if only a part of the checkpoint is loaded.
        expected: names that all ranks together load (see `names_of_all`); None means those of
            `tensors`.
        progress: called after each slice that was read, by one thread at a time.

    Raises:
        CheckpointError: `expected` differs from the checkpoint's names that start with `prefix`, or
            a shape or dtype differs; the message shows both sides, and `tensors` are unchanged.
            Also if a file is damaged or contains objects other than tensors, or if `path` is not a
            complete checkpoint.
    """
    with reading(path):
        reader = CheckpointReader(path)
        state = read_state(path)
        saved = {name: entry for name, entry in reader.tensors.items() if name.startswith(prefix)}
        _check_names(path, saved, {*tensors, *(expected or ())})
        _check_entries(path, saved, tensors)
        reader.fill(tensors, progress=progress)
        return state


def names_of_all(tensors: Iterable[str]) -> frozenset[str]:
    """Return the names that all ranks hold. Collective."""
    local_names = sorted(tensors)
    return frozenset(
        name for names in RankGroup(None).everywhere(lambda: local_names) for name in names
    )


def _check_names(path: Path, saved: Collection[str], expected: Collection[str]) -> None:
    missing = sorted(set(expected) - set(saved))
    unexpected = sorted(set(saved) - set(expected))
    if missing or unexpected:
        raise CheckpointError(
            f"{path} is of another model: it lacks {listed(missing) or 'none'} of the "
            f"{len(expected)} tensors requested, and has {listed(unexpected) or 'none'} among "
            f"{len(saved)} that were not requested: load it with the configuration it was saved "
            "with"
        )


def _check_entries(
    path: Path, saved: Mapping[str, TensorStorageMetadata], tensors: Tensors
) -> None:
    differing = [
        f"{name} is {_form(saved[name].size, saved[name].properties.dtype)} there and "
        f"{_form(tensor.shape, tensor.dtype)} here"
        for name, tensor in tensors.items()
        if (saved[name].size, saved[name].properties.dtype) != (tensor.shape, tensor.dtype)
    ]
    if differing:
        raise CheckpointError(
            f"{path} is of another model: {listed(differing)}: load it with the configuration it "
            "was saved with"
        )


def _form(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def _read(
    descriptor: int, place: SavedSlice, item: ReadItem, dtype: torch.dtype, target: Tensor
) -> None:
    """Fill `target` from the part of a saved slice of `dtype` that `item` describes."""
    saved, start = _saved(descriptor, place)
    part = _narrowed(saved, item.storage_offsets, item.lengths)
    if part.dtype != dtype:
        raise CheckpointError(
            f"{place.relative_path} holds {list(part.shape)} {part.dtype} of "
            f"{item.storage_index.fqn}, and its metadata says {dtype}"
        )
    if part.numel() == 0:
        return
    start += int(part.storage_offset()) * part.element_size()
    if not part.is_contiguous():
        # The elements are not adjacent: the bytes between them are read as well.
        pairs = zip(part.shape, part.stride(), strict=True)
        scratch = torch.empty(1 + sum((size - 1) * stride for size, stride in pairs), dtype=dtype)
        _pread(descriptor, scratch, start, place.relative_path)
        target.copy_(scratch.as_strided(part.shape, part.stride()))
    elif target.is_contiguous() and target.device.type == "cpu" and target.dtype == dtype:
        _pread(descriptor, target, start, place.relative_path)
    else:
        rows = target if target.dim() else target[None]
        row_bytes = part.nbytes // len(rows)
        scratch = torch.empty(max(1, _BLOCK // row_bytes), *rows.shape[1:], dtype=dtype)
        for first in range(0, len(rows), len(scratch)):
            block = rows[first : first + len(scratch)]
            _pread(
                descriptor, scratch[: len(block)], start + first * row_bytes, place.relative_path
            )
            block.copy_(scratch[: len(block)])


def _saved(descriptor: int, place: SavedSlice) -> tuple[Tensor, int]:
    """Return a saved slice without its data, and the position of the data in the file."""
    if place.offset + place.length > os.fstat(descriptor).st_size:
        raise CheckpointError(f"{place.relative_path} ends before a slice that its metadata names")
    window = _Window(descriptor, place.offset, place.length)
    file = cast(IO[bytes], window)
    try:
        tensor = torch.load(file, map_location="meta", weights_only=True)
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            raise CheckpointError(
                f"{place.relative_path} holds {type(tensor).__name__} where a tensor belongs"
            )
        return tensor, place.offset + _data_start(file, tensor.untyped_storage().nbytes(), place)
    except Exception as error:
        # torch and zipfile take the error of a failing disk for damage.
        if window.failure is None:
            raise
        raise window.failure from error


def _data_start(window: IO[bytes], size: int, place: SavedSlice) -> int:
    """Return the position of the `size` bytes of data in the archive that torch.save wrote."""
    with zipfile.ZipFile(window) as archive:
        records = [
            info for info in archive.infolist() if info.filename.partition("/")[2] == "data/0"
        ]
    if len(records) == 1 and records[0].compress_type == zipfile.ZIP_STORED:
        window.seek(records[0].header_offset)
        header = window.read(_LOCAL_HEADER)
        name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        start = records[0].header_offset + _LOCAL_HEADER + name + extra
        if records[0].file_size == size and start + size <= place.length:
            return start
    raise CheckpointError(
        f"{place.relative_path} does not hold the data of a slice that it describes"
    )


def _narrowed(tensor: Tensor, offsets: torch.Size, lengths: torch.Size) -> Tensor:
    """Return the view of a rectangle in a tensor."""
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


class _Window(io.RawIOBase):
    """Range of a file with a separate position, so that threads can share the file."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._offset = offset
        self._length = length
        self._position = 0
        self.failure: OSError | None = None
        """Error of a read that failed."""

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
        requested = min(len(buffer), max(0, self._length - self._position))
        try:
            count = os.preadv(
                self._descriptor, [memoryview(buffer)[:requested]], self._offset + self._position
            )
        except OSError as error:
            self.failure = error
            raise
        self._position += count
        return count


def _pread(descriptor: int, target: Tensor, offset: int, name: str) -> None:
    """Read the file into the memory of a contiguous CPU tensor."""
    memory = memoryview((ctypes.c_char * target.nbytes).from_address(target.data_ptr())).cast("B")
    done = 0
    while done < len(memory):
        count = os.preadv(descriptor, [memory[done:]], offset + done)
        if count == 0:
            raise CheckpointError(f"{name} ends before the data that its metadata names")
        done += count
