"""A tokenizer as the pipeline uses it: many texts in, arrays of ids out."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from megacore.artifact.files import workspace_errors, write_json
from megacore.errors import DataFormatError

TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"


class Tokenizer:
    """Wraps a Hugging Face `tokenizers.Tokenizer`; no special token is added on its own."""

    def __init__(self, backend: tokenizers.Tokenizer, eod_token: str) -> None:
        """`eod_token` ends a document; it must be in the vocabulary. Raises DataFormatError."""
        eod_id = backend.token_to_id(eod_token)
        if eod_id is None:
            raise DataFormatError(
                f"the token {eod_token!r} that ends a document is not in the vocabulary of {backend.get_vocab_size()} "
                "entries: give data.tokenizer another vocabulary, or name its own token (eod_token)"
            )
        self._backend = backend
        self.eod_token = eod_token
        self.eod_id: int = eod_id
        self.vocab_size: int = _vocab_size(backend)
        """Greatest id plus one: the rows that an embedding needs before padding."""

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """The ids of each text; `<|endoftext|>` and other special tokens in a text become their own ids."""
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """The ids of one text."""
        return self.encode_batch([text])[0]

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> str:
        """The text of the ids, special tokens written out."""
        return str(self._backend.decode([int(token) for token in ids], skip_special_tokens=False))

    def save(self, directory: Path, **special_tokens: str) -> None:
        """Write the files that `load_tokenizer` and `transformers.AutoTokenizer` read.

        `special_tokens` are further roles for tokenizer_config.json, as in bos_token="<s>". Raises WorkspaceError.
        """
        with workspace_errors(directory):
            self._backend.save(str(directory / TOKENIZER_NAME))
            if isinstance(self._backend.model, tokenizers.models.BPE):
                self._backend.model.save(str(directory))  # vocab.json and merges.txt
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.eod_token,
            **special_tokens,
            "clean_up_tokenization_spaces": False,
        }
        write_json(directory / TOKENIZER_CONFIG_NAME, config)


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer whose tokenizer.json and tokenizer_config.json are in `directory`. Raises DataFormatError."""
    path = Path(directory, TOKENIZER_CONFIG_NAME)
    try:
        eod_token = json.loads(path.read_text(encoding="utf-8"))["eos_token"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataFormatError(f"{path} is missing or damaged ({error}): build the tokenizer again") from error
    return Tokenizer(read_backend(Path(directory, TOKENIZER_NAME)), eod_token)


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """A tokenizer.json without its padding and truncation. Raises DataFormatError."""
    try:
        backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataFormatError(f"{path} cannot be read: {error.strerror}: give a tokenizer.json") from error
    except Exception as error:  # the bindings raise plain Exception
        raise DataFormatError(f"{path} is not a tokenizer.json that `tokenizers` reads: {error}") from error
    backend.no_padding()
    backend.no_truncation()
    return backend


def padded_vocab_size(vocab_size: int, divisible_by: int) -> int:
    """The vocabulary rounded up to a multiple of `divisible_by`.

    Megatron-LM multiplies that by the tensor-parallel size; here a model has one shape whatever its layout, and
    the tensor-parallel size must divide it.
    """
    return -(-vocab_size // divisible_by) * divisible_by


def _vocab_size(backend: tokenizers.Tokenizer) -> int:
    return max(backend.get_vocab(with_added_tokens=True).values()) + 1
