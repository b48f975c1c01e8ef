"""Initial weights that depend on the seed and on global names, not on how the model is divided."""

import math

import torch
from torch import Tensor, nn

from megacore.parallel.rng import parameter_generator
from megacore.tensor_parallel import Partition, partitions

RESIDUAL_PROJECTIONS = ("self_attention.dense.weight", "mlp.dense_4h_to_h.weight")
"""Weights whose output is added to the residual stream."""
WORD_EMBEDDINGS = "word_embeddings.weight"


@torch.no_grad()
def initialize(model: nn.Module, *, seed: int, std: float, num_layers: int, vocab_size: int) -> None:
    """Fill every parameter: layer norms with ones and zeros, biases with zeros, weights from N(0, std²).

    Projections into the residual take std / sqrt(2 x num_layers) (Radford et al. 2019). The rows of the vocabulary
    that are padding are drawn after the others, whose values thus do not depend on the amount of padding.
    """
    whole = Partition(0, 0, 1)
    divided = partitions(model)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif "layernorm" in name:
            parameter.fill_(1.0)
        else:
            part = divided.get(name, whole)
            scale = std / math.sqrt(2 * num_layers) if name.endswith(RESIDUAL_PROJECTIONS) else std
            rows = vocab_size if name.endswith(WORD_EMBEDDINGS) else None
            values = _normal(part.global_shape(tuple(parameter.shape)), scale, seed, name, rows)
            parameter.copy_(part.shard(values))


def _normal(shape: tuple[int, ...], std: float, seed: int, name: str, first_rows: int | None) -> Tensor:
    """A whole parameter in fp32 on the CPU, drawn in two goes when `first_rows` is given."""
    generator = parameter_generator(seed, name)
    values = torch.empty(shape)
    split = shape[0] if first_rows is None else first_rows
    for rows in (values[:split], values[split:]):
        rows.normal_(0.0, std, generator=generator)
    return values
