"""Tests of reading parts of saved tensors."""

import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megacore.checkpoint import load, save
from megacore.checkpoint.format import Marker, verify
from megacore.checkpoint.load import load_checkpoint
from megacore.checkpoint.save import save_checkpoint
from megacore.checkpoint.shard import TensorShard
from megacore.errors import CheckpointError
from tests.checkpoint._read import read_tensors


@pytest.mark.parametrize("block", [1, 50, 1 << 20])
@pytest.mark.parametrize(("threads", "dtype"), [(1, torch.bfloat16), (3, torch.float32)])
def test_any_rectangle_is_loaded_from_and_into_any_memory_order(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    threads: int,
    dtype: torch.dtype,
    block: int,
) -> None:
    monkeypatch.setattr(load, "_BLOCK", block)
    values = torch.arange(60.0, dtype=dtype).view(10, 6)
    tensors = {
        "row-major": values,
        "column-major": values.t().contiguous().t(),
        "scalar": torch.tensor(3.0),
    }
    path = save_checkpoint(tmp_path, 1, tensors, {})
    corners = {(0, 0): (4, 6), (4, 1): (3, 2), (9, 5): (1, 1), (2, 0): (8, 1)}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for name in ("row-major", "column-major"):
            for (row, column), (rows, columns) in corners.items():
                for target in (
                    torch.zeros(rows, columns, dtype=dtype),
                    torch.zeros(columns, rows, dtype=dtype).t(),
                ):
                    shard = TensorShard(
                        values.shape, values.dtype, {torch.Size((row, column)): target}
                    )
                    targets = {name: shard, "scalar": torch.tensor(0.0)}
                    load_checkpoint(path, targets, expected=tensors.keys())
                    assert torch.equal(target, values[row : row + rows, column : column + columns])
                    assert targets["scalar"] == 3.0
    finally:
        torch.set_num_threads(before)


def test_a_large_share_of_a_rank_is_written_to_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "LEAST_FILE_BYTES", 4000)
    tensors = {f"model.{n}": torch.full((10 * n,), float(n)) for n in range(1, 31)}
    path = save_checkpoint(tmp_path, 1, tensors, {})
    sizes = [
        record.size for name, record in Marker.read(path).files.items() if name.endswith(".distcp")
    ]
    assert 5 <= len(sizes) <= save.MOST_FILES
    assert verify(path).iteration == 1
    read = read_tensors(path)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def save_damaged(tmp_path: Path, change: object) -> Path:
    path = save_checkpoint(tmp_path, 1, {"model.w": torch.ones(40, 3)}, {})
    (shard,) = path.glob("*.distcp")
    if isinstance(change, torch.Tensor):
        torch.save(change, shard)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    length = shard.stat().st_size if change != "long" else 1 << 40
    metadata.storage_data = {
        index: _StorageInfo(shard.name, 0, length) for index in metadata.storage_data
    }
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    if change == "short":
        shard.write_bytes(shard.read_bytes()[:300])
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            torch.ones(40, 3, dtype=torch.float64),
            r"holds \[40, 3\] torch.float64 of model.w, and its metadata says",
        ),
        (torch.ones(39, 3), r"cannot be read"),
        (torch.ones(40, 3).to_sparse(), r"cannot be read"),
        ("short", r"cannot be read"),
        ("long", r"cannot be read"),
    ],
)
def test_a_file_that_contradicts_the_metadata_is_refused(
    tmp_path: Path, change: object, message: str
) -> None:
    path = save_damaged(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path, {"model.w": torch.zeros(40, 3)})


def rewrite(archive: Path, change: str) -> None:
    """Write the archive of a tensor with other data than its description says."""
    with zipfile.ZipFile(archive) as source:
        records = {info.filename: source.read(info) for info in source.infolist()}
    (data,) = (name for name in records if name.endswith("/data/0"))
    if change == "shorter":
        records[data] = records[data][:-4]
    kind = zipfile.ZIP_DEFLATED if change == "compressed" else zipfile.ZIP_STORED
    with zipfile.ZipFile(archive, "w", kind) as target:
        for name, content in records.items():
            target.writestr(name, content)


@pytest.mark.parametrize("change", ["compressed", "shorter"])
def test_data_that_cannot_be_read_in_place_are_refused(tmp_path: Path, change: str) -> None:
    path = save_damaged(tmp_path, None)
    (shard,) = path.glob("*.distcp")
    rewrite(shard, change)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.storage_data = {
        index: _StorageInfo(shard.name, 0, shard.stat().st_size) for index in metadata.storage_data
    }
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    target = torch.zeros(40, 3)
    with pytest.raises(CheckpointError, match="does not hold the data of a slice that it describ"):
        load_checkpoint(path, {"model.w": target})
    assert not target.any()


@pytest.mark.parametrize("asked", [(0, 40), (19, 21), (30, 40)])
def test_a_part_that_no_slice_has_is_refused(tmp_path: Path, asked: tuple[int, int]) -> None:
    rows = torch.ones(20, 3)
    shard = TensorShard(torch.Size((40, 3)), rows.dtype, {torch.Size((0, 0)): rows})
    path = save_checkpoint(tmp_path, 1, {"model.w": shard, "model.v": torch.ones(2)}, {})
    first, last = asked
    target, other = torch.zeros(last - first, 3), torch.zeros(2)
    part = TensorShard(shard.shape, shard.dtype, {torch.Size((first, 0)): target})
    with pytest.raises(CheckpointError, match=r"its slices do not cover model\.w: use another"):
        load_checkpoint(path, {"model.w": part, "model.v": other})
    assert not target.any()
    assert not other.any()
