"""The tokenize stage: a corpus becomes one pair of token files."""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.artifact.files import workspace_errors
from megacore.corpus.documents import JsonlDocuments, open_documents, read_sources
from megacore.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter, bin_path, idx_path, token_dtype
from megacore.errors import DataFormatError
from megacore.tokenizer.load import Tokenizer, load_tokenizer

VERSION = 1
"""Of the tokenize stage; raised when it produces something else."""
TOKENS_NAME = "tokens_text_document"
"""Name of the token files without .bin/.idx."""
_BATCH_CHARACTERS = 1 << 20
"""Text that is encoded in one call: enough to keep a thread busy, little enough to keep memory small."""
_BLOCK_TOKENS = 1 << 24

Encoded = list[npt.NDArray[np.int32]]


def tokens_prefix(directory: str | Path) -> str:
    """The prefix of the token files in a directory of the tokenize stage."""
    return str(Path(directory, TOKENS_NAME))


def tokenize_corpus(
    corpus_directory: Path,
    tokenizer_directory: Path,
    directory: Path,
    *,
    append_eod: bool,
    shuffle_seed: int | None,
    workers: int | None = None,
) -> dict[str, int]:
    """Write the corpus as token files `tokens_text_document.{bin,idx}` into the empty `directory`.

    Documents are permuted by `numpy.random.RandomState(shuffle_seed)` unless it is None; each gets the end-of-document
    token after it if `append_eod`; an empty one becomes a document entry without a sequence. The result does not
    depend on `workers` (threads; None: one per core). Ready-made token files are linked after their ids were checked.
    Returns counts: documents, empty_documents, sequences, tokens, vocab_size. Raises DataFormatError, WorkspaceError.
    """
    tokenizer = load_tokenizer(tokenizer_directory)
    sources = read_sources(corpus_directory)
    if sources is not None and sources[0]["kind"] == "prefix":
        counts = _link(sources[0]["prefix"], tokenizer, directory)
    else:
        documents = open_documents(corpus_directory)
        counts = _write(documents, tokenizer, directory, append_eod, shuffle_seed, workers or os.cpu_count() or 1)
    if not counts["tokens"]:
        raise DataFormatError(
            f"the {counts['documents']} documents of {corpus_directory} have no token: point data.source at text"
        )
    return {**counts, "vocab_size": tokenizer.vocab_size}


def _write(
    documents: JsonlDocuments,
    tokenizer: Tokenizer,
    directory: Path,
    append_eod: bool,
    shuffle_seed: int | None,
    workers: int,
) -> dict[str, int]:
    order = np.arange(len(documents))
    if shuffle_seed is not None:
        np.random.RandomState(shuffle_seed).shuffle(order)
    dtype = token_dtype(tokenizer.vocab_size)
    eod = np.array([tokenizer.eod_id] if append_eod else [], np.int32)
    with IndexedDatasetWriter(tokens_prefix(directory), dtype) as writer:
        for batch in encode_stream(tokenizer, documents.read(order), workers):
            for ids in batch:
                writer.add_document(np.concatenate([ids, eod]) if ids.size else ids)
    return {
        "documents": writer.documents,
        "empty_documents": writer.documents - writer.sequences,
        "sequences": writer.sequences,
        "tokens": writer.tokens,
    }


def encode_stream(tokenizer: Tokenizer, texts: Iterable[str], workers: int) -> Iterator[Encoded]:
    """The ids of each text in order, a batch at a time; `workers` threads encode, two batches each are in memory."""
    pending: deque[Future[Encoded]] = deque()
    with _one_thread_per_call(), ThreadPoolExecutor(workers, "megacore-tokenize") as pool:
        try:
            for batch in _batches(texts):
                pending.append(pool.submit(tokenizer.encode_batch, batch))
                if len(pending) == 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text) + 1
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextmanager
def _one_thread_per_call() -> Iterator[None]:
    """Keep `tokenizers` from using every core for each call: its pool knows no limit per call, our threads are it."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _link(prefix: str, tokenizer: Tokenizer, directory: Path) -> dict[str, int]:
    """Link a checked pair of token files into `directory`."""
    dataset = IndexedDataset(prefix)
    _check_ids(dataset, tokenizer.vocab_size)
    for path_of in (bin_path, idx_path):
        with workspace_errors(directory):
            path_of(tokens_prefix(directory)).symlink_to(path_of(prefix))
    starts: npt.NDArray[Any] = dataset.document_indices
    return {
        "documents": dataset.documents,
        "empty_documents": int(np.count_nonzero(starts[1:] == starts[:-1])),
        "sequences": len(dataset),
        "tokens": len(dataset.tokens),
    }


def _check_ids(dataset: IndexedDataset, vocab_size: int) -> None:
    for start in range(0, len(dataset.tokens), _BLOCK_TOKENS):
        block = dataset.tokens[start : start + _BLOCK_TOKENS]
        low, high = int(block.min()), int(block.max())
        if low < 0 or high >= vocab_size:
            raise DataFormatError(
                f"{bin_path(dataset.prefix)} holds the token id {low if low < 0 else high}, but the tokenizer has "
                f"{vocab_size} entries: give data.tokenizer the one that these tokens were made with"
            )
