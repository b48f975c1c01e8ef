"""Provenance through the whole pipeline: collect, tokenize, shard, merge, shuffle and index."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from megacore.cli import app
from megacore.config.data import JsonlSource, ParquetSource, Source, SourceTreeSource, TextSource
from megacore.corpus.collect import collect
from megacore.corpus.segments import divide, segments
from megacore.data.index_maps import build_index_maps
from megacore.data.index_options import IndexOptions, Mixture
from megacore.inspect.provenance import find_origins, read_document
from megacore.inspect.report import find_tokenizer, open_decoder, report_sample
from megacore.inspect.tokens import document_tokens, find_prefixes
from megacore.inspect.verify import verify
from megacore.token_files.indexed_dataset import IndexedDataset
from megacore.tokenizer.tokenize import (
    TokenizeOptions,
    merge_shards,
    tokenize_corpus,
    tokenize_shard,
)
from tests.data._corpus import END_OF_TEXT, byte_tokenizer

TEXTS = [f"Text {number}. " + "It has wörds. " * (number % 7) for number in range(60)]
SEQ_LENGTH = 48


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    byte_tokenizer().save(directory)
    return directory


def write_source(directory: Path, kind: str) -> Source:
    """Write the texts as a source; JSON Lines also get lines without a text."""
    directory.mkdir()
    if kind == "parquet":
        pq.write_table(pa.table({"text": TEXTS}), directory / "a.parquet", row_group_size=7)
        return ParquetSource(kind="parquet", files=(str(directory / "*.parquet"),))
    if kind in ("source_tree", "text"):
        for number, text in enumerate(TEXTS):
            (directory / f"{number:02d}.txt").write_text(text)
        if kind == "text":
            return TextSource(kind="text", files=(str(directory),))
        return SourceTreeSource(kind="source_tree", path=str(directory), pattern="*.txt")
    lines = [json.dumps({"text": text}) for text in TEXTS]
    for place, bad in ((55, "{"), (41, ""), (20, '{"other": 1}'), (3, ""), (3, '{"text": 3}')):
        lines.insert(place, bad)
    (directory / "a.jsonl").write_text("\n".join(lines[:35]) + "\n")
    (directory / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[35:]).encode()))
    return JsonlSource(
        kind="jsonl", files=(str(directory / "a.jsonl"), str(directory / "b.jsonl.gz"))
    )


def check_documents(prefix: str) -> None:
    """Check that each document's tokens are those of the line it is traced to."""
    dataset = IndexedDataset(prefix)
    origins = find_origins(prefix, dataset.documents)
    assert origins is not None
    path = find_tokenizer(prefix, origins)
    assert path is not None
    decode = open_decoder(path)
    texts = []
    for document in range(dataset.documents):
        place = origins.place(document)
        assert place is not None
        text = read_document(place).text
        assert decode(document_tokens(dataset, document)) == text + END_OF_TEXT
        texts.append(text)
    assert sorted(texts) == sorted(TEXTS)
    assert (texts == TEXTS) == (origins.shuffle_seed is None)


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "source_tree", "text"])
def test_every_document_is_traced_to_its_source(
    tmp_path: Path, tokenizer: Path, kind: str, seed: int | None
) -> None:
    for name in ("corpus", "tokens", "merged", "index"):
        (tmp_path / name).mkdir()
    collect(write_source(tmp_path / "source", kind), tmp_path / "corpus")
    options = TokenizeOptions(shuffle_seed=seed, on_bad_line="skip")
    tokenize_corpus(tmp_path / "corpus", tokenizer, tmp_path / "tokens", options)
    (prefix,) = find_prefixes(tmp_path / "tokens")
    check_documents(prefix)

    shards = []
    for number, parts in enumerate(divide(segments(tmp_path / "corpus"), 700)):
        shards.append(tmp_path / f"shard-{number}")
        shards[-1].mkdir()
        tokenize_shard(parts, tokenizer, shards[-1], options, workers=1)
    assert len(shards) > 2
    merge_shards(shards, tmp_path / "merged", tokenizer, options)
    (merged,) = find_prefixes(tmp_path / "merged")
    check_documents(merged)

    maps = IndexOptions(split="1", seq_length=SEQ_LENGTH, seed=5)
    build_index_maps(Mixture.single(merged), tmp_path / "index", maps, (60, 0, 0))
    assert "train maps 0" in {check.name for check in verify(tmp_path / "index")}
    for number in range(60):
        parts = report_sample(tmp_path / "index", "train", number, None)["parts"]
        assert sum(part["stop"] - part["start"] for part in parts) == SEQ_LENGTH + 1
        for part in parts:
            source, text = part["source"], part["text"].removesuffix(END_OF_TEXT).strip("\ufffd")
            if text:
                first, last = source["characters"]
                assert source["text"][first:last] == text
            if kind in ("source_tree", "text"):
                assert (tmp_path / "source" / source["named_source"]).read_text() == source["text"]


def test_documents_of_the_command_line_are_traced_to_their_source(
    tmp_path: Path, tokenizer: Path
) -> None:
    write_source(tmp_path / "source", "jsonl")
    arguments = [
        "tokenize",
        "--input",
        f"{tmp_path}/source/a.jsonl",
        f"{tmp_path}/source/b.jsonl.gz",
    ]
    arguments += ["--output-prefix", f"{tmp_path}/a", "--tokenizer", "hf"]
    arguments += [
        "--tokenizer-file",
        f"{tokenizer}/tokenizer.json",
        "--append-eod",
        "--on-bad-line",
        "skip",
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    prefix = f"{tmp_path}/a_text_document"
    dataset = IndexedDataset(prefix)
    origins = find_origins(prefix, dataset.documents)
    assert origins is not None
    places = [origins.place(document) for document in range(dataset.documents)]
    assert [read_document(place).text for place in places if place is not None] == TEXTS
    names = [check.name for check in verify(prefix)]
    assert names[-1] == "a_text_document.manifest.json"
