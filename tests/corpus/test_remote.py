"""Tests of sources on web servers."""

import errno
import functools
import gzip
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from megacore.config.data import HttpSource
from megacore.corpus import fetch, formats, remote
from megacore.corpus.blocks import iterate_texts
from megacore.corpus.collect import collect, fingerprint
from megacore.corpus.documents import read_sources
from megacore.corpus.fetch import Patience
from megacore.errors import DataFormatError, DownloadError, FileAccessError
from tests.corpus._files import lines, write_form
from tests.corpus._server import Site, serve
from tests.data._files import write_tokens

TEXTS = {
    "/x/a.jsonl": ["one", "two"],
    "/y/a.jsonl": ["three"],
    "/b.jsonl.gz": ["four"],
    "/c.jsonl.zst": ["five"],
    "/d.parquet": ["six", "seven"],
}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    with serve() as site:
        for path, texts in TEXTS.items():
            site.files[path] = write_form(
                tmp_path / "in" / path.rsplit("/")[-1], texts
            ).read_bytes()
        yield site


@pytest.fixture
def two_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    patience = Patience(attempts=2, backoff=0.01)
    monkeypatch.setattr(remote, "fetch", functools.partial(fetch.fetch, patience=patience))


def source(site: Site, *paths: str, key: str = "text", sha256: bool = False) -> HttpSource:
    files = [
        {
            "url": site.url + path,
            "sha256": hashlib.sha256(site.files[path]).hexdigest() if sha256 else None,
        }
        for path in paths
    ]
    return HttpSource.model_validate({"kind": "http", "files": files, "key": key})


def test_files_of_every_format_are_collected(site: Site, tmp_path: Path) -> None:
    http_source = source(site, *TEXTS)
    size = sum(map(len, site.files.values()))
    assert collect(http_source, tmp_path / "out") == {
        "documents": 7,
        "files": 5,
        "skipped_files": 0,
        "bytes": size,
    }
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    shutil.rmtree(tmp_path / ".downloads")
    assert list(iterate_texts(moved)) == [text for texts in TEXTS.values() for text in texts]
    assert {path.name for path in moved.iterdir()} == {
        "00000-a.jsonl", "00001-a.jsonl", "00002-b.jsonl.gz", "00003-c.jsonl.zst",
        "00004-d.parquet", "sources.json",
    }  # fmt: skip
    facts = json.loads((moved / "sources.json").read_text())
    assert facts["downloads"] == [
        {"url": site.url + path, "sha256": hashlib.sha256(site.files[path]).hexdigest()}
        for path in TEXTS
    ]


def test_a_second_download_gives_an_identical_corpus(site: Site, tmp_path: Path) -> None:
    contents = []
    for _ in range(2):
        collect(source(site, "/x/a.jsonl"), tmp_path / "out")
        contents.append({path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()})
        shutil.rmtree(tmp_path / ".downloads")
        shutil.rmtree(tmp_path / "out")
        (tmp_path / "out").mkdir()
    assert contents[0] == contents[1]


def test_a_pair_of_token_files_becomes_a_prefix_source(site: Site, tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "in" / "books", [3, 0, 4])
    for suffix in (".bin", ".idx"):
        site.files[f"/books{suffix}"] = Path(prefix + suffix).read_bytes()
    counts = collect(source(site, "/books.idx", "/books.bin", sha256=True), tmp_path / "out")
    assert (counts["documents"], counts["files"]) == (3, 2)
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    sources = read_sources(moved)
    assert sources is not None
    assert sources[0]["kind"] == "prefix"
    assert sources[0]["prefix"] == str(moved / "books")
    (tmp_path / "again").mkdir()
    site.files["/books.bin"] = site.files["/books.bin"][:-2]
    with pytest.raises(DataFormatError, match="do not belong together"):
        collect(source(site, "/books.bin", "/books.idx"), tmp_path / "again")


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (("/x/a.jsonl", "/books.bin", "/books.idx"), "token files come as one pair"),
        (("/books.bin",), "token files come as one pair"),
        (("/books.bin", "/more.bin"), "token files come as one pair"),
        (("/a.txt",), "names a.txt, whose form is unknown: its address must end in one of .jsonl"),
        (("/a.jsonl.xz",), "whose form is unknown"),
        (("/",), "names no file, whose form is unknown"),
        (("/a%00.jsonl",), "whose form is unknown"),
    ],
)
def test_unsupported_names_are_refused_before_any_request(
    site: Site, paths: tuple[str, ...], message: str
) -> None:
    with pytest.raises(DataFormatError, match=message):
        fingerprint(source(site, *paths))
    assert site.requests == []


@pytest.mark.usefixtures("two_attempts")
def test_the_next_attempt_resumes_a_failed_download(site: Site, tmp_path: Path) -> None:
    http_source = source(site, "/x/a.jsonl", "/b.jsonl.gz", sha256=True)
    content = site.files["/b.jsonl.gz"]
    site.files["/b.jsonl.gz"], site.breaks = content, [len(site.files["/x/a.jsonl"]), 10, 5]
    with pytest.raises(
        DownloadError, match=r"b\.jsonl\.gz failed 2 times in a row .* 15 bytes are there"
    ):
        collect(http_source, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    assert collect(http_source, tmp_path / "out")["documents"] == 3
    assert [request["path"] for request in site.requests].count("/x/a.jsonl") == 1
    assert site.requests[-1]["range"] == "bytes=15-"


def test_another_key_causes_no_second_download(site: Site, tmp_path: Path) -> None:
    collect(source(site, "/d.parquet", sha256=True), tmp_path / "out")
    (tmp_path / "out2").mkdir()
    with pytest.raises(DataFormatError, match="has no column 'body', only id, text"):
        collect(source(site, "/d.parquet", key="body", sha256=True), tmp_path / "out2")
    assert len(site.requests) == 1


def test_a_damaged_file_without_a_digest_is_downloaded_again(site: Site, tmp_path: Path) -> None:
    content = gzip.compress(lines(["x" * 1000]))
    site.files["/b.jsonl.gz"] = content[:-5]
    with pytest.raises(DataFormatError, match=r"b\.jsonl\.gz ends in the middle of its gzip data"):
        collect(source(site, "/b.jsonl.gz"), tmp_path / "out")
    site.files["/b.jsonl.gz"] = content
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "out").mkdir()
    assert collect(source(site, "/b.jsonl.gz"), tmp_path / "out")["documents"] == 1
    assert "if-none-match" not in site.requests[-1]


def test_limits_and_faults_of_this_machine_keep_downloads_without_a_digest(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.files["/zeros.jsonl.gz"] = gzip.compress(bytes(1 << 20))
    with pytest.raises(DataFormatError, match="over the limit of 9"):
        remote.collect(
            source(site, "/x/a.jsonl"), tmp_path / "out", tmp_path / "cache", document_bytes=9
        )
    monkeypatch.setattr(formats, "_UNPACKED_BYTES", 1 << 10)
    for path, error, sentence in (
        ("/zeros.jsonl.gz", DataFormatError, "200 times its gzip data"),
        ("/d.parquet", DataFormatError, "has no column 'missing'"),
        ("/y/a.jsonl", FileAccessError, "the disk or its connection fails"),
    ):
        if error is FileAccessError:
            monkeypatch.setattr(formats, "regular", _fail)
        shutil.rmtree(tmp_path / "out")
        (tmp_path / "out").mkdir()
        with pytest.raises(error, match=sentence):
            remote.collect(
                source(site, path, key="missing"),
                tmp_path / "out",
                tmp_path / "cache",
                document_bytes=10**8,
            )
    kept = {path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert {"a.jsonl", "zeros.jsonl.gz", "d.parquet"} <= kept
    assert len(list((tmp_path / "cache").glob("*/a.jsonl"))) == 2


def _fail(path: Path) -> Path:
    raise OSError(errno.EIO, "Input/output error", str(path))


def test_files_are_copied_if_they_cannot_be_linked(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    assert collect(source(site, "/x/a.jsonl"), tmp_path / "out")["documents"] == 2
    assert list(iterate_texts(tmp_path / "out")) == ["one", "two"]


def test_fingerprint_depends_on_urls_digests_and_key_without_passwords(site: Site) -> None:
    plain, named = source(site, "/x/a.jsonl"), source(site, "/x/a.jsonl", sha256=True)
    prints = [fingerprint(plain), fingerprint(named), fingerprint(source(site, "/y/a.jsonl"))]
    prints += [
        fingerprint(source(site, "/x/a.jsonl", key="body")),
        fingerprint(source(site, "/x/a.jsonl", "/b.jsonl.gz")),
    ]
    assert len({json.dumps(value) for value in prints}) == 5
    secret = HttpSource.model_validate(
        {"kind": "http", "files": [{"url": "https://me:secret@host/a.jsonl"}]}
    )
    assert "secret" not in json.dumps(fingerprint(secret))
    assert site.requests == []


def test_files_without_documents_are_refused(site: Site, tmp_path: Path) -> None:
    site.files["/x/a.jsonl"] = b""
    with pytest.raises(
        DataFormatError, match=rf"the corpus is empty: {site.url}/x/a\.jsonl has no document"
    ):
        collect(source(site, "/x/a.jsonl"), tmp_path / "out")
