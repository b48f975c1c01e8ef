"""Tensors of a checkpoint, read by name from any layout, one at a time."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.checkpoint import load
from megacore.checkpoint.load import CheckpointReader
from megacore.checkpoint.save import save_checkpoint
from megacore.checkpoint.shard import TensorShard
from megacore.compare.models import Options, compare_models
from megacore.convert.hf.write import write_model
from megacore.convert.megatron.checkpoint import write_megatron
from megacore.convert.megatron.core_write import write_core
from megacore.convert.source import CheckpointTensors, load_weights
from megacore.errors import CheckpointError
from megacore.models.build import build_bare
from megacore.parallel.mesh import ProcessMesh
from tests._limits import HANG
from tests.convert._models import our_model, tiny_spec

ROOT = Path(__file__).parents[2]
FLAT = (
    (slice(2), slice(4)),
    (slice(2, 3), slice(3)),
    (slice(2, 3), slice(3, 4)),
    (slice(3, 9), slice(4)),
)
"""Rectangles of two flat ranges of a tensor [9, 4]."""


def shard(tensor: Tensor, *corners: tuple[slice, ...]) -> TensorShard:
    """Return rectangles of a tensor like those on the ranks of a layout."""
    pieces = {
        torch.Size([part.start or 0 for part in corner]): tensor[corner].contiguous()
        for corner in corners
    }
    return TensorShard(tensor.shape, tensor.dtype, pieces)


def test_every_layout_is_read_without_torchs_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    plain, columns, flat = torch.randn(40, 30), torch.randn(7, 1 << 18), torch.randn(9, 4)
    tensors = {
        "model.whole": plain,
        "model.columns": shard(
            columns, (slice(7), slice(1 << 17)), (slice(7), slice(1 << 17, None))
        ),
        "model.flat": shard(flat, *FLAT),
        "model.scalar": torch.tensor(2.5),
        "model.small": plain[:3].to(torch.bfloat16),
        "optimizer.exp_avg": plain,
    }
    checkpoint = save_checkpoint(tmp_path, 1, tensors, {})

    original = torch.load

    def without_data(*values: Any, **options: Any) -> Any:
        assert options["map_location"] == "meta", "torch's reader takes twice the memory"
        return original(*values, **options)

    monkeypatch.setattr(torch, "load", without_data)
    monkeypatch.setattr(load, "_BLOCK", 100)
    read = CheckpointTensors(checkpoint)
    assert set(read) == {"whole", "columns", "flat", "scalar", "small"}
    assert torch.equal(read["whole"], plain)
    assert torch.equal(read["columns"], columns)
    assert torch.equal(read["flat"], flat)
    assert torch.equal(read["scalar"], torch.tensor(2.5))
    assert torch.equal(read["small"], plain[:3].bfloat16().float())
    with pytest.raises(KeyError):
        read["optimizer.exp_avg"]


def test_a_transposed_tensor_is_read(tmp_path: Path) -> None:
    turned = torch.randn(6, 4).t()
    checkpoint = save_checkpoint(tmp_path, 1, {"model.turned": turned}, {})
    assert torch.equal(CheckpointTensors(checkpoint)["turned"], turned)


def test_only_the_archive_of_a_tensor_is_read(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(
        tmp_path, 1, {"model.first": torch.ones(3), "model.last": torch.ones(5)}, {}
    )
    read = CheckpointTensors(checkpoint)
    (path,) = checkpoint.glob("*.distcp")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    readable = []
    for name in read:
        try:
            readable.append(bool(read[name].eq(1).all()))
        except CheckpointError:
            readable.append(False)
    assert sorted(readable) == [False, True]


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's record of peak memory"
)
def test_an_export_takes_the_memory_of_its_largest_tensor(tmp_path: Path) -> None:
    spec = tiny_spec("llama", hidden_size=512, ffn_hidden_size=1024)
    spec = spec.model_copy(update={"vocab_size": 32_000})
    named = {f"model.{name}": value.detach() for name, value in our_model(spec).named_parameters()}
    checkpoint = save_checkpoint(
        tmp_path / "checkpoints", 1, named, {"model": spec.model_dump(mode="json")}
    )
    largest = 4 * max(value.numel() for value in named.values())
    total = 4 * sum(value.numel() for value in named.values())
    command = [
        sys.executable,
        "-m",
        "tests.convert._memory",
        str(checkpoint),
        str(tmp_path / "out"),
        "float32",
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG)
    assert result.returncode == 0, result.stderr
    assert total > 2 * largest
    # Blocks of a few megabytes are added; with larger tensors they are part of the 10 %.
    assert largest < int(result.stdout) + (1 << 20) < 1.1 * largest + (6 << 20)


def test_a_model_with_alibi_computes_after_its_weights_were_assigned() -> None:
    spec = tiny_spec("gpt2", position_embedding_type="alibi")
    built = build_bare(spec, ProcessMesh.serial(), device="cpu")
    tensors = {name: torch.randn(value.shape) for name, value in built.named_parameters()}
    built.load_state_dict(tensors)
    tokens = torch.arange(8)[None]
    with torch.inference_mode():
        assert torch.equal(load_weights(spec, tensors)(tokens), built(tokens))


@pytest.mark.parametrize("form", ["hf", "megatron", "torch_dist", "comparison"])
def test_each_tensor_is_read_only_as_often_as_its_values_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """A question whether a checkpoint has a name must not read the tensor."""
    spec = tiny_spec("gpt2", num_layers=1)
    tensors = dict(our_model(spec).named_parameters())
    checkpoint = save_checkpoint(
        tmp_path,
        1,
        {f"model.{name}": value.detach() for name, value in tensors.items()},
        {"model": spec.model_dump(mode="json")},
    )
    read: list[str] = []
    fill = CheckpointReader.fill

    def counted(reader: CheckpointReader, targets: dict[str, Any]) -> None:
        read.extend(targets)
        fill(reader, targets)

    monkeypatch.setattr(CheckpointReader, "fill", counted)
    source = CheckpointTensors(checkpoint)
    assert all(name in source for name in tensors)
    assert "unknown" not in source
    assert not read
    match form:
        case "hf":
            write_model(tmp_path / "out", spec, source)
        case "megatron":
            write_megatron(spec, source, tmp_path / "out", iteration=1)
        case "torch_dist":
            write_core(spec, source, tmp_path / "out", iteration=1)
        case "comparison":
            for name in "ab":
                (tmp_path / name).mkdir()
                (tmp_path / name / checkpoint.name).symlink_to(checkpoint)
            compare_models(tmp_path / "a", tmp_path / "b", Options(logits=False))
    times = 1 if form != "comparison" else 2 * 3  # of both sides: shape, survey, comparison
    assert len(read) == times * len(tensors)
