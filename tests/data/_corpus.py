"""A small corpus with its text, token files, documents.json and tokenizer, written directly."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megacore.token_files.indexed_dataset_writer import IndexedDatasetWriter
from megacore.tokenizer.load import JsonTokenizer

END_OF_TEXT = "<|endoftext|>"


def byte_tokenizer() -> JsonTokenizer:
    """Return a tokenizer with a token for each byte and <|endoftext|> (id 256)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE({letter: number for number, letter in enumerate(alphabet)}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT])
    return JsonTokenizer(backend, END_OF_TEXT)


@dataclass(frozen=True)
class Corpus:
    """Token files, texts and tokenizer of a corpus that `write_corpus` wrote."""

    prefix: str
    texts: list[str]
    """Texts in the order of the files."""
    order: list[int]
    """Number of the text of each document of the token files."""
    tokenizer: Path


def write_lines(path: Path, texts: Sequence[str], key: str = "text", **fields: str) -> None:
    """Write a JSON Lines file, compressed if its name ends in .gz."""
    content = "".join(json.dumps({key: text, **fields}) + "\n" for text in texts)
    path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())


def write_documents(path: Path, files: Sequence[dict[str, Any]], **facts: Any) -> None:
    """Write a documents.json with these files."""
    values = {
        "format": 1,
        "shuffle_seed": None,
        "append_eod": True,
        "split_sentences": False,
        "tokenizer": {},
    }
    path.write_text(json.dumps(values | {"files": list(files)} | facts))


def entry(path: Path | str, documents: int, **facts: Any) -> dict[str, Any]:
    """Return the entry of a file in documents.json."""
    return {
        "path": str(path),
        "key": "text",
        "documents": documents,
        "skipped_lines": [],
        "first_line": 1,
    } | facts


def write_corpus(directory: Path, texts: Sequence[str], *, seed: int | None = None) -> Corpus:
    """Write the texts to two files, and their token files, documents.json and tokenizer.

    An empty text becomes an empty document.
    """
    tokenizer, place = byte_tokenizer(), directory / "tokenizer"
    place.mkdir(parents=True)
    tokenizer.save(place)
    half = len(texts) // 2
    write_lines(directory / "a.jsonl", texts[:half])
    write_lines(directory / "b.jsonl.gz", texts[half:])
    order = np.arange(len(texts))
    if seed is not None:
        np.random.RandomState(seed).shuffle(order)
    prefix = directory / "corpus_text_document"
    with IndexedDatasetWriter(prefix, "u2") as writer:
        for number in order:
            ids = tokenizer.encode(texts[number])
            writer.add_document(np.append(ids, tokenizer.eod_id) if len(ids) else ids)
    write_documents(
        Path(f"{prefix}.documents.json"),
        [entry(directory / "a.jsonl", half), entry(directory / "b.jsonl.gz", len(texts) - half)],
        shuffle_seed=seed,
        tokenizer={
            "directory": str(place),
            "eod_id": tokenizer.eod_id,
            "vocab_size": tokenizer.vocab_size,
        },
    )
    return Corpus(str(prefix), list(texts), order.tolist(), place)
