"""Streamed safetensors files, read back with safetensors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.convert.hf.write import write_safetensors
from megacore.errors import WorkspaceError


def test_a_file_is_read_back_bit_identically(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file

    tensors = {
        "b": torch.randn(3, 5),
        "a.weight": torch.randn(7).to(torch.bfloat16),
        "scalar": torch.tensor(2.5),
    }
    path = tmp_path / "model.safetensors"
    write_safetensors(
        tmp_path, {name: tuple(value.shape) for name, value in tensors.items()}, tensors.items()
    )
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == torch.float32
        assert torch.equal(read[name], tensor.float())
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


def test_tensors_must_arrive_in_the_declared_order(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="b came where a"):
        write_safetensors(tmp_path, {"a": (2,)}, [("b", torch.zeros(2))])
    with pytest.raises(AssertionError, match="nothing came where b"):
        write_safetensors(tmp_path, {"a": (2,), "b": (2,)}, [("a", torch.zeros(2))])


def test_a_full_disk_is_a_workspace_error(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("/dev/full")
    with pytest.raises(WorkspaceError, match="No space left"):
        write_safetensors(tmp_path, {"a": (1 << 16,)}, [("a", torch.zeros(1 << 16))])


def test_one_tensor_is_requested_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    sizes = []

    def stream() -> object:
        for name in ("a", "b"):
            yield name, torch.zeros(1 << 16)
            sizes.append(path.stat().st_size)

    write_safetensors(tmp_path, {"a": (1 << 16,), "b": (1 << 16,)}, stream())  # type: ignore[arg-type]
    assert sizes[0] <= 4 * (1 << 16) + 4096 < sizes[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shards_have_an_index_and_stay_below_their_maximum_size(tmp_path: Path, dtype: Any) -> None:
    from safetensors.torch import load_file

    tensors = {f"t{number}": torch.randn(10, number + 1) for number in range(6)}
    write_safetensors(
        tmp_path,
        {name: tuple(value.shape) for name, value in tensors.items()},
        tensors.items(),
        dtype=dtype,
        max_shard_size=60 * getattr(torch, dtype).itemsize,
    )
    files = sorted(tmp_path.glob("*.safetensors"))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))
    kind = getattr(torch, dtype)
    assert len(files) > 2
    assert {path.name for path in files} == set(index["weight_map"].values())
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert (
        index["metadata"]["total_size"]
        == sum(value.numel() for value in tensors.values()) * kind.itemsize
    )
    for name, value in tensors.items():
        assert torch.equal(load_file(tmp_path / index["weight_map"][name])[name], value.to(kind))
    for path in files:
        content = load_file(path)
        assert (
            len(content) == 1
            or sum(value.nbytes for value in content.values()) <= 60 * kind.itemsize
        )


def test_views_are_written_with_their_elements(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    matrix = torch.randn(700, 900)
    views = {"turned": matrix.t(), "part": matrix[:, 3:5], "empty": matrix[:0]}
    write_safetensors(
        tmp_path, {name: tuple(value.shape) for name, value in views.items()}, views.items()
    )
    read = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(read[name], value) for name, value in views.items())
