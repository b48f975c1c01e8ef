"""Whether a model can learn a task: its class, its head, its padding and its positions."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megacore.config.finetune import FinetuneConfig
from megacore.config.finetune_task import CausalLmConfig, ClassificationConfig, Seq2SeqConfig
from megacore.errors import ConfigError
from megacore.finetune.encode import missing_end
from megacore.finetune.glue import classification_settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HEAD = "ForSequenceClassification"
_UNNAMED = "LABEL_"
"""What transformers calls the classes of a head without names."""
_AFTER_PADDING = frozenset(
    {"camembert", "data2vec-text", "esm", "ibert", "longformer", "mpnet", "roberta", "roberta-prelayernorm"}
    | {"xlm-roberta", "xlm-roberta-xl", "xmod"}
)
"""Models whose positions are counted from the padding's id: so many entries of their table are no position."""


def check_fit(config: FinetuneConfig, model: Any, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise ConfigError for a model, of which `model` is transformers' configuration, that cannot learn the task."""
    _check_class(config, model)
    _check_vocabulary(config.model.path, model, tokenizer)
    if not isinstance(config.task, CausalLmConfig) and tokenizer.pad_token_id is None:
        raise ConfigError(
            f"the tokenizer of model.path {config.model.path} has no padding token, which task.kind "
            f"{config.task.kind} needs: name one of its tokens as model.pad_token"
            + (f", such as {tokenizer.eos_token!r}" if tokenizer.eos_token else "")
        )
    _check_positions(config, model)
    _check_room(config, model, tokenizer)


def _check_class(config: FinetuneConfig, model: Any) -> None:
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MASKED_LM_MAPPING,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    )

    kind = type(model)
    both = bool(getattr(model, "is_encoder_decoder", False))
    # XLNet's language model does not learn the next token: it takes labels as they are.
    masked = kind in MODEL_FOR_MASKED_LM_MAPPING or model.model_type == "xlnet"
    encoder = masked and not both and not getattr(model, "is_decoder", False)
    match config.task:
        case ClassificationConfig():
            fits = kind in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
            wanted = (
                "a model that transformers has a class …ForSequenceClassification of, such as BERT, DeBERTa or GPT-2"
            )
        case Seq2SeqConfig():
            fits = both and kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
            wanted = "an encoder-decoder, such as T5, BART or Blenderbot"
        case CausalLmConfig():
            fits = not both and not encoder and kind in MODEL_FOR_CAUSAL_LM_MAPPING
            wanted = "a decoder, such as GPT-2 or Llama"
    if fits:
        return
    form = "an encoder-decoder" if both else "an encoder" if encoder else "a decoder"
    others = {"seq2seq": both, "causal_lm": not both and not encoder and kind in MODEL_FOR_CAUSAL_LM_MAPPING}
    others["classification"] = kind in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    possible = [name for name, fitting in others.items() if fitting and name != config.task.kind]
    raise ConfigError(
        f"model.path {config.model.path} is {_architecture(model)}, {form}, but task.kind {config.task.kind} takes "
        f"{wanted}: give such a model" + (f", or set task.kind to {' or '.join(possible)}" if possible else "")
    )


def _architecture(model: Any) -> str:
    names = getattr(model, "architectures", None) or [model.model_type]
    return str(names[0])


def _check_vocabulary(path: str, model: Any, tokenizer: "PreTrainedTokenizerBase") -> None:
    largest = max(tokenizer.get_vocab().values())
    size = getattr(model, "vocab_size", None)
    if size is not None and largest >= size:
        raise ConfigError(
            f"the tokenizer of model.path {path} has ids up to {largest}, but the model's vocabulary has "
            f"{size} entries: give the tokenizer that it was trained with"
        )


def positions(model: Any) -> int | None:
    """Tokens of the longest sequence that a model has positions for; None where nothing limits them."""
    found = getattr(model, "max_position_embeddings", None)
    if not isinstance(found, int) or found <= 0:
        return None
    if getattr(model, "relative_attention", False) and not getattr(model, "position_biased_input", True):
        return None
    padding = getattr(model, "pad_token_id", None)
    if model.model_type in _AFTER_PADDING and padding is not None:
        return found - int(padding) - 1
    return found


def _check_positions(config: FinetuneConfig, model: Any) -> None:
    limit = positions(model)
    lengths: Mapping[str, int]
    match config.task:
        case ClassificationConfig():
            lengths = {"max_length": config.task.max_length}
        case Seq2SeqConfig():
            task = config.task
            lengths = {"max_source_length": task.max_source_length, "max_target_length": task.max_target_length}
        case CausalLmConfig():
            lengths = {"block_size": config.task.block_size}
    for name, length in lengths.items():
        if limit is not None and length > limit:
            raise ConfigError(
                f"task.{name} is {length}, but model.path {config.model.path} has {limit} positions: lower it to "
                f"{limit} or less"
            )


def _check_room(config: FinetuneConfig, model: Any, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise ConfigError for a length that special tokens fill: no text would be left, or more than the length."""
    own = 1 if getattr(model, "is_encoder_decoder", False) and missing_end(tokenizer, model) is not None else 0
    single, needed = tokenizer.num_special_tokens_to_add(), dict[str, tuple[int, int]]()
    match config.task:
        case ClassificationConfig() as task:
            pair = classification_settings(task).sentence2 is not None
            least = tokenizer.num_special_tokens_to_add(pair=pair) + own + 1 + pair
            needed = {"max_length": (task.max_length, least)}
        case Seq2SeqConfig() as task:
            needed = {"max_source_length": (task.max_source_length, single + 1)}
            needed["max_target_length"] = (task.max_target_length, single + own + 1)
    for name, (length, least) in needed.items():
        if length < least:
            raise ConfigError(
                f"task.{name} is {length}, which the special tokens of model.path {config.model.path} leave no room in "
                f"for text: raise it to {least} or more"
            )


def check_head(config: FinetuneConfig, model: Any, names: tuple[str, ...] | None) -> None:
    """Raise ConfigError for a checkpoint that has a trained head for other labels; `names` is None for numbers."""
    if config.model.random_weights or not _architecture(model).endswith(_HEAD):
        return
    own, needed = int(model.num_labels), 1 if names is None else len(names)
    labels = "a number" if names is None else f"{needed} classes ({', '.join(names[:10])})"
    own_names = tuple(str(model.id2label[number]) for number in range(own))
    if own != needed:
        if config.model.new_head:
            return
        raise ConfigError(
            f"model.path {config.model.path} has a trained head of {own} outputs ({', '.join(own_names[:10])}), but "
            f"the data has {labels}: set model.new_head to true, or give data with as many labels"
        )
    known = not any(name.startswith(_UNNAMED) for name in own_names)
    if names is not None and known and own_names != names and set(own_names) == set(names):
        raise ConfigError(
            f"model.path {config.model.path} has a trained head with the classes {', '.join(own_names)}, but the data "
            f"numbers them {', '.join(names)}: set task.labels to [{', '.join(own_names)}] and label rows by name"
        )
