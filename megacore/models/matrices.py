"""Matrices of the layers' linear projections, which Muon updates."""

from collections.abc import Iterator

from torch import nn

from megacore.models.layers.attention import CrossAttention, SelfAttention
from megacore.models.layers.transformer import TransformerLayer
from megacore.optim.muon import RowParts
from megacore.tensor_parallel import ColumnParallelLinear, RowParallelLinear


def layer_matrices(model: nn.Module) -> dict[str, RowParts]:
    """Return the weights of the linear projections in transformer layers, by global name.

    Embeddings, heads, biases and norms are not among them. A weight that projects to q, k and v, or
    to k and v, has rows [head][q, k, v][d] or [group][k, v][d].
    """
    return {
        f"{layer_name}.{name}.weight" if layer_name else f"{name}.weight": parts
        for layer_name, layer in model.named_modules()
        if isinstance(layer, TransformerLayer)
        for name, parts in _projections(layer)
    }


def _projections(layer: TransformerLayer) -> Iterator[tuple[str, RowParts]]:
    fused = {}
    for name, module in layer.named_modules():
        if isinstance(module, SelfAttention | CrossAttention):
            fused[f"{name}.query_key_value"] = RowParts(3, module.head_dim)
            fused[f"{name}.key_value"] = RowParts(2, module.head_dim)
    for name, module in layer.named_modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            yield name, fused.get(name, RowParts())
