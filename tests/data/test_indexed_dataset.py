"""Tests of reading token files."""

import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacore.errors import DataFormatError
from megacore.token_files.indexed_dataset import DTYPES, IndexedDataset, token_dtype
from megacore.token_files.indexed_dataset_writer import IndexedDatasetWriter
from tests.data._files import write_tokens


def test_written_files_equal_megatrons_format_byte_for_byte(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "a", token_dtype(50257)) as writer:
        for ids in ([1, 2, 3], [], [65000]):
            writer.add_document(ids)
    assert (writer.documents, writer.sequences, writer.tokens) == (3, 2, 4)
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<4H", 1, 2, 3, 65000)
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 4)
    expected += struct.pack("<2i", 3, 1) + struct.pack("<2q", 0, 6) + struct.pack("<4q", 0, 1, 1, 2)
    assert (tmp_path / "a.idx").read_bytes() == expected


def test_the_size_of_the_vocabulary_determines_the_type() -> None:
    assert token_dtype(65499) == np.dtype("<u2")
    assert token_dtype(65500) == np.dtype("<i4")


@settings(max_examples=40, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 120), max_size=6), max_size=12),
    code=st.sampled_from([1, 2, 3, 4, 5, 8]),
    modes=st.booleans(),
)
def test_written_documents_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], code: int, modes: bool
) -> None:
    prefix = tmp_path_factory.mktemp("files") / "a"
    with IndexedDatasetWriter(prefix, DTYPES[code]) as writer:
        for ids in documents:
            writer.add_document(ids)
    if modes:
        with open(f"{prefix}.idx", "ab") as file:
            file.write(bytes(writer.sequences))
    dataset = IndexedDataset(prefix)
    assert dataset.dtype == DTYPES[code]
    assert [dataset[i].tolist() for i in range(len(dataset))] == [ids for ids in documents if ids]
    assert dataset.tokens.tolist() == [token for ids in documents for token in ids]
    bounds = dataset.document_indices.tolist()
    assert [b - a for a, b in pairwise(bounds)] == [int(bool(ids)) for ids in documents]


def test_get_returns_parts_of_sequences(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_tokens(tmp_path / "a", [5, 3]))
    assert dataset.get(0, 2).tolist() == [2, 3, 4]
    assert dataset.get(1, 1, 1).tolist() == [6]
    assert dataset.get(1, 3, 0).tolist() == []
    assert dataset.token_range(1, 2).tolist() == [5, 6, 7]
    assert dataset.count_tokens(0, 2) == 8


def test_get_refuses_ranges_outside_a_sequence(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_tokens(tmp_path / "a", [5, 3]))
    for arguments in ((2,), (-1,), (0, 6), (0, -1), (0, 3, 3), (0, 0, -1)):
        with pytest.raises(IndexError):
            dataset.get(*arguments)


def test_tokens_are_read_only(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_tokens(tmp_path / "a", [5, 3]))
    with pytest.raises(ValueError, match="read-only"):
        dataset[0][0] = 1


def test_megatrons_token_files_are_read(shared_data: Path) -> None:
    dataset = IndexedDataset(shared_data / "golden" / "C_merged")
    assert (len(dataset), dataset.documents, dataset.dtype) == (596, 604, np.dtype("<u2"))


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_missing_file_is_refused_with_its_name(tmp_path: Path, suffix: str) -> None:
    prefix = write_tokens(tmp_path / "a", [5])
    Path(f"{prefix}.{suffix}").unlink()
    with pytest.raises(DataFormatError, match=rf"a\.{suffix} does not exist"):
        IndexedDataset(prefix)


@pytest.mark.parametrize(
    ("offset", "content", "message"),
    [
        (0, b"X", "is not an index"),
        (9, struct.pack("<Q", 2), "format version 2"),
        (17, b"\x07", "dtype code 7"),
        (17, b"\x09", "dtype code 9"),
        (17, b"\x04", "instead of 20: write"),
        (18, struct.pack("<Q", 2**61), "cut off or is damaged"),
        (26, struct.pack("<Q", 0), "no document entries"),
        (34, struct.pack("<i", -1), "the length -1"),
        (34, struct.pack("<i", 6), "instead of 12"),
        (42, struct.pack("<q", 2), "at byte 2 instead of 0"),
        (58, struct.pack("<q", 1), "span the sequences 1 to 2"),
        (66, struct.pack("<q", 3), "document 2 starts before document 1"),
        (74, struct.pack("<q", 1), "span the sequences 0 to 1"),
    ],
)
def test_a_damaged_idx_file_is_refused(
    tmp_path: Path, offset: int, content: bytes, message: str
) -> None:
    prefix = write_tokens(tmp_path / "a", [5, 3])
    path = Path(f"{prefix}.idx")
    data = bytearray(path.read_bytes())
    data[offset : offset + len(content)] = content
    path.write_bytes(data)
    with pytest.raises(DataFormatError, match=message):
        IndexedDataset(prefix)


def test_a_bin_file_of_the_wrong_size_is_refused(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "a", [5, 3])
    with open(f"{prefix}.bin", "ab") as file:
        file.write(b"\x00\x00")
    with pytest.raises(
        DataFormatError, match="has 18 bytes, but its index counts 8 tokens of 2 bytes = 16"
    ):
        IndexedDataset(prefix)
