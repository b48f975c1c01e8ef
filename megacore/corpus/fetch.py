"""Download one file into a directory, across failed attempts and with its progress shown.

NAME.part grows while it comes and NAME.part.json says which version of the file it is; NAME and
NAME.json are there when it is whole, and it is not fetched again. A download goes on where it broke
off as long as the server says that it still has that version (RFC 9110, sections 13.1.5 and 14).
"""

import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.artifact.build import lock
from megacore.artifact.files import read_json, sync_directory, workspace_errors, write_json
from megacore.artifact.manifest import file_digest
from megacore.errors import DataFormatError, DownloadError, WorkspaceError
from megacore.redact import redact, redact_log

if TYPE_CHECKING:
    import httpx

ProgressCallback = Callable[[int, int | None], None]
"""Takes the bytes that are there and all bytes, None as long as these are unknown."""
_LOG_SECONDS = 10.0
_logger = logging.getLogger("megacore.corpus")
_CHUNK = 1 << 20
_PROGRESS_BYTES = 1 << 20
"""An attempt that brought this much does not count as failed: a long download may break off many
times."""
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Status codes after which the same request may succeed."""


@dataclass(frozen=True)
class Patience:
    """How long a download is tried."""

    attempts: int = 5
    """Failures in a row, not counting those that brought a good deal."""
    backoff: float = 0.5
    """Seconds before the second attempt; they double with each."""
    connect_timeout: float = 10.0
    """Seconds."""
    read_timeout: float = 30.0
    """Seconds in which nothing comes."""
    longest_wait: float = 60.0
    """Seconds, when the server asks to be left alone for a while."""


PATIENCE = Patience()
"""For servers as they are."""


@dataclass(frozen=True)
class Version:
    """Which content of an address a file holds, as far as the server says."""

    url: str
    etag: str | None = None
    last_modified: str | None = None
    size: int | None = None
    """Bytes of the whole file."""
    sha256: str | None = None
    """Hex digest, known when it is whole."""

    @classmethod
    def read(cls, path: Path) -> "Version | None":
        """What `path` says; None when it is missing or damaged."""
        try:
            return cls(**read_json(path))
        except (OSError, ValueError, TypeError):
            return None

    @property
    def validator(self) -> str | None:
        """What proves that a rest is of the same content: a strong ETag, else its time."""
        return self.etag if self.etag and not self.etag.startswith("W/") else self.last_modified


def fetch(url: str, sha256: str | None, target: Path, patience: Patience = PATIENCE) -> Version:
    """Have the content of `url` in `target`; its version is returned.

    A file that is there already is taken when it has the `sha256`, or when none is given and the
    server says that it is still the same. Raises DataFormatError for an address that does not
    answer with a file, or with one that has another digest (it is removed); DownloadError when the
    connection is lost again and again; WorkspaceError.
    """
    with workspace_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with lock(target):
            there = _version_there(url, target)
            if there is not None and sha256 is not None and there.sha256 == sha256:
                return there
            with _client(url, patience) as client, download_progress(target.name) as report:
                download = _Download(client, url, target, there if sha256 is None else None, report)
                version = download.run(patience)
            if sha256 is not None and version.sha256 != sha256:
                forget(target)
                raise DataFormatError(
                    f"{shown(url)} has the sha256 {version.sha256}, not {sha256} as data.source "
                    "says: the file has changed or was damaged on its way; it was removed"
                )
            return version


def forget(target: Path) -> None:
    """Remove what `fetch` left of `target`."""
    for path in (target, *_beside(target)):
        path.unlink(missing_ok=True)


def shown(url: str) -> str:
    """An address without user, password and tokens that may be in it."""
    return redact(_without_user(url))


def _without_user(url: str) -> str:
    return re.sub(r"//[^/?#]*@", "//", url, count=1)


def _client(url: str, patience: Patience) -> "httpx.Client":
    import httpx  # here: it takes a while, and only this source needs it

    timeout = httpx.Timeout(patience.read_timeout, connect=patience.connect_timeout)
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise DataFormatError(
            f"{shown(url)} is no address ({_sentence(error)}): check data.source"
        ) from error
    for name in ("httpx", "httpcore"):  # they log the address of every request, its tokens with it
        redact_log(logging.getLogger(name))
    # Apart from the address, which is logged with every request; not sent to another host after a
    # redirection.
    auth = (address.username, address.password) if address.userinfo else None
    return httpx.Client(timeout=timeout, follow_redirects=True, auth=auth)


def _beside(target: Path) -> tuple[Path, Path, Path]:
    names = f"{target.name}.json", f"{target.name}.part", f"{target.name}.part.json"
    return target.with_name(names[0]), target.with_name(names[1]), target.with_name(names[2])


def _version_there(url: str, target: Path) -> Version | None:
    """The version of a whole file of an earlier attempt, if its content is what it was then."""
    version = Version.read(_beside(target)[0])
    if version is None or version.url != shown(url) or not target.is_file():
        return None
    return version if file_digest(target) == version.sha256 else None


class _BrokenOffError(Exception):
    """The attempt failed in a way that may pass, `wait` seconds later if the server said so."""

    def __init__(self, what: str, wait: float = 0.0) -> None:
        super().__init__(what)
        self.wait = wait


class _Download:
    """The attempts at one file, each of which goes on where the one before broke off."""

    def __init__(
        self,
        client: "httpx.Client",
        url: str,
        target: Path,
        there: Version | None,
        report: ProgressCallback,
    ) -> None:
        self._client = client
        self._address, self._url = _without_user(url), shown(url)
        self._target = target
        self._there = there
        self._report = report
        self._about, self._part, self._about_part = _beside(target)
        self._digest, self._size = hashlib.sha256(), 0
        self._version = Version.read(self._about_part) or Version(self._url)
        if self._version.url == self._url and self._version.validator and self._part.is_file():
            self._read_part()
        else:
            self._restart()

    def run(self, patience: Patience) -> Version:
        """The version that lies in the target when all of it has come."""
        import httpx

        failures, most = 0, self._size
        while True:
            try:
                return self._attempt()
            except (httpx.UnsupportedProtocol, httpx.InvalidURL, httpx.TooManyRedirects) as error:
                raise DataFormatError(
                    f"{self._url} cannot be downloaded: {_sentence(error)}: check data.source"
                ) from error
            except (httpx.TransportError, _BrokenOffError) as error:
                # More than ever was there, or a server that begins anew each time would be asked
                # for ever.
                failures = 0 if self._size - most >= _PROGRESS_BYTES else failures + 1
                most = max(most, self._size)
                if failures >= patience.attempts:
                    raise DownloadError(self._given_up(failures, error)) from error
                wait = min(getattr(error, "wait", 0.0), patience.longest_wait)
                time.sleep(max(wait, patience.backoff * 2 ** max(0, failures - 1)))

    def _given_up(self, failures: int, error: Exception) -> str:
        kept = (
            f"; {self._size} bytes are there and will not be fetched again"
            if self._version.validator
            else ""
        )
        return (
            f"the download of {self._url} failed {failures} times in a row "
            f"({_sentence(error)}){kept}: check the network and start again"
        )

    def _attempt(self) -> Version:
        if self._version.size != self._size or not self._size:
            with self._client.stream("GET", self._address, headers=self._headers()) as response:
                if response.status_code == 304 and self._there is not None:
                    return self._there
                self._accept(response)
                self._receive(response)
        if self._version.size not in (None, self._size):
            raise _BrokenOffError(f"{self._size} of {self._version.size} bytes came")
        return self._finish()

    def _headers(self) -> dict[str, str]:
        headers = {"Accept-Encoding": "identity"}
        if self._size and self._version.validator:
            return {**headers, "Range": f"bytes={self._size}-", "If-Range": self._version.validator}
        if self._there is not None and self._there.etag:
            headers["If-None-Match"] = self._there.etag
        elif self._there is not None and self._there.last_modified:
            headers["If-Modified-Since"] = self._there.last_modified
        return headers

    def _accept(self, response: "httpx.Response") -> None:
        """Make the part ready for what the response brings: the rest, or all of it."""
        status = response.status_code
        if status in _TRANSIENT:
            seconds = response.headers.get("retry-after", "")
            wait = float(seconds) if seconds.isdecimal() else 0.0
            raise _BrokenOffError(f"the server answered {status} {response.reason_phrase}", wait)
        if status == 206 and self._continues(response):
            return
        if status in (206, 416) and self._size:
            self._restart()
            raise _BrokenOffError("the server's file is another one than before")
        if status != 200:
            raise DataFormatError(
                f"{self._url} answered {status} {response.reason_phrase} instead of a file: check "
                "data.source"
            )
        self._restart(_version_of(response, self._url))

    def _continues(self, response: "httpx.Response") -> bool:
        """Whether the body is the rest of the part."""
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("content-range", ""))
        if found is None or int(found[1]) != self._size:
            return False
        now = _version_of(response, self._url)
        total = self._version.size if found[2] == "*" else int(found[2])
        before = replace(self._version, size=total)
        self._version = before if self._version.size is None else self._version
        return total == self._version.size and now.validator in (None, before.validator)

    def _receive(self, response: "httpx.Response") -> None:
        self._check_space()
        try:
            with workspace_errors(self._part), open(self._part, "ab", buffering=_CHUNK) as file:
                for chunk in response.iter_raw():
                    file.write(chunk)
                    self._digest.update(chunk)
                    self._size += len(chunk)
                    self._report(self._size, self._version.size)
        except WorkspaceError:
            # Of unknown length it may never fit: nobody else should find the disk full of it.
            if self._version.size is None:
                self._restart()
            raise

    def _check_space(self) -> None:
        missing = (self._version.size or 0) - self._size
        free = shutil.disk_usage(self._part.parent).free
        if missing > free:
            raise WorkspaceError(
                f"cannot write {self._part}: {missing} bytes are to come and {free} are free: free "
                "some space or set another workspace"
            )

    def _finish(self) -> Version:
        self._report(self._size, self._size)
        version = replace(self._version, size=self._size, sha256=self._digest.hexdigest())
        with workspace_errors(self._target):
            with open(self._part, "ab") as file:
                os.fsync(file.fileno())
            write_json(self._about, asdict(version))
            os.replace(self._part, self._target)
            self._about_part.unlink(missing_ok=True)
            sync_directory(self._target.parent)
        return version

    def _read_part(self) -> None:
        """Take up what an earlier process left."""
        with open(self._part, "rb") as file:
            while chunk := file.read(_CHUNK):
                self._digest.update(chunk)
                self._size += len(chunk)
        if self._version.size is not None and self._size > self._version.size:
            self._restart()

    def _restart(self, version: Version | None = None) -> None:
        """Start without a part.

        What is said of it goes first, for it must never be said of other bytes.
        """
        with workspace_errors(self._part):
            self._about_part.unlink(missing_ok=True)
            self._part.unlink(missing_ok=True)
            self._digest, self._size = hashlib.sha256(), 0
            self._version = version or Version(self._url)
            if version is not None:
                write_json(self._about_part, asdict(version))


def _version_of(response: "httpx.Response", url: str) -> Version:
    headers: Any = response.headers
    length = headers.get("content-length", "")
    return Version(
        url,
        headers.get("etag"),
        headers.get("last-modified"),
        int(length) if length.isdecimal() else None,
    )


def _sentence(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(". ")


@contextmanager
def download_progress(name: str) -> Iterator[ProgressCallback]:
    """Show the progress of the download `name` until the block is left."""
    from rich.console import Console

    console = Console(stderr=True)
    with _bar(name, console) if console.is_terminal else _log(name) as report:
        yield report


@contextmanager
def _bar(name: str, console: object) -> Iterator[ProgressCallback]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    assert isinstance(console, Console)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        # Escaped: a name may hold what rich would take for markup.
        task = progress.add_task(name.replace("[", r"\["), total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def _log(name: str) -> Iterator[ProgressCallback]:
    started = last = time.monotonic()

    def report(done: int, total: int | None) -> None:
        nonlocal last
        now = time.monotonic()
        finished = done == total
        if finished or now - last >= _LOG_SECONDS:
            last = now
            of_all = f" of {total / 1e6:.1f}" if total is not None else ""
            _logger.info("%s: %.1f%s MB after %.0f s", name, done / 1e6, of_all, now - started)

    yield report
