"""fp32 main weights and their moments: what the optimizer updates, wherever it lies (Micikevicius et al. 2018)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megacore.data_parallel.grad_sync import GradSync
from megacore.parallel.collectives import Pending
from megacore.parallel.mesh import ALONE


@dataclass(frozen=True)
class MainWeight:
    """Elements of one parameter that this rank updates; all tensors are fp32 and of one shape."""

    name: str
    """Global name of the parameter."""
    start: int
    """First element, counted within the flattened parameter of this tensor-parallel rank."""
    weight: Tensor
    gradient: Tensor
    exp_avg: Tensor
    """First moment."""
    exp_avg_sq: Tensor
    """Second moment."""
    target: Tensor | None = None
    """The model's weight of lower precision, into which an update rounds; None where the main weight is the model's."""


class MainWeights(Protocol):
    """Main weights that are published together."""

    @property
    def weights(self) -> Sequence[MainWeight]:
        """What this rank updates."""
        ...

    def publish(self) -> Pending:
        """Begin to bring what an update has written into the targets to whoever computes with it."""
        ...


class WholeWeights:
    """All main weights of a model chunk; where it computes in fp32, they are the model's weights."""

    def __init__(self, sync: GradSync, dtype: torch.dtype) -> None:
        """Take over the parameters of `sync`, fp32, and cast them to `dtype`; the main weights keep their bits."""
        self.weights = []
        for name, parameter in sync.parameters.items():
            main = parameter.data
            parameter.data = main.to(dtype)
            moments = torch.zeros_like(main), torch.zeros_like(main)
            target = None if dtype == torch.float32 else parameter.data
            self.weights.append(MainWeight(name, 0, main, sync.gradients[name], *moments, target))

    def publish(self) -> Pending:
        """The targets are the model's weights: nothing is left to do."""
        return Pending(ALONE, (), lambda: self.weights[0].weight)
