"""Initial weights that depend on the seed and on global names, not on how the model is divided."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from megacore.config.model import ModelConfig
from megacore.config.spec import ModelSpec
from megacore.parallel.rng import parameter_generator
from megacore.tensor_parallel import Partition, partitions

RESIDUAL_PROJECTIONS = ("attention.dense.weight", "mlp.dense_4h_to_h.weight")
"""Weights whose output is added to the residual stream."""
VOCABULARY_ROWS = ("word_embeddings.weight", "output_layer.weight")
"""Weights with a row for each entry of the vocabulary."""

Deviation = Callable[[str, tuple[int, ...]], float | Tensor]
"""Global name and whole shape of a weight -> standard deviation of its elements, or of each of its
rows [rows, 1]."""


@torch.no_grad()
def initialize(model: nn.Module, spec: ModelSpec, *, seed: int) -> None:
    """Fill every parameter with its initial values.

    Norms have ones and zeros, biases zeros, weights normal distributions.

    GPT (Radford et al. 2019): std init_method_std, of projections into the residual divided by
    sqrt(2 x num_layers). BERT (Devlin et al. 2018): the same; with norms after sums nothing is
    divided. T5 (Raffel et al. 2019, as in the public Mesh TensorFlow code): by the widths of its
    matrices. The rows of the vocabulary that are padding are drawn after the others, whose values
    thus do not depend on the amount of padding.
    """
    divided = partitions(model)
    for name, parameter in model.named_parameters():
        parameter.copy_(
            initial_weight(
                name, tuple(parameter.shape), spec, seed=seed, partition=divided.get(name)
            )
        )


def initial_weight(
    name: str,
    shape: tuple[int, ...],
    spec: ModelSpec,
    *,
    seed: int,
    partition: Partition | None = None,
) -> Tensor:
    """The initial values of one parameter, see `initialize`: fp32 on the CPU.

    Args:
        name: global name.
        shape: of this rank's part of it.
        spec: the model.
        seed: of the run.
        partition: which part of the whole that is; None when it is all of it.
    """
    if name.endswith("bias"):
        return torch.zeros(shape)
    if "layernorm" in name:
        return torch.ones(shape)
    part = partition or Partition(0, 0, 1)
    whole = part.global_shape(shape)
    deviation = t5_deviation(spec.model) if spec.family == "t5" else gpt_deviation(spec.model)
    rows = spec.vocab_size if name.endswith(VOCABULARY_ROWS) else None
    return part.shard(_normal(whole, deviation(name, whole), seed, name, rows))


def gpt_deviation(model: ModelConfig) -> Deviation:
    """Of GPT and BERT."""
    std = model.init_method_std
    residual = std / math.sqrt(2 * model.num_layers) if model.norm_position == "pre" else std

    def deviation(name: str, shape: tuple[int, ...]) -> float:
        return residual if name.endswith(RESIDUAL_PROJECTIONS) else std

    return deviation


def t5_deviation(model: ModelConfig) -> Deviation:
    """Of T5, whose scores are not divided by sqrt(d): the queries' weights are smaller instead."""
    hidden, head = model.hidden_size, model.head_dim
    keys, queries = float(hidden**-0.5), float((hidden * head) ** -0.5)

    def deviation(name: str, shape: tuple[int, ...]) -> float | Tensor:
        if name.endswith("query_key_value.weight"):
            of_head = torch.tensor([queries] * head + [keys] * (2 * head))
            return of_head.repeat(shape[0] // len(of_head)).unsqueeze(1)
        if name.endswith("query.weight"):
            return queries
        if name.endswith("attention.dense.weight"):
            return float(model.attention_size**-0.5)
        if name.endswith("mlp.dense_4h_to_h.weight"):
            return float(model.ffn_size**-0.5)
        # A head of its own is a matrix as the others; transformers draws it with std 1, and logits
        # spread by sqrt(h).
        return 1.0 if name.endswith("word_embeddings.weight") else keys

    return deviation


def _normal(
    shape: tuple[int, ...], std: float | Tensor, seed: int, name: str, first_rows: int | None
) -> Tensor:
    """A whole parameter in fp32 on the CPU, drawn in two goes when `first_rows` is given."""
    generator = parameter_generator(seed, name)
    values = torch.empty(shape)
    split = shape[0] if first_rows is None else first_rows
    for rows in (values[:split], values[split:]):
        if isinstance(std, Tensor):
            rows.normal_(0.0, 1.0, generator=generator)
        else:
            rows.normal_(0.0, std, generator=generator)
    return values.mul_(std) if isinstance(std, Tensor) else values
