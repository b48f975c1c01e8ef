"""Construction of a run's engine, with separate compilation of each layer.

A layer is one graph of torch.compile, in which linear layers with their communication are operators
(`megacore.tensor_parallel.linear`). Only what seeds dropout inside a layer splits the graph. The
compiler's cache is in the workspace, for later runs.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megacore.artifact.workspace import Workspace
from megacore.config.checks import check_device
from megacore.config.run import RunConfig
from megacore.config.spec import SpecialTokens
from megacore.engine.base import Engine
from megacore.engine.native import DTYPES, NativeEngine
from megacore.kernels.choice import choose_kernels
from megacore.models.layers.attention import CrossAttention, SelfAttention
from megacore.models.layers.transformer import TransformerLayer
from megacore.models.stage import Stage
from megacore.observe.logging import logger
from megacore.parallel.mesh import ProcessMesh
from megacore.tensor_parallel.linear import expose_sinks

_UNCOMPILED = {
    SelfAttention: ("seed",),
    CrossAttention: ("seed",),
}
"""Methods that run uncompiled, by class."""
_GRAPHS_OF_A_METHOD = 64
"""Maximum number of compiled graphs of a method for all layers together: in training and in
evaluation, with and without a bias, for each kind of layer."""
Graph = Callable[..., Any]


def build_engine(
    config: RunConfig,
    vocab_size: int,
    mesh: ProcessMesh,
    *,
    special_tokens: SpecialTokens,
    device: torch.device,
    precision: str,
    compiled_adam: bool = False,
) -> Engine:
    """Build this rank's part of the model with its initial weights, and its optimizer. Collective.

    Args:
        config: configuration of the run.
        vocab_size: entries of the tokenizer, before padding.
        mesh: this process's groups.
        special_tokens: ids of the special tokens.
        device: device to train on.
        precision: fp32, bf16 or fp16.
        compiled_adam: True if DeepSpeed's compiled CPU Adam is available.

    Raises:
        ParallelLayoutError: heads, widths, vocabulary or layers cannot be divided over the ranks.
        ConfigError: a kernel or CUDA graphs, which the configuration requests, cannot run here.
    """
    check_device(config.train, device.type)
    compiler = Compiler(device) if compiles(config.train.compile, config.engine, device) else None
    kernels = choose_kernels(
        device,
        DTYPES[precision],
        compiled=compiler is not None and compiler.works,
        softcapped=config.model.attn_logit_softcapping is not None,
        config=config.train.kernels,
    )
    if config.engine == "native":
        stage = Stage(
            config, vocab_size, mesh, special_tokens=special_tokens, device=device, kernels=kernels
        )
        engine = NativeEngine(stage, config, precision)
        if compiler is not None:
            # Shapes that a graph takes as variables would give other bits after a resume.
            dynamic = None if config.data.seq_length_schedule is None else False
            engine.kernels["layers"] = compiler.compile_layers(stage.chunks, dynamic=dynamic)
        return engine
    # This imports deepspeed, which takes seconds.
    if mesh.pipeline_parallel.size > 1:
        from megacore.engine.deepspeed.pipeline import DeepSpeedPipelineEngine as DeepSpeedEngine
    else:
        from megacore.engine.deepspeed.engine import DeepSpeedEngine  # type: ignore[assignment]
    return DeepSpeedEngine(
        config,
        vocab_size,
        mesh,
        special_tokens=special_tokens,
        device=device,
        precision=precision,
        kernels=kernels,
        compiled_adam=compiled_adam,
    )


def compiles(choice: str, engine: str, device: torch.device) -> bool:
    """Return True if layers are compiled, given `train.compile`, the engine and the device."""
    return choice == "on" or (choice == "auto" and engine == "native" and device.type == "cuda")


class Compiler:
    """Backend for torch.compile: Inductor with its cache in the workspace.

    A graph that cannot be compiled runs uncompiled, with a warning.
    """

    failed: str | None = None
    """Reason why the last graph was not compiled."""

    def __init__(self, device: torch.device) -> None:
        """Test the compiler on a small function.

        Raises WorkspaceError if the workspace cannot be written.
        """
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Workspace.of().compiled))
        torch.compile(torch.nn.functional.silu, backend=self)(torch.ones(8, device=device))
        self.works = self.failed is None
        """True if the compiler works on this machine."""

    def compile_layers(self, chunks: Sequence[nn.Module], *, dynamic: bool | None = None) -> str:
        """Compile every transformer layer of some chunks of a model on its first call.

        Layers stay uncompiled if the compiler does not work.

        Args:
            chunks: chunks of a model.
            dynamic: False compiles again for each shape; None lets torch decide, which takes a
                size that has changed as a variable.

        Returns:
            Description of the result, for the run's record.
        """
        import torch._dynamo

        if not self.works:
            return f"off: {self.failed}"
        torch._dynamo.config.recompile_limit = _GRAPHS_OF_A_METHOD
        for chunk in chunks:
            expose_sinks(chunk.parameters())
            for module in chunk.modules():
                for name in _UNCOMPILED.get(type(module), ()):
                    setattr(module, name, torch.compiler.disable(getattr(module, name)))  # type: ignore[no-untyped-call]
                if isinstance(module, TransformerLayer):
                    module.branches = torch.compile(  # type: ignore[method-assign]
                        module.branches, backend=self, dynamic=dynamic
                    )
        return "torch.compile of each layer"

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Graph:
        """Compile a graph with its backward pass, as torch.compile's backend."""
        from torch._dynamo.exc import RestartAnalysis
        from torch._inductor.compile_fx import compile_fx

        try:
            with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
                return compile_fx(graph, list(inputs))  # type: ignore[return-value]
        except RestartAnalysis:  # torch.compile's request for another graph
            raise
        except Exception as error:
            self.failed = (str(error).strip() or type(error).__name__).splitlines()[0]
            logger.warning(
                "a part of the model runs without torch.compile, which failed: %s", self.failed
            )
            return graph.forward
