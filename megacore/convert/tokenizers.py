"""Tokenizers of transformers directories as ours.

Their files are kept, or made into a tokenizer.json.
"""

from pathlib import Path
from typing import Any

from megacore.artifact.files import read_json
from megacore.config.spec import ModelSpec, SpecialTokens
from megacore.errors import ConversionError, DataFormatError
from megacore.tokenizer.build import END_OF_TEXT, read_gpt2_bpe
from megacore.tokenizer.load import (
    MODEL_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    JsonTokenizer,
    Tokenizer,
    load_tokenizer,
    read_backend,
)
from megacore.tokenizer.vocabulary import SENTINEL, role_names, special_tokens
from megacore.tokenizer.wordpiece import BERT_ROLES, read_wordpiece

_ROLES = ("bos_token", "pad_token", "cls_token", "sep_token", "mask_token", "unk_token")
_EXTRA_IDS = 100
"""Sentinels of a T5 whose tokenizer_config.json does not say how many."""
_SENTENCEPIECE = (MODEL_NAME, "spiece.model")


def adopt_tokenizer(source: Path, directory: Path, spec: ModelSpec) -> Tokenizer | None:
    """Write the tokenizer of a transformers directory into the empty `directory`, as ours.

    None when there is none.

    A tokenizer.json is taken where there is one, else a SentencePiece model, a vocab.txt of BERT's,
    or GPT-2's vocab.json and merges.txt. The document ends with what tokenizer_config.json calls
    eos_token, else with sep_token.

    Raises:
        ConversionError: tokenizer_config.json is damaged, or nothing ends a document.
        DataFormatError: the files are damaged.
        WorkspaceError: `directory` cannot be written.
    """
    settings = _settings(source)
    tokenizer = _read(source, settings)
    if tokenizer is not None:
        _add_sentinels(tokenizer, settings, spec)
        roles = {
            role: text for role in _ROLES if (text := _content(settings.get(role))) is not None
        }
        tokenizer.save(directory, {**role_names(tokenizer), **roles})
    return tokenizer


def tokenizer_size(directory: Path) -> int | None:
    """Entries of the tokenizer in a directory of ours or of transformers; None when there is none.

    Raises ConversionError, DataFormatError as `adopt_tokenizer`.
    """
    tokenizer = _read(directory, _settings(directory))
    return None if tokenizer is None else tokenizer.vocab_size


def spec_with_tokenizer(spec: ModelSpec, directory: Path) -> ModelSpec:
    """The spec with the tokenizer of `directory`, when there is one that `load_tokenizer` reads."""
    try:
        tokenizer = load_tokenizer(directory)
    except DataFormatError:
        return spec
    return with_special_tokens(spec, tokenizer, directory)


def with_special_tokens(
    spec: ModelSpec, tokenizer: Tokenizer, directory: Path, source: Path | None = None
) -> ModelSpec:
    """The spec with a tokenizer that lies in `directory`, or will.

    It was read from `source`, as errors say.

    What config.json says of special tokens goes before what their spelling says.

    Raises ConversionError when the tokenizer has tokens that the model has not, or lacks the one
    that ends its texts.
    """
    place, size, given = source or directory, tokenizer.vocab_size, spec.special_tokens
    if size > spec.vocab_size:
        raise ConversionError(
            f"the tokenizer in {place} has {size} entries and the model's vocabulary "
            f"{spec.vocab_size}: give the tokenizer that the model was trained with"
        )
    if given.eod is not None and given.eod >= size:
        raise ConversionError(
            f"the tokenizer in {place} has {size} entries, and the model ends a text with token "
            f"{given.eod}: give the tokenizer that the model was trained with"
        )
    spelled = special_tokens(tokenizer)
    known = {role: value for role, value in given.model_dump().items() if value not in (None, ())}
    merged = SpecialTokens(**(spelled.model_dump() | known))
    return spec.model_copy(update={"special_tokens": merged, "tokenizer_directory": str(directory)})


def _settings(source: Path) -> dict[str, Any]:
    """What tokenizer_config.json and special_tokens_map.json say; nothing when there are none."""
    found: dict[str, Any] = {}
    for name in ("special_tokens_map.json", TOKENIZER_CONFIG_NAME):
        path = source / name
        try:
            values = read_json(path)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise ConversionError(f"{path} cannot be read ({error}): copy it again") from error
        if not isinstance(values, dict):
            raise ConversionError(
                f"{path} holds {type(values).__name__}, not an object: copy it again"
            )
        found |= {key: value for key, value in values.items() if value is not None}
    return found


def _read(source: Path, settings: dict[str, Any]) -> Tokenizer | None:
    files = {path.name for path in source.iterdir()} if source.is_dir() else set()
    if TOKENIZER_NAME in files:
        path = source / TOKENIZER_NAME
        return JsonTokenizer(read_backend(path), _end(settings, path))
    model = next((name for name in _SENTENCEPIECE if name in files), None)
    if model is not None:
        # only such a tokenizer needs it
        from megacore.tokenizer.sentencepiece_model import SentencePieceModel

        return SentencePieceModel.read(source / model)
    if "vocab.txt" in files:
        lower_case = bool(settings.get("do_lower_case", True))
        backend = read_wordpiece(source / "vocab.txt", lower_case=lower_case)
        settings |= BERT_ROLES
        return JsonTokenizer(backend, BERT_ROLES["sep_token"])
    if {"vocab.json", "merges.txt"} <= files:
        backend = read_gpt2_bpe(source / "vocab.json", source / "merges.txt")
        return JsonTokenizer(backend, _content(settings.get("eos_token")) or END_OF_TEXT)
    return None


def _add_sentinels(tokenizer: Tokenizer, settings: dict[str, Any], spec: ModelSpec) -> None:
    """T5's sentinels, which transformers adds to its SentencePiece model, the first last."""
    if (
        spec.family == "t5"
        and not isinstance(tokenizer, JsonTokenizer)
        and tokenizer.token_id(SENTINEL.format(0)) is None
    ):
        count = settings.get("extra_ids", _EXTRA_IDS)
        tokenizer.add_special_tokens([SENTINEL.format(number) for number in reversed(range(count))])


def _end(settings: dict[str, Any], path: Path) -> str:
    """The token that ends a document."""
    end = _content(settings.get("eos_token")) or _content(settings.get("sep_token"))
    if end is None:
        raise ConversionError(
            f"nothing beside {path} says which token ends a document: give {TOKENIZER_CONFIG_NAME} "
            "an eos_token"
        )
    return end


def _content(token: Any) -> str | None:
    """The text of a token, which transformers writes by itself or with its properties."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None
