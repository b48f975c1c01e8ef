"""Files of text, tokens and tokenizers, and their readers."""

import gzip
import hashlib
import json
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import sentencepiece
import zstandard

from megacore.config.data import SourceTreeSource, TrainBpeTokenizer
from megacore.corpus import local_files
from megacore.corpus.blocks import iterate_texts, read_blocks
from megacore.corpus.collect import collect
from megacore.corpus.documents import SourceFile, read_sources, write_sources
from megacore.corpus.fetch import Patience, fetch
from megacore.corpus.local_files import count_documents
from megacore.corpus.segments import jsonl_segments
from megacore.data.gpt_dataset import GPTDataset
from megacore.data.index_directory import read_description
from megacore.errors import DataFormatError
from megacore.token_files.indexed_dataset import IndexedDataset, token_prefixes, write_members
from megacore.tokenizer.build import build_tokenizer, read_gpt2_bpe
from megacore.tokenizer.load import JsonTokenizer, Tokenizer, load_tokenizer
from megacore.tokenizer.records import read_files
from megacore.tokenizer.sentencepiece_model import SentencePieceModel
from megacore.tokenizer.sentences import SplitterChoice, make_splitter
from megacore.tokenizer.tokenize import TokenizeOptions, tokenize_corpus
from megacore.tokenizer.wordpiece import BERT_ROLES, read_wordpiece
from megacore.zeroshot.texts import read_lambada, read_wikitext
from tests.corpus._server import Handler, Site, _Server, etag
from tests.faults._data import texts, write_corpus
from tests.faults._mutations import Form
from tests.train import _runs
from tests.zeroshot._texts import write_lambada, write_wikitext

TEXT = "def step(value):\n    return value * 42  # größe\n"


# text


def make_download(directory: Path) -> Sequence[Path]:
    """Write a complete download and an interrupted one.

    The server runs as long as this process.
    """
    content = b"".join(_lines())
    server = _Server(
        ("127.0.0.1", 0), type("Handler", (Handler,), {"site": Site(files={"/a.jsonl": content})})
    )
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    ).start()
    url = f"http://127.0.0.1:{server.server_port}/a.jsonl"
    (directory / "url").write_text(url, encoding="ascii")
    fetch(url, None, directory / "whole" / "a.jsonl")
    (directory / "begun").mkdir()
    (directory / "begun" / "a.jsonl.part").write_bytes(content[: len(content) // 2])
    version = {
        "url": url,
        "etag": etag(content),
        "last_modified": None,
        "size": len(content),
        "sha256": None,
    }
    (directory / "begun" / "a.jsonl.part.json").write_text(json.dumps(version), encoding="utf-8")
    return [
        directory / "whole" / "a.jsonl",
        directory / "whole" / "a.jsonl.json",
        directory / "begun" / "a.jsonl.part.json",
    ]


def read_download(directory: Path) -> Any:
    url = (directory / "url").read_text(encoding="ascii")
    digests = []
    for state in ("whole", "begun"):
        shutil.rmtree(directory / "work", ignore_errors=True)
        shutil.copytree(directory / state, directory / "work")
        version = fetch(url, None, directory / "work" / "a.jsonl", Patience(backoff=0.001))
        content = (directory / "work" / "a.jsonl").read_bytes()
        digests.append((version.sha256, hashlib.sha256(content).hexdigest()))
    return digests


def make_tree(directory: Path) -> Sequence[Path]:
    tree = directory / "tree"
    tree.mkdir()
    for number, text in enumerate(texts(4, 30)):
        (tree / f"module_{number}.py").write_text(text, encoding="utf-8")
    (directory / "out").mkdir()
    return [tree / "module_2.py"]


def read_tree(directory: Path) -> Any:
    counts = collect(
        SourceTreeSource(kind="source_tree", path=str(directory / "tree")), directory / "out"
    )
    return counts, list(iterate_texts(directory / "out"))


def _lines() -> list[bytes]:
    return [
        json.dumps({"text": text, "id": n}).encode() + b"\n" for n, text in enumerate(texts(40, 30))
    ]


def make_jsonl(directory: Path) -> Sequence[Path]:
    (directory / "a.jsonl").write_bytes(b"".join(_lines()))
    return [directory / "a.jsonl"]


def make_gzip(directory: Path) -> Sequence[Path]:
    lines = _lines()
    (directory / "a.jsonl.gz").write_bytes(
        gzip.compress(b"".join(lines[:20])) + gzip.compress(b"".join(lines[20:]))
    )
    return [directory / "a.jsonl.gz"]


def make_zstd(directory: Path) -> Sequence[Path]:
    packer = zstandard.ZstdCompressor(write_checksum=True)
    (directory / "a.jsonl.zst").write_bytes(packer.compress(b"".join(_lines())))
    return [directory / "a.jsonl.zst"]


def make_parquet(directory: Path) -> Sequence[Path]:
    table = pa.table({"id": list(range(60)), "text": list(texts(60, 30))})
    pq.write_table(table, directory / "a.parquet", row_group_size=20)
    return [directory / "a.parquet"]


def read_documents(directory: Path) -> Any:
    (path,) = directory.glob("a.*")
    documents = []
    for block in read_blocks(jsonl_segments([path], "text"), 1 << 14):
        good, bad = block.texts()
        if bad:
            raise DataFormatError(bad[0].reason)
        documents += good
    sizes = local_files.group_sizes(path, "text") if path.suffix == ".parquet" else []
    return count_documents(path, "text"), documents, sizes


def make_corpus(directory: Path) -> Sequence[Path]:
    (directory / "a.jsonl").write_bytes(b"".join(_lines()))
    write_sources(directory, "jsonl", [SourceFile.of(directory / "a.jsonl")], key="text")
    return [directory / "sources.json"]


def read_corpus(directory: Path) -> Any:
    facts, files = read_sources(directory) or ({}, [])
    return facts, files, list(iterate_texts(directory))


# tokens and maps


def make_tokens(directory: Path) -> Sequence[Path]:
    prefix = _runs.write_data(directory / "data", _runs.config())
    return [prefix.with_suffix(".bin"), prefix.with_suffix(".idx")]


def read_tokens(directory: Path) -> Any:
    dataset = IndexedDataset(directory / "data" / "tokens_text_document")
    return [
        dataset[number].tolist() for number in range(len(dataset))
    ], dataset.document_indices.tolist()


def make_maps(directory: Path) -> Sequence[Path]:
    _runs.write_data(directory / "data", _runs.config())
    return sorted((directory / "data" / "index").glob("train_*.npy"))


def read_maps(directory: Path) -> Any:
    data = directory / "data"
    dataset = GPTDataset(data / "tokens_text_document", data / "index", "train", _runs.SEQ_LENGTH)
    return dataset.gather(range(len(dataset))).tolist()


def make_index_json(directory: Path) -> Sequence[Path]:
    _runs.write_data(directory / "data", _runs.config())
    return [directory / "data" / "index" / "index.json"]


def read_index_json(directory: Path) -> Any:
    return repr(read_description(directory / "data" / "index"))


def make_members(directory: Path) -> Sequence[Path]:
    make_tokens(directory)
    (directory / "blend").mkdir()
    write_members(directory / "blend", [directory / "data", directory / "data"])
    return [directory / "blend" / "members.json"]


def read_members(directory: Path) -> Any:
    return token_prefixes(directory / "blend")


def make_documents_json(directory: Path) -> Sequence[Path]:
    for name in ("tokenizer", "tokens"):
        (directory / name).mkdir()
    write_corpus(directory / "corpus", 60, 40)
    build_tokenizer(BPE, directory / "corpus", directory / "tokenizer")
    tokenize_corpus(
        directory / "corpus",
        directory / "tokenizer",
        directory / "tokens",
        TokenizeOptions(),
        workers=1,
    )
    return [directory / "tokens" / "documents.json"]


def read_documents_json(directory: Path) -> Any:
    return repr(read_files(directory / "tokens"))


# tokenizers

BPE = TrainBpeTokenizer(kind="train-bpe", vocab_size=300)


def _use(tokenizer: Tokenizer) -> Any:
    ids = tokenizer.encode(TEXT)
    return (
        ids.tolist(),
        tokenizer.decode(ids),
        tokenizer.vocab_size,
        tokenizer.eod_id,
        sorted(tokenizer.special_ids()),
    )


def make_tokenizer(directory: Path) -> Sequence[Path]:
    (directory / "tokenizer").mkdir()
    write_corpus(directory / "corpus", 60, 40)
    build_tokenizer(BPE, directory / "corpus", directory / "tokenizer")
    return [directory / "tokenizer" / name for name in ("tokenizer.json", "tokenizer_config.json")]


def read_tokenizer(directory: Path) -> Any:
    return _use(load_tokenizer(directory / "tokenizer"))


def make_gpt2(directory: Path) -> Sequence[Path]:
    make_tokenizer(directory)
    return [directory / "tokenizer" / name for name in ("vocab.json", "merges.txt")]


def read_gpt2(directory: Path) -> Any:
    folder = directory / "tokenizer"
    return _use(
        JsonTokenizer(read_gpt2_bpe(folder / "vocab.json", folder / "merges.txt"), "<|endoftext|>")
    )


def make_wordpiece(directory: Path) -> Sequence[Path]:
    letters = [chr(code) for code in range(97, 123)]
    tokens = [
        *BERT_ROLES.values(),
        *letters,
        *(f"##{letter}" for letter in letters),
        "value",
        "##turn",
        "re",
        "step",
    ]
    (directory / "vocab.txt").write_text("\n".join(dict.fromkeys(tokens)) + "\n", encoding="utf-8")
    return [directory / "vocab.txt"]


def read_vocab(directory: Path) -> Any:
    backend = read_wordpiece(directory / "vocab.txt", lower_case=True)
    return _use(JsonTokenizer(backend, BERT_ROLES["sep_token"]))


def make_sentencepiece(directory: Path) -> Sequence[Path]:
    lines = [f"hello world number {number} größe\n" for number in range(50)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(directory / "m"),
        vocab_size=32,
        minloglevel=2,
        num_threads=1,
    )
    return [directory / "m.model"]


def read_sentencepiece(directory: Path) -> Any:
    return _use(SentencePieceModel.read(directory / "m.model"))


def make_punkt(directory: Path) -> Sequence[Path]:
    folder = directory / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    contents = {
        "collocations.tab": "##number##\tmr\nst\tpetersburg\n",
        "sent_starters.txt": "he\nthe\n",
        "abbrev_types.txt": "mr\ndr\ne.g\n",
        "ortho_context.tab": "smith\t4\nhe\t46\nthe\t46\n",
    }
    for name, content in contents.items():
        (folder / name).write_text(content, encoding="utf-8")
    return sorted(folder.iterdir())


def read_punkt(directory: Path) -> Any:
    return make_splitter(SplitterChoice("punkt", data=str(directory)))(
        "Mr. Smith saw it. He was in St. Petersburg."
    )


def make_zeroshot(directory: Path) -> Sequence[Path]:
    make_tokenizer(directory)
    return [
        write_wikitext(directory / "wiki.txt", 90),
        write_lambada(directory / "lambada.jsonl", 9),
    ]


def read_zeroshot(directory: Path) -> Any:
    tokenizer = load_tokenizer(directory / "tokenizer")
    return repr(
        (
            read_wikitext(directory / "wiki.txt", tokenizer),
            read_lambada(directory / "lambada.jsonl", tokenizer),
        )
    )


DATA_FORMS = (
    Form("text", make_tree, read_tree, 30),
    Form("download's state", make_download, read_download, 20, heals=True),
    Form("jsonl", make_jsonl, read_documents, 60),
    Form("jsonl.gz", make_gzip, read_documents, 80),
    Form("jsonl.zst", make_zstd, read_documents, 80),
    Form("parquet", make_parquet, read_documents, 120),
    Form("sources.json", make_corpus, read_corpus, 40, also=("cannot be read: No such file",)),
    Form("tokens .bin/.idx", make_tokens, read_tokens, 120, also=("tokens_text_document",)),
    Form("index maps .npy", make_maps, read_maps, 120, also=("_index.npy",)),
    Form("index.json", make_index_json, read_index_json, 40),
    Form("members.json", make_members, read_members, 30),
    Form("documents.json", make_documents_json, read_documents_json, 40),
    Form("tokenizer.json", make_tokenizer, read_tokenizer, 80, also=("tokenizer_config.json",)),
    Form("vocab.json, merges.txt", make_gpt2, read_gpt2, 60, also=("merges.txt",)),
    Form("WordPiece vocab.txt", make_wordpiece, read_vocab, 60),
    Form("SentencePiece model", make_sentencepiece, read_sentencepiece, 60),
    Form("Punkt model", make_punkt, read_punkt, 30),
    Form("zero-shot texts", make_zeroshot, read_zeroshot, 30),
)
