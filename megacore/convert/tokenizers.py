"""Import of tokenizers from transformers directories.

Their files are copied, or converted to a tokenizer.json.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import normalizers, pre_tokenizers

from megacore.artifact.files import read_json, reason_of
from megacore.config.data import END_OF_TEXT
from megacore.config.spec import ModelSpec, SpecialTokens
from megacore.errors import ConversionError, DataFormatError, listed
from megacore.paths import is_dir, is_file
from megacore.tokenizer.build import read_gpt2_bpe
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

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROLES = ("bos_token", "pad_token", "cls_token", "sep_token", "mask_token", "unk_token")
_EXTRA_IDS = 100
"""Default number of T5's sentinels, if tokenizer_config.json has no `extra_ids`."""
SPLIT_SPECIAL = "split_special_tokens"
"""Key of tokenizer_config.json; if true, special tokens in a text are encoded as ordinary text."""
SENTENCEPIECE_NAMES = (MODEL_NAME, "spiece.model")
"""Names of a SentencePiece model in transformers directories; of several, the first is read."""
ADDED_NAME = "added_tokens.json"
_GPT2_FILES = {"vocab.json", "merges.txt"}
_OTHER_SPLITS = frozenset({"Qwen2Tokenizer", "Qwen2TokenizerFast"})
"""Classes whose vocab.json and merges.txt belong to another division of texts than GPT-2's."""
_BYTE_LEVEL = frozenset(
    {"GPT2Tokenizer", "GPT2TokenizerFast", "GPTNeoXTokenizer", "GPTNeoXTokenizerFast"}
)
_WORDPIECE = frozenset({"BertTokenizer", "BertTokenizerFast"})
"""Classes that replace options in a tokenizer.json by those in tokenizer_config.json."""


def adopt_tokenizer(source: Path, directory: Path, spec: ModelSpec) -> Tokenizer | None:
    """Convert the tokenizer of a transformers directory to ours, in the empty `directory`.

    It is read from tokenizer.json if present, else from a SentencePiece model, BERT's vocab.txt, or
    GPT-2's vocab.json and merges.txt. An export of a SentencePiece model has both of the first two;
    the model is read. The end of a document is the eos_token of tokenizer_config.json, else its
    sep_token.

    Returns:
        The tokenizer, or None if `source` has none.

    Raises:
        ConversionError: if tokenizer_config.json is damaged or no token ends a document.
        DataFormatError: if the files are damaged.
        WorkspaceError: if `directory` cannot be written.
    """
    tokenizer, settings = read_tokenizer(source)
    if tokenizer is not None:
        _add_sentinels(tokenizer, settings, spec, source)
        roles = {
            role: text for role in _ROLES if (text := _content(settings.get(role))) is not None
        }
        tokenizer.save(directory, {**role_names(tokenizer), **roles})
    return tokenizer


def tokenizer_size(directory: Path) -> int | None:
    """Return the vocabulary size of the tokenizer in `directory`; None if there is none.

    The directory is one of megacore or transformers.

    Raises:
        ConversionError: if tokenizer_config.json is damaged or no token ends a document.
        DataFormatError: if the files are damaged.
    """
    tokenizer = read_tokenizer(directory)[0]
    return None if tokenizer is None else tokenizer.vocab_size


def read_tokenizer(directory: Path) -> tuple[Tokenizer | None, dict[str, Any]]:
    """Read the tokenizer in `directory`, if there is one, and its settings.

    The directory is one of megacore or transformers.

    Raises:
        ConversionError: if tokenizer_config.json is damaged or no token ends a document.
        DataFormatError: if the files are damaged.
    """
    settings = _settings(directory)
    return _read(directory, settings), settings


def spec_with_tokenizer(spec: ModelSpec, directory: Path) -> ModelSpec:
    """Return the spec with the tokenizer in `directory`, if `load_tokenizer` can read one."""
    try:
        tokenizer = load_tokenizer(directory)
    except DataFormatError:
        return spec
    return with_special_tokens(spec, tokenizer, directory)


def with_special_tokens(
    spec: ModelSpec, tokenizer: Tokenizer, directory: Path, source: Path | None = None
) -> ModelSpec:
    """Return the spec with a tokenizer and its special tokens.

    Special tokens of the spec (from config.json) override those recognized by their spelling.

    Args:
        spec: spec of the model.
        tokenizer: the model's tokenizer.
        directory: present or future directory of the tokenizer.
        source: directory that errors name; None means `directory`.

    Raises:
        ConversionError: if the tokenizer has more entries than the model's vocabulary, or lacks the
            token that ends the model's texts.
    """
    where, size, declared = source or directory, tokenizer.vocab_size, spec.special_tokens
    if size > spec.vocab_size:
        raise ConversionError(
            f"the tokenizer in {where} has {size} entries and the model's vocabulary "
            f"{spec.vocab_size}: give the tokenizer that the model was trained with"
        )
    if declared.eod is not None and declared.eod >= size:
        raise ConversionError(
            f"the tokenizer in {where} has {size} entries, and the model ends a text with token "
            f"{declared.eod}: give the tokenizer that the model was trained with"
        )
    spelled = special_tokens(tokenizer)
    known = {
        role: value for role, value in declared.model_dump().items() if value not in (None, ())
    }
    merged = SpecialTokens(**(spelled.model_dump() | known))
    return spec.model_copy(update={"special_tokens": merged, "tokenizer_directory": str(directory)})


def missing_end(
    tokenizer: "PreTrainedTokenizerBase", model: Any, *, target: bool = False
) -> int | None:
    """Return the end token that a source lacks for an encoder-decoder; None if it lacks none.

    The encoders of transformers read sources with an end token, which most of their tokenizers
    add. Those that megacore exports add none.

    Args:
        tokenizer: the model's tokenizer.
        model: transformers configuration of the model.
        target: True for the end token that a target lacks.
    """
    if not getattr(model, "is_encoder_decoder", False):
        return None
    end = _end_id(tokenizer, model)
    ids = (tokenizer(text_target="a") if target else tokenizer("a"))["input_ids"]
    # Multilingual tokenizers add a language after the end; others may have no token for the text.
    return None if ids[-1:] == [end] or end in ids[1:] else end


def _end_id(tokenizer: "PreTrainedTokenizerBase", model: Any) -> int | None:
    """Return the id of the end token from the model's configuration, or else its tokenizer."""
    end = getattr(model, "eos_token_id", None)
    end = end[0] if isinstance(end, list) else end
    return tokenizer.eos_token_id if end is None else int(end)


def with_begin(spec: ModelSpec, directory: Path) -> ModelSpec:
    """Return a decoder's spec with the bos_token that the tokenizer in `directory` names.

    The directory is one of megacore or transformers. A tokenizer that names none, or one outside
    the vocabulary, changes nothing.

    Raises:
        ConversionError: if tokenizer_config.json is damaged or no token ends a document.
        DataFormatError: if the tokenizer's files are damaged.
    """
    settings = _settings(directory)
    text = _content(settings.get("bos_token"))
    if spec.family != "gpt" or text is None:
        return spec
    tokenizer = _read(directory, settings)
    if tokenizer is None:
        return spec
    token, special = tokenizer.token_id(text), spec.special_tokens
    if token is None or token >= spec.vocab_size:
        return spec
    bos = None if token == special.eod else token
    return spec.model_copy(update={"special_tokens": special.model_copy(update={"bos": bos})})


def _settings(source: Path) -> dict[str, Any]:
    """Read special_tokens_map.json and tokenizer_config.json; return {} if there are none."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", TOKENIZER_CONFIG_NAME):
        path = source / name
        try:
            values = read_json(path)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise ConversionError(
                f"{path} cannot be read ({reason_of(error)}): copy it again"
            ) from error
        if not isinstance(values, dict):
            raise ConversionError(
                f"{path} holds {type(values).__name__}, not an object: copy it again"
            )
        settings |= {key: value for key, value in values.items() if value is not None}
    return settings


def _read(source: Path, settings: dict[str, Any]) -> Tokenizer | None:
    tokenizer = _read_files(source, settings)
    if tokenizer is not None:
        _check_complete(tokenizer, source, settings)
    return tokenizer


def _check_complete(tokenizer: Tokenizer, source: Path, settings: dict[str, Any]) -> None:
    """Refuse files that encode a text otherwise than transformers.

    A tokenizer.json that transformers writes encodes as it does.
    """
    sentinel, padding = SENTINEL.partition("{")[0], _content(settings.get("pad_token"))
    lacking = [
        token
        for token in _added_tokens(source, settings)
        if tokenizer.token_id(token) is None
        and not token.startswith(sentinel)
        and token != padding  # which no text has
    ]
    kind, written = settings.get("tokenizer_class"), is_file(source / TOKENIZER_NAME)
    if lacking:
        reason = f"its vocabulary lacks the added tokens {listed(lacking)}"
    elif isinstance(tokenizer, JsonTokenizer) and kind in _OTHER_SPLITS and not written:
        reason = f"a {kind} does not divide texts as GPT-2's"
    else:
        return
    has, write = ("a {}, but", "it again") if written else ("no {}, and", "one")
    raise ConversionError(
        f"{source} has {has.format(TOKENIZER_NAME)} {reason}: write {write} with "
        "AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY)"
    )


def _added_tokens(source: Path, settings: dict[str, Any]) -> list[str]:
    """Return the tokens that were added to the vocabulary, by any of the files that name them."""
    added: list[Any] = []
    if is_file(source / ADDED_NAME):
        try:
            added += read_json(source / ADDED_NAME)
        except (OSError, ValueError, TypeError) as error:
            raise ConversionError(
                f"{source / ADDED_NAME} cannot be read ({reason_of(error)}): copy it again"
            ) from error
    decoder = settings.get("added_tokens_decoder")
    added += decoder.values() if isinstance(decoder, dict) else []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = settings.get(key)
        added += more if isinstance(more, list) else []
    return list(dict.fromkeys(text for token in added if (text := _content(token)) is not None))


def _read_files(source: Path, settings: dict[str, Any]) -> Tokenizer | None:
    files = {path.name for path in source.iterdir()} if is_dir(source) else set()
    model = next((name for name in SENTENCEPIECE_NAMES if name in files), None)
    # An export of a SentencePiece model has both: only the model reads special tokens as text.
    if TOKENIZER_NAME in files and not (model and settings.get(SPLIT_SPECIAL)):
        path = source / TOKENIZER_NAME
        backend = read_backend(path)
        _follow_class(backend, settings)
        return JsonTokenizer(backend, _end(settings, path, files))
    if model is not None:
        # imported here because only SentencePiece tokenizers need it
        from megacore.tokenizer.sentencepiece_model import SentencePieceModel

        return SentencePieceModel.read(source / model)
    if "vocab.txt" in files:
        lower_case, strip_accents, divide_chinese = _wordpiece_options(settings)
        backend = read_wordpiece(
            source / "vocab.txt",
            lower_case=lower_case,
            strip_accents=strip_accents,
            divide_chinese=divide_chinese,
        )
        settings |= BERT_ROLES
        return JsonTokenizer(backend, BERT_ROLES["sep_token"])
    if files >= _GPT2_FILES:
        backend = read_gpt2_bpe(source / "vocab.json", source / "merges.txt")
        _follow_class(backend, {"tokenizer_class": "GPT2Tokenizer", **settings})
        return JsonTokenizer(backend, _content(settings.get("eos_token")) or END_OF_TEXT)
    return None


def _wordpiece_options(settings: dict[str, Any]) -> tuple[bool, bool | None, bool]:
    """Return whether BERT's class lowers letters, strips accents and divides Chinese words."""
    accents = settings.get("strip_accents")
    return (
        bool(settings.get("do_lower_case", True)),
        None if accents is None else bool(accents),
        bool(settings.get("tokenize_chinese_chars", True)),
    )


def _follow_class(backend: tokenizers.Tokenizer, settings: dict[str, Any]) -> None:
    """Give a tokenizer the options that its class of transformers gives it."""
    kind = settings.get("tokenizer_class")
    division, normalizer = backend.pre_tokenizer, backend.normalizer
    if kind in _BYTE_LEVEL and isinstance(division, pre_tokenizers.ByteLevel):
        division.add_prefix_space = bool(settings.get("add_prefix_space", False))
    if kind in _WORDPIECE and isinstance(normalizer, normalizers.BertNormalizer):
        options = _wordpiece_options(settings)
        normalizer.lowercase, normalizer.strip_accents, normalizer.handle_chinese_chars = options


def _add_sentinels(
    tokenizer: Tokenizer, settings: dict[str, Any], spec: ModelSpec, source: Path
) -> None:
    """Add T5's sentinels in descending order, like transformers for SentencePiece models."""
    if (
        spec.family == "t5"
        and not isinstance(tokenizer, JsonTokenizer)
        and tokenizer.token_id(SENTINEL.format(0)) is None
    ):
        count = settings.get("extra_ids", _EXTRA_IDS)
        if type(count) is not int or not 0 <= count <= spec.vocab_size:
            raise ConversionError(
                f"{source / TOKENIZER_CONFIG_NAME} has extra_ids {count!r}: give the number of "
                f"sentinels, at most the {spec.vocab_size} rows of the model's vocabulary"
            )
        tokenizer.add_special_tokens([SENTINEL.format(number) for number in reversed(range(count))])


def _end(settings: dict[str, Any], path: Path, files: set[str]) -> str:
    """Return the token that ends a document.

    If no settings name one, as in the published directories of GPT-2 and BERT, the vocabulary next
    to a tokenizer.json tells the class, whose default transformers takes.
    """
    end = _content(settings.get("eos_token")) or _content(settings.get("sep_token"))
    if end is None and "vocab.txt" in files:
        return BERT_ROLES["sep_token"]
    if end is None and files >= _GPT2_FILES:
        return END_OF_TEXT
    if end is None:
        raise ConversionError(
            f"no file next to {path} says which token ends a document: give "
            f"{TOKENIZER_CONFIG_NAME} an eos_token"
        )
    return end


def _content(token: Any) -> str | None:
    """Return the text of a token, which transformers writes as a string or an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None
