import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacore.errors import DataFormatError
from megacore.inspect.provenance import DocumentPlace, OriginFile, Origins, find_origins
from tests.data._corpus import entry, write_corpus, write_documents


@settings(max_examples=60, deadline=None)
@given(good=st.lists(st.booleans(), min_size=1, max_size=40), first=st.integers(1, 9))
def test_line_numbers_count_skipped_lines(good: list[bool], first: int) -> None:
    lines = [first + index for index, is_good in enumerate(good) if is_good]
    skipped = tuple(first + index for index, is_good in enumerate(good) if not is_good)
    file = OriginFile("a", "text", len(lines), skipped, first)
    assert [file.line(number) for number in range(len(lines))] == lines


def test_documents_of_several_files_have_their_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "documents.json"
    files = [
        entry("/data/a.jsonl", 2, skipped_lines=[2]),
        entry("/data/none.jsonl", 0, skipped_lines=[1, 2]),
        entry("/data/a.jsonl", 3, skipped_lines=[7], first_line=6),
        entry("near.parquet", 1, key="content"),
    ]
    write_documents(path, files)
    origins = Origins.read(path)
    places = [origins.place(number) for number in range(origins.documents)]
    assert places[:5] == [DocumentPlace("/data/a.jsonl", line, "text") for line in (1, 3, 6, 8, 9)]
    assert places[5] == DocumentPlace(str(tmp_path / "near.parquet"), 1, "content")
    for number in (-1, 6):
        with pytest.raises(IndexError, match="has no document"):
            origins.place(number)


def test_the_shuffle_of_documents_is_undone(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, [f"text {number}" for number in range(20)], seed=7)
    origins = find_origins(corpus.prefix, 20)
    assert origins is not None
    assert corpus.order != sorted(corpus.order)
    for stored, read in enumerate(corpus.order):
        place = origins.place(stored)
        assert place is not None
        expected = ("a.jsonl", read + 1) if read < 10 else ("b.jsonl.gz", read - 9)
        assert (Path(place.path).name, place.line) == expected


def test_documents_json_is_read_from_the_directory_of_the_token_files(tmp_path: Path) -> None:
    assert find_origins(tmp_path / "tokens_text_document", 1) is None
    write_documents(tmp_path / "documents.json", [entry("a", 1)])
    assert find_origins(tmp_path / "tokens_text_document", 1) is not None
    assert find_origins(tmp_path / "other_text_document", 1) is None
    write_documents(tmp_path / "other_text_document.documents.json", [entry("b", 1)])
    origins = find_origins(tmp_path / "other_text_document", 1)
    assert origins is not None
    assert origins.files[0].path == str(tmp_path / "b")
    with pytest.raises(DataFormatError, match=r"counts 1 documents, but .* has 2"):
        find_origins(tmp_path / "other_text_document", 2)


def test_linked_token_files_are_traced_to_their_source(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "made", ["a", "b"])
    (tmp_path / "linked").mkdir()
    path = tmp_path / "linked" / "documents.json"
    write_documents(path, [], prefix=corpus.prefix)
    origins = find_origins(tmp_path / "linked" / "tokens_text_document", 2)
    assert origins is not None
    assert origins.place(1) == DocumentPlace(str(tmp_path / "made" / "b.jsonl.gz"), 1, "text")
    Path(f"{corpus.prefix}.documents.json").unlink()
    origins = find_origins(tmp_path / "linked" / "tokens_text_document", 2)
    assert origins is not None
    assert (origins.path, origins.place(1)) == (path, None)


def test_a_shard_without_first_line_has_no_places(tmp_path: Path) -> None:
    write_documents(tmp_path / "documents.json", [entry("a", 1, first_line=None)])
    assert Origins.read(tmp_path / "documents.json").place(0) is None


def test_the_tokenizer_path_is_none_if_the_directory_is_gone(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    for directory, expected in (
        ("tokenizer", tmp_path / "tokenizer"),
        ("gone", None),
        (None, None),
    ):
        write_documents(tmp_path / "documents.json", [], tokenizer={"directory": directory})
        assert Origins.read(tmp_path / "documents.json").tokenizer_path == expected


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        json.dumps({"format": 2}),
        json.dumps({"format": 1, "files": 3}),
        json.dumps({"format": 1, "files": [entry("a", -1)], "shuffle_seed": None}),
        json.dumps(
            {"format": 1, "files": [entry("a", 1, skipped_lines=[2, 2])], "shuffle_seed": None}
        ),
        json.dumps({"format": 1, "files": [], "shuffle_seed": "x"}),
        json.dumps({"format": 1, "files": [], "shuffle_seed": -1}),
        json.dumps({"format": 1, "files": [], "shuffle_seed": None, "append_eod": True}),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "documents.json").write_text(content)
    with pytest.raises(DataFormatError, match=r"documents\.json (is damaged|has format 2)"):
        Origins.read(tmp_path / "documents.json")
