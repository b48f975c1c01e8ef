"""A SentencePiece model (Kudo and Richardson 2018) as a tokenizer."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import sentencepiece

from megacore.artifact.files import access_errors, regular, workspace_errors, write_json
from megacore.errors import DataFormatError
from megacore.tokenizer.load import (
    MODEL_NAME,
    TOKENIZER_BYTES,
    TOKENIZER_CONFIG_NAME,
    Encoded,
    SpecialTokenRoles,
    Tokenizer,
    check_new,
)

_SPACE = "▁"
"""Character that a piece has in place of a space."""


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
        return "".join(pieces).replace(_SPACE, " ").strip()

    def token_id(self, token: str) -> int | None:
        """Return the id of a piece, or None if the vocabulary lacks it."""
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
        as their ids, and decodes as `decode_as_exported` does. Raises WorkspaceError.
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


def _control_symbol(token: str) -> bytes:
    """Return a serialized piece, which is field 1 of a model.

    Its fields are the text (1), the score (2) and the type (3: control).
    """
    text = token.encode()
    piece = b"\x0a" + _varint(len(text)) + text + b"\x15" + bytes(4) + b"\x18\x03"
    return b"\x0a" + _varint(len(piece)) + piece


def _varint(number: int) -> bytes:
    parts = []
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])
