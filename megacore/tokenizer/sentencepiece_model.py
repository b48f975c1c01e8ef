"""A SentencePiece model (Kudo and Richardson 2018) as a tokenizer."""

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import sentencepiece
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from megacore.artifact.files import access_errors, regular, workspace_errors, write_json
from megacore.errors import DataFormatError
from megacore.tokenizer.load import (
    MODEL_NAME,
    SPACE,
    TOKENIZER_BYTES,
    TOKENIZER_CONFIG_NAME,
    Encoded,
    SpecialTokenRoles,
    Tokenizer,
    check_new,
)

# Numbers of fields and values in sentencepiece_model.proto of google/sentencepiece. The module that
# protoc generated from it comes with sentencepiece, but needs a matching version of protobuf.
_PIECES, _TRAINER, _NORMALIZER, _DENORMALIZER = 1, 2, 3, 5
_TEXT, _SCORE, _KIND = 1, 2, 3
_NORMAL, _UNKNOWN, _USER_DEFINED, _UNUSED = 1, 2, 4, 5
_MODEL_TYPE, _WHITESPACE_AS_SUFFIX, _BYTE_FALLBACK, _UNK_SURFACE = 3, 24, 35, 44
_BPE = 2
_CHARSMAP, _DUMMY_PREFIX, _REMOVE_EXTRA_WHITESPACES, _ESCAPE_WHITESPACES = 2, 3, 4, 5
_GUARD = "\ufdd0"
"""Noncharacter, which no text has."""
_ALL = 1 << 16
"""Number of spaces that is more than a piece has."""
_PROBES = (
    "",
    " ",
    "    ",
    "a",
    " The quick  brown fox\n\n\tjumps over 3.14159 lazy dogs!  ",
    "\nline\r\nline\n   indented\n\n\n",
    "\0\x01\x7f\N{NO-BREAK SPACE}\N{ZERO WIDTH SPACE}\N{IDEOGRAPHIC SPACE}",
    "▁▁ ▁a▁",
    "Größe e\N{COMBINING ACUTE ACCENT} ａ\N{COMBINING ACUTE ACCENT} ½ ﬁ İ ẞ ſ",
    "中文 日本語 ｶﾞ 한국어 हिन्दी שלום Привет",
    "💡👩‍👩‍👧🇩🇪👍🏽",
    "ababababab aaaaaaaaaaaaa ======= 1000000000000 hahahahaha",
    "<s>a</s><unk><0x0A><pad>",
)
"""Texts that an exported tokenizer must encode and decode equally."""


class SentencePieceModel(Tokenizer):
    """A SentencePiece `.model`.

    As in Megatron-LM, the model's end-of-sentence piece ends a document.

    Control symbols such as `</s>` in a text are encoded as ordinary text.
    """

    def __init__(self, model: bytes, name: str) -> None:
        """Load `model`, the content of the file `name`. Raises DataFormatError."""
        processor = sentencepiece.SentencePieceProcessor()
        try:
            processor.LoadFromSerializedProto(model)
            pieces = processor.get_piece_size()
        except Exception as error:  # the bindings raise RuntimeError or an error of the parser
            raise DataFormatError(
                f"{name} is not a SentencePiece model ({error}): give another .model"
            ) from error
        eod_id = processor.eos_id()
        if eod_id < 0:
            raise DataFormatError(
                f"{name} has no end of sentence among its {pieces} pieces, so nothing can end a "
                "document: give a model that was trained with one (eos_id)"
            )
        super().__init__(str(processor.id_to_piece(eod_id)), eod_id, pieces)
        self._processor = processor
        self._model = model

    @classmethod
    def read(cls, path: Path) -> "SentencePieceModel":
        """Read a model from a file. Raises DataFormatError, FileAccessError."""
        try:
            with access_errors(path):
                model = regular(path, TOKENIZER_BYTES).read_bytes()
        except OSError as error:
            raise DataFormatError(
                f"{path} cannot be read: {error.strerror}: give a SentencePiece .model"
            ) from error
        return cls(model, str(path))

    def encode_flat(self, texts: Sequence[str]) -> Encoded:
        """Return the concatenated ids of all texts."""
        encoded = self._processor.encode(list(texts), out_type=int, num_threads=1)
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        return Encoded(
            np.fromiter(chain.from_iterable(encoded), np.int32, int(lengths.sum())), lengths
        )

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> str:
        """Return the text of the ids; control symbols are omitted."""
        return str(self._processor.decode([int(token) for token in ids]))

    def decode_as_exported(self, ids: Sequence[int]) -> str:
        """Return the text that transformers 5 decodes, which is that of the joined pieces.

        The bytes of a model with byte fallback stay pieces such as `<0x0A>`, and white space at the
        ends is removed.
        """
        pieces = (str(self._processor.id_to_piece(int(token))) for token in ids)
        return "".join(pieces).replace(SPACE, " ").strip()

    def exported(self) -> tokenizers.Tokenizer | None:
        """Return a tokenizer of the library tokenizers with the same ids and texts, if one exists.

        It encodes control symbols in a text as ordinary text, like this class. There is one for
        BPEs without normalization rules: the library applies a charsmap per grapheme, and adds the
        scores of a unigram in fp64 instead of fp32, which decides near-ties in long texts
        differently. The result is also None if it encodes or decodes a probe text or a piece
        differently.
        """
        backend = _converted(self._model)
        if backend is None:
            return None
        controls = [token for token in self.special_ids() if self._processor.IsControl(token)]
        backend.add_special_tokens(
            [
                tokenizers.AddedToken(
                    self._processor.id_to_piece(token), normalized=False, special=True
                )
                for token in sorted(controls)
            ]
        )
        backend.encode_special_tokens = True
        pieces = [piece.replace(SPACE, " ") for piece in self.tokens()]
        texts = [*_PROBES, *pieces, *(f"a{piece}b" for piece in pieces)]
        expected = self._processor.encode(texts, out_type=int, num_threads=1)
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        if any(
            encoding.ids != ids for encoding, ids in zip(encodings, expected, strict=True)
        ) or backend.decode_batch(expected, skip_special_tokens=False) != [
            self.decode(ids) for ids in expected
        ]:
            return None
        return backend

    def token_id(self, token: str) -> int | None:
        """Return the id of a piece, or None if the vocabulary lacks it."""
        try:
            token.encode()
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON can hold
            return None
        piece_id = int(self._processor.piece_to_id(token))
        return piece_id if self._processor.id_to_piece(piece_id) == token else None

    def tokens(self) -> list[str]:
        """Return the vocabulary in the order of the ids, [v]."""
        return [str(self._processor.id_to_piece(number)) for number in range(self.vocab_size)]

    def special_ids(self) -> frozenset[int]:
        """Return the ids of control, unknown and unused pieces."""
        processor = self._processor
        kinds = (processor.IsControl, processor.IsUnknown, processor.IsUnused)
        return frozenset(
            number for number in range(self.vocab_size) if any(kind(number) for kind in kinds)
        )

    def add_special_tokens(self, tokens: Sequence[str]) -> None:
        """Append control symbols to the vocabulary.

        Raises DataFormatError if one exists already.
        """
        check_new(self, tokens)
        # Concatenated serialized protobuf messages form one message with the fields of both.
        self._model += b"".join(_control_symbol(token) for token in tokens)
        self._processor.LoadFromSerializedProto(self._model)
        self.vocab_size = int(self._processor.get_piece_size())

    def save(self, directory: Path, roles: SpecialTokenRoles | None = None) -> None:
        """Write tokenizer.model and tokenizer_config.json.

        `AutoTokenizer` of transformers 5 reads them as well, but encodes control symbols in a text
        as their ids, and decodes as `decode_as_exported` does. An export of a model therefore has
        the tokenizer of `exported` too. Raises WorkspaceError.
        """
        with workspace_errors(directory):
            (directory / MODEL_NAME).write_bytes(self._model)
        processor = self._processor
        role_ids = {
            "bos_token": processor.bos_id(),
            "pad_token": processor.pad_id(),
            "unk_token": processor.unk_id(),
        }
        named = {
            role: str(processor.id_to_piece(token))
            for role, token in role_ids.items()
            if token >= 0
        }
        config = {
            "tokenizer_class": "SentencePieceBackend",
            "eos_token": self.eod_token,
            **named,
            **(roles or {}),
        }
        write_json(directory / TOKENIZER_CONFIG_NAME, config)


def _converted(model: bytes) -> tokenizers.Tokenizer | None:
    """Convert a BPE without normalization rules; return None for other models."""
    fields = list(_fields(model))
    trainer, normalizer, denormalizer = (
        dict(chain.from_iterable(_fields(value) for key, value in fields if key == section))
        for section in (_TRAINER, _NORMALIZER, _DENORMALIZER)
    )
    pieces = [dict(_fields(value)) for key, value in fields if key == _PIECES]
    texts = [bytes(piece[_TEXT]).decode() for piece in pieces]
    kinds = [piece.get(_KIND, _NORMAL) for piece in pieces]
    if (
        trainer.get(_MODEL_TYPE) != _BPE
        or trainer.get(_WHITESPACE_AS_SUFFIX)
        or normalizer.get(_CHARSMAP)
        or denormalizer.get(_CHARSMAP)
        or not normalizer.get(_ESCAPE_WHITESPACES, True)
        or _UNUSED in kinds
        or kinds.count(_UNKNOWN) != 1
    ):
        return None
    scores = {
        text: float(np.frombuffer(piece.get(_SCORE, bytes(4)), "<f4")[0])
        for text, piece, kind in zip(texts, pieces, kinds, strict=True)
        if kind == _NORMAL
    }
    merges = [
        (-score, cut, (text[:cut], text[cut:]))
        for text, score in scores.items()
        for cut in range(1, len(text))
        if text[:cut] in scores and text[cut:] in scores
    ]
    merges.sort(key=lambda merge: merge[:2])
    symbols = [text for text, kind in zip(texts, kinds, strict=True) if kind == _USER_DEFINED]
    unknown = texts[kinds.index(_UNKNOWN)]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={text: number for number, text in enumerate(texts)},
            merges=[pair for _, _, pair in merges],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=bool(trainer.get(_BYTE_FALLBACK)),
            ignore_merges=bool(symbols),  # a user-defined symbol has no merges
        )
    )
    prefix = bool(normalizer.get(_DUMMY_PREFIX, True))
    strip = bool(normalizer.get(_REMOVE_EXTRA_WHITESPACES, True))
    steps: list[Any] = []
    if strip:
        steps += [
            normalizers.Replace(Regex(rf"\A +|[ {SPACE}]+\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    if prefix:
        steps.append(normalizers.Prepend(SPACE))
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    if symbols:
        longest_first = sorted(symbols, key=len, reverse=True)
        backend.pre_tokenizer = pre_tokenizers.Split(
            Regex("|".join(map(re.escape, longest_first))), "isolated"
        )
    surface = bytes(trainer.get(_UNK_SURFACE, " \N{DOUBLE QUESTION MARK} ".encode())).decode()
    # A space of the surface at the start of a text is no white space that is removed.
    guard = _GUARD if strip and not trainer.get(_BYTE_FALLBACK) else ""
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(unknown, f"{guard}{surface}"),
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", _ALL if strip else 1, 0)] if prefix or strip else []),
            *([decoders.Replace(guard, "")] if guard else []),
        ]
    )
    return backend


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number and value (int or bytes) of each field of a serialized protobuf message."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while place < len(message):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
            continue
        size = varint() if kind == 2 else {1: 8, 5: 4}[kind]
        yield key >> 3, message[place : place + size]
        place += size


def _control_symbol(token: str) -> bytes:
    """Return a serialized piece of a model: its text, a score of 0 and the type of controls."""
    text = token.encode()
    piece = b"\x0a" + _varint(len(text)) + text + b"\x15" + bytes(4) + b"\x18\x03"
    return b"\x0a" + _varint(len(piece)) + piece


def _varint(number: int) -> bytes:
    parts = []
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])
