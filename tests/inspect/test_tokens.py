from pathlib import Path

import pytest

from megacore.errors import DataFormatError
from megacore.inspect import tokens
from megacore.inspect.tokens import describe, document_of, document_tokens, find_prefixes, id_range
from megacore.token_files.indexed_dataset import IndexedDataset, write_members
from megacore.token_files.indexed_dataset_writer import IndexedDatasetWriter
from tests.data._files import write_tokens


def test_description_counts_documents_sequences_tokens_and_bytes(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_tokens(tmp_path / "a", [5, 0, 3, 0]))
    report = describe(dataset)
    assert (report.documents, report.empty_documents, report.sequences, report.tokens) == (
        4,
        2,
        2,
        8,
    )
    assert (report.dtype, report.bin_bytes, report.idx_bytes) == ("uint16", 16, 34 + 12 * 2 + 8 * 5)
    assert (report.smallest_id, report.largest_id) == (0, 7)
    assert report.lengths is not None
    assert report.lengths.median == 3


def test_the_range_of_ids_spans_all_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_BLOCK_BYTES", 8)
    with IndexedDatasetWriter(tmp_path / "a", "<i4") as writer:
        writer.add_document([7, 9, 70_000, 4, 8])
    assert id_range(IndexedDataset(tmp_path / "a")) == (4, 70_000)


def test_a_file_without_tokens_has_no_ids(tmp_path: Path) -> None:
    report = describe(IndexedDataset(write_tokens(tmp_path / "a", [0])))
    assert (report.smallest_id, report.largest_id, report.lengths) == (None, None, None)


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_a_path_with_or_without_suffix_names_the_token_files(tmp_path: Path, suffix: str) -> None:
    prefix = write_tokens(tmp_path / "a.b_text_document", [5])
    assert find_prefixes(prefix + suffix) == (prefix,)


def test_a_directory_names_its_members(tmp_path: Path) -> None:
    prefixes = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        prefixes.append(write_tokens(tmp_path / name / "tokens_text_document", [5]))
    (tmp_path / "both").mkdir()
    write_members(tmp_path / "both", [tmp_path / "one", tmp_path / "two"])
    assert find_prefixes(tmp_path / "one") == (prefixes[0],)
    assert find_prefixes(tmp_path / "both") == tuple(prefixes)


def test_a_path_without_text_document_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "a_text_document", [5])
    with pytest.raises(DataFormatError, match=rf"a\.idx does not exist: did you mean {prefix}\?"):
        find_prefixes(tmp_path / "a")
    with pytest.raises(DataFormatError, match=r"/b does not exist: give a pair"):
        find_prefixes(tmp_path / "b")
    (tmp_path / "b").touch()
    with pytest.raises(DataFormatError, match=r"/b\.idx does not exist: give a pair"):
        find_prefixes(tmp_path / "b")


def test_documents_and_sequences_are_looked_up_by_number(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_tokens(tmp_path / "a", [0, 2, 0, 0, 3]))
    assert [document_of(dataset, sequence) for sequence in range(2)] == [1, 4]
    assert [document_tokens(dataset, number).tolist() for number in range(5)] == [
        [],
        [0, 1],
        [],
        [],
        [2, 3, 4],
    ]
    assert document_tokens(dataset, 4, 2).tolist() == [2, 3]
    for number in (-1, 5):
        with pytest.raises(IndexError, match="has no document"):
            document_tokens(dataset, number)
