import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megacore.errors import DataFormatError
from megacore.inspect import provenance
from megacore.inspect.provenance import DocumentPlace, read_document
from tests.data._corpus import write_lines

TEXTS = ["first", "", "thïrd\nline", "x" * 100, "last"]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "_SCAN_BYTES", 16)


def place(path: Path, line: int, key: str = "text") -> DocumentPlace:
    return DocumentPlace(str(path), line, key)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_every_line_of_a_file_is_read(tmp_path: Path, name: str) -> None:
    write_lines(tmp_path / name, TEXTS, key="content", source="lib/a.py")
    for number, text in enumerate(TEXTS, 1):
        document = read_document(place(tmp_path / name, number, "content"))
        assert (document.text, document.source) == (text, "lib/a.py")
    with pytest.raises(DataFormatError, match="has 5 lines, not 6"):
        read_document(place(tmp_path / name, 6, "content"))


def test_a_line_of_a_zstd_file_is_read(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", TEXTS)
    compressed = zstandard.ZstdCompressor().compress((tmp_path / "a.jsonl").read_bytes())
    (tmp_path / "a.jsonl.zst").write_bytes(compressed)
    document = read_document(place(tmp_path / "a.jsonl.zst", 3))
    assert (document.text, document.source) == (TEXTS[2], None)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=30), min_size=1, max_size=8),
    end=st.booleans(),
)
def test_any_text_is_read_from_its_line(tmp_path: Path, texts: list[str], end: bool) -> None:
    content = "\n".join(json.dumps({"text": text}) for text in texts) + ("\n" if end else "")
    (tmp_path / "a.jsonl").write_text("\ufeff" + content, encoding="utf-8")
    assert [
        read_document(place(tmp_path / "a.jsonl", line)).text for line in range(1, len(texts) + 1)
    ] == texts
    with pytest.raises(DataFormatError, match=f"has {len(texts)} lines, not {len(texts) + 1}"):
        read_document(place(tmp_path / "a.jsonl", len(texts) + 1))


def test_rows_of_a_parquet_file_are_read(tmp_path: Path) -> None:
    table = pa.table({"text": [*TEXTS, None], "other": list(range(6))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    assert [read_document(place(tmp_path / "a.parquet", row)).text for row in range(1, 6)] == TEXTS
    for row, message in ((6, "row 6 is no text"), (7, "has 6 rows, not 7")):
        with pytest.raises(DataFormatError, match=message):
            read_document(place(tmp_path / "a.parquet", row))


def test_a_line_without_a_document_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n')
    for path, line, message in (
        (tmp_path / "a.jsonl", 2, "a.jsonl:2 is blank"),
        (tmp_path / "b", 1, "cannot be read"),
    ):
        with pytest.raises(DataFormatError, match=message):
            read_document(place(path, line))


def test_a_file_whose_size_has_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    assert read_document(DocumentPlace(str(path), 2, "text", 32)).text == "two"
    with pytest.raises(
        DataFormatError,
        match=r"a\.jsonl has 32 bytes and had 48 when it was tokenized: line 2 may be",
    ):
        read_document(DocumentPlace(str(path), 2, "text", 48))
