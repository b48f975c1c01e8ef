"""Tests of tokenizing a corpus in shards and merging them."""

import json
import os
import resource
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megacore.corpus.segments import divide, jsonl_segments, segments
from megacore.errors import DataFormatError
from megacore.tokenizer.records import read_files
from megacore.tokenizer.tokenize import (
    TokenizeOptions,
    merge_shards,
    tokenize_corpus,
    tokenize_shard,
)
from tests.tokenizer._corpora import TEXTS, train_tokenizer, write_corpus


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("shards")
    corpus = write_corpus(root / "corpus", TEXTS)
    with open(corpus / "corpus.jsonl", "a") as file:
        file.write('\n{"text": 3}\n{"text": "the end"}')
    tokenizer = train_tokenizer(root / "tokenizer", write_corpus(root / "training", TEXTS))
    return corpus, tokenizer


def tokenize_in_shards(
    corpus: Path, tokenizer: Path, folder: Path, size: int, options: TokenizeOptions
) -> Path:
    shards = []
    for number, part in enumerate(divide(segments(corpus), size)):
        shards.append(folder / f"shard-{number}")
        shards[-1].mkdir()
        tokenize_shard(part, tokenizer, shards[-1], options, workers=1)
    (folder / "merged").mkdir()
    merge_shards(shards, folder / "merged", tokenizer, options)
    return folder / "merged"


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(size=st.integers(1, 3000), seed=st.none() | st.integers(0, 99), sentences=st.booleans())
def test_merged_shards_equal_the_unsharded_result(
    folders: tuple[Path, Path],
    tmp_path_factory: pytest.TempPathFactory,
    size: int,
    seed: int | None,
    sentences: bool,
) -> None:
    folder = tmp_path_factory.mktemp("run")
    options = TokenizeOptions(
        shuffle_seed=seed, split_sentences=sentences, sentence_splitter="rules", on_bad_line="skip"
    )
    (folder / "unsharded").mkdir()
    counts = tokenize_corpus(*folders, folder / "unsharded", options, workers=1)
    merged = tokenize_in_shards(*folders, folder, max(size, 400), options)
    assert {path.name: path.read_bytes() for path in merged.iterdir()} == {
        path.name: path.read_bytes() for path in (folder / "unsharded").iterdir()
    }
    assert counts["skipped_lines"] == 2


def test_a_shard_without_tokens_is_accepted_and_a_corpus_without_refused(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    corpus = write_corpus(tmp_path / "corpus", ["", ""])
    for name in ("shard", "merged"):
        (tmp_path / name).mkdir()
    counts = tokenize_shard(segments(corpus), folders[1], tmp_path / "shard", TokenizeOptions())
    assert (counts["documents"], counts["tokens"]) == (2, 0)
    with pytest.raises(DataFormatError, match="the 2 documents of the 1 shards have no token"):
        merge_shards(
            [tmp_path / "shard"], tmp_path / "merged", folders[1], TokenizeOptions(shuffle_seed=1)
        )


def test_a_repeated_file_has_one_record_per_occurrence(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    path = write_corpus(tmp_path / "corpus", ["a", "b"]) / "corpus.jsonl"
    (tmp_path / "shard").mkdir()
    tokenize_shard(
        jsonl_segments([path, path], "text") * 2, folders[1], tmp_path / "shard", TokenizeOptions()
    )
    files = json.loads((tmp_path / "shard" / "documents.json").read_text())["files"]
    assert [file["documents"] for file in files] == [2, 2, 2, 2]


def test_shards_in_the_wrong_order_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    options = TokenizeOptions(on_bad_line="skip")
    tokenize_in_shards(*folders, tmp_path, 500, options)
    (tmp_path / "again").mkdir()
    with pytest.raises(
        DataFormatError, match=r"a shard begins inside of .*corpus\.jsonl, but the one before it"
    ):
        merge_shards(
            [tmp_path / "shard-1", tmp_path / "shard-0"], tmp_path / "again", folders[1], options
        )
    assert list((tmp_path / "again").iterdir()) == []


def test_a_damaged_shard_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    options = TokenizeOptions(on_bad_line="skip")
    tokenize_in_shards(*folders, tmp_path, 500, options)
    with open(tmp_path / "shard-1" / "tokens_text_document.bin", "ab") as file:
        file.write(b"\0\0")
    (tmp_path / "again").mkdir()
    with pytest.raises(DataFormatError, match=r"shard-1.*\.bin has \d+ bytes"):
        merge_shards(
            [tmp_path / "shard-0", tmp_path / "shard-1"], tmp_path / "again", folders[1], options
        )
    assert list((tmp_path / "again").iterdir()) == []


@pytest.mark.parametrize("entry", [{"path": 5, "key": "text"}, {"path": "a"}, None])
def test_a_damaged_record_of_files_is_refused(tmp_path: Path, entry: object) -> None:
    (tmp_path / "documents.json").write_text(json.dumps({"files": [entry]}))
    with pytest.raises(DataFormatError, match=r"documents\.json is missing or damaged .*tokenize"):
        read_files(tmp_path)


def test_the_merge_of_many_shards_has_few_files_open(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """300 shards, and room for 32 more open files than this process has."""
    documents, options = 300, TokenizeOptions()
    corpus = write_corpus(tmp_path / "corpus", [f"document {n}" for n in range(documents)])
    shards = []
    for number, part in enumerate(divide(segments(corpus), 1)):
        shards.append(tmp_path / f"shard-{number}")
        shards[-1].mkdir()
        tokenize_shard(part, folders[1], shards[-1], options, workers=1)
    (tmp_path / "merged").mkdir()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 32, limit[1]))
    try:
        counts = merge_shards(shards, tmp_path / "merged", folders[1], options)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert len(shards) > documents * 0.9
    assert counts["documents"] == documents
