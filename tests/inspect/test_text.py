import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from megacore.artifact.build import StageKey, seal
from megacore.artifact.manifest import Manifest
from megacore.errors import DataFormatError
from megacore.inspect.provenance import Origins
from megacore.inspect.report import find_text, find_tokenizer, open_decoder
from tests.data._corpus import byte_tokenizer, write_corpus, write_documents


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    byte_tokenizer().save(directory)
    return directory


def test_a_tokenizer_directory_and_its_file_decode_alike(tokenizer: Path) -> None:
    ids = np.append(byte_tokenizer().encode("naïve"), 256)
    for path in (tokenizer, tokenizer / "tokenizer.json"):
        assert open_decoder(path)(ids) == "naïve<|endoftext|>"
    (tokenizer / "tokenizer_config.json").unlink()
    assert open_decoder(tokenizer)(ids) == "naïve<|endoftext|>"


def test_a_vocabulary_suffices_to_decode(tmp_path: Path) -> None:
    backend = byte_tokenizer()
    (tmp_path / "vocab.json").write_text(
        json.dumps(backend.backend.get_vocab(with_added_tokens=True))
    )
    assert (
        open_decoder(tmp_path / "vocab.json")(np.append(backend.encode("naïve"), 256))
        == "naïve<|endoftext|>"
    )
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "token", "##s"])
    )
    assert open_decoder(tmp_path / "vocab.txt")(np.array([5, 6, 3])) == "tokens [SEP]"


@pytest.mark.parametrize("token", [-1, 257])
def test_ids_of_another_vocabulary_are_refused(tokenizer: Path, token: int) -> None:
    with pytest.raises(DataFormatError, match=rf"hold the id {token}, but .* has 257 entries"):
        open_decoder(tokenizer)(np.array([1, token]))


@pytest.mark.parametrize("name", ["none", "none.model", "text.json", "text.model"])
def test_a_path_without_a_tokenizer_is_refused(tmp_path: Path, name: str) -> None:
    if name.startswith("text"):
        (tmp_path / name).write_text("text")
    with pytest.raises(DataFormatError, match=name):
        open_decoder(tmp_path / name)


def test_documents_json_names_the_tokenizer(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, ["a"])
    origins = Origins.read(Path(f"{corpus.prefix}.documents.json"))
    assert find_tokenizer(corpus.prefix, origins) == corpus.tokenizer
    shutil.rmtree(corpus.tokenizer)
    assert find_tokenizer(corpus.prefix, origins) is None


def test_a_workspace_finds_the_tokenizer_by_its_digest(tmp_path: Path) -> None:
    digests = {}
    for name in ("one", "two"):
        directory = tmp_path / "tokenizers" / name
        directory.mkdir(parents=True)
        (directory / "tokenizer.json").write_text(name)
        digests[name] = seal(directory, StageKey("tokenizer", 1, {}, {}), {}, 1.0).digest
    tokens = tmp_path / "tokenized" / "abc"
    tokens.mkdir(parents=True)
    write_documents(tokens / "documents.json", [], tokenizer={"directory": None})
    seal(tokens, StageKey("tokenize", 1, {}, {"tokenizer": digests["two"]}), {}, 1.0)
    origins = Origins.read(tokens / "documents.json")
    prefix = str(tokens / "tokens_text_document")
    assert find_tokenizer(prefix, origins) == tmp_path / "tokenizers" / "two"
    assert Manifest.read(tokens).inputs == {"tokenizer": digests["two"]}
    (tmp_path / "tokenizers" / "one" / "manifest.json").write_text("{}")
    assert find_tokenizer(prefix, origins) is None


def test_text_is_found_in_its_source() -> None:
    assert find_text("two\ufffd", "one two\u00e9") == (4, 7)
    assert find_text("\ufffd\ufffd", "one") is None
    assert find_text("Two", "one two") is None
    assert find_text("a", "a a a", "a \ufffd") == (2, 3)
