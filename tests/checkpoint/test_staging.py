"""Tests of the host memory buffers of background saves and of dividing the work among ranks."""

import errno
import os
from typing import Any

import pytest
import torch

from megacore.checkpoint.staging import HostBuffers, divide_rectangles
from megacore.errors import CheckpointError
from tests.checkpoint._examples import assert_equal, example


def test_buffers_are_reused_until_shapes_change() -> None:
    buffers, tensors = HostBuffers(), example()

    def addresses() -> dict[str, int]:
        copied = buffers.copy(tensors)
        assert_equal(copied, tensors)  # type: ignore[arg-type]
        # torch saves the entire storage of a tensor and copies a tensor that shares its storage.
        assert all(copy.untyped_storage().nbytes() == copy.nbytes for copy in copied.values())  # type: ignore[union-attr]
        return {name: copy.data_ptr() for name, copy in copied.items()}  # type: ignore[union-attr]

    first = addresses()
    for tensor in tensors.values():
        tensor += 1
    assert addresses() == first
    tensors["model.large"] = torch.ones(9, 9)
    del tensors["model.half"]
    assert addresses().keys() == tensors.keys()


def test_too_little_host_memory_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr("mmap.mmap", refuse)
    with pytest.raises(
        CheckpointError, match=r"no host memory for 3 MiB .*set checkpoint\.asynchronous to false"
    ):
        HostBuffers().copy({"model.large": torch.zeros(700_000)})


def test_several_threads_copy_equal_values() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        tensors = {"model.w": torch.arange(9_000_001.0), "model.v": torch.arange(300_000.0)}
        assert_equal(HostBuffers().copy(tensors), tensors)  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(before)


def test_shared_out_divides_all_pieces_evenly() -> None:
    pieces = {(f"t{n}", (0,), (n,)): 10 * n for n in range(1, 40)}
    only_rank_0 = {("own", (0,), (500,)): 2000}
    sizes_by_rank = [pieces | only_rank_0, pieces, dict(list(pieces.items())[:20])]
    assigned = divide_rectangles(sizes_by_rank)
    assert sum(map(len, assigned)) == 40
    assert set().union(*assigned) == pieces.keys() | only_rank_0.keys()
    assert all(keys <= sizes.keys() for keys, sizes in zip(assigned, sizes_by_rank, strict=True))
    loads = [
        sum(sizes[key] for key in keys) for keys, sizes in zip(assigned, sizes_by_rank, strict=True)
    ]
    assert loads[2] == 2100, "rank 2 must write all of its pieces"
    assert abs(loads[0] - loads[1]) <= 100
    assert divide_rectangles(sizes_by_rank) == assigned
