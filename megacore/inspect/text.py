"""Token ids as text, with the tokenizer that they were made with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from megacore.artifact.manifest import MANIFEST_NAME, Manifest
from megacore.artifact.workspace import FOLDERS
from megacore.errors import ArtifactError, DataFormatError
from megacore.inspect.provenance import Origins

if TYPE_CHECKING:
    import tokenizers

Decode = Callable[[npt.NDArray[Any]], str]
"""The text of an array of ids, special tokens written out."""
_EDGE = "\N{REPLACEMENT CHARACTER}"
"""What decoding leaves of a character that the first or last token holds only a part of."""


def open_decoder(path: Path) -> Decode:
    """The decoder of a tokenizer.

    `path` is a directory of the tokenizer stage, a tokenizer.json, the vocab.json of GPT-2 or the vocab.txt of BERT,
    or a SentencePiece model. Raises DataFormatError, the decoder too for ids that the tokenizer does not have.
    """
    decode, vocab_size = _open(path)

    def checked(ids: npt.NDArray[Any]) -> str:
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise DataFormatError(
                f"the tokens hold the id {bad}, but {path} has {vocab_size} entries: give --tokenizer the one that "
                "they were made with"
            )
        return decode(ids)

    return checked


def _open(path: Path) -> tuple[Decode, int]:
    """The decoder of a tokenizer, and how many ids it knows."""
    from megacore.tokenizer.load import TOKENIZER_CONFIG_NAME, TOKENIZER_NAME, load_tokenizer

    if path.is_file() and path.suffix not in (".json", ".txt"):
        from megacore.tokenizer.sentencepiece_model import SentencePieceModel

        model = SentencePieceModel.read(path)
        return model.decode, model.vocab_size
    if (path / TOKENIZER_CONFIG_NAME).exists():
        tokenizer = load_tokenizer(path)
        return tokenizer.decode, tokenizer.vocab_size
    backend = _open_backend(path / TOKENIZER_NAME if path.is_dir() else path)
    vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    return lambda ids: str(backend.decode(ids.tolist(), skip_special_tokens=False)), vocab_size


def _open_backend(path: Path) -> "tokenizers.Tokenizer":
    import tokenizers

    from megacore.tokenizer.load import read_backend
    from megacore.tokenizer.wordpiece import read_wordpiece

    if not path.is_file():
        raise DataFormatError(
            f"{path} does not exist: give a tokenizer's directory, tokenizer.json, vocab.json, vocab.txt or .model"
        )
    if path.suffix == ".txt":
        return read_wordpiece(path, lower_case=True)
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataFormatError(f"{path} is neither a tokenizer.json nor a vocab.json: {error}") from error
    if not isinstance(values, dict) or not all(isinstance(token, int) for token in values.values()):
        return read_backend(path)
    # Of GPT-2's two files the vocabulary is enough: merges are for the other direction.
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(values, []))
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


def find_tokenizer(prefix: str, origins: Origins | None) -> Path | None:
    """The directory of the tokenizer that token files were made with; None when it is unknown or gone.

    `documents.json` names it; in a workspace the manifest beside the files has the digest of the tokenizer's own.
    """
    if origins is not None and origins.tokenizer_path is not None:
        return origins.tokenizer_path
    directory = Path(prefix).resolve().parent
    if not (directory / MANIFEST_NAME).exists():
        return None
    try:
        digest = Manifest.read(directory).inputs.get("tokenizer")
        for candidate in sorted((directory.parents[1] / FOLDERS["tokenizer"]).glob(f"*/{MANIFEST_NAME}")):
            if Manifest.read(candidate.parent).digest == digest:
                return candidate.parent
    except ArtifactError:
        return None
    return None


def find_text(text: str, source: str, before: str = "") -> tuple[int, int] | None:
    """Where the decoded text stands in its source (first character, one past the last); None when it does not.

    `before` is the decoded text from the document's beginning on: what repeats itself is looked for after it.
    Characters cut in half by the first or last token are not looked for. Tokenizers that change the text, as by
    lower-casing it, have no such place.
    """
    wanted = text.strip(_EDGE)
    start = source.find(wanted, len(before.rstrip(_EDGE))) if wanted else -1
    return None if start < 0 else (start, start + len(wanted))
