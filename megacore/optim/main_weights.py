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


class MainWeights(Protocol):
    """Main weights that are published together."""

    @property
    def weights(self) -> Sequence[MainWeight]:
        """What this rank updates."""
        ...

    def publish(self) -> Pending:
        """Begin to bring what was changed into the model's weights."""
        ...


class WholeWeights:
    """All main weights of a model chunk; where it computes in fp32, they are the model's weights."""

    def __init__(self, sync: GradSync, dtype: torch.dtype) -> None:
        """Take over the parameters of `sync`, fp32, and cast them to `dtype`; the main weights keep their bits."""
        self._parameters = sync.parameters
        self.weights = [
            MainWeight(
                name,
                0,
                parameter.data,
                sync.gradients[name],
                torch.zeros_like(parameter.data),
                torch.zeros_like(parameter.data),
            )
            for name, parameter in sync.parameters.items()
        ]
        self._copies = dtype != torch.float32
        for parameter in sync.parameters.values():
            parameter.data = parameter.data.to(dtype)

    def publish(self) -> Pending:
        """Round the main weights into a model of lower precision."""
        if self._copies:
            targets = [self._parameters[main.name].data for main in self.weights]
            torch._foreach_copy_(targets, [main.weight for main in self.weights])
        return Pending(ALONE, (), lambda: self.weights[0].weight)
