"""Web pages are read from WARC and WET files, and a file that is cut off or no WARC is refused."""

import gzip
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datatrove", reason="the extra curate is not installed")
pytest.importorskip("warcio", reason="the extra web is not installed")

from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from megacore.artifact.files import read_json
from megacore.config.curate import CurateSteps
from megacore.config.data import WarcSource
from megacore.config.validate import validated
from megacore.corpus import web_pages
from megacore.corpus.collect import collect
from megacore.corpus.curate import curate_corpus
from megacore.corpus.curate_job import CurateOptions
from megacore.corpus.segments import Segment, divide, segments
from megacore.errors import DamagedFileError, DataFormatError

LIMIT = 10_000
EXTRACT = {"step": "extract_text"}


def html(number: int, charset: str = "utf-8") -> bytes:
    prose = f"This is a sentence of page {number}, and the naïve reader goes on with it. " * 6
    page = (
        f"<html><head><meta charset={charset}><title>T</title></head><body>"
        "<nav><a href='/'>Home</a> <a href='/more'>More</a></nav>"
        f"<article><h1>Heading</h1><p>{prose}</p></article><footer>All rights reserved</footer>"
        "</body></html>"
    )
    return page.encode(charset)


def response(
    writer: Any,
    number: int,
    content: bytes,
    kind: str = "text/html",
    status: str = "200 OK",
    packing: str = "identity",
    transfer: str = "",
) -> None:
    headers = [
        ("Content-Type", kind),
        ("Content-Encoding", packing),
        ("Transfer-Encoding", transfer),
    ]
    writer.write_record(
        writer.create_warc_record(
            f"http://site.example/{number}",
            "response",
            payload=BytesIO(content),
            http_headers=StatusAndHeaders(status, headers, protocol="HTTP/1.1"),
            warc_headers_dict={"WARC-Date": "2020-01-02T03:04:05Z"},
        )
    )


def write_warc(path: Path, pages: int = 20) -> Path:
    """Write a WARC file of HTML pages, and other records among them, of which none is a page."""
    with open(path, "wb") as file:
        writer = WARCWriter(file, gzip=path.suffix == ".gz")
        writer.write_record(writer.create_warcinfo_record(path.name, {"software": "test"}))
        for number in range(pages):
            response(writer, number, html(number), "text/html; charset=UTF-8")
            if number % 5 == 0:
                response(writer, 1000, b"%PDF-1.4", "application/pdf")
                response(writer, 1001, html(1001), status="404 Not Found")
                response(writer, 1002, b"\x1b?", packing="unknown")
                record = writer.create_warc_record("http://site.example/", "metadata")
                writer.write_record(record)
    return path


def write_wet(path: Path, texts: list[str]) -> Path:
    with open(path, "wb") as file:
        writer = WARCWriter(file, gzip=path.suffix == ".gz")
        for number, text in enumerate(texts):
            record = writer.create_warc_record(
                f"http://site.example/{number}",
                "conversion",
                payload=BytesIO(text.encode()),
                warc_content_type="text/plain",
            )
            writer.write_record(record)
    return path


def source_of(*files: Path) -> WarcSource:
    return WarcSource(kind="warc", files=tuple(map(str, files)))


def curated(tmp_path: Path, corpus: Path, *steps: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the lines that a curation in few shards keeps."""
    import orjson

    output = tmp_path / f"{corpus.name}.out"
    output.mkdir()
    chosen = validated(CurateSteps, {"curate": list(steps)}, "steps").curate
    options = CurateOptions(shard_bytes=6000, workers=1)
    curate_corpus(corpus, output, tmp_path / f"{corpus.name}.work", chosen, options)
    return [
        orjson.loads(line)
        for path in sorted(output.glob("documents-*"))
        for line in path.read_bytes().splitlines()
    ]


@pytest.mark.parametrize(("size", "least"), [(1, 20), (2500, 3)])
@pytest.mark.parametrize("name", ["a.warc.gz", "a.warc"])
def test_segments_hold_each_page_once(
    name: str, size: int, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_pages, "_CUT_BYTES", 1)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    counts = collect(source_of(write_warc(tmp_path / name)), corpus)
    assert counts["documents"] == 20
    shards = divide(segments(corpus), size)
    assert len(shards) > least
    pages = [
        page for shard in shards for part in shard for page in web_pages.read_pages(part, LIMIT)
    ]
    assert [page.number for page in pages] == list(range(1, 21))
    assert [page.url for page in pages] == [f"http://site.example/{n}" for n in range(20)]
    assert [page.text for page in pages] == [html(number).decode() for number in range(20)]
    assert {page.date for page in pages} == {"2020-01-02T03:04:05Z"}


def test_places_to_cut_are_farther_apart_where_they_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_pages, "_CUT_BYTES", 1)
    monkeypatch.setattr(web_pages, "_MOST_CUTS", 5)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    files = [write_warc(tmp_path / name) for name in ("a.warc", "b.warc")]
    assert collect(source_of(*files), corpus)["documents"] == 40
    parts = segments(corpus)
    assert 4 <= len(parts) <= 7
    numbers = [page.number for part in parts for page in web_pages.read_pages(part, LIMIT)]
    assert numbers == [*range(1, 21)] * 2


def test_curation_extracts_the_text_of_pages_and_keeps_that_of_wet_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datatrove.pipeline.extractors import Trafilatura

    monkeypatch.setattr(web_pages, "_CUT_BYTES", 1000)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    files = write_warc(tmp_path / "a.warc.gz"), write_wet(tmp_path / "b.warc.wet.gz", ["<b> stays"])
    collect(source_of(*files), corpus)
    lines = curated(tmp_path, corpus, EXTRACT, {"step": "exact_dedup"})
    extractor = Trafilatura(deduplicate=False)
    expected = [extractor.extract(html(number).decode()) for number in range(20)]
    assert [line["text"] for line in lines] == [*expected, "<b> stays"]
    assert "Home" not in lines[0]["text"]
    assert lines[3]["source"] == f"{files[0]}:4 http://site.example/3"
    assert read_json(tmp_path / "corpus.out/report.json")["steps"][0]["changed"] == 20


def test_the_step_url_reads_addresses_before_the_text_is_extracted(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    banned = tmp_path / "urls.txt"
    banned.write_text("http://site.example/2\n")
    collect(source_of(write_warc(tmp_path / "a.warc.gz", 4)), corpus)
    url = {"step": "url", "extra_urls": str(banned), "use_integrated_lists": False}
    lines = curated(tmp_path, corpus, url, EXTRACT)
    assert [line["source"].rpartition("/")[2] for line in lines] == ["0", "1", "3"]


def test_html_without_an_extraction_is_refused(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    collect(source_of(write_warc(tmp_path / "a.warc.gz", 1)), corpus)
    with pytest.raises(DataFormatError, match=r"a\.warc\.gz:1 http://site.example/0 is HTML: put"):
        curated(tmp_path, corpus, {"step": "exact_dedup"})


@pytest.mark.parametrize(
    ("content", "kind", "word"),
    [
        (html(0, "iso-8859-1"), "text/html", "naïve"),
        (html(0, "cp1252").replace(b"charset", b""), "text/html; charset=cp1252", "naïve"),
        (html(0).replace(b"charset", b""), "text/html", "naïve"),
        (("Съешь ещё этих мягких французских булок. " * 9).encode("cp1251"), "text/html", "Съешь"),
        (
            ("It’s naïve. " * 9).encode("cp1252"),
            "text/html; charset=ISO-8859-1",
            "It’s naïve. It’s",
        ),
        ("<meta charset=gb2312>朱镕基說".encode("gb18030"), "text/html", "朱镕基說"),
        ("日本語のｶﾅ".encode("iso2022_jp_ext"), "text/html; charset=ISO-2022-JP", "日本語のｶﾅ"),
        ("<meta charset=iso-2022-jp>日本".encode("iso2022_jp"), "text/html", ">日本"),
        ("naïve “€".encode()[:-1], "text/html; charset=utf-8", "naïve “"),
        ("naïve 漢".encode("euc_jp")[:-1], "text/html; charset=euc-jp", "naïve "),
        (("It’s naïve. " * 9).encode() + b"\x92", "text/html; charset=latin-1", "It’s naïve. It’s"),
        (("It’s naïve. " * 9).encode() + b"\x92.", "text/html; charset=latin-1", "naïve. \ufffd."),
    ],
    ids=[
        "meta",
        "server",
        "utf-8",
        "detected",
        "larger encoding",
        "larger encoding of meta",
        "seven bits",
        "seven bits of meta",
        "cut off",
        "cut off in another encoding",
        "end of utf-8 damaged",
        "utf-8 damaged",
    ],
)
def test_pages_are_decoded(content: bytes, kind: str, word: str, tmp_path: Path) -> None:
    path = tmp_path / "a.warc"
    with open(path, "wb") as file:
        response(WARCWriter(file, gzip=False), 0, content, kind)
    (page,) = web_pages.read_pages(Segment(str(path), "", first_page=1), LIMIT)
    assert word in page.text


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    whole = write_warc(tmp_path / "a.warc.gz").read_bytes()
    plain = write_warc(tmp_path / "a.warc").read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) // 2 : len(whole) // 2 + 200] = bytes(200)
    cases = {
        "cut.warc.gz": whole[: len(whole) - 150],
        "cut.warc": plain[: len(plain) - 500],
        "damaged.warc.gz": bytes(damaged),
        "text.warc.gz": b"no WARC file",
        "one-member.warc.gz": gzip.compress(plain),
    }
    for name, content in cases.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(DamagedFileError, match=f"{name} (has a record|is no WARC file)"):
            collect(source_of(path), tmp_path)


@pytest.mark.parametrize("packing", ["gzip", "x-gzip", "GZip"])
@pytest.mark.parametrize("transfer", ["chunked", "Chunked"])
def test_responses_are_unpacked(packing: str, transfer: str, tmp_path: Path) -> None:
    path = tmp_path / "a.warc"
    content = gzip.compress(html(0))
    content = b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content)
    with open(path, "wb") as file:
        response(WARCWriter(file, gzip=False), 0, content, packing=packing, transfer=transfer)
    (page,) = web_pages.read_pages(Segment(str(path), "", first_page=1), LIMIT)
    assert page.text == html(0).decode()


@pytest.mark.parametrize(("name", "end"), [("a.warc.gz", b""), ("a.warc", b"\r\n\r\n")])
def test_a_file_that_is_cut_off_anywhere_in_its_last_record_is_refused(
    name: str, end: bytes, tmp_path: Path
) -> None:
    path = tmp_path / name
    with open(path, "wb") as file:
        writer = WARCWriter(file, gzip=path.suffix == ".gz")
        response(writer, 0, b"<html>")
        last = file.tell()
        response(writer, 1, b"<html>")
    whole = path.read_bytes()
    assert web_pages._scan(str(path))[1] == 2
    for size in range(last + 1, len(whole) - len(end)):
        path.write_bytes(whole[:size])
        with pytest.raises(DamagedFileError):
            web_pages._scan(str(path))


def test_a_page_over_the_limit_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.warc"
    with open(path, "wb") as file:
        writer = WARCWriter(file, gzip=False)
        response(writer, 0, html(0))
        response(writer, 1, html(1) * 50)
    pages = web_pages.read_pages(Segment(str(path), "", first_page=1), LIMIT)
    next(pages)
    with pytest.raises(DataFormatError, match=f"{path} page 2 is a document of more than 10,000"):
        next(pages)
