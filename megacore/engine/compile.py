"""Layers through torch.compile, each by itself.

Linear layers stay out of the graphs: they talk to other ranks and add to main gradients, which a graph would forget.
What stands between two of them is fused. The compiler's results lie in the workspace for the next run.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megacore.artifact.workspace import Workspace
from megacore.config.run import RunConfig
from megacore.models.layers.attention import CrossAttention, SelfAttention
from megacore.models.layers.mlp import MLP
from megacore.models.layers.transformer import TransformerLayer
from megacore.observe.logging import logger
from megacore.tensor_parallel import ColumnParallelLinear, RowParallelLinear

_UNCOMPILED = {
    ColumnParallelLinear: ("forward",),
    RowParallelLinear: ("forward",),
    SelfAttention: ("projections", "seed"),
    CrossAttention: ("seed",),
    MLP: ("columns",),
    TransformerLayer: ("seed",),
}
"""Methods that run as they are."""
_GRAPHS_OF_A_METHOD = 64
"""Of the layers together: in training and evaluation, with and without a bias, for each kind of layer."""

Graph = Callable[..., Any]


def compiles(config: RunConfig, device: torch.device) -> bool:
    """Whether a run's layers are to be compiled on a device."""
    wanted = config.train.compile
    return wanted == "on" or (wanted == "auto" and config.engine == "native" and device.type == "cuda")


def compile_layers(chunks: Sequence[nn.Module], device: torch.device) -> str:
    """Compile every transformer layer of some chunks of a model when it first runs.

    A graph that cannot be compiled runs as it is, with a warning.

    Returns:
        What is done, for the run's record: layers stay as they are where there is no compiler.

    Raises:
        WorkspaceError: the workspace cannot be written.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Workspace.of().compiled))
    import torch._dynamo

    torch._dynamo.config.recompile_limit = _GRAPHS_OF_A_METHOD
    backend = _Backend()
    torch.compile(torch.nn.functional.silu, backend=backend)(torch.ones(8, device=device))
    if backend.failed:
        return f"off: {backend.failed}"
    for chunk in chunks:
        for module in chunk.modules():
            for name in _UNCOMPILED.get(type(module), ()):
                setattr(module, name, torch.compiler.disable(getattr(module, name)))  # type: ignore[no-untyped-call]
            if isinstance(module, TransformerLayer):
                module.branches = torch.compile(module.branches, backend=backend)  # type: ignore[method-assign]
    return "torch.compile of each layer"


class _Backend:
    """Inductor, and after its failure the graph as it is."""

    failed: str | None = None
    """Why the last graph was not compiled."""

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Graph:
        from torch._inductor.compile_fx import compile_fx

        try:
            with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
                return compile_fx(graph, list(inputs))  # type: ignore[return-value]
        except Exception as error:
            self.failed = str(error).strip().splitlines()[0]
            logger.warning("a part of the model runs without torch.compile, which failed: %s", self.failed)
            return graph.forward
