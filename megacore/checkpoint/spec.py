"""Which model a checkpoint holds; nothing here imports torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megacore.checkpoint.format import STATE_NAME, read_state
from megacore.config.spec import ModelSpec
from megacore.errors import CheckpointError

MODEL_KEY = "model"
"""Of the checkpoint's state: the model, as JSON."""
_RESOLVED = {
    "num_query_groups": "query_groups",
    "kv_channels": "head_dim",
    "ffn_hidden_size": "ffn_size",
    "num_decoder_layers": "decoder_layers",
}
"""Values that may be left to follow from others, and what they are then."""
_FREE = frozenset(
    {"hidden_dropout", "attention_dropout", "init_method_std", "make_vocab_size_divisible_by"}
)
"""Values that matter to training alone, or to the number of rows, which is compared by itself."""


def read_spec(checkpoint: Path) -> ModelSpec:
    """Return the model whose weights a checkpoint holds.

    Raises CheckpointError when its state cannot be read or does not say.
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
        where = ".".join(map(str, (MODEL_KEY, *first["loc"])))
        raise CheckpointError(
            f"{checkpoint / STATE_NAME} holds no model that this version of megacore knows "
            f"({where}: {first['msg']}): read it with the version that wrote it"
        ) from error


def check_same_model(checkpoint: Path, there: ModelSpec, here: ModelSpec) -> None:
    """Refuse the weights of another model than the one that is here.

    What matters to training alone may differ, and the length of a model without a position table. A
    vocabulary may be smaller than one that is as large as its padded table: such a checkpoint does
    not tell which rows are padding.

    Raises CheckpointError with both sides of everything that differs.
    """
    differing = [
        f"{name} is {_shown(theirs)} there and {_shown(ours)} here"
        for name, theirs, ours in _pairs(there, here)
    ]
    if differing:
        raise CheckpointError(
            f"{checkpoint} is of another model: {', '.join(differing)}: use a "
            "checkpoint of this model, or change the configuration"
        )


def _pairs(there: ModelSpec, here: ModelSpec) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name and both values of whatever has to be the same and is not."""
    if there.family != here.family:
        yield "family", there.family, here.family
        return
    unpadded = there.vocab_size == there.padded_vocab_size == here.padded_vocab_size
    if there.vocab_size != here.vocab_size and not unpadded:
        yield "the vocabulary", f"{there.vocab_size} entries", f"{here.vocab_size} entries"
    elif there.padded_vocab_size != here.padded_vocab_size:
        yield (
            "the padded vocabulary",
            f"{there.padded_vocab_size} entries",
            f"{here.padded_vocab_size} entries",
        )
    free = set(_FREE)
    if here.model.position_embedding_type != "learned_absolute":
        free.add("max_position_embeddings")
    if here.family != "t5":
        free.add("num_decoder_layers")
    for name in type(here.model).model_fields:
        theirs, ours = (getattr(spec.model, _RESOLVED.get(name, name)) for spec in (there, here))
        if name not in free and theirs != ours:
            yield f"model.{name}", theirs, ours


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
