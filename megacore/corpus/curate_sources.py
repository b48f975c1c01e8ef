"""Duplicates of documents that earlier sources of a blend keep.

Deduplication across sources compares the documents of earlier sources as further shards, behind
those of the source itself. Files `.fallen` record which earlier source has the duplicate of a
document: pairs of the document's number in its shard and the number of that source from 1.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.paths import exists, glob

FALLEN = "megacore.fallen"
"""Field with the reason of a document's removal, if it falls to an earlier source."""
_SIGNATURE = np.dtype([("hash", "<u8"), ("priority", "<u2"), ("doc", "<u4")])
"""datatrove's record of an exact signature; a file is sorted by hash."""


class Attribution:
    """Block after a comparison: documents fall to the first source that has a duplicate of them."""

    def __init__(self, folder: Path, owners: Sequence[int], first: int, *, near: bool) -> None:
        """Take the folder of a deduplication.

        Args:
            folder: folder with signatures and duplicates.
            owners: number of the source of each shard of earlier sources, ascending.
            first: number of own shards, the number of the first shard of an earlier source.
            near: True for the clusters of near duplicates, False for one task's exact duplicates.
        """
        self._folder, self._owners, self._first, self._near = folder, owners, first, near

    def __call__(self, data: Any, rank: int = 0, world_size: int = 1) -> None:
        """Write the files `.fallen` of one task."""
        if self._near:
            self._attribute_clusters()
        else:
            self._attribute_exact(rank)

    def _attribute_exact(self, finder: int) -> None:
        signatures = self._folder / "signatures" / f"{finder:04d}"
        for path in sorted(glob(self._folder / "duplicates" / f"{finder:05d}", "*.c4_dup")):
            if int(path.stem) >= self._first:
                continue
            rows = _signatures(signatures / f"{path.stem}.c4_sig")
            rows = rows[np.isin(rows["doc"], np.fromfile(path, "<u4"))]
            sources = np.zeros(len(rows), "<u4")
            # The first source comes last and overwrites the others.
            for number, owner in reversed(list(enumerate(self._owners, self._first))):
                hashes = _signatures(signatures / f"{number:05d}.c4_sig")["hash"]
                places = np.searchsorted(hashes, rows["hash"])
                inside = places < len(hashes)
                same = np.zeros(len(rows), bool)
                same[inside] = hashes[places[inside]] == rows["hash"][inside]
                sources[same] = owner
            _write(path, zip(rows["doc"][sources > 0], sources[sources > 0], strict=True))

    def _attribute_clusters(self) -> None:
        """Remove the own documents of clusters that have one of an earlier source, too.

        datatrove keeps any one document of a cluster.
        """
        folder, sources = self._folder / "remove", dict[int, int]()
        for number, owner in enumerate(self._owners, self._first):
            for cluster in _pairs(folder / f"{number:06d}.clusters")[:, 1].tolist():
                sources.setdefault(cluster, owner)
        for path in sorted(glob(folder, "*.clusters")):
            if int(path.stem) >= self._first:
                continue
            fallen = [
                (document, sources[cluster])
                for document, cluster in _pairs(path).tolist()
                if cluster in sources
            ]
            if fallen:
                removed = path.with_suffix(".remove")
                documents = {document for document, _ in fallen}
                if exists(removed):
                    documents.update(np.fromfile(removed, "<u4").tolist())
                _write_numbers(removed, sorted(documents))
            _write(path, fallen)


class SourceNames:
    """Block that gives documents that fall to an earlier source this reason of their removal."""

    def __init__(self, folder: Path) -> None:
        """Take the folder of a deduplication."""
        self._folder = folder

    def __call__(self, data: Iterable[Any], rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        """Yield the documents of a shard."""
        sources = dict(
            pair
            for path in glob(self._folder, "*/**/*.fallen")
            if int(path.stem) == rank
            for pair in _pairs(path).tolist()
        )
        for number, document in enumerate(data):
            if number in sources:
                document.metadata[FALLEN] = f"duplicate of source {sources[number]}"
            yield document


def _signatures(path: Path) -> npt.NDArray[Any]:
    """Return the signatures of a shard; a file that is missing or empty has none."""
    if not exists(path) or not path.stat().st_size:
        return np.empty(0, _SIGNATURE)
    return np.memmap(path, _SIGNATURE, "r")


def _pairs(path: Path) -> npt.NDArray[np.uint32]:
    """Return the pairs of numbers in a file [N, 2]; there are none if it is missing."""
    return (np.fromfile(path, "<u4") if exists(path) else np.empty(0, "<u4")).reshape(-1, 2)


def _write(path: Path, pairs: Iterable[tuple[Any, Any]]) -> None:
    _write_numbers(path.with_suffix(".fallen"), list(pairs))


def _write_numbers(path: Path, numbers: Sequence[Any]) -> None:
    """Write numbers as u32; numpy's tofile would not notice a full disk if they are few."""
    path.write_bytes(np.array(numbers, "<u4").tobytes())
