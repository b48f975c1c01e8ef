"""Model specification in a checkpoint. Nothing here imports torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from megacore.checkpoint.format import STATE_NAME, read_state
from megacore.config.base import as_yaml
from megacore.config.spec import ModelSpec
from megacore.errors import CheckpointError

MODEL_KEY = "model"
"""Key of the checkpoint's state: the model, as JSON."""
RESOLVED = {
    "num_query_groups": "query_groups",
    "kv_channels": "head_dim",
    "ffn_hidden_size": "ffn_size",
    "num_decoder_layers": "decoder_layers",
    "query_pre_attn_scalar": "attention_scalar",
}
"""Fields that may be unset, with the property that gives the effective value."""
FREE = frozenset(
    {
        "hidden_dropout",
        "attention_dropout",
        "init_method_std",
        "residual_init_std",
        "make_vocab_size_divisible_by",
    }
)
"""Fields that matter only for training, or only for the number of rows, which is compared
separately."""


_ROTATIONS = ("rotary_base", "rope_scaling")
"""Fields that decide the rotary frequencies, which an extension of the context may change."""


def read_spec(checkpoint: Path) -> ModelSpec:
    """Return the specification of the model in a checkpoint.

    Raises CheckpointError if its state cannot be read or does not contain the model.
    """
    state = read_state(checkpoint)
    if MODEL_KEY not in state:
        raise CheckpointError(
            f"{checkpoint / STATE_NAME} does not say which model its weights are of: it was "
            "written by an earlier version of megacore, which has to read it too"
        )
    try:
        return ModelSpec.model_validate(state[MODEL_KEY])
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(map(str, (MODEL_KEY, *first["loc"])))
        raise CheckpointError(
            f"{checkpoint / STATE_NAME} holds no model that this version of megacore knows "
            f"({location}: {first['msg']}): read it with the version that wrote it"
        ) from error


def check_same_model(
    checkpoint: Path, saved_spec: ModelSpec, current_spec: ModelSpec, *, extends: bool = False
) -> None:
    """Refuse the weights of a model other than `current_spec`.

    Fields that matter only for training may differ, as well as the length of a model without a
    position table. A vocabulary may be smaller than one that is as large as its padded table: such
    a checkpoint does not tell which rows are padding.

    Args:
        checkpoint: path of the checkpoint, for messages.
        saved_spec: model of the checkpoint.
        current_spec: model of the run.
        extends: True for a new training, whose sequences may be longer than the checkpoint's, with
            other rotary frequencies (`rotary_base`, `rope_scaling`).

    Raises CheckpointError with both sides of every difference.
    """
    if extends:
        _check_table(checkpoint, saved_spec, current_spec)
    differing = [
        f"{name} is {_shown(saved)} there and {_shown(current)} here"
        for name, saved, current in _pairs(saved_spec, current_spec, extends=extends)
    ]
    if differing:
        raise CheckpointError(
            f"{checkpoint} is of another model: {', '.join(differing)}: use a "
            "checkpoint of this model, or change the configuration"
        )


def changed_rotations(saved_spec: ModelSpec, current_spec: ModelSpec) -> list[str]:
    """Return each difference of the rotary frequencies as text, such as `rotary_base 1 -> 2`."""
    return [
        f"{name} {_shown(saved)} -> {_shown(current)}"
        for name in _ROTATIONS
        for saved, current in [
            (getattr(saved_spec.model, name), getattr(current_spec.model, name)),
        ]
        if saved != current
    ]


def _check_table(checkpoint: Path, saved_spec: ModelSpec, current_spec: ModelSpec) -> None:
    """Refuse to extend a learned table of positions."""
    saved, current = saved_spec.max_position_embeddings, current_spec.max_position_embeddings
    learned = {spec.model.position_embedding_type for spec in (saved_spec, current_spec)}
    if learned == {"learned_absolute"} and saved < current:
        raise CheckpointError(
            f"{checkpoint} has a learned table of {saved} positions, which cannot be extended to "
            f"the {current} of this run: set data.seq_length to at most {saved} and "
            f"model.max_position_embeddings to {saved}, or begin with a model of rotary positions"
        )


def _pairs(
    saved_spec: ModelSpec, current_spec: ModelSpec, *, extends: bool
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name and both values of each field that must be the same and is not."""
    if saved_spec.family != current_spec.family:
        yield "family", saved_spec.family, current_spec.family
        return
    unpadded = (
        saved_spec.vocab_size == saved_spec.padded_vocab_size == current_spec.padded_vocab_size
    )
    if saved_spec.vocab_size != current_spec.vocab_size and not unpadded:
        yield (
            "the vocabulary",
            f"{saved_spec.vocab_size} entries",
            f"{current_spec.vocab_size} entries",
        )
    elif saved_spec.padded_vocab_size != current_spec.padded_vocab_size:
        yield (
            "the padded vocabulary",
            f"{saved_spec.padded_vocab_size} entries",
            f"{current_spec.padded_vocab_size} entries",
        )
    free = set(FREE)
    if current_spec.model.position_embedding_type != "learned_absolute":
        free.add("max_position_embeddings")
        if extends and saved_spec.max_position_embeddings < current_spec.max_position_embeddings:
            free.update(_ROTATIONS)
    if current_spec.family != "t5":
        free.add("num_decoder_layers")
    for name in type(current_spec.model).model_fields:
        saved, current = (
            getattr(spec.model, RESOLVED.get(name, name)) for spec in (saved_spec, current_spec)
        )
        if name not in free and saved != current:
            yield f"model.{name}", saved, current


def _shown(value: Any) -> str:
    """Return a value as a configuration writes it, without the unset fields of a mapping."""
    if isinstance(value, BaseModel):
        fields = [f"{name}: {_shown(field)}" for name, field in value if field is not None]
        return f"{{{', '.join(fields)}}}"
    return as_yaml(value)
