"""Example tensors of every shape, type and memory layout that a checkpoint may contain.

`Payload` is what it must not contain.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Payload:
    """An object that creates a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def example() -> dict[str, Tensor]:
    """Return large and small, contiguous and strided tensors, most with distinct elements."""
    return {
        "model.large": torch.arange(700_000.0).view(700, 1000),
        "model.turned": torch.arange(600_000.0).view(600, 1000).t(),
        "model.part": torch.arange(40.0).view(8, 5)[2:5, 1:3],
        "model.half": torch.arange(7.0).to(torch.bfloat16),
        "model.none": torch.zeros(0, 3),
        "optimizer.step": torch.tensor(7),
    }


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=0, atol=0)
