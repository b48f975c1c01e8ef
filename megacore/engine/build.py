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
from megacore.config.checks import LEAST_FLEX_HEAD, check_device
from megacore.config.run import RunConfig
from megacore.config.spec import SpecialTokens
from megacore.data_parallel.sharding import Sharding
from megacore.engine.base import Engine
from megacore.engine.native import NativeEngine
from megacore.kernels.choice import Kernels, choose_kernels
from megacore.kernels.implementation import DTYPES, Setting, flex_obstacle
from megacore.models.layers.attention import CrossAttention, SelfAttention
from megacore.models.layers.transformer import TransformerLayer
from megacore.models.stage import Stage
from megacore.observe.logging import logger
from megacore.parallel.mesh import ProcessMesh
from megacore.tensor_parallel.linear import expose_sinks

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
    dtype = DTYPES[precision]
    kernels, forms = _choose_kernels(config, device, dtype, compiler)
    if config.engine == "native":
        sharding = Sharding.of(
            config.parallel.data_parallel_sharding, mesh.data_context_parallel.size
        )
        stage = Stage(
            config,
            vocab_size,
            mesh,
            special_tokens=special_tokens,
            device=device,
            kernels=kernels,
            stored=not sharding.divides("optimizer"),
        )
        engine: Engine = NativeEngine(stage, config, precision)
        engine.kernels |= forms
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
    engine = DeepSpeedEngine(
        config,
        vocab_size,
        mesh,
        special_tokens=special_tokens,
        device=device,
        precision=precision,
        kernels=kernels,
        compiled_adam=compiled_adam,
    )
    engine.kernels |= forms
    return engine


def _choose_kernels(
    config: RunConfig, device: torch.device, dtype: torch.dtype, compiler: "Compiler | None"
) -> tuple[Kernels, dict[str, str]]:
    """Return a run's kernels, and the form of its masks for the record if it has any."""
    masks = _masks(config)
    setting = Setting(
        device,
        dtype,
        compiled=compiler is not None and compiler.works,
        softcapped=config.model.attn_logit_softcapping is not None,
        masked=masks,
        flex_failure=_flex_failure(config, dtype, compiler) if masks else None,
    )
    kernels = choose_kernels(setting, config=config.train.kernels)
    return kernels, {"masks": _form_of_masks(config, kernels, setting)} if masks else {}


def _masks(config: RunConfig) -> bool:
    """Return True if attention needs a mask, bias or soft cap besides the causal mask.

    The learned bias of T5 is no mask.
    """
    model = config.model
    return (
        config.data.reset_attention_mask
        or (model.sliding_window or config.data.seq_length) < config.data.seq_length
        or model.position_embedding_type == "alibi"
        or model.attn_logit_softcapping is not None
        or config.parallel.context_parallel_size > 1
        or config.family != "gpt"
    )


def _flex_failure(config: RunConfig, dtype: torch.dtype, compiler: "Compiler | None") -> str | None:
    """Return why FlexAttention cannot compute a model's attention, None if it can.

    Where nothing else prevents its use, it is compiled for a small input.
    """
    model = config.model
    if model.attention_dropout:
        return f"it drops no weights (model.attention_dropout is {model.attention_dropout})"
    if model.head_dim < LEAST_FLEX_HEAD:
        return f"it needs heads of {LEAST_FLEX_HEAD} or more features (they have {model.head_dim})"
    if compiler is None or not compiler.works or compiler.device.type != "cuda":
        return None
    if config.train.kernels.attention not in ("auto", "flex"):
        return None
    from megacore.kernels.flex import try_out

    try:
        try_out(compiler.compile, compiler.device, dtype, model)
    except Exception as error:
        return f"it does not compile here: {_first_line(error)}"
    return None


def _form_of_masks(config: RunConfig, kernels: Kernels, setting: Setting) -> str:
    """Return the form of the masks for the run's record, with the reason if they are dense."""
    dropout = config.model.attention_dropout
    alibi = config.model.position_embedding_type == "alibi"
    if kernels.masks == "blocks":
        return "spans in blocks"
    if kernels.masks == "spans" and not dropout and not alibi:
        return "spans"
    if config.train.kernels.attention == "plain":
        return "dense (train.kernels.attention is plain)"
    if setting.device.type == "cuda":
        return f"dense (FlexAttention is not used: {flex_obstacle(setting)})"
    bias = "attention dropout" if dropout else "ALiBi" if alibi else "masks"
    return f"dense ({kernels.names['attention']} has no {bias} by spans)"


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
        self.device = device
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
                if isinstance(module, SelfAttention | CrossAttention):
                    module.seed = torch.compiler.disable(module.seed)  # type: ignore[method-assign,no-untyped-call]
                if isinstance(module, SelfAttention):  # for the check of document masks
                    module.attend = torch.compile(  # type: ignore[method-assign]
                        module.attend, backend=self, dynamic=dynamic
                    )
                if isinstance(module, TransformerLayer):
                    module.branches = torch.compile(  # type: ignore[method-assign]
                        module.branches, backend=self, dynamic=dynamic
                    )
        return "torch.compile of each layer"

    def compile(self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Graph:
        """Compile a graph with its backward pass, or raise the compiler's error."""
        from torch._inductor.compile_fx import compile_fx

        with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
            return compile_fx(graph, list(inputs))  # type: ignore[return-value]

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Graph:
        """Compile a graph if possible, as torch.compile's backend."""
        from torch._dynamo.exc import RestartAnalysis

        try:
            return self.compile(graph, inputs)
        except RestartAnalysis:  # torch.compile's request for another graph
            raise
        except Exception as error:
            self.failed = _first_line(error)
            logger.warning(
                "a part of the model runs without torch.compile, which failed: %s", self.failed
            )
            return graph.forward


def _first_line(error: Exception) -> str:
    """Return the first line of the compiler's error, which torch.compile wraps."""
    error = getattr(error, "inner_exception", error)
    return (str(error).strip() or type(error).__name__).splitlines()[0]
