"""From a configuration to a model with its initial weights."""

import torch

from megacore.config.run import RunConfig
from megacore.models.gpt import GPTModel
from megacore.models.init import initialize
from megacore.parallel.mesh import ProcessMesh
from megacore.pipeline_parallel.partition import ModelChunk
from megacore.tokenizer import padded_vocab_size


def build_model(
    config: RunConfig,
    vocab_size: int,
    mesh: ProcessMesh,
    *,
    device: torch.device | str = "cpu",
    chunk: ModelChunk | None = None,
) -> GPTModel:
    """The model of a run, in fp32, with the initial weights of `config.seed`, the same for every layout.

    Args:
        config: the run.
        vocab_size: entries of the tokenizer, before padding.
        mesh: this process's groups; it gets its own part of each layer. Sequence parallelism is off where one rank
            holds the whole layer.
        device: where the parameters are; "meta" builds shapes alone, for planning.
        chunk: the part of the model to build; None is all of it.

    Raises:
        ParallelLayoutError: heads, widths or vocabulary cannot be divided over the ranks.
    """
    train = config.train
    model = GPTModel(
        config.model,
        padded_vocab_size=padded_vocab_size(vocab_size, config.model.make_vocab_size_divisible_by),
        max_position_embeddings=config.max_position_embeddings,
        layers=chunk.layers if chunk else None,
        has_embedding=chunk is None or chunk.has_embedding,
        has_head=chunk is None or chunk.has_head,
        recompute=train.recompute,
        recompute_num_layers=train.recompute_num_layers,
        label_smoothing=train.label_smoothing,
        z_loss=train.z_loss,
        tp=mesh.tensor_parallel,
        sequence_parallel=config.parallel.sequence_parallel,
        device=device,
    )
    if torch.device(device).type != "meta":
        initialize(
            model,
            seed=config.seed,
            std=config.model.init_method_std,
            num_layers=config.model.num_layers,
            vocab_size=vocab_size,
        )
    return model
