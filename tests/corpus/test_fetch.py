"""Tests of downloading one file: resuming, versions, digests and errors."""

import errno
import hashlib
import io
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from megacore.artifact.build import lock
from megacore.corpus import fetch as fetch_module
from megacore.corpus.fetch import Patience, fetch, forget, forget_version
from megacore.errors import DataFormatError, DownloadError, WorkspaceError
from tests._limits import HANG
from tests.corpus._server import Site, etag, serve

CONTENT = random.Random(1).randbytes(5 << 20)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
QUICK = Patience(
    attempts=3, backoff=0.01, connect_timeout=HANG, read_timeout=HANG, longest_wait=0.05
)


@pytest.fixture
def site() -> Iterator[Site]:
    with serve() as site:
        site.files["/a.jsonl"] = CONTENT
        yield site


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "a.jsonl"


def fetch_file(site: Site, target: Path, sha256: str | None = SHA256) -> fetch_module.Version:
    return fetch(f"{site.url}/a.jsonl", sha256, target, QUICK)


def names(target: Path) -> set[str]:
    return {path.name for path in target.parent.iterdir() if not path.name.startswith(".")}


def test_a_download_leaves_only_the_file_and_its_record(site: Site, target: Path) -> None:
    version = fetch_file(site, target)
    assert (version.sha256, version.size) == (SHA256, len(CONTENT))
    assert target.read_bytes() == CONTENT
    assert names(target) == {"a.jsonl", "a.jsonl.json"}
    assert site.requests[0]["accept-encoding"] == "identity"


def test_an_interrupted_download_resumes_at_the_last_byte(site: Site, target: Path) -> None:
    site.breaks = [3 << 20, 1 << 20, 100_000, 5]
    assert fetch_file(site, target).sha256 == SHA256
    assert target.read_bytes() == CONTENT
    assert site.ranges_asked() == [
        None,
        *(
            f"bytes={start}-"
            for start in (3 << 20, 4 << 20, (4 << 20) + 100_000, (4 << 20) + 100_005)
        ),
    ]
    assert site.requests[1]["if-range"] == etag(CONTENT)


def test_the_next_process_resumes_the_download_of_a_killed_one(site: Site, target: Path) -> None:
    # The process is killed during its wait before the second attempt.
    site.breaks = [2 << 20]
    script = (
        "import sys, time; from pathlib import Path; from megacore.corpus import fetch\n"
        "fetch.time.sleep = lambda seconds: (print('broke off', flush=True), time.sleep.__class__, "
        "sys.stdin.read())\n"
        "fetch.fetch(sys.argv[1], None, Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", script, f"{site.url}/a.jsonl", str(target)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"broke off\n"
    process.kill()
    process.communicate()
    assert names(target) == {"a.jsonl.part", "a.jsonl.part.json"}
    assert fetch_file(site, target, None).sha256 == SHA256
    assert site.ranges_asked() == [None, f"bytes={2 << 20}-"]
    assert names(target) == {"a.jsonl", "a.jsonl.json"}


def test_a_part_that_is_removed_during_the_download_is_fetched_again(
    site: Site, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [target.with_name("a.jsonl.part")]

    def remove(done: int, total: int | None) -> None:
        if parts:
            parts.pop().unlink()

    @contextmanager
    def removing(name: str) -> Iterator[fetch_module.ProgressCallback]:
        yield remove

    monkeypatch.setattr(fetch_module, "download_progress", removing)
    assert fetch_file(site, target, None).sha256 == SHA256
    assert target.read_bytes() == CONTENT
    assert len(site.requests) == 2


def test_other_content_that_another_process_fetched_is_not_forgotten(
    site: Site, target: Path
) -> None:
    damaged = fetch_file(site, target, None)
    site.files["/a.jsonl"] = b"whole"
    whole = fetch_file(site, target, None)
    forget_version(target, damaged)
    with lock(target):
        forget_version(target, whole)
    assert target.read_bytes() == b"whole"
    forget_version(target, whole)
    assert names(target) == set()


@pytest.mark.parametrize("values", [{"ranges": False}, {"validators": False}, {"chunked": True}])
def test_a_server_without_ranges_validators_or_length_sends_the_file_again(
    site: Site, target: Path, values: dict[str, bool]
) -> None:
    for name, value in values.items():
        setattr(site, name, value)
    site.breaks = [3 << 20, 10]
    assert fetch_file(site, target).sha256 == SHA256
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize("if_range", [True, False])
@pytest.mark.parametrize("sha256", [True, False])
def test_old_and_new_content_are_never_mixed(
    site: Site, target: Path, if_range: bool, sha256: bool
) -> None:
    site.breaks, site.if_range = [1 << 20, 10, 10, 10], if_range
    with pytest.raises(DownloadError, match=r"failed 3 times in a row .* 1048606 bytes are there"):
        fetch_file(site, target)
    changed = bytes(reversed(CONTENT))
    site.files["/a.jsonl"] = changed
    digest = hashlib.sha256(changed).hexdigest()
    assert fetch_file(site, target, digest if sha256 else None).sha256 == digest
    assert target.read_bytes() == changed


def test_content_that_became_shorter_is_fetched_again(site: Site, target: Path) -> None:
    site.breaks, site.if_range = [4 << 20, 1, 1, 1], False
    with pytest.raises(DownloadError):
        fetch_file(site, target)
    site.files["/a.jsonl"] = b"short"
    assert fetch_file(site, target, None).size == 5


def test_a_wrong_digest_is_refused_and_leaves_no_file(site: Site, target: Path) -> None:
    wrong = "0" * 64
    with pytest.raises(
        DataFormatError,
        match=rf"/a\.jsonl has the sha256 {SHA256}, not {wrong} as data\.source says",
    ):
        fetch_file(site, target, wrong)
    assert names(target) == set()
    assert len(site.requests) == 1


def test_a_file_with_the_right_digest_is_not_requested_again(site: Site, target: Path) -> None:
    fetch_file(site, target)
    assert fetch_file(site, target).sha256 == SHA256
    assert len(site.requests) == 1
    # The digest is computed from the file's bytes again.
    target.write_bytes(CONTENT[:-1] + b"?")
    assert fetch_file(site, target).sha256 == SHA256
    assert target.read_bytes() == CONTENT
    assert len(site.requests) == 2


def test_a_file_without_a_digest_is_revalidated_with_the_server(site: Site, target: Path) -> None:
    fetch_file(site, target, None)
    before = target.stat().st_ino
    assert fetch_file(site, target, None).sha256 == SHA256
    assert site.requests[1]["if-none-match"] == etag(CONTENT)
    assert target.stat().st_ino == before
    assert names(target) == {"a.jsonl", "a.jsonl.json"}
    linked = target.with_name("linked")
    os.link(target, linked)
    site.files["/a.jsonl"] = b"new"
    assert fetch_file(site, target, None).size == 3
    assert (target.read_bytes(), linked.read_bytes()) == (b"new", CONTENT)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_temporary_server_error_is_retried(site: Site, target: Path, status: int) -> None:
    site.statuses, site.headers = [status, status], {"Retry-After": "3600"}
    started = time.monotonic()
    assert fetch_file(site, target).sha256 == SHA256
    assert 0.1 <= time.monotonic() - started < 120  # two waits of longest_wait, not of an hour


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_persistent_server_error_fails_after_the_attempts(
    site: Site, target: Path, status: int
) -> None:
    site.statuses = [status] * 3
    with pytest.raises(
        DownloadError, match=rf"failed 3 times in a row \(the server answered {status}"
    ) as caught:
        fetch_file(site, target)
    assert caught.value.retryable


@pytest.mark.parametrize("status", [401, 403, 404, 410, 304])
def test_a_client_error_is_not_retried(site: Site, target: Path, status: int) -> None:
    site.statuses = [status]
    with pytest.raises(
        DataFormatError,
        match=rf"/a\.jsonl answered {status} \w.* instead of a file: check data\.source",
    ):
        fetch_file(site, target)
    assert len(site.requests) == 1
    assert names(target) == set()


def test_a_redirect_is_followed_without_reading_its_body(site: Site, target: Path) -> None:
    site.statuses, site.headers = [302], {"Location": f"{site.url}/a.jsonl"}
    assert fetch_file(site, target).sha256 == SHA256


def test_a_redirect_within_the_site_keeps_the_password(site: Site, target: Path) -> None:
    elsewhere = site.url.replace("127.0.0.1", "localhost")
    user = site.url.replace("//", "//me:secret@")
    for place, sent in ((site.url, True), (elsewhere, False)):
        site.statuses, site.headers = [302], {"Location": f"{place}/a.jsonl"}
        site.requests.clear()
        fetch(f"{user}/b.jsonl", SHA256, target.with_name(f"b{sent}"), QUICK)
        assert ["authorization" in request for request in site.requests] == [True, sent]


def test_a_loop_of_redirects_is_refused(site: Site, target: Path) -> None:
    site.statuses, site.headers = [302] * 50, {"Location": f"{site.url}/a.jsonl"}
    with pytest.raises(
        DataFormatError, match=r"/b\.jsonl redirects more than 10 times, the last time to .*/a\.js"
    ):
        fetch(f"{site.url}/b.jsonl", None, target.with_name("b"), QUICK)
    assert len(site.requests) == 1 + fetch_module.MAX_REDIRECTS


@pytest.mark.parametrize("address", ["ftp://127.0.0.1/a.jsonl", "file://127.0.0.1/etc/passwd"])
def test_a_redirect_to_another_protocol_is_refused(site: Site, target: Path, address: str) -> None:
    site.statuses, site.headers = [302], {"Location": address}
    with pytest.raises(
        DataFormatError, match=rf"/c\.jsonl redirects to {address}; .*only to http and https: check"
    ):
        fetch(f"{site.url}/c.jsonl", None, target.with_name("c"), QUICK)


def test_a_redirect_from_https_to_http_is_refused(target: Path) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(302, headers={"Location": "http://a.example/x?token=secret"})

    target.parent.mkdir()
    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        download = fetch_module._Download(
            client, "https://a.example/x", target, None, lambda done, total: None, 10
        )
        with pytest.raises(
            DataFormatError, match=r"redirects to http://a\.example/x.* from https .*only to https:"
        ) as error:
            download.run(QUICK)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_file_above_the_limit_is_refused_and_removed(
    site: Site, target: Path, chunked: bool
) -> None:
    site.chunked = chunked
    with pytest.raises(
        DataFormatError,
        match=r"/a\.jsonl has at least \d+ bytes, more than data\.source\.max_file_gb = 0\.001 ",
    ):
        fetch(f"{site.url}/a.jsonl", None, target, QUICK, max_bytes=1_000_000)
    assert (len(site.requests), names(target)) == (1, set())


def test_a_refused_connection_fails_soon(target: Path) -> None:
    with serve() as site:
        url = site.url
    started = time.monotonic()
    with pytest.raises(DownloadError, match=r"failed 3 times in a row \(.*refused"):
        fetch(f"{url}/a.jsonl", None, target, QUICK)
    assert time.monotonic() - started < 120  # the connection's timeout is longer


def test_a_silent_server_fails_after_the_read_timeout(site: Site, target: Path) -> None:
    site.silence = threading.Event()
    for seconds in (0.2, 1.0, 5.0, 30.0):  # on a busy machine even the first bytes may take longer
        site.breaks = [1000, 0, 0]  # bytes that each attempt gets
        with pytest.raises(DownloadError, match=r"failed 3 times in a row \(timed out\)") as caught:
            fetch(f"{site.url}/a.jsonl", None, target, replace(QUICK, read_timeout=seconds))
        if "; 1000 bytes are there" in str(caught.value):
            break
        forget(target)
    site.silence.set()
    assert "; 1000 bytes are there" in str(caught.value)
    assert not target.exists()


def test_a_length_that_is_too_short_fails_the_digest_check(site: Site, target: Path) -> None:
    site.length_error = -1
    with pytest.raises(DataFormatError, match="has the sha256"):
        fetch_file(site, target)


def test_a_server_that_always_restarts_the_file_fails_after_the_attempts(
    site: Site, target: Path
) -> None:
    site.ranges, site.breaks = False, [2 << 20] * 100
    with pytest.raises(DownloadError, match="failed 3 times in a row"):
        fetch_file(site, target)
    assert len(site.requests) == 4


def test_too_little_free_disk_is_refused_before_the_download(
    site: Site, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil._ntuple_diskusage(10**9, 10**9, 1 << 20)
    monkeypatch.setattr(fetch_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        WorkspaceError,
        match=r"a\.jsonl\.part: 5242880 bytes are still to be downloaded and 1048576",
    ):
        fetch_file(site, target)


def test_a_full_disk_during_the_download_is_refused_and_the_next_attempt_succeeds(
    site: Site, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def __init__(self, *_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", str(target))

    monkeypatch.setattr(fetch_module, "write_json", Full)
    with pytest.raises(WorkspaceError, match="No space left on device: free some space"):
        fetch_file(site, target)
    monkeypatch.undo()
    assert fetch_file(site, target).sha256 == SHA256


@pytest.mark.parametrize("chunked", [True, False])
def test_a_full_disk_keeps_the_partial_file_only_if_the_length_is_known(
    site: Site, target: Path, monkeypatch: pytest.MonkeyPatch, chunked: bool
) -> None:
    class Full(io.FileIO):
        def write(self, data: bytes) -> int:  # type: ignore[override]
            if self.tell() + len(data) > 3 << 20:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    monkeypatch.setattr(
        fetch_module, "open", lambda path, mode, **_: Full(path, mode), raising=False
    )
    site.chunked = chunked
    with pytest.raises(
        WorkspaceError,
        match=r"cannot write .*a\.jsonl\.part: No space left on device: free some space",
    ):
        fetch_file(site, target)
    assert target.with_name("a.jsonl.part").exists() != chunked
    monkeypatch.undo()
    assert fetch_file(site, target).sha256 == SHA256


def test_concurrent_downloads_fetch_the_file_once(site: Site, target: Path) -> None:
    threads = [threading.Thread(target=fetch_file, args=(site, target)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.read_bytes() == CONTENT
    assert len(site.requests) == 1


@pytest.mark.parametrize("url", ["http://host:x/a", "http://[::1/a", "http://a\tb/c"])
def test_an_invalid_url_is_refused(target: Path, url: str) -> None:
    with pytest.raises(DataFormatError, match=r"is no address .*: check data\.source"):
        fetch(url, None, target, QUICK)


def test_a_password_is_not_logged_or_stored(
    site: Site, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = site.url.replace("//", "//me:a@secret@") + "/a.jsonl"
    with caplog.at_level(logging.DEBUG):
        fetch(url, None, target, QUICK)
    assert "httpx" in {record.name for record in caplog.records}
    assert "secret" not in caplog.text
    assert "secret" not in (target.parent / "a.jsonl.json").read_text()
    assert site.requests[0]["authorization"].startswith("Basic ")
    with pytest.raises(DataFormatError) as caught:
        fetch(url + "x", None, target.with_name("x"), QUICK)
    assert "secret" not in str(caught.value)


def test_an_empty_file_is_downloaded(site: Site, target: Path) -> None:
    site.files["/a.jsonl"] = b""
    assert fetch_file(site, target, None).size == 0
    assert target.read_bytes() == b""


def test_damaged_download_records_are_ignored(site: Site, target: Path) -> None:
    target.parent.mkdir(parents=True)
    for record in (
        "",
        "[]",
        '{"url": 1}',
        json.dumps({"url": f"{site.url}/a.jsonl", "etag": "x", "size": 3}),
    ):
        (target.parent / "a.jsonl.part").write_bytes(b"garbage")
        (target.parent / "a.jsonl.part.json").write_text(record)
        (target.parent / "a.jsonl.json").write_text(record)
        assert fetch_file(site, target, None).sha256 == SHA256


def test_progress_is_logged_without_a_terminal(
    site: Site, target: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "_LOG_SECONDS", 0.0)
    with caplog.at_level(logging.INFO, "megacore.corpus"):
        fetch_file(site, target)
    assert caplog.messages[-1].startswith("a.jsonl: 5.2 of 5.2 MB after ")
    assert len(caplog.messages) > 2


def use_terminal(monkeypatch: pytest.MonkeyPatch, *, redraws: bool) -> io.StringIO:
    """Let consoles write to a terminal, of the returned content, that can redraw a line or not."""
    from rich import console

    screen = io.StringIO()

    class Terminal(console.Console):
        def __init__(self, *, stderr: bool) -> None:
            super().__init__(
                file=screen, stderr=stderr, force_terminal=True, force_interactive=redraws
            )

    monkeypatch.setattr(console, "Console", Terminal)
    return screen


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = use_terminal(monkeypatch, redraws=True)
    with fetch_module.download_progress("a[b].jsonl") as report:
        report(10, None)
        report(1_000_000, 2_000_000)
    assert "a[b].jsonl" in screen.getvalue()
    assert "1.0/2.0 MB" in screen.getvalue()


def test_progress_is_logged_on_a_terminal_that_cannot_redraw_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    screen = use_terminal(monkeypatch, redraws=False)
    with (
        caplog.at_level(logging.INFO, "megacore.corpus"),
        fetch_module.download_progress("a.jsonl") as report,
    ):
        report(2_000_000, 2_000_000)
    assert caplog.messages[-1].startswith("a.jsonl: 2.0 of 2.0 MB after ")
    assert screen.getvalue() == ""
