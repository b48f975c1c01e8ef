"""Construction of models: with initial weights from a configuration, or bare from a checkpoint."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from megacore.config.model import Family
from megacore.config.run import RunConfig
from megacore.config.spec import ModelSpec
from megacore.kernels.choice import Kernels
from megacore.models.base import Model
from megacore.models.gpt import GPTModel
from megacore.models.init import initialize, without_memory
from megacore.parallel.mesh import ProcessMesh
from megacore.pipeline_parallel.partition import ModelChunk


def build_model(
    config: RunConfig,
    vocab_size: int,
    mesh: ProcessMesh,
    *,
    device: torch.device | str = "cpu",
    chunk: ModelChunk | None = None,
    kernels: Kernels | None = None,
    initial_weights: bool = True,
    stored: bool = True,
) -> Model:
    """Build the model of a run in fp32, with initial weights that do not depend on the layout.

    Args:
        config: the run's configuration; `config.seed` determines the weights.
        vocab_size: entries of the tokenizer, before padding.
        mesh: this process's groups; the model has this rank's part of each layer. Sequence
            parallelism is off if one rank has the whole layer.
        device: device of the parameters; "meta" builds only shapes, for planning.
        chunk: part of the model to build; None means the whole model.
        kernels: kernels to compute with; None means plain torch.
        initial_weights: initialize the parameters; otherwise they are left uninitialized.
        stored: allocate the parameters; otherwise they have shapes and no memory.

    Raises:
        ParallelLayoutError: heads, widths or vocabulary cannot be divided over the ranks.
    """
    train = config.train
    spec = ModelSpec.of(config, vocab_size)
    options: dict[str, Any] = (
        {"sentence_task": config.data.masked_lm.sentence_task} if config.family == "bert" else {}
    )
    with nullcontext() if stored else without_memory():
        model = _class_of(config.family)(
            spec.model,
            padded_vocab_size=spec.padded_vocab_size,
            max_position_embeddings=spec.max_position_embeddings,
            chunk=chunk,
            recompute=train.recompute,
            recompute_num_layers=train.recompute_num_layers,
            label_smoothing=train.label_smoothing,
            z_loss=train.z_loss,
            kernels=kernels,
            tp=mesh.tensor_parallel,
            sequence_parallel=config.parallel.sequence_parallel,
            cp=mesh.context_parallel,
            device=device,
            **options,
        )
    if initial_weights and stored and torch.device(device).type != "meta":
        initialize(model, spec, seed=config.seed)
    return model


def build_bare(spec: ModelSpec, mesh: ProcessMesh, *, device: torch.device | str = "meta") -> Model:
    """Build a whole uninitialized model to load weights into; it is not for training.

    Args:
        spec: description of the model in the checkpoint.
        mesh: this process's groups; the model has this rank's part of each layer.
        device: device of the parameters; on "meta" weights are assigned later.

    Raises:
        ParallelLayoutError: heads, widths or vocabulary cannot be divided over the ranks.
    """
    model = _class_of(spec.family)(
        spec.model,
        padded_vocab_size=spec.padded_vocab_size,
        max_position_embeddings=spec.max_position_embeddings,
        tp=mesh.tensor_parallel,
        device=device,
    )
    return model.eval()


def _class_of(family: Family) -> Callable[..., Model]:
    """Return the class of a family; BERT and T5 are imported only when needed."""
    match family:
        case "gpt":
            return GPTModel
        case "bert":
            from megacore.models.bert import BertModel

            return BertModel
        case "t5":
            from megacore.models.t5 import T5Model

            return T5Model
