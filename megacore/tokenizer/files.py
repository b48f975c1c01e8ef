"""Tokenization of files outside a workspace, for the command `megacore tokenize`."""

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megacore.artifact import StageKey
from megacore.artifact.files import (
    remove_dead_temporaries,
    sync_directory,
    workspace_errors,
    write_json,
)
from megacore.artifact.manifest import FileEntry, Manifest, file_digest
from megacore.config.data import ExistingTokenizer, HfTokenizer, JsonlSource
from megacore.corpus.documents import SourceFile, check_unchanged_files
from megacore.corpus.formats import SUFFIXES
from megacore.corpus.local_files import list_files, warn_of_repetitions
from megacore.corpus.segments import Segment, jsonl_segments
from megacore.errors import ConfigError
from megacore.paths import exists, is_dir
from megacore.token_files.indexed_dataset import IndexedDataset
from megacore.token_files.indexed_dataset_writer import (
    IndexedDatasetWriter,
    partition_order,
    permute,
)
from megacore.tokenizer.build import fingerprint, open_tokenizer
from megacore.tokenizer.records import DOCUMENTS_NAME
from megacore.tokenizer.tokenize import (
    VERSION,
    Progress,
    TokenizeOptions,
    check_tokens,
    documents_facts,
    write_tokens,
)

_SUFFIXES = (f".{DOCUMENTS_NAME}", ".manifest.json", ".bin", ".idx")
"""Suffixes of the output files in the order of creation: an `.idx` implies that all exist."""


@dataclass(frozen=True)
class Inputs:
    """Input files, resolved before anything is written."""

    segments: tuple[Segment, ...]
    files: tuple[SourceFile, ...]
    size: int | None
    """Bytes of input, for a progress bar; None if some files are compressed or parquet."""

    @classmethod
    def find(cls, patterns: Sequence[str], key: str) -> "Inputs":
        """Return the files that match paths and globs, with the text under `key`.

        Raises DataFormatError.
        """
        files = list_files(JsonlSource(kind="jsonl", files=tuple(patterns), key=key))
        warn_of_repetitions([Path(file.path) for file in files])
        plain = all(Path(file.path).suffix not in SUFFIXES for file in files)
        size = sum(file.size for file in files) if plain else None
        return cls(tuple(jsonl_segments([file.path for file in files], key)), tuple(files), size)


def output_prefix(prefix: str, key: str, options: TokenizeOptions) -> str:
    """Return Megatron-LM's name of the token files, without .bin/.idx.

    The name is PREFIX_KEY_document, or PREFIX_KEY_sentence if sentences are split.
    """
    return f"{prefix}_{key}_{'sentence' if options.split_sentences else 'document'}"


def check_output(target: str, *, overwrite: bool) -> None:
    """Raise ConfigError if the output cannot be written.

    That is the case if token files exist and `overwrite` is not set, if an output path is a
    directory, or if a parent of it is a file.
    """
    for path in (Path(f"{target}{suffix}") for suffix in _SUFFIXES):
        if is_dir(path):
            raise ConfigError(f"{path} is a directory: give another --output-prefix")
    for folder in Path(target).absolute().parents:
        if exists(folder) and not is_dir(folder):
            raise ConfigError(f"{folder} is a file: give another --output-prefix")
    existing = [
        f"{target}{suffix}" for suffix in (".bin", ".idx") if os.path.lexists(f"{target}{suffix}")
    ]
    if existing and not overwrite:
        raise ConfigError(
            f"{' and '.join(existing)} exist already: give another --output-prefix, or --overwrite"
        )


def tokenize_files(
    inputs: Inputs,
    choice: ExistingTokenizer,
    target: str,
    options: TokenizeOptions,
    *,
    workers: int | None,
    progress: Progress,
    document_bytes: int,
) -> dict[str, int]:
    """Write `target`.bin and .idx with the inputs' documents in order, and two JSON files.

    `.documents.json` maps documents to input lines; `.manifest.json` contains the parameters and
    the digests of the files. An older index is removed first and the new one appears last, so files
    without an index are incomplete. Returns the same counts and raises the same errors as
    `tokenize_corpus`.
    """
    started = time.monotonic()
    folder = Path(f"{target}.tmp-{os.getpid()}")
    with workspace_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_dead_temporaries(Path(target))
        folder.mkdir()
    try:
        tokenizer = open_tokenizer(choice, folder.parent / ".huggingface")
        tokens = folder / ("tokens" if options.partitions == 1 else "read")
        counts, files, digests = write_tokens(
            inputs.segments,
            tokenizer,
            tokens,
            options,
            workers=workers,
            progress=progress,
            document_bytes=document_bytes,
        )
        check_unchanged_files(inputs.files)
        counts["vocab_size"] = tokenizer.vocab_size
        check_tokens(counts, ", ".join(dict.fromkeys(segment.path for segment in inputs.segments)))
        if options.partitions > 1:
            digests = _partition(tokens, folder / "tokens", options.partitions)
        record = documents_facts(files, tokenizer, _readable(choice), options, None)
        write_json(folder / f"tokens.{DOCUMENTS_NAME}", record)
        key = StageKey.of("tokenize", VERSION, _parameters(inputs, choice, options))
        manifest = Manifest(
            key.stage,
            key.version,
            key.key,
            key.parameters,
            key.inputs,
            _entries(folder, target, digests),
            counts,
            round(time.monotonic() - started, 3),
        )
        write_json(folder / "tokens.manifest.json", asdict(manifest))
        _publish(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return counts


def _partition(source: Path, prefix: Path, partitions: int) -> dict[str, str]:
    """Write the documents in the order of partitions; return the digests of the files by suffix.

    The memory maps of `source` are closed on return: NFS could not remove their folder.
    """
    dataset = IndexedDataset(source)
    with IndexedDatasetWriter(prefix, dataset.dtype) as writer:
        permute(dataset, partition_order(dataset.documents, partitions), writer)
    return writer.sha256


def _readable(choice: ExistingTokenizer) -> Path | None:
    """Return the path of a local tokenizer.json, or None if the tokenizer has none."""
    path = Path(choice.name) if isinstance(choice, HfTokenizer) else None
    return path if path is not None and exists(path) else None


def _parameters(
    inputs: Inputs, choice: ExistingTokenizer, options: TokenizeOptions
) -> dict[str, Any]:
    values = asdict(options)
    if options.partitions == 1:
        del values["partitions"]
    values["sentence_data"] = None if options.sentence_data is None else str(options.sentence_data)
    files = [[file.path, file.size] for file in inputs.files]
    return {
        **values,
        "tokenizer": fingerprint(choice),
        "inputs": files,
        "json_key": inputs.segments[0].key,
    }


def _entries(folder: Path, target: str, digests: dict[str, str]) -> dict[str, FileEntry]:
    entries = {}
    for suffix in (".bin", ".idx", f".{DOCUMENTS_NAME}"):
        path = folder / f"tokens{suffix}"
        status = path.stat()
        digest = digests.get(suffix) or file_digest(path)
        entries[f"{Path(target).name}{suffix}"] = FileEntry(
            status.st_size, digest, status.st_mtime_ns
        )
    return entries


def _publish(folder: Path, target: str) -> None:
    """Move the files to their final names.

    An older index is removed first because it does not describe the new tokens.
    """
    with workspace_errors(folder):
        Path(f"{target}.idx").unlink(missing_ok=True)
        for suffix in _SUFFIXES:
            os.replace(folder / f"tokens{suffix}", f"{target}{suffix}")
        sync_directory(folder.parent)
