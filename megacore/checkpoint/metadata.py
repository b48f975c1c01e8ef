"""Reader of torch's pickled `.metadata` that executes nothing.

A pickle can call only what its `find_class` returns. Our `find_class` returns record classes
created for a single read, which only store attributes, and three harmless values of torch. It
refuses all other names. The records are then checked field by field and converted to torch's own
metadata.
"""

import importlib
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megacore.artifact.files import access_errors, regular
from megacore.checkpoint.shard import TensorShard, pieces_of
from megacore.errors import CheckpointError, FileAccessError

PRIVATE_NAMES = {
    "torch.distributed.checkpoint.filesystem._StorageInfo": (
        "save.py",
        "the place of a saved slice: torch's own reader expects it under this name in .metadata",
    ),
}
"""Every private name of torch in this package, with the file that uses it and the purpose."""
_DCP = "torch.distributed.checkpoint"
_RECORDS = {
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
}
_PLANNING = f"{_DCP}.planner"
_FOREIGN_RECORDS = frozenset(
    {
        (f"{_DCP}.metadata", "BytesStorageMetadata"),
        (f"{_DCP}.metadata", "StorageMeta"),
        (_PLANNING, "SavePlan"),
        (_PLANNING, "WriteItem"),
        (_PLANNING, "WriteItemType"),
        (_PLANNING, "TensorWriteData"),
        (_PLANNING, "BytesIOWriteData"),
        ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
        ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # its place in Python 3.13
    }
)
"""Further records in the metadata of other programs, whose content is ignored."""
_ENUMERATIONS = frozenset({"_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING", "WriteItemType"})
"""Records of enumerations."""
_FOREIGN_PACKAGE = "megatron.core.dist_checkpointing."
"""Package whose classes become such records, too."""
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


@dataclass(frozen=True)
class SavedSlice:
    """Position of the archive around a saved rectangle."""

    relative_path: str
    """File in the checkpoint's directory."""
    offset: int
    """Offset of the archive in the file, in bytes."""
    length: int
    """Length of the archive in bytes."""


def private_name(name: str) -> Any:
    """Import one of PRIVATE_NAMES. Raises CheckpointError if this version of torch lacks it."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        file, purpose = PRIVATE_NAMES[name]
        raise CheckpointError(
            f"torch {torch.__version__} moved {name}, which megacore/checkpoint/{file} uses for "
            f"{purpose}: install the version that constraints.txt names"
        ) from error


def chunks_of(tensor: Tensor | TensorShard) -> list[ChunkStorageMetadata]:
    """Return the rectangles' positions and sizes in torch's planning format."""
    return [
        ChunkStorageMetadata(offsets, piece.size()) for offsets, piece in pieces_of(tensor).items()
    ]


def read_metadata(path: Path, *, foreign: bool = False) -> Metadata:
    """Read `.metadata` without executing it.

    With `foreign`, it may be of another program: it may name objects in addition to tensors, and
    hold the plans of the ranks that wrote it, which are ignored.

    Raises CheckpointError if it contains anything but the metadata of tensors, and FileAccessError.
    """
    try:
        with access_errors(path), open(regular(path), "rb") as file:
            record = _RecordUnpickler(file, foreign=foreign).load()
        return _metadata(record, foreign=foreign)
    except FileAccessError:
        raise
    except CheckpointError as error:
        raise CheckpointError(f"{path} is refused: {error}: use another checkpoint") from error
    except Exception as error:  # a damaged pickle can raise any exception
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{path} cannot be read ({reason}): use another checkpoint"
        ) from error


class _RecordUnpickler(pickle.Unpickler):
    """Unpickler that builds only records with allowed names."""

    def __init__(self, file: Any, *, foreign: bool) -> None:
        super().__init__(file)
        self._classes: dict[str, type] = {}
        self._foreign = foreign

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) == ("torch.serialization", "_get_layout"):
            return str
        if (module, name) == ("builtins", "getattr"):
            return self._member
        ignored = (module, name) in _FOREIGN_RECORDS or module.startswith(_FOREIGN_PACKAGE)
        if (module, name) in _RECORDS or (self._foreign and ignored):
            return self._classes.setdefault(name, _record_class(name))
        raise CheckpointError(f"it asks for {module}.{name}, which no checkpoint of tensors needs")

    def _member(self, owner: Any, name: Any) -> Any:
        """Return the record of an enumeration's member.

        Python 3.11.0 to 3.11.3 pickle members as calls of `getattr`.
        """
        for known in _ENUMERATIONS & self._classes.keys():
            if owner is self._classes[known]:
                return owner(_text(name))
        raise CheckpointError("it asks for builtins.getattr, which no checkpoint of tensors needs")

    def persistent_load(self, pid: Any) -> Any:
        raise CheckpointError("it refers to an object outside the file")


def _record_class(name: str) -> type:
    """Create a class for a single read, so that a pickle's changes to it do not persist."""

    def init(self: Any, *values: Any) -> None:
        self.__dict__["values"] = values

    def set_state(self: Any, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})

    return type(name, (), {"__init__": init, "__setstate__": set_state})


def _metadata(record: Any, *, foreign: bool) -> Metadata:
    """Convert a record to torch's metadata and check each field."""
    fields = _fields(record, "Metadata")
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    entries |= {
        _text(name): _entry(entry, foreign=foreign)
        for name, entry in _dictionary(fields["state_dict_metadata"]).items()
    }
    storage = {
        _index(index, foreign=foreign): _storage(info)
        for index, info in _dictionary(fields["storage_data"]).items()
    }
    planner_data = {name: (name,) for name in entries}
    version = fields.get("version")
    return Metadata(
        entries, planner_data, storage, StorageMeta(), None if version is None else _text(version)
    )


def _entry(record: Any, *, foreign: bool) -> TensorStorageMetadata | BytesStorageMetadata:
    if foreign and type(record).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    return _tensor(record)


def _tensor(record: Any) -> TensorStorageMetadata:
    if type(record).__name__ != "TensorStorageMetadata":
        raise CheckpointError(
            f"it holds an entry of type {type(record).__name__} that is no tensor"
        )
    fields = _fields(record, "TensorStorageMetadata")
    properties = _fields(fields["properties"], "TensorProperties")["state"]
    if not isinstance(properties, tuple) or not isinstance(properties[0], torch.dtype):
        raise CheckpointError(f"it holds tensor properties {properties!r} without a dtype")
    chunks = [_chunk(chunk) for chunk in fields["chunks"]]
    return TensorStorageMetadata(
        TensorProperties(dtype=properties[0]), _size(fields["size"]), chunks
    )


def _chunk(record: Any) -> ChunkStorageMetadata:
    fields = _fields(record, "ChunkStorageMetadata")
    return ChunkStorageMetadata(_size(fields["offsets"]), _size(fields["sizes"]))


def _index(record: Any, *, foreign: bool) -> MetadataIndex:
    fields = _fields(record, "MetadataIndex")
    hint = fields.get("index")
    return MetadataIndex(
        _text(fields["fqn"]),
        None if foreign and fields.get("offset") is None else _size(fields["offset"]),
        None if hint is None else _integer(hint),
    )


def _storage(record: Any) -> SavedSlice:
    fields = _fields(record, "_StorageInfo")
    name = _text(fields["relative_path"])
    if name in {"", ".", ".."} or "/" in name or "\0" in name:
        raise CheckpointError(f"it points to the file {name!r} outside the checkpoint")
    if fields.get("transform_descriptors"):
        raise CheckpointError(f"it asks for transforms {fields['transform_descriptors']!r}")
    return SavedSlice(name, _integer(fields["offset"]), _integer(fields["length"]))


def _fields(record: Any, name: str) -> dict[str, Any]:
    if type(record).__name__ != name or not hasattr(record, "__dict__"):
        raise CheckpointError(f"it holds {type(record).__name__} where {name} belongs")
    return dict(vars(record))


def _dictionary(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"it holds {type(value).__name__} where a dictionary belongs")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise CheckpointError(f"it holds {value!r} where a name belongs")
    return value


def _integer(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise CheckpointError(f"it holds {value!r} where a count belongs")
    return value


def _size(value: Any) -> torch.Size:
    if not isinstance(value, torch.Size):
        raise CheckpointError(f"it holds {value!r} where a shape belongs")
    return value
