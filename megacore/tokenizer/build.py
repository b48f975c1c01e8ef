"""The tokenizer stage, whose output megacore and `transformers.AutoTokenizer` can load.

The directory contains tokenizer_config.json and tokenizer.json. A byte-level BPE also has
vocab.json and merges.txt. A SentencePiece model has tokenizer.model in place of tokenizer.json. The
tokenizer is trained, read from files, or downloaded from the Hugging Face hub.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from megacore.artifact.files import access_errors, read_json, reason_of, regular
from megacore.artifact.manifest import file_digest
from megacore.config.data import (
    END_OF_TEXT,
    BertWordPieceTokenizer,
    ExistingTokenizer,
    Gpt2BpeTokenizer,
    HfTokenizer,
    OnBadLine,
    SentencePieceTokenizer,
    TokenizerChoice,
    TrainBpeTokenizer,
    TrainedTokenizer,
    TrainWordPieceTokenizer,
)
from megacore.config.keys import key_parameters
from megacore.corpus.blocks import iterate_texts
from megacore.corpus.documents import read_sources
from megacore.corpus.formats import DOCUMENT_BYTES
from megacore.errors import ConfigError, DataFormatError, DownloadError
from megacore.tokenizer.load import (
    TOKENIZER_BYTES,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    JsonTokenizer,
    Tokenizer,
    grouped,
    read_backend,
)
from megacore.tokenizer.vocabulary import SENTINEL, role_names, special_tokens
from megacore.tokenizer.wordpiece import BERT_ROLES, read_wordpiece, train_wordpiece

VERSION = 2
"""Version of the tokenizer stage, increased whenever its output changes."""
_GPT2_ROLES = {"bos_token": END_OF_TEXT, "unk_token": END_OF_TEXT}


def fingerprint(choice: TokenizerChoice) -> dict[str, Any]:
    """Return the fields that determine the tokenizer, in addition to the corpus.

    Files are identified by their content, not by their name. A repository of the hub is identified
    by its name and revision. Raises DataFormatError for a missing file.
    """
    content: dict[str, Any]
    match choice:
        case Gpt2BpeTokenizer():
            content = {
                "vocab": _digest(Path(choice.vocab_file)),
                "merges": _digest(Path(choice.merge_file)),
            }
        case BertWordPieceTokenizer():
            content = {"vocab": _digest(Path(choice.vocab_file))}
        case SentencePieceTokenizer():
            content = {"model": _digest(Path(choice.model_file))}
        case HfTokenizer() if choice.local_file is not None:
            content = {"tokenizer": _digest(choice.local_file)}
        case HfTokenizer():
            content = {"name": choice.name, "revision": choice.revision}
        case _:
            content = {}
    return key_parameters(choice, "tokenizer", content)


def build_tokenizer(
    choice: TokenizerChoice,
    corpora: Path | Sequence[Path],
    directory: Path,
    *,
    on_bad_line: OnBadLine = "stop",
    document_bytes: int = DOCUMENT_BYTES,
) -> dict[str, Any]:
    """Fill the empty `directory` with the tokenizer's files.

    Returns vocab_size, eod_id, eod_token, special_tokens.

    Training uses the corpus directories `corpora` in order. Downloads are cached in `.huggingface`
    next to `directory`. Raises DataFormatError for files that are missing or malformed,
    DownloadError if the hub cannot be reached, WorkspaceError.
    """
    folders = [corpora] if isinstance(corpora, Path) else corpora

    def texts() -> Iterator[str]:
        return (
            text
            for folder in folders
            for text in iterate_texts(
                folder, on_bad_line=on_bad_line, document_bytes=document_bytes
            )
        )

    if isinstance(choice, TrainedTokenizer):
        tokenizer = train_tokenizer(choice, texts)
        for folder in folders:
            read_sources(folder)  # a file may have changed while it was read
    else:
        tokenizer = open_tokenizer(choice, directory.parent / ".huggingface")
    roles = _GPT2_ROLES if isinstance(choice, TrainBpeTokenizer | Gpt2BpeTokenizer) else {}
    tokenizer.save(directory, {**roles, **role_names(tokenizer)})
    return {
        "vocab_size": tokenizer.vocab_size,
        "eod_id": tokenizer.eod_id,
        "eod_token": tokenizer.eod_token,
        "special_tokens": special_tokens(tokenizer).model_dump(mode="json"),
    }


def train_tokenizer(choice: TrainedTokenizer, texts: Callable[[], Iterable[str]]) -> Tokenizer:
    """Train a tokenizer on all texts; each call of `texts` iterates over all of them.

    Raises DataFormatError.
    """
    match choice:
        case TrainBpeTokenizer():
            backend = train_bpe(texts(), choice.vocab_size, choice.special_tokens)
            tokenizer = JsonTokenizer(backend, END_OF_TEXT)
        case TrainWordPieceTokenizer():
            backend = train_wordpiece(texts, choice.vocab_size, lower_case=choice.lower_case)
            tokenizer = JsonTokenizer(backend, BERT_ROLES["sep_token"])
    return _with_sentinels(tokenizer, choice.vocab_extra_ids)


def open_tokenizer(choice: ExistingTokenizer, cache_directory: Path) -> Tokenizer:
    """Open an existing tokenizer. Raises the same errors as `build_tokenizer`."""
    tokenizer: Tokenizer
    match choice:
        case Gpt2BpeTokenizer():
            tokenizer = JsonTokenizer(
                read_gpt2_bpe(Path(choice.vocab_file), Path(choice.merge_file)), END_OF_TEXT
            )
        case BertWordPieceTokenizer():
            backend = read_wordpiece(Path(choice.vocab_file), lower_case=choice.lower_case)
            tokenizer = JsonTokenizer(backend, BERT_ROLES["sep_token"])
        case SentencePieceTokenizer():
            # Imported here because only SentencePiece models need it.
            from megacore.tokenizer.sentencepiece_model import SentencePieceModel

            tokenizer = SentencePieceModel.read(Path(choice.model_file))
        case HfTokenizer():
            path = choice.local_file or download_tokenizer(choice, cache_directory)
            tokenizer = _with_eod(read_backend(path), choice.eod_token, path)
    return _with_sentinels(tokenizer, choice.vocab_extra_ids)


def _with_sentinels(tokenizer: Tokenizer, count: int) -> Tokenizer:
    if count:
        tokenizer.add_special_tokens([SENTINEL.format(number) for number in range(count)])
    return tokenizer


def train_bpe(
    texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()
) -> tokenizers.Tokenizer:
    """Train a byte-level BPE with exactly `vocab_size` entries.

    The entries are <|endoftext|> (id 0), `special_tokens`, the 256 bytes, and merges.

    Raises DataFormatError if the texts have too few distinct pairs for that many entries, if
    `vocab_size` is too small, or if the special tokens are not distinct.
    """
    special = [END_OF_TEXT, *special_tokens]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if len({*special, *alphabet, ""}) != len(special) + len(alphabet) + 1:
        raise DataFormatError(
            f"data.tokenizer.special_tokens {', '.join(map(repr, special_tokens))} name a token "
            f"twice, {END_OF_TEXT}, or a single byte: give each another name"
        )
    if vocab_size < len(special) + len(alphabet):
        raise DataFormatError(
            f"data.tokenizer.vocab_size {vocab_size} has no room for {len(special)} special tokens "
            f"and {len(alphabet)} bytes: raise it to at least {len(special) + len(alphabet)}"
        )
    backend = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(grouped(texts), trainer)
    if backend.get_vocab_size() != vocab_size:
        raise DataFormatError(
            f"the corpus yields a vocabulary of {backend.get_vocab_size()} entries, not the "
            f"{vocab_size} of data.tokenizer.vocab_size: lower it to at most "
            f"{backend.get_vocab_size()}, or use more text"
        )
    return backend


def read_gpt2_bpe(vocab_file: Path, merge_file: Path) -> tokenizers.Tokenizer:
    """Read GPT-2's tokenizer from vocab.json and merges.txt. Raises DataFormatError."""
    vocab = _read_vocab(vocab_file)
    merges = _read_merges(merge_file)
    if END_OF_TEXT not in vocab:
        raise DataFormatError(
            f"{vocab_file} has no {END_OF_TEXT} among its {len(vocab)} entries: it is not GPT-2's"
        )
    if len(merges) + len(pre_tokenizers.ByteLevel.alphabet()) >= len(vocab):
        raise DataFormatError(
            f"{merge_file} has {len(merges)} merges, which with 256 bytes and {END_OF_TEXT} need "
            f"more than the {len(vocab)} entries of {vocab_file}: the two files do not belong "
            "together"
        )
    try:
        model = models.BPE(vocab=vocab, merges=merges)
    except Exception as error:  # the bindings raise plain Exception
        raise DataFormatError(
            f"{merge_file} and {vocab_file} do not belong together: {error}"
        ) from error
    return _byte_level(model)


def _byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    if backend.token_to_id(END_OF_TEXT) is not None:
        backend.add_special_tokens([END_OF_TEXT])
    return backend


def _read_vocab(path: Path) -> dict[str, int]:
    try:
        vocab = read_json(path)
    except OSError as error:
        raise DataFormatError(
            f"{path} cannot be read: {error.strerror}: set data.tokenizer.vocab_file"
        ) from error
    except ValueError as error:
        raise DataFormatError(
            f"{path} is not a vocab.json ({error}): set data.tokenizer.vocab_file"
        ) from error
    ids: list[Any] = list(vocab.values()) if isinstance(vocab, dict) else [None]
    if not all(type(token) is int for token in ids) or set(ids) != set(range(len(ids))):
        raise DataFormatError(
            f"{path} does not map its tokens to the ids 0, 1, 2, …: it is not a vocab.json"
        )
    return dict(vocab)


def _read_merges(path: Path) -> list[tuple[str, str]]:
    try:
        with access_errors(path):
            lines = regular(path, TOKENIZER_BYTES).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataFormatError(
            f"{path} cannot be read ({reason_of(error)}): set data.tokenizer.merge_file"
        ) from error
    merges = []
    for number, line in enumerate(lines, 1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.partition(" ")
        if not left or not right or " " in right:
            raise DataFormatError(
                f"{path}:{number} is {line!r}, not two tokens with a space between: not a "
                "merges.txt"
            )
        merges.append((left, right))
    return merges


def _with_eod(backend: tokenizers.Tokenizer, eod_token: str, path: Path) -> Tokenizer:
    try:
        tokenizer = JsonTokenizer(backend, eod_token)
    except DataFormatError as error:
        raise DataFormatError(f"{path}: {error}") from error
    backend.add_special_tokens([eod_token])
    return tokenizer


def _digest(path: Path) -> str:
    try:
        with access_errors(path):
            return file_digest(path)
    except OSError as error:
        raise DataFormatError(
            f"{path} cannot be read: {error.strerror}: check data.tokenizer"
        ) from error


def as_in_megatron(
    choice: HfTokenizer, cache_directory: Path, *, eod_token: str | None, special_tokens: bool
) -> HfTokenizer:
    """Return a tokenizer that encodes documents as Megatron-LM's HuggingFaceTokenizer does.

    Args:
        choice: tokenizer.json of a file, directory or repository.
        cache_directory: directory of downloads.
        eod_token: token that ends a document; None means the tokenizer's eos_token, as
            tokenizer_config.json names it.
        special_tokens: True to refuse a tokenizer that adds special tokens to each text.

    Raises:
        ConfigError: the tokenizer adds special tokens, or does not name its eos_token.
        DataFormatError: a file is missing or malformed.
        DownloadError: the hub cannot be reached.
    """
    path = choice.local_file or download_tokenizer(choice, cache_directory)
    backend = read_backend(path)
    added = backend.encode("", add_special_tokens=True).tokens if special_tokens else []
    if added:
        raise ConfigError(
            f"{choice.name} adds {' '.join(added)} to each text, which megacore does not write: "
            "tokenize without them (--tokenizer-hf-no-include-special-tokens)"
        )
    if eod_token is None:
        settings = (
            path.with_name(TOKENIZER_CONFIG_NAME)
            if choice.local_file is not None
            else download_tokenizer(choice, cache_directory, TOKENIZER_CONFIG_NAME)
        )
        eod_token = _eos_token(settings)
    return choice.model_copy(update={"eod_token": eod_token})


def _eos_token(path: Path) -> str:
    """Return the eos_token of a tokenizer_config.json. Raises ConfigError."""
    try:
        token = read_json(path)["eos_token"]
        token = token["content"] if isinstance(token, dict) else token
    except (OSError, ValueError, KeyError, TypeError):
        token = None
    if not isinstance(token, str):
        raise ConfigError(
            f"{path} does not name the eos_token that ends a document: give it as --eod-token"
        )
    return token


def download_tokenizer(
    choice: HfTokenizer, cache_directory: Path, file: str = TOKENIZER_NAME
) -> Path:
    """Return the path of a hub tokenizer's file in `cache_directory`, downloading it if needed.

    Raises DataFormatError, DownloadError.
    """
    # Imported here because only a tokenizer of the hub needs it.
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = choice.name if choice.revision is None else f"{choice.name} at {choice.revision}"
    try:
        return Path(
            hf_hub_download(
                choice.name,
                file,
                revision=choice.revision,
                cache_dir=str(cache_directory),
            )
        )
    except LocalEntryNotFoundError as error:
        raise DownloadError(
            f"{file} of {name} cannot be downloaded: the hub cannot be reached: check "
            "the network, or give a local file as data.tokenizer.name"
        ) from error
    except (
        EntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
        HFValidationError,
    ) as error:
        raise DataFormatError(
            f"data.tokenizer.name {name} is neither a local file nor a repository of the hub with "
            f"a {file}"
        ) from error
    except OSError as error:
        raise DownloadError(
            f"{file} of {name} cannot be downloaded: {reason_of(error)}: try again"
        ) from error
