import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megacore.config.source import PrefixSource
from megacore.config.tokenizer import TrainBpeTokenizer
from megacore.corpus.collect import collect
from megacore.corpus.documents import CorpusWriter
from megacore.data.indexed_dataset import IndexedDataset
from megacore.errors import DataFormatError
from megacore.tokenizer import load_tokenizer, tokenize
from megacore.tokenizer.build import build_tokenizer
from megacore.tokenizer.tokenize import encode_stream, tokenize_corpus, tokens_prefix
from tests.data._files import write_tokens

TEXTS = ["", "first " * 9, "größe 💡", "a<|endoftext|>b", *(f"value_{i} = {i}\n" * (i % 7) for i in range(60))]


def write_corpus(directory: Path, texts: list[str]) -> Path:
    directory.mkdir()
    with CorpusWriter(directory) as writer:
        for text in texts:
            writer.add(text, "test")
    return directory


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("tokenize")
    corpus = write_corpus(root / "corpus", TEXTS)
    (root / "tokenizer").mkdir()
    build_tokenizer(TrainBpeTokenizer(kind="train-bpe", vocab_size=280), corpus, root / "tokenizer")
    return corpus, root / "tokenizer"


def documents(directory: Path) -> list[list[int]]:
    dataset = IndexedDataset(tokens_prefix(directory))
    bounds = dataset.document_indices.tolist()
    return [dataset.token_range(a, b).tolist() for a, b in pairwise(bounds)]


@pytest.mark.parametrize("append_eod", [False, True])
@pytest.mark.parametrize("seed", [None, 1234])
def test_documents_are_encoded_in_their_order(
    folders: tuple[Path, Path], tmp_path: Path, append_eod: bool, seed: int | None
) -> None:
    counts = tokenize_corpus(*folders, tmp_path, append_eod=append_eod, shuffle_seed=seed)
    tokenizer = load_tokenizer(folders[1])
    order = list(range(len(TEXTS)))
    if seed is not None:
        order = np.random.RandomState(seed).permutation(len(TEXTS)).tolist()
    end = [tokenizer.eod_id] if append_eod else []
    expected = [[*tokenizer.encode(TEXTS[i]).tolist(), *end] if TEXTS[i] else [] for i in order]
    assert documents(tmp_path) == expected
    empty = sum(not text for text in TEXTS)
    assert counts == {
        "documents": len(TEXTS),
        "empty_documents": empty,
        "sequences": len(TEXTS) - empty,
        "tokens": sum(map(len, expected)),
        "vocab_size": 280,
    }


def test_files_do_not_depend_on_workers_and_batches(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = []
    for workers, size in ((1, 1 << 20), (1, 50), (2, 50), (5, 1)):
        monkeypatch.setattr(tokenize, "_BATCH_CHARACTERS", size)
        directory = tmp_path / f"{workers}-{size}"
        directory.mkdir()
        tokenize_corpus(*folders, directory, append_eod=True, shuffle_seed=7, workers=workers)
        contents.append([Path(f"{tokens_prefix(directory)}.{suffix}").read_bytes() for suffix in ("bin", "idx")])
    assert all(content == contents[0] for content in contents)


def test_reading_ahead_is_bounded(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "_BATCH_CHARACTERS", 1)
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    taken: list[str] = []
    stream = encode_stream(load_tokenizer(folders[1]), (taken.append(text) or text for text in TEXTS * 10), 2)
    next(stream)
    assert len(taken) <= 5
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    stream.close()
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_corpus_without_tokens_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", ["", ""])
    (tmp_path / "out").mkdir()
    with pytest.raises(DataFormatError, match=r"the 2 documents of .* have no token"):
        tokenize_corpus(corpus, folders[1], tmp_path / "out", append_eod=True, shuffle_seed=1)


def test_bad_line_leaves_no_file(folders: tuple[Path, Path], tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", ["fine"] * 5)
    with open(corpus / "corpus.jsonl", "a") as file:
        file.write("{\n")
    (tmp_path / "out").mkdir()
    with pytest.raises(DataFormatError, match=r"corpus\.jsonl:6 is not JSON"):
        tokenize_corpus(corpus, folders[1], tmp_path / "out", append_eod=True, shuffle_seed=1)
    assert list((tmp_path / "out").iterdir()) == []


def test_ready_made_tokens_are_linked(folders: tuple[Path, Path], tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "given", [9, 0, 30])
    for name in ("corpus", "out"):
        (tmp_path / name).mkdir()
    collect(PrefixSource(kind="prefix", prefix=prefix), tmp_path / "corpus")
    counts = tokenize_corpus(tmp_path / "corpus", folders[1], tmp_path / "out", append_eod=True, shuffle_seed=1)
    assert counts == {"documents": 3, "empty_documents": 1, "sequences": 2, "tokens": 39, "vocab_size": 280}
    assert documents(tmp_path / "out") == [list(range(9)), [], list(range(9, 39))]
    assert Path(f"{tokens_prefix(tmp_path / 'out')}.bin").samefile(f"{prefix}.bin")


def test_ready_made_tokens_of_another_vocabulary_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    for name in ("corpus", "out"):
        (tmp_path / name).mkdir()
    collect(PrefixSource(kind="prefix", prefix=write_tokens(tmp_path / "given", [281])), tmp_path / "corpus")
    with pytest.raises(DataFormatError, match=r"given\.bin holds the token id 280, but the tokenizer has 280"):
        tokenize_corpus(tmp_path / "corpus", folders[1], tmp_path / "out", append_eod=True, shuffle_seed=1)
    assert list((tmp_path / "out").iterdir()) == []
