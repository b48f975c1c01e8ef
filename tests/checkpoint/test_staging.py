import errno
import os
from typing import Any

import pytest
import torch

from megacore.checkpoint.staging import HostBuffers, shared_out
from megacore.errors import CheckpointError
from tests.checkpoint._examples import assert_equal, example


def test_buffers_are_reused_until_the_form_changes() -> None:
    buffers, tensors = HostBuffers(), example()

    def addresses() -> dict[str, int]:
        copied = buffers.copy(tensors)
        assert_equal(copied, tensors)  # type: ignore[arg-type]
        # Torch saves the storage that a tensor lies in, and copies a tensor that has none of its
        # own.
        assert all(copy.untyped_storage().nbytes() == copy.nbytes for copy in copied.values())  # type: ignore[union-attr]
        return {name: copy.data_ptr() for name, copy in copied.items()}  # type: ignore[union-attr]

    first = addresses()
    for tensor in tensors.values():
        tensor += 1
    assert addresses() == first
    tensors["model.large"] = torch.ones(9, 9)
    del tensors["model.half"]
    assert addresses().keys() == tensors.keys()


def test_too_little_host_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr("mmap.mmap", refuse)
    with pytest.raises(
        CheckpointError, match=r"no host memory for 3 MiB .*set checkpoint\.asynchronous to false"
    ):
        HostBuffers().copy({"model.large": torch.zeros(700_000)})


def test_several_threads_copy_the_same() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        tensors = {"model.w": torch.arange(9_000_001.0), "model.v": torch.arange(300_000.0)}
        assert_equal(HostBuffers().copy(tensors), tensors)  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(before)


def test_sharing_out_is_even_and_complete() -> None:
    pieces = {(f"t{n}", (0,), (n,)): 10 * n for n in range(1, 40)}
    alone = {("own", (0,), (500,)): 2000}
    held = [pieces | alone, pieces, dict(list(pieces.items())[:20])]
    own = shared_out(held)
    assert sum(map(len, own)) == 40
    assert set().union(*own) == pieces.keys() | alone.keys()
    assert all(keys <= one.keys() for keys, one in zip(own, held, strict=True))
    loads = [sum(one[key] for key in keys) for keys, one in zip(own, held, strict=True)]
    assert loads[2] == 2100, "all that it holds"
    assert abs(loads[0] - loads[1]) <= 100
    assert shared_out(held) == own
