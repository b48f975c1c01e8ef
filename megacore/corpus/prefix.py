"""Ready-made token files, as Megatron-LM's tools write them: nothing is copied, the corpus refers to them."""

from pathlib import Path
from typing import Any

from megacore.artifact.manifest import file_digest
from megacore.config.keys import key_parameters
from megacore.config.source import PrefixSource
from megacore.corpus.documents import SourceFile, write_sources
from megacore.data.indexed_dataset import IndexedDataset, bin_path, idx_path


def fingerprint(source: PrefixSource) -> dict[str, Any]:
    """Return absolute paths, sizes and modification times of both files, and the sha256 of the index."""
    files = [[file.path, file.size, file.mtime_ns] for file in _files(source)]
    return key_parameters(source, "collect", {"files": files, "idx_sha256": file_digest(idx_path(source.prefix))})


def collect(source: PrefixSource, directory: Path) -> dict[str, int]:
    """Write `sources.json` after the files' structure was checked. Raises DataFormatError."""
    files = _files(source)
    dataset = IndexedDataset(source.prefix)
    write_sources(directory, source.kind, files, prefix=str(Path(source.prefix).absolute()))
    # A pair of files of nothing but empty documents is as empty as one without documents.
    documents = dataset.documents if len(dataset) else 0
    size = sum(file.size for file in files)
    return {"documents": documents, "files": len(files), "skipped_files": 0, "bytes": size}


def _files(source: PrefixSource) -> list[SourceFile]:
    return [SourceFile.of(path) for path in (bin_path(source.prefix), idx_path(source.prefix))]
