"""Tests of reading objects in addition to tensors, from checkpoints of other programs."""

import errno
import io
import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megacore.checkpoint import load
from megacore.checkpoint.load import CheckpointReader
from megacore.errors import CheckpointError, TransientFileError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            {"w": torch.ones(40), "first": {"step": 3}, "second": {"step": 4}},
            checkpoint_id=tmp_path,
            no_dist=True,
        )
    return tmp_path


def test_every_object_is_read_from_its_place_in_the_file(checkpoint: Path) -> None:
    reader = CheckpointReader(checkpoint, foreign=True)
    assert list(reader.tensors) == ["w"]
    assert sorted(reader.objects) == ["first.step", "second.step"]
    for name, step in (("first.step", 3), ("second.step", 4)):
        assert torch.load(io.BytesIO(reader.read_object(name, 1 << 16)), weights_only=True) == step


def test_objects_are_refused_in_checkpoints_of_megacore(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"asks for .*BytesStorageMetadata, which no"):
        CheckpointReader(checkpoint)


def test_a_large_or_missing_or_cut_object_is_refused(checkpoint: Path) -> None:
    reader = CheckpointReader(checkpoint, foreign=True)
    place = max((reader.place_of(name) for name in reader.objects), key=lambda place: place.offset)
    (name,) = (name for name in reader.objects if reader.place_of(name) == place)
    assert len(reader.read_object(name, place.length)) == place.length
    with pytest.raises(CheckpointError, match=f"as {name}, over the limit of {place.length - 1:,}"):
        reader.read_object(name, place.length - 1)
    with pytest.raises(CheckpointError, match="does not say where third is: use another"):
        reader.read_object("third", 1 << 16)
    file = checkpoint / place.relative_path
    content = file.read_bytes()
    end = place.offset + place.length
    file.write_bytes(content[:end])  # nothing has to follow the object
    assert reader.read_object(name, place.length) == content[place.offset : end]
    file.write_bytes(content[: end - 1])
    with pytest.raises(CheckpointError, match=f"ends before {name}, which its metadata names"):
        reader.read_object(name, place.length)


def test_a_file_that_a_failing_disk_hides_is_not_taken_for_a_missing_one(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = CheckpointReader(checkpoint, foreign=True)

    def fail(path: Path) -> Path:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(load, "regular", fail)
    code = errno.ESTALE
    with pytest.raises(TransientFileError, match=r"distcp \(Stale file handle\)"):
        reader.place_of("first.step")
    code = errno.ENOENT
    with pytest.raises(CheckpointError, match=r"cannot be read .*: use another"):
        reader.place_of("first.step")
