"""Loss of a whole GPT, without an engine."""

from torch import Tensor

from megacore.models.base import LM_LOSS
from megacore.models.gpt import GPTModel
from megacore.models.inputs import ModelInput


def loss_of(
    model: GPTModel, tokens: Tensor, labels: Tensor, *, dropout_seed: int | None = None
) -> Tensor:
    """Return the loss of each label: ids [b, s] and [b, s] to fp32 [b, s]."""
    losses = model.run(ModelInput(tokens, labels), dropout_seed=dropout_seed)
    assert isinstance(losses, dict)
    return losses[LM_LOSS].losses
