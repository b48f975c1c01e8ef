"""The tokenize stage, which turns a corpus into one pair of token files.

A corpus may be tokenized in shards, which are then merged by streaming.
"""

import itertools
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megacore.artifact.files import workspace_errors, write_json
from megacore.config.data import OnBadLine, Splitter
from megacore.corpus.blocks import Block, read_blocks
from megacore.corpus.documents import read_sources
from megacore.corpus.formats import DOCUMENT_BYTES
from megacore.corpus.segments import Segment, segments
from megacore.errors import DataFormatError
from megacore.token_files.indexed_dataset import (
    TOKENS_NAMES,
    IndexedDataset,
    bin_path,
    idx_path,
    token_dtype,
)
from megacore.token_files.indexed_dataset_writer import IndexedDatasetWriter, permute
from megacore.tokenizer.encode import BlockEncoder, EncodedBlock, encode_blocks
from megacore.tokenizer.fast import SAMPLE_CHARACTERS, choose_encoder, take_sample
from megacore.tokenizer.load import Tokenizer, load_tokenizer
from megacore.tokenizer.records import (
    DOCUMENTS_NAME,
    FORMAT,
    FileRecord,
    join_shards,
    portable,
    read_files,
)
from megacore.tokenizer.sentences import SentenceSplitter, SplitterChoice

VERSION = 2
"""Version of the tokenize stage, increased whenever its output changes."""
TOKENS_NAME, SENTENCES_NAME = TOKENS_NAMES
BLOCK_BYTES = 2 << 20
"""Bytes of input encoded in one call: enough to keep a thread busy, few enough for its cache."""
_BLOCK_TOKENS = 1 << 24
_SAMPLE_BLOCKS = 64
_SHOWN_LINES = 3
_logger = logging.getLogger(__name__)
Progress = Callable[[int], None]
"""Callback that receives the bytes of input of each finished block."""


@dataclass(frozen=True)
class TokenizeOptions:
    """Options that determine the tokens, in addition to corpus and tokenizer."""

    append_eod: bool = True
    """True to append the end-of-document token to each document that has tokens."""
    shuffle_seed: int | None = None
    """Seed of `numpy.random.RandomState` to permute the documents; None keeps their order."""
    split_sentences: bool = False
    """True to store each sentence as a sequence."""
    keep_newlines: bool = False
    """True if sentences keep the white space that follows them."""
    sentence_splitter: Splitter = "punkt"
    language: str = "english"
    """Language of the Punkt model."""
    on_bad_line: OnBadLine = "stop"
    """Treatment of a line without a document: raise an error, or skip and count it."""
    partitions: int = 1
    """Number of partitions whose order the documents have (`partition_order`)."""
    sentence_data: Path | None = None
    """Directory with Punkt's models (`download_punkt`)."""

    @property
    def name(self) -> str:
        """Name of the token files without .bin/.idx."""
        return SENTENCES_NAME if self.split_sentences else TOKENS_NAME

    @property
    def splitter(self) -> SplitterChoice | None:
        """Options of the sentence splitter, or None if texts are not split."""
        if not self.split_sentences:
            return None
        data = None if self.sentence_data is None else str(self.sentence_data)
        return SplitterChoice(self.sentence_splitter, self.language, self.keep_newlines, data)


def tokens_prefix(directory: str | Path, options: TokenizeOptions | None = None) -> str:
    """Return the prefix of the token files in a directory of the tokenize stage."""
    return str(Path(directory, (options or TokenizeOptions()).name))


def tokenize_corpus(
    corpus_directory: Path,
    tokenizer_directory: Path,
    directory: Path,
    options: TokenizeOptions,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
    document_bytes: int = DOCUMENT_BYTES,
) -> dict[str, int]:
    """Write the corpus as token files and documents.json into the empty `directory`.

    The files are `tokens_text_document.{bin,idx}`, or `tokens_text_sentence` if sentences are
    split. An empty document becomes a document entry without a sequence. The result does not depend
    on `workers`, the number of threads (by default one per core). For ready-made token files, the
    ids are checked and the files are linked without reordering. Returns counts: documents,
    empty_documents, sequences, tokens, vocab_size, skipped_lines. Raises DataFormatError, also for
    a document of more than `document_bytes`, WorkspaceError, and WorkerLostError if a process that
    splits sentences is killed.
    """
    tokenizer = load_tokenizer(tokenizer_directory)
    sources = read_sources(corpus_directory)
    if sources is not None and sources[0]["kind"] == "prefix":
        counts = _link(sources[0]["prefix"], tokenizer, directory, options)
        check_tokens(counts, corpus_directory)
        origin = portable(sources[0]["prefix"], directory)
        # The options with which these files were made are unknown.
        facts = {"prefix": origin, "append_eod": None, "shuffle_seed": None}
        record_documents(directory, [], tokenizer, tokenizer_directory, options, **facts)
    else:
        parts = segments(corpus_directory)
        with ShuffleOnExit(directory, options) as target:
            counts, files, _ = write_tokens(
                parts,
                tokenizer,
                target,
                options,
                workers=workers,
                progress=progress,
                document_bytes=document_bytes,
            )
            check_tokens(counts, corpus_directory)
        record_documents(directory, files, tokenizer, tokenizer_directory, options)
    read_sources(corpus_directory)  # a file may have changed while it was read
    return {**counts, "vocab_size": tokenizer.vocab_size}


def check_tokens(counts: dict[str, int], source: object) -> None:
    """Raise DataFormatError if `source` has no documents or its documents have no tokens."""
    if not counts["documents"]:
        skipped = (
            f": all {counts['skipped_lines']} lines were skipped" if counts["skipped_lines"] else ""
        )
        raise DataFormatError(f"{source} holds no document{skipped}: point data.source at text")
    if not counts["tokens"]:
        raise DataFormatError(
            f"the {counts['documents']} documents of {source} have no token: point data.source at "
            "text"
        )


def write_tokens(
    parts: Sequence[Segment],
    tokenizer: Tokenizer,
    prefix: str | Path,
    options: TokenizeOptions,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
    document_bytes: int = DOCUMENT_BYTES,
) -> tuple[dict[str, int], list[FileRecord], dict[str, str]]:
    """Write the documents of `parts` in order to the token files of `prefix`.

    Returns counts (without vocab_size), a record of each part, and the digests of the token files
    by suffix.
    """
    workers = workers or len(os.sched_getaffinity(0))
    dtype = token_dtype(tokenizer.vocab_size)
    # Copies, because the same object may occur twice and each part has a separate record.
    parts = [replace(part) for part in parts]
    files = [FileRecord.of(part) for part in parts]
    record_of = {id(part): file for part, file in zip(parts, files, strict=True)}
    with ExitStack() as stack:
        choice = options.splitter
        splitter = (
            None if choice is None else stack.enter_context(SentenceSplitter(choice, workers))
        )
        sample, blocks = _look_ahead(read_blocks(parts, BLOCK_BYTES, document_bytes))
        encode = BlockEncoder(
            encoder=choose_encoder(tokenizer, sample, workers),
            eod_id=tokenizer.eod_id if options.append_eod else None,
            vocab_size=tokenizer.vocab_size,
            dtype=dtype,
            on_bad_line=options.on_bad_line,
            splitter=splitter,
        )
        with IndexedDatasetWriter(prefix, dtype) as writer:
            for done in encode_blocks(blocks, encode, workers):
                writer.add_batch(done.batch.ids, done.batch.lengths, done.batch.sequences)
                _note(record_of[id(done.block.segment)], done)
                if progress is not None:
                    progress(done.block.size)
    return counts_of(writer, files), files, writer.sha256


def counts_of(writer: IndexedDatasetWriter, files: Sequence[FileRecord]) -> dict[str, int]:
    """Return the counts of a finished writer and of skipped lines, and log the latter."""
    skipped = [
        f"{file.path}:{line}" for file in files for line in file.skipped_lines[:_SHOWN_LINES]
    ]
    count = sum(len(file.skipped_lines) for file in files)
    if count:
        more = ", …" if count > _SHOWN_LINES else ""
        _logger.warning(
            "skipped %d lines without a document: %s%s",
            count,
            ", ".join(skipped[:_SHOWN_LINES]),
            more,
        )
    return {
        "documents": writer.documents,
        "empty_documents": writer.empty_documents,
        "sequences": writer.sequences,
        "tokens": writer.tokens,
        "skipped_lines": count,
    }


def record_documents(
    directory: Path,
    files: Sequence[FileRecord],
    tokenizer: Tokenizer,
    tokenizer_directory: Path | None,
    options: TokenizeOptions,
    **facts: Any,
) -> None:
    """Write documents.json with the origin of the documents and the options of the stage.

    Raises WorkspaceError.
    """
    content = documents_facts(files, tokenizer, tokenizer_directory, options, directory)
    write_json(directory / DOCUMENTS_NAME, content | facts)


def documents_facts(
    files: Sequence[FileRecord],
    tokenizer: Tokenizer,
    tokenizer_path: Path | None,
    options: TokenizeOptions,
    directory: Path | None,
) -> dict[str, Any]:
    """Return the content of a documents.json in `directory`.

    Paths are absolute if `directory` is None. `tokenizer_path` is the directory or file of the
    tokenizer, or None if it has neither.
    """
    partitions = {} if options.partitions == 1 else {"partitions": options.partitions}
    return {
        "format": FORMAT,
        "files": [asdict(file) | {"path": portable(file.path, directory)} for file in files],
        "shuffle_seed": options.shuffle_seed,
        **partitions,
        "append_eod": options.append_eod,
        "split_sentences": options.split_sentences,
        "tokenizer": {
            "directory": None if tokenizer_path is None else portable(tokenizer_path, directory),
            "eod_id": tokenizer.eod_id,
            "eod_token": tokenizer.eod_token,
            "vocab_size": tokenizer.vocab_size,
        },
    }


class ShuffleOnExit:
    """A context manager that permutes token files after they were written in reading order.

    It returns the prefix to write to, which is the final one if there is no shuffle seed.
    """

    def __init__(self, directory: Path, options: TokenizeOptions) -> None:
        self._prefix = tokens_prefix(directory, options)
        self._seed = options.shuffle_seed
        self._folder = directory / f"unshuffled.tmp-{os.getpid()}"

    def __enter__(self) -> str:
        if self._seed is None:
            return self._prefix
        with workspace_errors(self._folder):
            self._folder.mkdir()
        return str(self._folder / "tokens")

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._seed is None:
            return
        try:
            if kind is None:
                self._permute(self._seed)
                with workspace_errors(self._folder):
                    shutil.rmtree(self._folder)  # a file that stays would be in the artifact
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _permute(self, seed: int) -> None:
        """Write the final files, and close the memory maps of the first ones.

        NFS keeps a deleted file that is still mapped as .nfs… in its folder, which then cannot be
        removed.
        """
        dataset = IndexedDataset(self._folder / "tokens")
        order = np.arange(dataset.documents)
        np.random.RandomState(seed).shuffle(order)
        with IndexedDatasetWriter(self._prefix, dataset.dtype) as writer:
            permute(dataset, order, writer)


def _look_ahead(blocks: Iterator[Block]) -> tuple[list[str], Iterable[Block]]:
    """Return a sample of the first texts, and an iterable over all blocks."""
    first: list[Block] = []
    sample: list[str] = []
    for block in itertools.islice(blocks, _SAMPLE_BLOCKS):
        first.append(block)
        sample += block.texts()[0]
        if sum(map(len, sample)) >= SAMPLE_CHARACTERS:
            break
    return take_sample(sample), itertools.chain(first, blocks)


def _note(file: FileRecord, done: EncodedBlock) -> None:
    file.documents += len(done.batch.sequences)
    file.skipped_lines += [line.line for line in done.bad]


def _link(
    prefix: str, tokenizer: Tokenizer, directory: Path, options: TokenizeOptions
) -> dict[str, int]:
    """Check a pair of token files, link it into `directory` and return its counts."""
    dataset = IndexedDataset(prefix)
    _check_ids(dataset, tokenizer.vocab_size)
    for path_of in (bin_path, idx_path):
        with workspace_errors(directory):
            path_of(tokens_prefix(directory, options)).symlink_to(path_of(prefix))
    starts = dataset.document_indices
    return {
        "documents": dataset.documents,
        "empty_documents": int(np.count_nonzero(starts[1:] == starts[:-1])),
        "sequences": len(dataset),
        "tokens": len(dataset.tokens),
        "skipped_lines": 0,
    }


def _check_ids(dataset: IndexedDataset, vocab_size: int) -> None:
    for start in range(0, len(dataset.tokens), _BLOCK_TOKENS):
        block = dataset.tokens[start : start + _BLOCK_TOKENS]
        low, high = int(block.min()), int(block.max())
        if low < 0 or high >= vocab_size:
            raise DataFormatError(
                f"{bin_path(dataset.prefix)} holds the token id {low if low < 0 else high}, but "
                f"the tokenizer has {vocab_size} entries: give data.tokenizer the one that these "
                "tokens were made with"
            )


def tokenize_shard(
    parts: Sequence[Segment],
    tokenizer_directory: Path,
    directory: Path,
    options: TokenizeOptions,
    *,
    workers: int | None = None,
    document_bytes: int = DOCUMENT_BYTES,
) -> dict[str, int]:
    """Write one shard of a corpus into the empty `directory`, without permuting its documents.

    A shard may have no tokens. Returns the same counts and raises the same errors as
    `tokenize_corpus`.
    """
    options = replace(options, shuffle_seed=None)
    tokenizer = load_tokenizer(tokenizer_directory)
    prefix = tokens_prefix(directory, options)
    counts, files, _ = write_tokens(
        parts, tokenizer, prefix, options, workers=workers, document_bytes=document_bytes
    )
    record_documents(directory, files, tokenizer, tokenizer_directory, options)
    return {**counts, "vocab_size": tokenizer.vocab_size}


def merge_shards(
    shard_directories: Sequence[Path],
    directory: Path,
    tokenizer_directory: Path,
    options: TokenizeOptions,
) -> dict[str, int]:
    """Merge the shards of a corpus, in order, into the output that `tokenize_corpus` would write.

    Returns the same counts. Raises DataFormatError for shards that are damaged or do not belong
    together, WorkspaceError.
    """
    tokenizer = load_tokenizer(tokenizer_directory)
    files = join_shards([read_files(shard) for shard in shard_directories])
    with ShuffleOnExit(directory, options) as target:
        with IndexedDatasetWriter(target, token_dtype(tokenizer.vocab_size)) as writer:
            for shard in shard_directories:
                writer.append(IndexedDataset(tokens_prefix(shard, options)))
        counts = counts_of(writer, files)
        check_tokens(counts, f"the {len(shard_directories)} shards")
    record_documents(directory, files, tokenizer, tokenizer_directory, options)
    return {**counts, "vocab_size": tokenizer.vocab_size}
