"""Initial weights, which depend on the seed and on global names but not on the layout."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from megacore.config.model import ModelConfig
from megacore.config.spec import ModelSpec
from megacore.parallel.rng import parameter_generator
from megacore.tensor_parallel import Partition, partitions

RESIDUAL_PROJECTIONS = ("attention.dense.weight", "mlp.dense_4h_to_h.weight")
"""Suffixes of weights with an output that is added to the residual stream."""
VOCABULARY_ROWS = ("word_embeddings.weight", "output_layer.weight")
"""Suffixes of weights with one row per entry of the vocabulary."""

Deviation = Callable[[str, tuple[int, ...]], float | Tensor]
"""Function of a weight's global name and global shape that returns the standard deviation of its
elements, or one per row [rows, 1]."""


@torch.no_grad()
def initialize(model: nn.Module, spec: ModelSpec, *, seed: int) -> None:
    """Fill every parameter with its initial values.

    The weights of norms are ones, or zeros with apply_layernorm_1p. Biases are zeros. Other weights
    have normal distributions.

    In GPT (Radford et al. 2019) the standard deviation is init_method_std, divided by
    sqrt(2 x num_layers) for projections into the residual stream, or residual_init_std for these.
    In BERT (Devlin et al. 2018) it
    is the same, but not divided if norms come after the sums. In T5 (Raffel et al. 2019, as in the
    public Mesh TensorFlow code) it depends on the widths of the matrices. The padding rows of the
    vocabulary are drawn after the others, so that the values of the others do not depend on the
    amount of padding.
    """
    initial = initial_weights(model, spec, seed=seed)
    for name, parameter in model.named_parameters():
        parameter.copy_(initial(name))


def initial_weights(model: nn.Module, spec: ModelSpec, *, seed: int) -> Callable[[str], Tensor]:
    """Return the function from a parameter's name to its initial values, see `initialize`.

    They are fp32 on the CPU, of the shape that this rank's parameter has.
    """
    divided = partitions(model)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return lambda name: initial_weight(
        name, shapes[name], spec, seed=seed, partition=divided.get(name)
    )


@contextmanager
def without_memory() -> Iterator[None]:
    """Free the memory of every parameter that is created in this context, but not its shape."""

    def free(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter.untyped_storage().resize_(0)

    handle = register_module_parameter_registration_hook(free)
    try:
        yield
    finally:
        handle.remove()


def initial_weight(
    name: str,
    shape: tuple[int, ...],
    spec: ModelSpec,
    *,
    seed: int,
    partition: Partition | None = None,
) -> Tensor:
    """Return the initial values of one parameter, see `initialize`: fp32 on the CPU.

    Args:
        name: global name.
        shape: shape of this rank's part.
        spec: the model.
        seed: seed of the run.
        partition: position of this part in the whole parameter; None if it is not divided.
    """
    if name.endswith("bias"):
        return torch.zeros(shape)
    if "layernorm" in name:
        return torch.zeros(shape) if spec.model.apply_layernorm_1p else torch.ones(shape)
    part = partition or Partition(0, 0, 1)
    global_shape = part.global_shape(shape)
    deviation = t5_deviation(spec.model) if spec.family == "t5" else gpt_deviation(spec.model)
    rows = spec.vocab_size if name.endswith(VOCABULARY_ROWS) else None
    return part.shard(_normal(global_shape, deviation(name, global_shape), seed, name, rows))


def gpt_deviation(model: ModelConfig) -> Deviation:
    """Return the standard deviations of GPT and BERT."""
    std = model.init_method_std
    residual = std / math.sqrt(2 * model.num_layers) if model.norm_position == "pre" else std
    residual = model.residual_init_std or residual

    def deviation(name: str, shape: tuple[int, ...]) -> float:
        return residual if name.endswith(RESIDUAL_PROJECTIONS) else std

    return deviation


def t5_deviation(model: ModelConfig) -> Deviation:
    """Return the standard deviations of T5.

    T5 does not divide scores by sqrt(d); the weights of its queries are smaller instead.
    """
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
        # A separate output layer is a matrix like the others. transformers draws it with std 1,
        # which spreads the logits by sqrt(h).
        return 1.0 if name.endswith("word_embeddings.weight") else keys

    return deviation


def _normal(
    shape: tuple[int, ...], std: float | Tensor, seed: int, name: str, first_rows: int | None
) -> Tensor:
    """Draw a whole parameter in fp32 on the CPU; rows from `first_rows` on are drawn last."""
    generator = parameter_generator(seed, name)
    values = torch.empty(shape)
    split = shape[0] if first_rows is None else first_rows
    for rows in (values[:split], values[split:]):
        if isinstance(std, Tensor):
            rows.normal_(0.0, 1.0, generator=generator)
        else:
            rows.normal_(0.0, std, generator=generator)
    return values.mul_(std) if isinstance(std, Tensor) else values
