"""Tests of local parquet sources."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megacore.config.data import JsonlSource, ParquetSource
from megacore.corpus import local_files
from megacore.corpus.blocks import iterate_texts
from megacore.corpus.collect import collect, fingerprint
from megacore.errors import DataFormatError
from tests.corpus._files import write_form


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    write_form(folder / "a.parquet", ["one", "two", "three"])
    write_form(folder / "b.parquet", ["four"])
    write_form(folder / "none.parquet", [])
    (tmp_path / "out").mkdir()
    return folder


def source(*files: Path | str, key: str = "text") -> ParquetSource:
    return ParquetSource(kind="parquet", files=tuple(map(str, files)), key=key)


def test_rows_of_the_files_are_documents(files: Path, tmp_path: Path) -> None:
    parquet_source = source(files / "b.parquet", files / "[an]*.parquet")
    size = sum(path.stat().st_size for path in files.iterdir())
    assert collect(parquet_source, tmp_path / "out") == {
        "documents": 4,
        "files": 3,
        "skipped_files": 0,
        "bytes": size,
    }
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["sources.json"]
    assert list(iterate_texts(tmp_path / "out")) == ["four", "one", "two", "three"]


def test_a_changed_file_is_refused_and_has_another_fingerprint(files: Path, tmp_path: Path) -> None:
    parquet_source = source(files / "a.parquet")
    before = fingerprint(parquet_source)
    assert fingerprint(source(files / "a.parquet", key="id")) != before
    collect(parquet_source, tmp_path / "out")
    write_form(files / "a.parquet", ["other"])
    assert fingerprint(parquet_source) != before
    with pytest.raises(DataFormatError, match=r"a\.parquet has changed since it was collected"):
        list(iterate_texts(tmp_path / "out"))


def test_wrong_files_and_columns_are_refused_by_collect(files: Path, tmp_path: Path) -> None:
    (files / "x.jsonl").write_text('{"text": "a"}\n')
    pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), files / "twice.parquet")
    (files / "broken.parquet").write_bytes((files / "a.parquet").read_bytes()[:-20])
    for parquet_source, message in {
        source(
            files / "a.parquet", key="body"
        ): r"a\.parquet has no column 'body', only id, text: set data\.source\.key",
        source(
            files / "a.parquet", key="id"
        ): r"a\.parquet has int64 in column 'id' instead of text",
        source(files / "twice.parquet"): r"twice\.parquet has 2 columns 'text': rename all but one",
        source(
            files / "x.jsonl"
        ): r"x\.jsonl is no parquet file: give it to a source of kind jsonl",
        JsonlSource(
            kind="jsonl", files=(str(files / "a.parquet"),)
        ): r"a\.parquet is no jsonl file: give it to a source of kind parquet",
        source(files / "broken.parquet"): r"broken\.parquet is a damaged parquet file",
        source(files / "none.parquet"): "the corpus is empty",
        source(files / "c.parquet"): "cannot be read: No such file",
        source(files / "*.parq"): "no file matches",
        source(files): "is not a file",
    }.items():
        with pytest.raises(DataFormatError, match=message):
            collect(parquet_source, tmp_path / "out")


def test_a_null_row_is_refused_with_its_number_or_skipped(files: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", None]}), files / "a.parquet")
    assert collect(source(files / "a.parquet"), tmp_path / "out")["documents"] == 2
    with pytest.raises(
        DataFormatError, match=r"a\.parquet row 2 is null under 'text': repair or remove the row"
    ):
        list(iterate_texts(tmp_path / "out"))
    assert list(iterate_texts(tmp_path / "out", on_bad_line="skip")) == ["a"]


def test_chunks_of_a_dictionary_column_are_bounded_in_size(tmp_path: Path) -> None:
    # The sizes in the file's metadata count each distinct value once.
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.array(["x" * 10_000] * 4_000).dictionary_encode()}), path)
    assert sum(local_files.group_sizes(path, "text")) < 1 << 20
    sizes = [column.nbytes for column in local_files.read_column(path, "text", 0, None, 1 << 20)]
    assert max(sizes) < 16 << 20
