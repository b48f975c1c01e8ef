"""What is streamed is what safetensors reads."""

from pathlib import Path

import pytest
import torch

from megacore.convert.safetensors_stream import write_float32
from megacore.errors import WorkspaceError


def test_file_is_read_back_bitwise(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file

    tensors = {"b": torch.randn(3, 5), "a.weight": torch.randn(7).to(torch.bfloat16), "scalar": torch.tensor(2.5)}
    path = tmp_path / "model.safetensors"
    size = write_float32(path, {name: tuple(value.shape) for name, value in tensors.items()}, tensors.items())
    assert size == path.stat().st_size
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == torch.float32
        assert torch.equal(read[name], tensor.float())
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


def test_tensors_must_come_as_announced(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(AssertionError, match="b came where a"):
        write_float32(path, {"a": (2,)}, [("b", torch.zeros(2))])
    with pytest.raises(ValueError, match="shorter"):
        write_float32(path, {"a": (2,), "b": (2,)}, [("a", torch.zeros(2))])


def test_a_refusing_disk_is_a_workspace_error() -> None:
    with pytest.raises(WorkspaceError, match="No space left"):
        write_float32(Path("/dev/full"), {"a": (1 << 16,)}, [("a", torch.zeros(1 << 16))])


def test_only_one_tensor_is_asked_for_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    sizes = []

    def stream() -> object:
        for name in ("a", "b"):
            yield name, torch.zeros(1 << 16)
            sizes.append(path.stat().st_size)

    write_float32(path, {"a": (1 << 16,), "b": (1 << 16,)}, stream())  # type: ignore[arg-type]
    assert sizes[0] <= 4 * (1 << 16) + 4096 < sizes[1]
