"""Which engine a run asks for."""

import torch

from megacore.config.run import RunConfig
from megacore.config.spec import SpecialTokens
from megacore.engine.base import Engine
from megacore.engine.native import NativeEngine
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
    if config.engine == "native":
        stage = Stage(config, vocab_size, mesh, special_tokens=special_tokens, device=device)
        return NativeEngine(stage, config, precision)
    # Imports deepspeed, which takes seconds.
    if mesh.pipeline_parallel.size > 1:
        from megacore.engine.deepspeed_pipeline import DeepSpeedPipelineEngine as DeepSpeedEngine
    else:
        from megacore.engine.deepspeed import DeepSpeedEngine  # type: ignore[assignment]
    return DeepSpeedEngine(
        config,
        vocab_size,
        mesh,
        special_tokens=special_tokens,
        device=device,
        precision=precision,
        compiled_adam=compiled_adam,
    )
