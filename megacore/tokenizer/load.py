"""Interface of tokenizers, and functions to load them and to encode texts in batches."""

import itertools
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import tokenizers

from megacore.artifact.files import (
    access_errors,
    read_json,
    reason_of,
    regular,
    workspace_errors,
    write_json,
)
from megacore.errors import DataFormatError, FileAccessError, one_line
from megacore.paths import exists

TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
MODEL_NAME = "tokenizer.model"
"""Name of a SentencePiece model, as used by Hugging Face."""
SPACE = "▁"
"""Character that SentencePiece writes for a space."""
TOKENIZER_BYTES = 1 << 28
"""Maximum size of a tokenizer's file; the largest known have 2^25 bytes."""
_BATCH_CHARACTERS = 1 << 19
"""Characters that `tokenizers` encodes in one call. Until the call returns, a token takes about 100
bytes."""
SpecialTokenRoles = Mapping[str, str | Sequence[str]]
"""Special tokens by their key in tokenizer_config.json."""
_SHOWN = 40
_TEXTS = 256
_TRAINED_CHARACTERS = 1 << 24
"""Texts and characters that a trainer of `tokenizers` takes at a time."""
_MOST_IDS = 1 << 24
"""Ids from here on are refused: the largest vocabularies have 2^20, and libraries allocate, and may
abort the process, by the greatest id."""


class Encoded(NamedTuple):
    """Concatenated ids of several texts."""

    ids: npt.NDArray[np.integer[Any]]
    """[tokens]: ids of all texts."""
    lengths: npt.NDArray[np.int64]
    """[texts]: number of tokens of each text."""


class Tokenizer(ABC):
    """Base class of tokenizers; encoding adds no special tokens."""

    def __init__(self, eod_token: str, eod_id: int, vocab_size: int) -> None:
        self.eod_token = eod_token
        """Token that ends a document."""
        self.eod_id = eod_id
        self.vocab_size = vocab_size
        """Greatest id plus one: the number of rows of an embedding before padding."""

    @abstractmethod
    def encode_flat(self, texts: Sequence[str]) -> Encoded:
        """Return the concatenated ids of all texts. Thread-safe."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> str:
        """Return the text of the ids, including special tokens."""

    def decode_as_exported(self, ids: Sequence[int]) -> str:
        """Return the text that transformers decodes from the ids with only the files of `save`."""
        return self.decode(ids)

    @abstractmethod
    def token_id(self, token: str) -> int | None:
        """Return the id of a token, or None if the vocabulary lacks it."""

    @abstractmethod
    def tokens(self) -> list[str]:
        """Return the tokens in the order of their ids, [v]; an unused id gives an empty string."""

    @abstractmethod
    def special_ids(self) -> frozenset[int]:
        """Return the ids of the special tokens."""

    @abstractmethod
    def add_special_tokens(self, tokens: Sequence[str]) -> None:
        """Append special tokens to the vocabulary.

        Raises DataFormatError if one exists already.
        """

    @abstractmethod
    def save(self, directory: Path, roles: SpecialTokenRoles | None = None) -> None:
        """Write the files that `load_tokenizer` reads.

        `roles` are further entries of tokenizer_config.json, such as bos_token="<s>". Raises
        WorkspaceError.
        """

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """Return the ids of each text.

        `<|endoftext|>` and other special tokens in a text are encoded as their ids.
        """
        ids, lengths = self.encode_flat(texts)
        return np.split(ids.astype(np.int32), np.cumsum(lengths)[:-1]) if len(lengths) else []

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """Return the ids of one text."""
        return self.encode_batch([text])[0]


class IncrementalText:
    """Text of a growing sequence of ids, in pieces of complete characters."""

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        emit: Callable[[str], object],
        context: Sequence[int],
    ) -> None:
        """Begin after the ids in `context`, whose text is not emitted.

        `decode` returns the text of ids, and `emit` takes each piece of new text.
        """
        self._decode, self._emit = decode, emit
        self._ids = list(context)
        self._first = len(self._ids)
        self._text = self._decode(self._ids) if self._ids else ""

    def add(self, token: int) -> None:
        """Append an id and emit the text that is complete."""
        self._ids.append(token)
        text = self._decode(self._ids)
        # A character's bytes may be spread over several ids.
        if not text.endswith("\N{REPLACEMENT CHARACTER}") and text.startswith(self._text):
            self._emit(text[len(self._text) :])
            self._text = text

    def end(self) -> None:
        """Emit the remaining text, in which incomplete characters are replaced."""
        text = self._decode(self._ids)
        if len(self._ids) > self._first:
            # A later id may have changed text that was emitted.
            pairs = zip(text, self._text, strict=False)
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            self._emit(text[same:])


class JsonTokenizer(Tokenizer):
    """A tokenizer described by a tokenizer.json, run by Hugging Face `tokenizers`."""

    def __init__(self, backend: tokenizers.Tokenizer, eod_token: str) -> None:
        """Wrap `backend`.

        `eod_token` ends a document. Raises DataFormatError if the vocabulary lacks it.
        """
        eod_id = backend.token_to_id(eod_token)
        if eod_id is None:
            raise DataFormatError(
                f"the token {eod_token!r} that ends a document is not in the vocabulary of "
                f"{backend.get_vocab_size()} entries: give data.tokenizer another vocabulary, or "
                "name its own token with data.tokenizer.eod_token"
            )
        super().__init__(
            eod_token, eod_id, max(backend.get_vocab(with_added_tokens=True).values()) + 1
        )
        self.backend = backend

    def encode_flat(self, texts: Sequence[str]) -> Encoded:
        """Return the concatenated ids of all texts."""
        parts: list[npt.NDArray[np.int32]] = []
        lengths: list[int] = []
        for batch in text_batches(texts, _BATCH_CHARACTERS):
            for encoding in self.backend.encode_batch_fast(batch, add_special_tokens=False):
                parts.append(np.array(encoding.ids, np.int32))
                lengths.append(len(parts[-1]))
        return Encoded(
            np.concatenate(parts) if parts else np.zeros(0, np.int32), np.array(lengths, np.int64)
        )

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> str:
        """Return the text of the ids, including special tokens."""
        return str(self.backend.decode([int(token) for token in ids], skip_special_tokens=False))

    def token_id(self, token: str) -> int | None:
        """Return the id of a token, or None if the vocabulary lacks it."""
        try:
            number: int | None = self.backend.token_to_id(token)
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON can hold
            return None
        return number

    def tokens(self) -> list[str]:
        """Return the tokens in the order of their ids, [v]; an unused id gives an empty string."""
        by_id = {
            number: token
            for token, number in self.backend.get_vocab(with_added_tokens=True).items()
        }
        return [by_id.get(number, "") for number in range(self.vocab_size)]

    def special_ids(self) -> frozenset[int]:
        """Return the ids of the special tokens."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    def add_special_tokens(self, tokens: Sequence[str]) -> None:
        """Append special tokens to the vocabulary.

        Raises DataFormatError if one exists already or if the vocabulary skips ids.
        """
        check_new(self, tokens)
        self.backend.add_special_tokens(list(tokens))
        expected = range(self.vocab_size, self.vocab_size + len(tokens))
        if [self.token_id(token) for token in tokens] != list(expected):
            raise DataFormatError(
                f"the {len(tokens)} tokens from {tokens[0]} on cannot stand at the end of a "
                "vocabulary that skips ids: leave data.tokenizer.vocab_extra_ids out, or give "
                "another vocabulary"
            )
        self.vocab_size += len(tokens)

    @property
    def is_bpe(self) -> bool:
        """True if the model is a BPE, the kind that gigatoken supports."""
        return isinstance(self.backend.model, tokenizers.models.BPE)

    def save(self, directory: Path, roles: SpecialTokenRoles | None = None) -> None:
        """Write the files that `load_tokenizer` and `transformers.AutoTokenizer` read.

        Raises WorkspaceError.
        """
        with workspace_errors(directory), _numbered_errors(directory):
            self.backend.save(str(directory / TOKENIZER_NAME))
            if self.is_bpe:
                self.backend.model.save(str(directory))  # vocab.json and merges.txt
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.eod_token,
            **(roles or {}),
            "clean_up_tokenization_spaces": False,
        }
        write_json(directory / TOKENIZER_CONFIG_NAME, config)


@contextmanager
def _numbered_errors(path: Path) -> Iterator[None]:
    """Translate a plain Exception of the bindings that names an OS error number into an OSError."""
    try:
        yield
    except Exception as error:
        match = re.search(r"os error (\d+)", str(error))
        if type(error) is not Exception or match is None:
            raise
        raise OSError(int(match[1]), os.strerror(int(match[1])), str(path)) from error


def check_new(tokenizer: Tokenizer, tokens: Sequence[str]) -> None:
    """Raise DataFormatError if the vocabulary already contains one of the tokens."""
    known = next((token for token in tokens if tokenizer.token_id(token) is not None), None)
    if known is not None:
        raise DataFormatError(
            f"the vocabulary has {known} already: leave data.tokenizer.vocab_extra_ids out, or "
            "give another vocabulary"
        )


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Load the tokenizer that was saved in `directory`. Raises DataFormatError."""
    path = Path(directory, TOKENIZER_CONFIG_NAME)
    try:
        eod_token = read_json(path)["eos_token"]
        if not isinstance(eod_token, str):
            raise TypeError(f"its eos_token is {eod_token!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataFormatError(
            f"{path} is missing or damaged ({reason_of(error)}): build the tokenizer again"
        ) from error
    if exists(Path(directory, MODEL_NAME)):
        # Imported here because only SentencePiece models need it.
        from megacore.tokenizer.sentencepiece_model import SentencePieceModel

        return SentencePieceModel.read(Path(directory, MODEL_NAME))
    backend = read_backend(Path(directory, TOKENIZER_NAME))
    if backend.token_to_id(eod_token) is None:
        raise DataFormatError(
            f"{path} says that {eod_token!r} ends a document, which {TOKENIZER_NAME} next to it "
            "does not have: build the tokenizer again"
        )
    return JsonTokenizer(backend, eod_token)


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """Read a tokenizer.json and disable its padding and truncation.

    Raises DataFormatError, FileAccessError.
    """
    try:
        with access_errors(path):
            text = regular(path, TOKENIZER_BYTES).read_text(encoding="utf-8")
        check_ids(path, text)
        backend = tokenizers.Tokenizer.from_str(text)
    except (DataFormatError, FileAccessError):
        raise
    except OSError as error:
        raise DataFormatError(
            f"{path} cannot be read: {error.strerror}: give a tokenizer.json"
        ) from error
    except Exception as error:  # the bindings raise plain Exception
        raise DataFormatError(
            f"{path} is not a tokenizer.json that `tokenizers` reads: {one_line(error)}"
        ) from error
    backend.no_padding()
    backend.no_truncation()
    return backend


def check_ids(path: Path, text: str) -> None:
    """Raise DataFormatError if a tokenizer.json contains an id that no vocabulary reaches."""
    try:
        content = orjson.loads(text)
        vocab = content["model"].get("vocab")
        ids = dict(vocab) if isinstance(vocab, dict) else {}
        added = content.get("added_tokens") or []
        ids |= {str(token.get("content")): token.get("id") for token in added}
    except (ValueError, KeyError, TypeError, AttributeError):
        return  # `tokenizers` describes the problem
    for token, number in ids.items():
        if isinstance(number, int) and number >= _MOST_IDS:
            raise DataFormatError(
                f"{path} gives the token {token[:_SHOWN]!r} the id {number:,}, and ids must be "
                f"below {_MOST_IDS:,}: the file is damaged, give another tokenizer"
            )


def text_batches(texts: Sequence[str], characters: int) -> list[Sequence[str]]:
    """Divide texts into batches of about `characters` in total, at least one text each."""
    batches, start, size = [], 0, 0
    for number, text in enumerate(texts):
        size += len(text) + 1
        if size >= characters:
            batches.append(texts[start : number + 1])
            start, size = number + 1, 0
    return [*batches, texts[start:]] if start < len(texts) else batches


def grouped(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield the texts in lists of bounded size, for the trainers of `tokenizers`."""
    batch: list[str] = []
    room = _TRAINED_CHARACTERS
    for text in texts:
        batch.append(text)
        room -= len(text)
        if len(batch) == _TEXTS or room <= 0:
            yield batch
            batch, room = [], _TRAINED_CHARACTERS
    if batch:
        yield batch
