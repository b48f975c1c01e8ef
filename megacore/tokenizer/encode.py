"""Parsing, splitting and encoding of blocks of documents in threads, in the order of the blocks.

Encoded blocks are assembled for storage: the ids are checked and converted to the stored type, and
end-of-document tokens are added.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.config.data import OnBadLine
from megacore.corpus.blocks import BadLine, Block
from megacore.errors import DataFormatError
from megacore.tokenizer.fast import Encoder
from megacore.tokenizer.load import Encoded
from megacore.tokenizer.sentences import SentenceSplitter


@dataclass(frozen=True)
class TokenBatch:
    """Consecutive documents in the form of the arguments of `IndexedDatasetWriter.add_batch`."""

    ids: npt.NDArray[Any]
    """[tokens]: concatenated ids of all sequences."""
    lengths: npt.NDArray[np.int64]
    """[sequences]: number of tokens of each sequence, never 0."""
    sequences: npt.NDArray[np.int64]
    """[documents]: number of sequences of each document."""


def assemble(
    encoded: Encoded,
    pieces: npt.NDArray[np.int64] | None,
    *,
    eod_id: int | None,
    vocab_size: int,
    dtype: np.dtype[Any],
) -> TokenBatch:
    """Assemble encoded texts into documents.

    Document i consists of the next `pieces[i]` texts, or of one text if `pieces` is None. A text
    without tokens gives no sequence, and a document without sequences gets no `eod_id`. Raises
    DataFormatError for an id that is not in the vocabulary.
    """
    ids = encoded.ids
    if ids.size and (
        int(ids.max()) >= vocab_size or (ids.dtype.kind == "i" and int(ids.min()) < 0)
    ):
        bad = int(ids[(ids >= vocab_size) | (ids < 0)][0])
        raise DataFormatError(
            f"the tokenizer gave the token id {bad}, but its vocabulary has {vocab_size} entries: "
            "its files are damaged"
        )
    full = encoded.lengths > 0
    lengths = encoded.lengths[full]
    if pieces is None:
        sequences = full.astype(np.int64)
    else:
        before = np.concatenate([[0], np.cumsum(full)])
        ends = np.cumsum(pieces)
        sequences = before[ends] - before[ends - pieces]
    if eod_id is None:
        return TokenBatch(ids.astype(dtype, copy=False), lengths, sequences)
    last = np.cumsum(sequences)[sequences > 0] - 1
    ends = np.cumsum(lengths)[last] + np.arange(len(last))
    stored = np.empty(ids.size + len(last), dtype)
    is_text = np.ones(stored.size, np.bool_)
    is_text[ends] = False
    stored[is_text] = ids
    stored[ends] = eod_id
    lengths[last] += 1
    return TokenBatch(stored, lengths, sequences)


@dataclass(frozen=True)
class BlockEncoder:
    """A thread-safe callable that parses, splits and encodes one block."""

    encoder: Encoder
    eod_id: int | None
    vocab_size: int
    dtype: np.dtype[Any]
    on_bad_line: OnBadLine
    splitter: SentenceSplitter | None = None

    def __call__(self, block: Block) -> "EncodedBlock":
        """Encode a block. Raises DataFormatError with file and line, WorkerLostError."""
        texts, bad = block.texts()
        if bad and self.on_bad_line == "stop":
            raise DataFormatError(bad[0].reason)
        pieces = None
        if self.splitter is not None:
            texts, pieces = self.splitter.split(texts)
        encoded = self.encoder.encode_flat(texts)
        batch = assemble(
            encoded, pieces, eod_id=self.eod_id, vocab_size=self.vocab_size, dtype=self.dtype
        )
        return EncodedBlock(block, batch, bad)


@dataclass(frozen=True)
class EncodedBlock:
    """A block with its tokens and its bad lines."""

    block: Block
    batch: TokenBatch
    bad: list[BadLine]


def encode_blocks(
    blocks: Iterable[Block], encode: Callable[[Block], EncodedBlock], workers: int
) -> Iterator[EncodedBlock]:
    """Yield the encoded blocks in order.

    `workers` threads encode; at most twice as many blocks are in memory.
    """
    pending: deque[Future[EncodedBlock]] = deque()
    with _one_thread_per_call, ThreadPoolExecutor(workers, "megacore-tokenize") as pool:
        try:
            for block in blocks:
                pending.append(pool.submit(encode, block))
                if len(pending) == 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


class _OneThreadPerCall:
    """A context manager that keeps `tokenizers` from using every core for a single call.

    The thread pool of `tokenizers` has no limit per call. The setting is an environment variable of
    the process; the last of several concurrent users restores its previous value.
    """

    NAME = "TOKENIZERS_PARALLELISM"

    def __init__(self) -> None:
        self._lock = Lock()
        self._users = 0
        self._before: str | None = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._before = os.environ.get(self.NAME)
                os.environ[self.NAME] = "false"
            self._users += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            if self._before is None:
                del os.environ[self.NAME]
            else:
                os.environ[self.NAME] = self._before


_one_thread_per_call = _OneThreadPerCall()
