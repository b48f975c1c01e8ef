"""What the training loop asks of an engine."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Update:
    """Outcome of one iteration; all but `losses` is the same on every rank."""

    losses: tuple[float, ...]
    """Mean loss of each micro batch of this rank, in nats per token."""
    grad_norm: float
    """Global gradient norm before clipping, unscaled."""
    applied: bool
    """Whether the weights were updated: a gradient that is not finite leaves them alone."""
    fatal: bool = False
    """Whether a lower loss scale cannot help: the gradient is not finite for another reason."""

    @property
    def loss(self) -> float:
        """Mean over this rank's micro batches."""
        return sum(self.losses) / len(self.losses)


class Engine(Protocol):
    """One model with its optimizer: forward, backward, update, and the state that a checkpoint holds."""

    device: torch.device
    precision: str
    """Compute type: fp32, bf16 or fp16."""
    kernels: dict[str, str]
    """Which implementation each operation runs on."""

    @property
    def parameters(self) -> int:
        """Number of the model's parameters."""
        ...

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding."""
        ...

    @property
    def loss_scale(self) -> float:
        """Factor on the loss before backward."""
        ...

    def start_iteration(self) -> None:
        """Forget the gradients of the iteration before."""
        ...

    def micro_step(self, tokens: Tensor, *, last: bool) -> None:
        """Forward and backward of one micro batch.

        Args:
            tokens: ids on the engine's device, [b, s + 1].
            last: whether it is the iteration's last: only then gradients travel between ranks.
        """
        ...

    def update(self, lr: float) -> Update:
        """Average the gradients over the ranks, clip them, and make one optimizer step."""
        ...

    def token_losses(self, tokens: Tensor) -> Tensor:
        """Loss of every target without dropout or gradients: ids [b, s + 1] -> fp32 [b, s]."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a checkpoint holds as tensors, under its global name; they are loaded in place."""
        ...

    def state(self) -> dict[str, Any]:
        """Everything else that a checkpoint holds, as JSON."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state` and from the tensors, which were loaded in place before."""
        ...
