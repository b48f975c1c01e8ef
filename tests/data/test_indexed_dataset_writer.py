"""Tests of writing, merging and permuting token files."""

import errno
import hashlib
import os
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacore.errors import DataFormatError, WorkspaceError
from megacore.token_files import indexed_dataset_writer
from megacore.token_files.indexed_dataset import IndexedDataset
from megacore.token_files.indexed_dataset_writer import IndexedDatasetWriter, permute
from tests._limits import HANG

Documents = list[list[list[int]]]

documents_of_sequences = st.lists(
    st.lists(st.lists(st.integers(0, 65535), min_size=1, max_size=5), max_size=4), max_size=12
)


def write(prefix: Path, documents: Documents, batches: int | None = None) -> IndexedDatasetWriter:
    """Write documents of sequences, one at a time or in batches of `batches` documents."""
    with IndexedDatasetWriter(prefix, "u2") as writer:
        if batches is None:
            for document in documents:
                writer.add_document(
                    [i for ids in document for i in ids], [len(ids) for ids in document]
                )
        else:
            for start in range(0, len(documents), batches):
                part = documents[start : start + batches]
                sequences = [ids for document in part for ids in document]
                writer.add_batch(
                    np.array([i for ids in sequences for i in ids], np.uint32),
                    np.array([len(ids) for ids in sequences], np.int64),
                    np.array([len(document) for document in part], np.int64),
                )
    return writer


def contents(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def read(prefix: Path) -> Documents:
    dataset = IndexedDataset(prefix)
    starts = dataset.document_indices.tolist()
    return [[dataset[i].tolist() for i in range(a, b)] for a, b in pairwise(starts)]


@settings(max_examples=60, deadline=None)
@given(documents=documents_of_sequences, batches=st.integers(1, 5))
def test_batches_and_single_documents_give_equal_files(
    tmp_path_factory: pytest.TempPathFactory, documents: Documents, batches: int
) -> None:
    folder = tmp_path_factory.mktemp("files")
    single = write(folder / "single", documents)
    batched = write(folder / "batched", documents, batches)
    assert contents(folder / "single") == contents(folder / "batched")
    assert read(folder / "batched") == documents
    counts = [
        (writer.documents, writer.empty_documents, writer.sequences, writer.tokens)
        for writer in (single, batched)
    ]
    sequences = [len(ids) for document in documents for ids in document]
    assert counts[0] == counts[1]
    assert counts[0] == (len(documents), documents.count([]), len(sequences), sum(sequences))
    for suffix, content in zip((".bin", ".idx"), contents(folder / "batched"), strict=True):
        assert batched.sha256[suffix] == hashlib.sha256(content).hexdigest()


def test_a_length_of_zero_is_an_empty_document(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "a", "u2") as writer:
        writer.add_batch(np.arange(5), np.array([0, 3, 0, 2]))
        writer.add_batch(np.arange(0), np.array([0]))
    assert read(tmp_path / "a") == [[], [[0, 1, 2]], [], [[3, 4]], []]


@pytest.mark.parametrize(("lengths", "sequences"), [([2], None), ([3], [2]), ([1, 2], [1])])
def test_lengths_that_do_not_add_up_are_refused(
    tmp_path: Path, lengths: list[int], sequences: list[int] | None
) -> None:
    counts = None if sequences is None else np.array(sequences)
    with (
        pytest.raises(ValueError, match="3 ids in"),
        IndexedDatasetWriter(tmp_path / "a", "u2") as writer,
    ):
        writer.add_batch(np.arange(3), np.array(lengths), counts)
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=40, deadline=None)
@given(shards=st.lists(documents_of_sequences, min_size=1, max_size=4))
def test_merged_shards_equal_the_unsharded_files(
    tmp_path_factory: pytest.TempPathFactory, shards: list[Documents]
) -> None:
    folder = tmp_path_factory.mktemp("files")
    unsharded = write(folder / "unsharded", [document for shard in shards for document in shard])
    with IndexedDatasetWriter(folder / "merged", "u2") as writer:
        for number, shard in enumerate(shards):
            write(folder / str(number), shard)
            writer.append(IndexedDataset(folder / str(number)))
    assert contents(folder / "merged") == contents(folder / "unsharded")
    assert writer.sha256 == unsharded.sha256
    assert writer.documents == unsharded.documents
    assert writer.empty_documents == unsharded.empty_documents


@settings(max_examples=60, deadline=None)
@given(documents=documents_of_sequences, seed=st.integers(0, 2**32 - 1), gather=st.integers(1, 6))
def test_permuted_files_equal_files_of_permuted_documents(
    tmp_path_factory: pytest.TempPathFactory, documents: Documents, seed: int, gather: int
) -> None:
    folder = tmp_path_factory.mktemp("files")
    order = np.arange(len(documents))
    np.random.RandomState(seed).shuffle(order)
    write(folder / "expected", [documents[i] for i in order])
    write(folder / "read", documents)
    with (
        pytest.MonkeyPatch.context() as patch,
        IndexedDatasetWriter(folder / "permuted", "u2") as writer,
    ):
        patch.setattr(indexed_dataset_writer, "_GATHER_DOCUMENTS", gather)
        patch.setattr(indexed_dataset_writer, "_COPY_BYTES", 8)
        permute(IndexedDataset(folder / "read"), order, writer)
    assert contents(folder / "permuted") == contents(folder / "expected")


def test_shards_of_different_types_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", [[[1]]])
    with (
        pytest.raises(DataFormatError, match="made with different tokenizers"),
        IndexedDatasetWriter(tmp_path / "b", "i4") as writer,
    ):
        writer.append(IndexedDataset(tmp_path / "a"))


@pytest.mark.parametrize("change", [-3, -2, 1, 2])
def test_a_shard_that_changes_its_length_is_refused_or_read_as_it_was(
    tmp_path: Path, change: int
) -> None:
    write(tmp_path / "a", [[[1, 2], [3]]])
    before = contents(tmp_path / "a")
    dataset = IndexedDataset(tmp_path / "a")
    os.truncate(tmp_path / "a.bin", 6 + change)
    expected: AbstractContextManager[object] = nullcontext()
    if change < 0:
        expected = pytest.raises(DataFormatError, match=r"a\.bin became shorter while it was read")
    with expected, IndexedDatasetWriter(tmp_path / "b", "u2") as writer:
        writer.append(dataset)
    if change > 0:
        assert contents(tmp_path / "b") == before


@pytest.mark.parametrize(("dtype", "bad"), [("u2", 2**16), ("u2", -1), ("i4", 2**31), ("i4", -2)])
def test_an_id_that_the_type_cannot_hold_is_refused_and_leaves_no_file(
    tmp_path: Path, dtype: str, bad: int
) -> None:
    with (
        pytest.raises(DataFormatError, match=f"document 3 has the token id {bad}, beyond"),
        IndexedDatasetWriter(tmp_path / "a", dtype) as writer,
    ):
        writer.add_batch(np.array([9, 1, 2, bad, 3]), np.array([1, 0, 2, 2]))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_the_existing_files(tmp_path: Path) -> None:
    write(tmp_path / "a", [[[1, 2]]])
    before = contents(tmp_path / "a")
    with pytest.raises(DataFormatError), IndexedDatasetWriter(tmp_path / "a", "u2") as writer:
        writer.add_batch(np.array([5, 2**16]), np.array([1, 1]))
    assert contents(tmp_path / "a") == before
    assert len(list(tmp_path.iterdir())) == 2


def test_a_bin_file_that_cannot_be_renamed_keeps_the_existing_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a", [[[1, 2]]])
    before = contents(tmp_path / "a")
    replace = os.replace

    def refuse(source: Path, target: Path) -> None:
        if target == tmp_path / "a.bin":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(WorkspaceError, match=r"a\.bin: .*it is a mount point or in use"):
        write(tmp_path / "a", [[[3]]])
    assert contents(tmp_path / "a") == before
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("name", ["a.bin", "a.idx"])
def test_a_directory_in_the_way_is_kept_and_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name / "file").mkdir(parents=True)
    with pytest.raises(WorkspaceError, match="in the way"):
        write(tmp_path / "a", [[[1]]])
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == [
        name,
        f"{name}/file",
    ]


def test_the_idx_file_appears_after_the_bin_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    visible_names: list[set[str]] = []
    replace = os.replace

    def watch(source: Path, target: Path) -> None:
        replace(source, target)
        visible_names.append({path.name for path in tmp_path.iterdir() if ".tmp-" not in path.name})

    monkeypatch.setattr(os, "replace", watch)
    write(tmp_path / "a", [[[1]]])
    assert visible_names == [{"a.bin"}, {"a.bin", "a.idx"}]


def test_a_full_disk_raises_a_workspace_error_and_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / f"a.bin.tmp-{os.getpid()}").symlink_to("/dev/full")
    with (
        pytest.raises(WorkspaceError, match="free some space"),
        IndexedDatasetWriter(tmp_path / "a", "u2") as writer,
    ):
        writer.add_document(np.zeros(1 << 20, np.uint16))
    assert list(tmp_path.iterdir()) == []


NO_FILE_BEYOND_4_KB = """
import resource, signal, sys
import numpy as np
from megacore.token_files.indexed_dataset_writer import IndexedDatasetWriter
from megacore.errors import WorkspaceError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    with IndexedDatasetWriter(sys.argv[1], "u2") as writer:
        writer.add_batch(np.ones(1000, np.uint16), np.ones(1000, np.int64))
except WorkspaceError as error:
    sys.exit(str(error))
"""


def test_an_idx_file_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    # In a separate process: the limit would also apply to the output of pytest.
    command = [sys.executable, "-c", NO_FILE_BEYOND_4_KB, str(tmp_path / "a")]
    result = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=HANG
    )
    assert result.returncode == 1
    assert "File too large: raise the limit" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_large_permutation_is_processed_in_parts(tmp_path: Path) -> None:
    # The tokens take 64 MB.
    lengths = np.full(4096, 8192)
    with IndexedDatasetWriter(tmp_path / "a", "u2") as writer:
        for _ in range(16):
            writer.add_batch(np.zeros(lengths[:256].sum(), np.uint16), lengths[:256])
    dataset = IndexedDataset(tmp_path / "a")
    parts = list(
        accumulate(part.stop - part.start for part in indexed_dataset_writer._parts(lengths * 2))
    )
    assert parts == [1024, 2048, 3072, 4096]
    with IndexedDatasetWriter(tmp_path / "b", "u2") as writer:
        permute(dataset, np.arange(4096)[::-1], writer)
    assert writer.tokens == len(dataset.tokens)


def test_a_temporary_that_cannot_be_removed_is_a_workspace_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    writer = IndexedDatasetWriter(tmp_path / "tokens", "u2")
    writer.add_document([1])
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(WorkspaceError, match="Read-only"):
        writer.__exit__(KeyError, KeyError())
