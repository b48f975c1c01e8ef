"""Tests of tokenizing a corpus into token files."""

import dataclasses
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megacore.config.data import PrefixSource
from megacore.corpus.collect import collect
from megacore.corpus.documents import CorpusWriter
from megacore.errors import DataFormatError, FileAccessError, WorkspaceError
from megacore.token_files.indexed_dataset import IndexedDataset
from megacore.tokenizer import load_tokenizer, tokenize
from megacore.tokenizer.encode import encode_blocks
from megacore.tokenizer.tokenize import TokenizeOptions, tokenize_corpus, tokens_prefix
from tests.corpus._files import collect_changing_file
from tests.data._files import write_tokens
from tests.tokenizer._corpora import (
    TEXTS,
    contents,
    documents,
    train_punkt,
    train_tokenizer,
    write_corpus,
)

SENTENCES = TokenizeOptions(split_sentences=True, sentence_splitter="rules")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("tokenize")
    corpus = write_corpus(root / "corpus", TEXTS)
    return corpus, train_tokenizer(root / "tokenizer", corpus)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.mark.parametrize("append_eod", [False, True])
@pytest.mark.parametrize("seed", [None, 1234])
def test_documents_are_encoded_in_corpus_or_shuffled_order(
    folders: tuple[Path, Path], tmp_path: Path, append_eod: bool, seed: int | None
) -> None:
    counts = tokenize_corpus(*folders, tmp_path, TokenizeOptions(append_eod, seed))
    tokenizer = load_tokenizer(folders[1])
    order = list(range(len(TEXTS)))
    if seed is not None:
        order = np.random.RandomState(seed).permutation(len(TEXTS)).tolist()
    end = [tokenizer.eod_id] if append_eod else []
    expected = [[[*tokenizer.encode(TEXTS[i]).tolist(), *end]] if TEXTS[i] else [] for i in order]
    assert documents(tmp_path) == expected
    empty = sum(not text for text in TEXTS)
    assert counts == {
        "documents": len(TEXTS),
        "empty_documents": empty,
        "sequences": len(TEXTS) - empty,
        "tokens": sum(len(ids) for document in expected for ids in document),
        "vocab_size": 280,
        "skipped_lines": 0,
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "documents.json",
        "tokens_text_document.bin",
        "tokens_text_document.idx",
    ]


def test_a_file_that_changes_while_it_is_tokenized_is_refused(
    folders: tuple[Path, Path], tmp_path: Path, out: Path
) -> None:
    overwrite = collect_changing_file(tmp_path)
    with pytest.raises(DataFormatError, match=r"a\.jsonl has changed since it was collected"):
        tokenize_corpus(tmp_path / "corpus", folders[1], out, TokenizeOptions(), progress=overwrite)


def test_files_do_not_depend_on_workers_and_block_size(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    for workers, size in ((1, 1 << 20), (1, 50), (2, 50), (5, 1)):
        monkeypatch.setattr(tokenize, "BLOCK_BYTES", size)
        directory = tmp_path / f"{workers}-{size}"
        directory.mkdir()
        tokenize_corpus(*folders, directory, TokenizeOptions(shuffle_seed=7), workers=workers)
        written.append({path.name: path.read_bytes() for path in directory.iterdir()})
    assert all(files == written[0] for files in written)


@pytest.mark.parametrize("append_eod", [False, True])
def test_split_sentences_are_stored_as_sequences(
    folders: tuple[Path, Path], tmp_path: Path, append_eod: bool
) -> None:
    texts = ["One ends. Two ends! Is it three?", "", " \n ", "Alone"]
    corpus = write_corpus(tmp_path / "corpus", texts)
    options = dataclasses.replace(SENTENCES, append_eod=append_eod)
    tokenize_corpus(corpus, folders[1], tmp_path, options, workers=1)
    tokenizer = load_tokenizer(folders[1])
    expected = [
        [tokenizer.encode(sentence).tolist() for sentence in sentences]
        for sentences in (["One ends.", "Two ends!", "Is it three?"], [], [], ["Alone"])
    ]
    for document in expected:
        if document and append_eod:
            document[-1].append(tokenizer.eod_id)
    assert documents(tmp_path, options) == expected
    assert (tmp_path / "tokens_text_sentence.idx").exists()


def test_punkt_in_worker_processes_gives_identical_files(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    corpus = write_corpus(
        tmp_path / "corpus", ["Mr. Smith left. He was late.", "", "Dr. No came back. Why?"]
    )
    options = TokenizeOptions(split_sentences=True, sentence_data=train_punkt(tmp_path / "punkt"))
    for workers in (1, 2):
        (tmp_path / str(workers)).mkdir()
        tokenize_corpus(corpus, folders[1], tmp_path / str(workers), options, workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    assert [len(document) for document in documents(tmp_path / "1", options)] == [2, 0, 2]


def test_encode_blocks_reads_a_bounded_number_of_blocks_ahead() -> None:
    read_blocks: list[int] = []

    def blocks() -> Iterator[int]:
        for number in range(40):
            read_blocks.append(number)
            yield number

    def encode(block: int) -> int:
        assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
        return block

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TOKENIZERS_PARALLELISM", raising=False)
        stream = encode_blocks(blocks(), encode, 2)  # type: ignore[arg-type]
        assert next(stream) == 0  # type: ignore[comparison-overlap]
        assert len(read_blocks) == 4
        stream.close()  # type: ignore[attr-defined]
        assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_documents_json_records_files_and_skipped_lines(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    workspace = tmp_path / "workspace"
    (workspace / "corpora").mkdir(parents=True)
    corpus = write_corpus(workspace / "corpora" / "c", ["one", "two"])
    with open(corpus / "corpus.jsonl", "a") as file:
        file.write('\n{"other": 1}\n{"text": "three"}')
    out = workspace / "tokenized" / "t"
    out.mkdir(parents=True)
    counts = tokenize_corpus(
        corpus, folders[1], out, TokenizeOptions(on_bad_line="skip", shuffle_seed=3)
    )
    assert (counts["documents"], counts["skipped_lines"]) == (3, 2)
    record = json.loads((out / "documents.json").read_text())
    path, size = "../../corpora/c/corpus.jsonl", (corpus / "corpus.jsonl").stat().st_size
    assert record == {
        "format": 1,
        "files": [
            {
                "path": path,
                "key": "text",
                "documents": 3,
                "skipped_lines": [3, 4],
                "first_line": 1,
                "size": size,
            }
        ],
        "shuffle_seed": 3,
        "append_eod": True,
        "split_sentences": False,
        "tokenizer": {
            "directory": str(folders[1]),
            "eod_id": 0,
            "eod_token": "<|endoftext|>",
            "vocab_size": 280,
        },
    }


def test_skipped_lines_are_logged(
    folders: tuple[Path, Path], tmp_path: Path, out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = write_corpus(tmp_path / "corpus", ["one"])
    with open(corpus / "corpus.jsonl", "a") as file:
        file.write("{\n" * 5)
    tokenize_corpus(corpus, folders[1], out, TokenizeOptions(on_bad_line="skip"))
    path = corpus / "corpus.jsonl"
    assert f"skipped 5 lines without a document: {path}:2, {path}:3, {path}:4, …" in caplog.text


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_a_corpus_without_tokens_is_refused(
    folders: tuple[Path, Path], tmp_path: Path, out: Path, texts: list[str]
) -> None:
    corpus = write_corpus(tmp_path / "corpus", texts)
    with pytest.raises(
        DataFormatError,
        match=rf"the {len(texts)} documents of .* have no token"
        if texts
        else "holds no document: point",
    ):
        tokenize_corpus(corpus, folders[1], out, TokenizeOptions(shuffle_seed=1))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{\n", r"corpus\.jsonl:6 is not JSON"),
        ("\n", r"corpus\.jsonl:6 is blank"),
        ('{"words": "x"}\n', r"corpus\.jsonl:6 has no key 'text', only words"),
        ('{"text": 5}\n', r"corpus\.jsonl:6 has a int under 'text'"),
        ('{"text": "\\ud800"}\n', r"corpus\.jsonl:6 is not JSON"),
    ],
)
@pytest.mark.parametrize("seed", [None, 1])
def test_a_bad_line_is_refused_without_output_or_skipped(
    folders: tuple[Path, Path], tmp_path: Path, out: Path, line: str, message: str, seed: int | None
) -> None:
    corpus = write_corpus(tmp_path / "corpus", ["fine"] * 5)
    with open(corpus / "corpus.jsonl", "a") as file:
        file.write(line + '{"text": "after"}\n')
    with pytest.raises(DataFormatError, match=message):
        tokenize_corpus(corpus, folders[1], out, TokenizeOptions(shuffle_seed=seed))
    assert list(out.iterdir()) == []
    counts = tokenize_corpus(
        corpus, folders[1], out, TokenizeOptions(shuffle_seed=seed, on_bad_line="skip")
    )
    assert (counts["documents"], counts["skipped_lines"]) == (6, 1)


def test_a_full_disk_leaves_no_file(folders: tuple[Path, Path], out: Path) -> None:
    (out / f"tokens_text_document.bin.tmp-{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(WorkspaceError, match="No space left on device: free some space"):
        tokenize_corpus(*folders, out, TokenizeOptions())
    assert list(out.iterdir()) == []


def test_unshuffled_tokens_that_cannot_be_deleted_stop_the_build(
    folders: tuple[Path, Path], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would become part of the artifact, which would have another digest."""

    unlink = os.unlink

    def fail(path: str, **options: int) -> None:
        if path == "tokens.idx":
            raise OSError(errno.EIO, "Input/output error")
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", fail)
    with pytest.raises(FileAccessError, match=r"Input/output error.*: the disk"):
        tokenize_corpus(*folders, out, TokenizeOptions(shuffle_seed=1))


def test_an_id_outside_the_vocabulary_is_refused(
    folders: tuple[Path, Path], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(folders[1])
    tokenizer.vocab_size = 100
    monkeypatch.setattr(tokenize, "load_tokenizer", lambda directory: tokenizer)
    with pytest.raises(
        DataFormatError, match=r"the token id \d+, but its vocabulary has 100 entries"
    ):
        tokenize_corpus(*folders, out, TokenizeOptions())
    assert list(out.iterdir()) == []


def test_existing_token_files_are_linked(
    folders: tuple[Path, Path], tmp_path: Path, out: Path
) -> None:
    prefix = write_tokens(tmp_path / "given", [9, 0, 30])
    (tmp_path / "corpus").mkdir()
    collect(PrefixSource(kind="prefix", prefix=prefix), tmp_path / "corpus")
    counts = tokenize_corpus(tmp_path / "corpus", folders[1], out, TokenizeOptions(shuffle_seed=1))
    assert counts == {
        "documents": 3,
        "empty_documents": 1,
        "sequences": 2,
        "tokens": 39,
        "vocab_size": 280,
        "skipped_lines": 0,
    }
    assert documents(out) == [[list(range(9))], [], [list(range(9, 39))]]
    assert Path(f"{tokens_prefix(out)}.bin").samefile(f"{prefix}.bin")
    assert Path(
        os.path.normpath(out / json.loads((out / "documents.json").read_text())["prefix"])
    ) == Path(prefix)


def test_existing_token_files_of_a_larger_vocabulary_are_refused(
    folders: tuple[Path, Path], tmp_path: Path, out: Path
) -> None:
    (tmp_path / "corpus").mkdir()
    collect(
        PrefixSource(kind="prefix", prefix=write_tokens(tmp_path / "given", [281])),
        tmp_path / "corpus",
    )
    with pytest.raises(
        DataFormatError, match=r"given\.bin holds the token id 280, but the tokenizer has 280"
    ):
        tokenize_corpus(tmp_path / "corpus", folders[1], out, TokenizeOptions(shuffle_seed=1))
    assert list(out.iterdir()) == []


def test_progress_adds_up_to_the_size_of_the_input(
    folders: tuple[Path, Path], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "BLOCK_BYTES", 100)
    sizes: list[int] = []
    tokenize_corpus(*folders, out, TokenizeOptions(), progress=sizes.append)
    assert len(sizes) > 3
    assert sum(sizes) == (folders[0] / "corpus.jsonl").stat().st_size


def test_a_large_vocabulary_is_stored_as_int32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: Path
) -> None:
    corpus = write_corpus(tmp_path / "corpus", ["abc"])
    tokenizer = load_tokenizer(train_tokenizer(tmp_path / "tokenizer", corpus, 257))
    tokenizer.vocab_size = 65500
    monkeypatch.setattr(tokenize, "load_tokenizer", lambda directory: tokenizer)
    tokenize_corpus(corpus, tmp_path / "tokenizer", out, TokenizeOptions())
    assert IndexedDataset(tokens_prefix(out)).dtype == np.dtype("<i4")


def test_unicode_texts_are_unchanged_after_decoding(
    folders: tuple[Path, Path], tmp_path: Path, out: Path
) -> None:
    texts = ["\x00\u2028é", "👩‍👩‍👧‍👦", "\U0010ffff"]
    (tmp_path / "corpus").mkdir()
    with CorpusWriter(tmp_path / "corpus") as writer:
        for text in texts:
            writer.add(text, "test")
    tokenize_corpus(tmp_path / "corpus", folders[1], out, TokenizeOptions(append_eod=False))
    tokenizer = load_tokenizer(folders[1])
    assert [tokenizer.decode(document[0]) for document in documents(out)] == texts
