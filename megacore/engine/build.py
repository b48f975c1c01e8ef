"""Which engine a run asks for."""

import torch

from megacore.config.run import RunConfig
from megacore.config.spec import SpecialTokens
from megacore.engine.base import Engine
from megacore.engine.compile import Compiler, compiles
from megacore.engine.native import DTYPES, NativeEngine
from megacore.kernels.choice import Kernels, choose_kernels, plain_kernels
from megacore.models.stage import Stage
from megacore.parallel.mesh import ProcessMesh


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
    """This rank's part of the model with its initial weights, and its optimizer. Collective.

    Args:
        config: the run.
        vocab_size: entries of the tokenizer, before padding.
        mesh: this process's groups.
        special_tokens: ids of the tokens that have a role.
        device: to train on.
        precision: fp32, bf16 or fp16.
        compiled_adam: whether DeepSpeed's own Adam for the CPU is there to be loaded.

    Raises:
        ParallelLayoutError: heads, widths, vocabulary or layers cannot be divided over the ranks.
    """
    compiler = Compiler(device) if compiles(config, device) else None
    kernels = kernels_of(config, device, precision, compiled=compiler is not None and compiler.works)
    if config.engine == "native":
        stage = Stage(config, vocab_size, mesh, special_tokens=special_tokens, device=device, kernels=kernels)
        engine = NativeEngine(stage, config, precision)
        if compiler is not None:
            engine.kernels["layers"] = compiler.compile_layers(stage.chunks)
        return engine
    # Imports deepspeed, which takes seconds.
    if mesh.pipeline_parallel.size > 1:
        from megacore.engine.deepspeed.pipeline import DeepSpeedPipelineEngine as DeepSpeedEngine
    else:
        from megacore.engine.deepspeed.zero import DeepSpeedEngine  # type: ignore[assignment]
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


def kernels_of(config: RunConfig, device: torch.device, precision: str, *, compiled: bool = False) -> Kernels:
    """What computes the operations of a run.

    Args:
        config: the run.
        device: of the model.
        precision: fp32, bf16 or fp16.
        compiled: whether layers go through torch.compile, which works.
    """
    if config.train.kernels == "plain":
        return plain_kernels()
    return choose_kernels(device, DTYPES[precision], compiled=compiled)
