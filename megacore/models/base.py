"""What a pipeline stage, an engine and a conversion ask of a model, whatever its family."""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from megacore.models.inputs import ModelInput
from megacore.models.losses import Losses


class Model(nn.Module, ABC):
    """One chunk of a pipeline, or all of a model; parameters have the names of the whole model."""

    has_embedding: bool
    """Whether the chunk takes tokens, and no other chunk's output."""
    has_head: bool
    """Whether it computes the losses."""
    padded_vocab_size: int
    """Rows of the embedding (v)."""
    loss_names: tuple[str, ...]
    """Names of the losses, in the order in which a chunk with the head returns them."""

    @property
    @abstractmethod
    def shared_parameters(self) -> frozenset[str]:
        """Parameters that other chunks hold too; the gradients of all are summed."""

    @abstractmethod
    def run(
        self, given: ModelInput | None, hidden: Tensor | None = None, *, dropout_seed: int | None = None
    ) -> Tensor | Losses:
        """What this chunk makes of one micro batch.

        Args:
            given: the micro batch; None for a chunk between the others that needs nothing of it.
            hidden: what the chunk before returned, for a chunk without the embedding.
            dropout_seed: of the micro batch (`megacore.parallel.rng.micro_batch_seed`), for training with dropout.

        Returns:
            What the next chunk takes, or from a chunk with the head the losses.
        """
