"""Tests that loading a checkpoint executes no code of a malicious pickle."""

import errno
import io
import os
import pickle
import zipfile
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megacore.checkpoint.format import FileRecord, Marker, latest_complete
from megacore.checkpoint.load import load_checkpoint
from megacore.checkpoint.metadata import SavedSlice, read_metadata
from megacore.checkpoint.save import save_checkpoint
from megacore.errors import CheckpointError, TransientFileError
from tests.checkpoint._examples import Payload
from tests.checkpoint._read import read_tensors


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "root", 1, {"model.w": torch.ones(4, 3)}, {"x": 1})


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    return tmp_path / "executed"


def update_marker(checkpoint: Path) -> None:
    """Write the digests of the changed files to the marker; an attacker can do this too."""
    marker = Marker.read(checkpoint)
    files = {name: FileRecord.of(checkpoint / name) for name in marker.files}
    Marker(marker.iteration, None, files).write(checkpoint)
    assert latest_complete(checkpoint.parent) == checkpoint


def torch_metadata(checkpoint: Path) -> Metadata:
    metadata: Metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    return metadata


def map_tensors_to_entire_file(shard: Path) -> None:
    """Change the metadata so that every tensor is the entire file."""
    metadata = torch_metadata(shard.parent)
    entire_file = _StorageInfo(shard.name, 0, shard.stat().st_size)
    metadata.storage_data = dict.fromkeys(metadata.storage_data, entire_file)
    (shard.parent / ".metadata").write_bytes(pickle.dumps(metadata))


def assert_refused(checkpoint: Path, trap: Path, message: str) -> None:
    """Check that both ways to load fail with `message` and execute nothing."""
    update_marker(checkpoint)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(checkpoint, {"model.w": torch.zeros(4, 3)})
    with pytest.raises(CheckpointError, match=message):
        read_tensors(checkpoint)
    assert not trap.exists(), "the pickle was executed"


def test_unpickling_the_payload_executes_it(trap: Path) -> None:
    pickle.loads(pickle.dumps(Payload(trap)))
    assert trap.is_dir()


def test_a_payload_as_the_metadata_is_refused(checkpoint: Path, trap: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Payload(trap)))
    assert_refused(checkpoint, trap, r"\.metadata is refused: it asks for posix\.mkdir")


@pytest.mark.parametrize("field", ["planner_data", "storage_meta", "version"])
def test_a_payload_in_a_field_of_the_metadata_is_refused(
    checkpoint: Path, trap: Path, field: str
) -> None:
    metadata = torch_metadata(checkpoint)
    setattr(metadata, field, Payload(trap))
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_refused(checkpoint, trap, r"it asks for posix\.mkdir")


@pytest.mark.parametrize(
    "stream",
    [
        b"cos\nmkdir\n(V{trap}\ntR.",  # protocol 0: GLOBAL and REDUCE
        b"(V{trap}\nios\nmkdir\n.",  # INST
        b"cbuiltins\ngetattr\n(cos\npath\nVjoin\ntR.",  # attributes of modules
        b"cbuiltins\ngetattr\n(ctorch\nSize\nVindex\ntR.",  # and of other classes
        b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\nMetadata\nV__init__\ntR.",
        b"\x80\x04\x8c\x05torch\x8c\x04load\x93\x8c\x04{name}\x85R.",  # another callable of torch
        b"ctorch\nSize\n(cbuiltins\neval\ntR.",
        b"\x80\x02}(X\x01\x00\x00\x00aPpersistent\nu.",  # a persistent id
    ],
)
def test_other_calls_in_a_pickle_are_refused(checkpoint: Path, trap: Path, stream: bytes) -> None:
    stream = stream.replace(b"{trap}", str(trap).encode()).replace(b"{name}", b"name")
    (checkpoint / ".metadata").write_bytes(stream)
    assert_refused(checkpoint, trap, r"\.metadata (is refused|cannot be read)")


def test_a_pickle_cannot_set_attributes_of_torchs_classes(checkpoint: Path) -> None:
    # BUILD on a class itself sets attributes of the class.
    stream = (
        b"\x80\x04\x8c\x29torch.distributed.checkpoint."
        b"metadata\x8c\x0dMetadataIndex\x93N}\x8c\x05owned\x8c\x01xs\x86b."
    )
    stream = stream.replace(
        b"\x8c\x29", b"\x8c" + bytes([len("torch.distributed.checkpoint.metadata")])
    )
    (checkpoint / ".metadata").write_bytes(stream)
    with pytest.raises(CheckpointError):
        read_metadata(checkpoint / ".metadata")
    assert not hasattr(MetadataIndex, "owned")


def test_metadata_entries_other_than_tensors_are_refused(checkpoint: Path, trap: Path) -> None:
    metadata = torch_metadata(checkpoint)
    metadata.state_dict_metadata["extra"] = BytesStorageMetadata()
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_refused(
        checkpoint,
        trap,
        r"it asks for torch\.distributed\.checkpoint\.metadata\.BytesStorageMetadata",
    )


@pytest.mark.parametrize("name", ["../../secret", "/etc/hostname", "a/b", ".."])
def test_files_outside_the_checkpoint_are_refused(checkpoint: Path, trap: Path, name: str) -> None:
    metadata = torch_metadata(checkpoint)
    metadata.storage_data = {index: _StorageInfo(name, 0, 10) for index in metadata.storage_data}
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_refused(checkpoint, trap, "points to the file .* outside the checkpoint")


def test_transforms_in_the_metadata_are_refused(checkpoint: Path, trap: Path) -> None:
    metadata = torch_metadata(checkpoint)
    metadata.storage_data = {
        index: _StorageInfo(info.relative_path, info.offset, info.length, ["stream.zstd"])
        for index, info in metadata.storage_data.items()
    }
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_refused(checkpoint, trap, "asks for transforms")


def test_a_payload_in_a_shard_is_refused(checkpoint: Path, trap: Path) -> None:
    (shard,) = checkpoint.glob("*.distcp")
    torch.save(Payload(trap), shard)
    map_tensors_to_entire_file(shard)
    assert_refused(checkpoint, trap, "cannot be read: UnpicklingError")


def test_a_payload_in_the_archive_of_a_shard_is_refused(checkpoint: Path, trap: Path) -> None:
    # Only data.pkl in the archive of the tensor is replaced.
    (shard,) = checkpoint.glob("*.distcp")
    buffer = io.BytesIO()
    with zipfile.ZipFile(shard) as old, zipfile.ZipFile(buffer, "w") as new:
        for item in old.infolist():
            content = old.read(item.filename)
            if item.filename.endswith("data.pkl"):
                content = pickle.dumps(Payload(trap), protocol=2)
            new.writestr(item.filename, content)
    shard.write_bytes(buffer.getvalue())
    map_tensors_to_entire_file(shard)
    assert_refused(checkpoint, trap, "cannot be read")


@pytest.mark.parametrize(
    "content", [b"", b"\x80", b"\x80\x04N.", b"\xff" * 40, pickle.dumps({"a": 1})]
)
def test_damaged_metadata_is_a_checkpoint_error(
    checkpoint: Path, trap: Path, content: bytes
) -> None:
    (checkpoint / ".metadata").write_bytes(content)
    assert_refused(checkpoint, trap, r"\.metadata (is refused|cannot be read)")


def test_valid_metadata_is_read_equal_to_torchs(checkpoint: Path) -> None:
    metadata, expected = read_metadata(checkpoint / ".metadata"), torch_metadata(checkpoint)
    assert metadata.state_dict_metadata.keys() == expected.state_dict_metadata.keys()
    for name, expected_entry in expected.state_dict_metadata.items():
        entry = metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        assert isinstance(expected_entry, TensorStorageMetadata)
        assert (entry.size, entry.chunks, entry.properties.dtype) == (
            expected_entry.size,
            expected_entry.chunks,
            expected_entry.properties.dtype,
        )
    slices = {index: SavedSlice(**vars(info)) for index, info in expected.storage_data.items()}
    assert metadata.storage_data == slices


class _EnumerationsByName(pickle.Pickler):
    """Pickler that stores members of enumerations as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


def test_metadata_of_the_first_pythons_3_11_is_read(checkpoint: Path) -> None:
    metadata, file = torch_metadata(checkpoint), io.BytesIO()
    _EnumerationsByName(file).dump(metadata)
    assert b"getattr" in file.getvalue()
    (checkpoint / ".metadata").write_bytes(file.getvalue())
    entries = read_metadata(checkpoint / ".metadata").state_dict_metadata
    assert entries.keys() == metadata.state_dict_metadata.keys()


@pytest.mark.parametrize(
    "name", ["../x", "/etc/hostname", "..", "", "below/../../x", "below//x", "below/"]
)
def test_file_names_in_the_marker_cannot_leave_the_checkpoint(checkpoint: Path, name: str) -> None:
    text = (checkpoint / "complete.json").read_text()
    (checkpoint / "complete.json").write_text(text.replace("state.json", name))
    with pytest.raises(CheckpointError, match="leaves the checkpoint's directory"):
        Marker.read(checkpoint)


def test_a_read_that_fails_once_is_no_damage_of_a_checkpoint(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls, failing = os.preadv, 0, 0

    def read(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(*arguments)

    monkeypatch.setattr(os, "preadv", read)
    load_checkpoint(checkpoint, {"model.w": torch.zeros(4, 3)})
    for failing in range(1, calls + 1):  # noqa: B007 - `read` uses it
        calls = 0
        with pytest.raises(TransientFileError, match=f"cannot read or write {checkpoint}"):
            load_checkpoint(checkpoint, {"model.w": torch.zeros(4, 3)})


@pytest.mark.parametrize("call", ["builtins.open", "os.preadv"])
def test_a_failing_disk_is_no_damage_of_a_checkpoint(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*arguments: object, **values: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))  # without a name, as read() raises it

    monkeypatch.setattr(call, fail)
    with pytest.raises(TransientFileError, match=f"cannot read or write {checkpoint}.*dmesg"):
        load_checkpoint(checkpoint, {"model.w": torch.zeros(4, 3)})
