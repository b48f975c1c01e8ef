"""Data stages as kinds of fault tests.

Each builds its artifact below `place`, from inputs that all cases share.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from megacore.artifact import Manifest, StageKey, build_artifact, open_artifact
from megacore.config.data import HttpSource, RemoteFile, SourceTreeSource, TrainBpeTokenizer
from megacore.corpus.collect import collect
from megacore.corpus.documents import CorpusWriter
from megacore.corpus.fetch import Version
from megacore.data.index_maps import build_index_maps
from megacore.data.index_options import IndexOptions, Member, Mixture
from megacore.errors import ArtifactError
from megacore.token_files.indexed_dataset import write_members
from megacore.token_files.indexed_dataset_writer import IndexedDatasetWriter
from megacore.tokenizer.build import build_tokenizer
from megacore.tokenizer.tokenize import (
    TokenizeOptions,
    merge_shards,
    tokenize_corpus,
    tokenize_shard,
)
from tests.corpus._server import Handler, Site, serve
from tests.faults._cases import Kind

Counts = Mapping[str, Any]
TEXT = (
    "the cat sat on a mat. It saw 42 birds, and wrote: def run(self, value) -> None! Mr. Smith "
    "agreed."
)
WORDS = (*TEXT.split(), "")


def build(place: Path, stage: str, fill: Callable[[Path], Counts]) -> None:
    """Build the artifact of a case like a task."""
    build_artifact(place / "artifacts", StageKey(stage, 1, {}, {}), fill, verify="full")


def artifacts(place: Path) -> list[Path]:
    """Return the directories that a reader accepts as artifacts."""
    folder = place / "artifacts"
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in paths if not path.name.startswith(".") and ".tmp-" not in path.name]


def visible(inputs: Path, place: Path) -> list[str]:
    """Return the problems of artifacts that are present but not complete."""
    problems = []
    for path in artifacts(place):
        try:
            open_artifact(path, "full")
        except ArtifactError as error:
            problems.append(str(error))
    return problems


def new_problems(
    problems_of: Callable[[Path, Path], list[str]], inputs: Path, place: Path
) -> list[str]:
    """Return the problems of a place without those that it had when the case began."""
    start = inputs / "start"
    old = [text.replace(str(start), str(place)) for text in problems_of(inputs, start)]
    return [text for text in problems_of(inputs, place) if text not in old]


def result(inputs: Path, place: Path) -> Any:
    """Return the digests of the artifact's files and the names of temporaries next to it."""
    (directory,) = artifacts(place)
    manifest = Manifest.read(directory)
    temporaries = [path.name for path in (place / "artifacts").iterdir() if ".tmp-" in path.name]
    return {name: entry.sha256 for name, entry in manifest.files.items()} | {
        "temporaries": temporaries
    }


def texts(count: int, words: int, seed: int = 0) -> Iterator[str]:
    """Yield generated prose."""
    random = np.random.RandomState(seed)
    for number in range(count):
        indices = random.randint(0, len(WORDS), words)
        yield f"Document {number}. " + " ".join(WORDS[index] for index in indices)


def write_corpus(directory: Path, count: int, words: int) -> None:
    directory.mkdir(parents=True)
    with CorpusWriter(directory) as writer:
        for number, text in enumerate(texts(count, words)):
            writer.add(text, f"document {number}")


def write_tokens(prefix: Path, documents: int, length: int, seed: int = 0) -> None:
    random = np.random.RandomState(seed)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(documents):
            writer.add_document(random.randint(0, 500, random.randint(1, length)))


# download


class _Paced:
    """A socket's file that sends slowly enough to be interrupted."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        for start in range(0, len(data), 1 << 17):
            self._file.write(data[start : start + (1 << 17)])
            if len(data) > 1 << 17:
                time.sleep(0.006)
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _PacedHandler(Handler):
    ranges: Path
    """Log of the Range header of each request."""

    def do_GET(self) -> None:  # noqa: N802 - name required by http.server
        with open(self.ranges, "a", encoding="ascii") as file:
            file.write(f"{self.headers.get('Range')}\n")
        super().do_GET()

    def setup(self) -> None:
        super().setup()
        self.wfile = _Paced(self.wfile)  # type: ignore[assignment]


@contextmanager
def _serve(inputs: Path) -> Iterator[None]:
    """Serve the input over HTTP.

    Its address is written to a file next to it, and each requested Range to another.
    """
    files = {"/text.jsonl": (inputs / "text.jsonl").read_bytes()}
    with serve(Site(files), _PacedHandler, ranges=inputs / "ranges") as site:
        (inputs / "url").write_text(f"{site.url}/text.jsonl", encoding="ascii")
        yield


def _prepare_download(inputs: Path) -> None:
    with open(inputs / "text.jsonl", "w", encoding="utf-8") as file:
        for text in texts(2000, 1200):
            file.write(json.dumps({"text": text}) + "\n")


def _source(inputs: Path) -> HttpSource:
    return HttpSource(
        kind="http", files=(RemoteFile(url=(inputs / "url").read_text(encoding="ascii")),)
    )


def _download(inputs: Path, place: Path, attempt: int) -> None:
    parts = [
        path
        for path in place.glob("artifacts/.downloads/*/*.part")
        if Path(f"{path}.json").exists()
    ]
    size_before = parts[0].stat().st_size if parts else 0
    build(place, "collect", lambda directory: collect(_source(inputs), directory))
    if 0 < size_before < (inputs / "text.jsonl").stat().st_size:
        ranges = (inputs / "ranges").read_text(encoding="ascii").splitlines()
        assert f"bytes={size_before}-" in ranges, (
            f"{size_before} bytes existed, but no request asked for only the rest"
        )


def _visible_download(inputs: Path, place: Path) -> list[str]:
    problems = visible(inputs, place)
    for version_path in place.glob("artifacts/.downloads/*/*.json"):
        target = version_path.with_suffix("")
        if version_path.name.endswith(".part.json") or not target.exists():
            continue
        version = Version.read(version_path)
        if version is None or hashlib.sha256(target.read_bytes()).hexdigest() != version.sha256:
            problems.append(f"{target} looks whole and is not")
    for target in place.glob("artifacts/.downloads/*/*.jsonl"):
        if not Path(f"{target}.json").exists():
            problems.append(f"{target} looks whole and nothing says which version it is")
    return problems


def _result_download(inputs: Path, place: Path) -> Any:
    corpus = result(inputs, place)
    # The corpus contains the server's port, which is the same for all cases of a session. The
    # path of the cache is not.
    downloads = sorted(
        path.name
        for path in place.glob("artifacts/.downloads/*/*")
        if not path.name.startswith(".")
    )
    return {"corpus": corpus, "downloads": downloads}


# collect, tokenize


def _prepare_tree(inputs: Path) -> None:
    tree = inputs / "tree"
    for number, text in enumerate(texts(9000, 60)):
        folder = tree / f"package_{number % 50}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"module_{number}.py").write_text(text, encoding="utf-8")


def _collect(inputs: Path, place: Path, attempt: int) -> None:
    source = SourceTreeSource(kind="source_tree", path=str(inputs / "tree"))
    build(place, "collect", lambda directory: collect(source, directory))


def _prepare_corpus(inputs: Path) -> None:
    write_corpus(inputs / "corpus", 3000, 600)
    write_corpus(inputs / "little", 300, 300)
    (inputs / "tokenizer").mkdir()
    build_tokenizer(
        TrainBpeTokenizer(kind="train-bpe", vocab_size=320), inputs / "little", inputs / "tokenizer"
    )


def _train_tokenizer(inputs: Path, place: Path, attempt: int) -> None:
    choice = TrainBpeTokenizer(kind="train-bpe", vocab_size=320)
    build(
        place, "tokenizer", lambda directory: build_tokenizer(choice, inputs / "little", directory)
    )


def _tokenize(inputs: Path, place: Path, attempt: int) -> None:
    options = TokenizeOptions(shuffle_seed=7)
    build(
        place,
        "tokenize",
        lambda directory: tokenize_corpus(
            inputs / "corpus", inputs / "tokenizer", directory, options, workers=2
        ),
    )


def _tokenize_sentences(inputs: Path, place: Path, attempt: int) -> None:
    options = TokenizeOptions(split_sentences=True, sentence_splitter="rules")
    build(
        place,
        "tokenize",
        lambda directory: tokenize_corpus(
            inputs / "little", inputs / "tokenizer", directory, options, workers=2
        ),
    )


def _tokenize_shards(inputs: Path, place: Path, attempt: int) -> None:
    """Tokenize the shards as separate artifacts and merge them.

    Complete shards are not built again.
    """
    from megacore.corpus.segments import divide, segments

    options = TokenizeOptions()
    size = (inputs / "corpus" / "corpus.jsonl").stat().st_size
    shards = []
    for number, shard in enumerate(divide(segments(inputs / "corpus"), size // 3)):
        artifact, _ = build_artifact(
            place / "shards",
            StageKey("tokenize-shard", 1, {"number": number}, {}),
            lambda directory, shard=shard: tokenize_shard(  # type: ignore[misc]
                shard, inputs / "tokenizer", directory, options, workers=1
            ),
            verify="full",
        )
        shards.append(artifact.directory)
    build(
        place,
        "tokenize",
        lambda directory: merge_shards(shards, directory, inputs / "tokenizer", options),
    )
    shutil.rmtree(place / "shards")


# blend, index maps


def _prepare_tokens(inputs: Path) -> None:
    for number in range(3):
        write_tokens(inputs / f"tokens-{number}" / "tokens_text_document", 20_000, 100, number)


def _blend(inputs: Path, place: Path, attempt: int) -> None:
    members = [inputs / f"tokens-{number}" for number in range(3)]

    def fill(directory: Path) -> Counts:
        write_members(directory, members)
        return {"members": len(members)}

    build(place, "blend", fill)


def _index(inputs: Path, place: Path, attempt: int) -> None:
    mixture = Mixture.blend(
        [
            Member(str(inputs / f"tokens-{n}" / "tokens_text_document"), weight)
            for n, weight in enumerate((5, 3, 2))
        ]
    )
    options = IndexOptions(split="90,5,5", seq_length=16, seed=3)
    samples = (4_000_000, 20_000, 20_000)
    build(place, "index", lambda directory: build_index_maps(mixture, directory, options, samples))


DATA_KINDS = (
    Kind(
        "download", _download, _result_download, _visible_download, _prepare_download, serve=_serve
    ),
    Kind("collect", _collect, result, visible, _prepare_tree),
    Kind("tokenizer", _train_tokenizer, result, visible, _prepare_corpus),
    Kind("tokenize", _tokenize, result, visible, _prepare_corpus),
    Kind("tokenize-shards", _tokenize_shards, result, visible, _prepare_corpus),
    Kind(
        "tokenize-worker",
        _tokenize_sentences,
        result,
        visible,
        _prepare_corpus,
        victims=("worker", "all"),
    ),
    Kind("blend", _blend, result, visible, _prepare_tokens),
    Kind("index", _index, result, visible, _prepare_tokens),
)
