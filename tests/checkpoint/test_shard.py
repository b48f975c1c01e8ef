"""Tests of sharded tensors and of checkpoints read in another layout than written."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megacore.checkpoint.format import Marker, read_state
from megacore.checkpoint.load import CheckpointReader, load_checkpoint
from megacore.checkpoint.save import save_checkpoint
from megacore.checkpoint.shard import TensorShard, rectangles
from megacore.errors import CheckpointError
from megacore.tensor_parallel.partition import Partition
from tests._dist import run_distributed
from tests.checkpoint import _layouts
from tests.checkpoint._read import read_tensors


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_a_flat_range_is_covered_by_few_rectangles_in_order(
    shape: list[int], data: st.DataObject
) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    numbers = torch.arange(size).view(shape)
    elements: list[int] = []
    boxes = list(rectangles(start, stop, shape))
    for offsets, sizes in boxes:
        box = numbers[
            tuple(
                slice(first, first + length) for first, length in zip(offsets, sizes, strict=True)
            )
        ]
        assert box.shape == tuple(sizes)
        elements += box.flatten().tolist()
    assert elements == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_pieces_of_runs_are_views_at_their_global_offsets() -> None:
    flat = torch.arange(9.0)
    shard = TensorShard.of_runs(
        [(2, flat[:5]), (9, flat[5:])], (4, 4), torch.float32, Partition(dim=1, rank=1, size=2)
    )
    assert shard.shape == (4, 8)
    assert {tuple(offsets): piece.tolist() for offsets, piece in shard.pieces.items()} == {
        (0, 6): [[0, 1]],
        (1, 4): [[2, 3, 4]],
        (2, 5): [[5, 6, 7]],
        (3, 4): [[8]],
    }
    for piece in shard.pieces.values():
        piece.zero_()
    assert not flat.any()


def test_a_shard_of_another_shape_or_type_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, {"model.w": torch.ones(4, 6)}, {})
    for shape, dtype, message in (
        ((4, 2), torch.float32, r"model\.w is \[4, 6\] float32 there and \[4, 4\] float32 here"),
        ((4, 3), torch.bfloat16, r"model\.w is \[4, 6\] float32 there and \[4, 6\] bfloat16 here"),
    ):
        part = torch.zeros(shape, dtype=dtype)
        shard = TensorShard.of_runs([(0, part.view(-1))], shape, dtype, Partition(1, 0, 2))
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(path, {"model.w": shard})
        assert not part.any()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("layouts")
    return root, run_distributed(4, _layouts.run, str(root))


def test_every_layout_reads_the_checkpoints_of_every_layout(
    checkpoints: tuple[Path, list[dict[str, Any]]],
) -> None:
    assert [result["mismatches"] for result in checkpoints[1]] == [[]] * 4
    # Some tensors have several pieces, and the pipeline stages have different tensors.
    assert max(result["most_pieces"] for result in checkpoints[1]) > 2
    assert checkpoints[1][0]["names"] != checkpoints[1][3]["names"]


@pytest.mark.parametrize("layout", _layouts.LAYOUTS)
def test_a_checkpoint_contains_each_element_once(
    checkpoints: tuple[Path, list[dict[str, Any]]], layout: str
) -> None:
    path, expected = checkpoints[0] / layout / "iter_0000001", _layouts.values()
    tensors = read_tensors(path)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name
    for name, entry in CheckpointReader(path).tensors.items():
        assert sum(math.prod(chunk.sizes) for chunk in entry.chunks) == expected[name].numel()
    assert read_state(path) == {"writer": layout}
    assert {f"__{rank}_0.distcp" for rank in range(4)} <= set(Marker.read(path).files)


def test_a_checkpoint_of_another_model_is_refused_on_every_rank(
    checkpoints: tuple[Path, list[dict[str, Any]]],
) -> None:
    for result in checkpoints[1]:
        lacking, renamed = result["refusals"]
        assert (
            "lacks none of the 12 tensors requested, and has model.last.bias, "
            "optimizer.exp_avg.last.bias"
        ) in lacking
        assert "among 15 that were not requested" in lacking
        # Rank 2 of the same pipeline stage still has the old name.
        assert (
            "lacks model.last.scale of the 16 tensors requested, and has none among 15" in renamed
        )
