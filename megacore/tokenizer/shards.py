"""A corpus tokenized in parts, which are then merged by streaming."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megacore.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter, token_dtype
from megacore.tokenizer.load import load_tokenizer
from megacore.tokenizer.records import join_shards, read_files
from megacore.tokenizer.tokenize import (
    Progress,
    TokenizeOptions,
    Unshuffled,
    check_tokens,
    counts_of,
    record_documents,
    tokens_prefix,
    write_tokens,
)

if TYPE_CHECKING:
    from megacore.corpus.segments import Segment


def tokenize_shard(
    segments: "Sequence[Segment]",
    tokenizer_directory: Path,
    directory: Path,
    options: TokenizeOptions,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> dict[str, int]:
    """Write a part of a corpus into the empty `directory` as `tokenize_corpus` does, in reading order.

    A shard may be without a token. Returns and raises as `tokenize_corpus`.
    """
    options = replace(options, shuffle_seed=None)
    tokenizer = load_tokenizer(tokenizer_directory)
    prefix = tokens_prefix(directory, options)
    counts, files = write_tokens(segments, tokenizer, prefix, options, workers=workers, progress=progress)
    record_documents(directory, files, tokenizer, tokenizer_directory, options)
    return {**counts, "vocab_size": tokenizer.vocab_size}


def merge_shards(
    shard_directories: Sequence[Path], directory: Path, tokenizer_directory: Path, options: TokenizeOptions
) -> dict[str, int]:
    """Write what `tokenize_corpus` would have written, from all shards of a corpus in their order.

    Returns its counts. Raises DataFormatError for shards that are damaged or do not belong together, WorkspaceError.
    """
    tokenizer = load_tokenizer(tokenizer_directory)
    files = join_shards([read_files(shard) for shard in shard_directories])
    with Unshuffled(directory, options) as target:
        with IndexedDatasetWriter(target, token_dtype(tokenizer.vocab_size)) as writer:
            for shard in shard_directories:
                writer.append(IndexedDataset(tokens_prefix(shard, options)))
        counts = counts_of(writer, files)
        check_tokens(counts, f"the {len(shard_directories)} shards")
    record_documents(directory, files, tokenizer, tokenizer_directory, options)
    return {**counts, "vocab_size": tokenizer.vocab_size}
