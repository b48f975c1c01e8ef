"""Download of a single file, with retries, resuming and a progress report.

NAME.part is the partial download, and NAME.part.json identifies the version of the file. When the
download is complete, they become NAME and NAME.json, and the file is not downloaded again. A
partial download is resumed as long as the server still has the same version of the file (RFC 9110,
sections 13.1.5 and 14).
"""

import hashlib
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.artifact.build import lock, try_lock
from megacore.artifact.files import read_json, sync_directory, workspace_errors, write_json
from megacore.artifact.manifest import file_digest
from megacore.errors import DataFormatError, DownloadError, WorkspaceError
from megacore.paths import is_file
from megacore.redact import redact, redact_log

if TYPE_CHECKING:
    import httpx
    from rich.console import Console

_BAR = threading.Lock()
"""Held by the download whose progress bar is on the terminal."""
ProgressCallback = Callable[[int, int | None], None]
"""Callback that receives the number of bytes so far and the total, which is None if unknown."""
_LOG_SECONDS = 10.0
_logger = logging.getLogger("megacore.corpus")
_CHUNK = 1 << 20
_PROGRESS_BYTES = 1 << 20
"""Bytes of progress that reset the count of failures: a long download may be interrupted often."""
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Status codes after which the same request may succeed."""
MAX_REDIRECTS = 10
"""Number of redirects of one request that are followed."""
MAX_BYTES = 1000 * 10**9
"""Default of the largest file in bytes; `data.source.max_file_gb` changes it."""


@dataclass(frozen=True)
class Patience:
    """Limits of a download's attempts and waits."""

    attempts: int = 5
    """Failures in a row after which the download fails; progress of 1 MiB resets the count."""
    backoff: float = 0.5
    """Seconds before the second attempt, doubled before each further one."""
    connect_timeout: float = 10.0
    """Seconds to wait for a connection."""
    read_timeout: float = 30.0
    """Seconds to wait for data."""
    longest_wait: float = 60.0
    """Maximum number of seconds to wait when the server sends Retry-After."""


PATIENCE = Patience()
"""Default limits."""


@dataclass(frozen=True)
class Version:
    """Version of a file: its address and the validators, size and digest of its content."""

    url: str
    etag: str | None = None
    last_modified: str | None = None
    size: int | None = None
    """Size of the complete file in bytes."""
    sha256: str | None = None
    """Hex digest of the complete file; None before the download is complete."""

    @classmethod
    def read(cls, path: Path) -> "Version | None":
        """Read a version from the JSON file `path`; return None if it is missing or damaged."""
        try:
            return cls(**read_json(path))
        except (OSError, ValueError, TypeError):
            return None

    @property
    def validator(self) -> str | None:
        """Validator that ties a partial download to its content: a strong ETag, or Last-Modified.

        None if the server sent neither.
        """
        return self.etag if self.etag and not self.etag.startswith("W/") else self.last_modified


def fetch(
    url: str,
    sha256: str | None,
    target: Path,
    patience: Patience = PATIENCE,
    *,
    max_bytes: int = MAX_BYTES,
) -> Version:
    """Download `url` to `target`, resuming a partial file, and return its version.

    An existing file is reused if it has the `sha256`, or, without a `sha256`, if the server reports
    that it is unchanged. At most `MAX_REDIRECTS` redirects are followed, from https only to https.

    Raises:
        DataFormatError: the address does not answer with a file, redirects too often or to a
            refused scheme, the file has more than `max_bytes` bytes, or its digest differs; what
            was downloaded of the last two is removed.
        DownloadError: all attempts fail.
        WorkspaceError: `target` cannot be written.
    """
    with workspace_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with lock(target):
            complete = _complete_version(url, target)
            if complete is not None and sha256 is not None and complete.sha256 == sha256:
                return complete
            with _client(url, patience) as client, download_progress(target.name) as report:
                download = _Download(
                    client, url, target, complete if sha256 is None else None, report, max_bytes
                )
                version = download.run(patience)
            if sha256 is not None and version.sha256 != sha256:
                forget(target)
                raise DataFormatError(
                    f"{shown(url)} has the sha256 {version.sha256}, not {sha256} as data.source "
                    "says: the file has changed or was damaged on its way; it was removed"
                )
            return version


def forget_version(target: Path, version: Version) -> None:
    """Remove what `fetch` wrote for `target`, unless another process fetches it or has done so.

    Raises WorkspaceError.
    """
    with workspace_errors(target), try_lock(target) as free:
        known = Version.read(_side_files(target)[0])
        if free and known is not None and known.sha256 == version.sha256:
            forget(target)


def forget(target: Path) -> None:
    """Remove `target` and the other files that `fetch` wrote for it, while its lock is held."""
    for path in (target, *_side_files(target)):
        path.unlink(missing_ok=True)


def shown(url: str) -> str:
    """Return the address without user, password and tokens."""
    return redact(_without_user(url))


def _without_user(url: str) -> str:
    return re.sub(r"//[^/?#]*@", "//", url, count=1)


def _client(url: str, patience: Patience) -> "httpx.Client":
    import httpx  # imported here because it imports slowly and only this source needs it

    timeout = httpx.Timeout(patience.read_timeout, connect=patience.connect_timeout)
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise DataFormatError(
            f"{shown(url)} is no address ({first_sentence(error)}): check data.source"
        ) from error
    for name in ("httpx", "httpcore"):  # they log the address of every request, with its tokens
        redact_log(logging.getLogger(name))
    # The credentials are passed separately because the address is logged with every request.
    auth = (address.username, address.password) if address.userinfo else None
    return httpx.Client(timeout=timeout, auth=auth)


def _side_files(target: Path) -> tuple[Path, Path, Path]:
    name = target.name
    return (
        target.with_name(f"{name}.json"),
        target.with_name(f"{name}.part"),
        target.with_name(f"{name}.part.json"),
    )


def _complete_version(url: str, target: Path) -> Version | None:
    """Return the version of a complete earlier download, or None if it is missing or changed."""
    version = Version.read(_side_files(target)[0])
    if version is None or version.url != shown(url) or not is_file(target):
        return None
    return version if file_digest(target) == version.sha256 else None


class _BrokenOffError(Exception):
    """A failure that a retry may overcome, after `wait` seconds if the server requested a delay."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


class _Download:
    """Attempts to download one file; each resumes where the previous one ended."""

    def __init__(
        self,
        client: "httpx.Client",
        url: str,
        target: Path,
        complete: Version | None,
        report: ProgressCallback,
        max_bytes: int,
    ) -> None:
        """Resume the partial download of `target` if there is one.

        `complete` is the version of an existing complete file, which is reused if the server
        answers that it is unchanged.
        """
        self._client, self._max_bytes = client, max_bytes
        self._address, self._url = _without_user(url), shown(url)
        self._target = target
        self._complete = complete
        self._report = report
        self._about, self._part, self._about_part = _side_files(target)
        self._digest, self._size = hashlib.sha256(), 0
        self._version = Version.read(self._about_part) or Version(self._url)
        if self._version.url == self._url and self._version.validator and is_file(self._part):
            self._read_part()
        else:
            self._restart()

    def run(self, patience: Patience) -> Version:
        """Download the file, retrying after failures, and return its version."""
        import httpx

        failures, largest = 0, self._size
        while True:
            try:
                return self._attempt()
            except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
                raise DataFormatError(
                    f"{self._url} cannot be downloaded: {first_sentence(error)}: check data.source"
                ) from error
            except (httpx.TransportError, _BrokenOffError) as error:
                # Progress counts only beyond the largest size so far. Otherwise a server that
                # starts over each time would be retried forever.
                failures = 0 if self._size - largest >= _PROGRESS_BYTES else failures + 1
                largest = max(largest, self._size)
                if failures >= patience.attempts:
                    raise DownloadError(self._given_up(failures, error)) from error
                wait = min(getattr(error, "wait", 0.0), patience.longest_wait)
                time.sleep(max(wait, patience.backoff * 2 ** max(0, failures - 1)))

    def _given_up(self, failures: int, error: Exception) -> str:
        note = (
            f"; {self._size} bytes are there and will not be fetched again"
            if self._version.validator
            else ""
        )
        return (
            f"the download of {self._url} failed {failures} times in a row "
            f"({first_sentence(error)}){note}: check the network and start again"
        )

    def _attempt(self) -> Version:
        if self._version.size != self._size or not self._size:
            with self._response() as response:
                if response.status_code == 304 and self._complete is not None:
                    return self._complete
                self._accept(response)
                self._receive(response)
        if self._version.size not in (None, self._size):
            raise _BrokenOffError(f"{self._size} of {self._version.size} bytes arrived")
        return self._finish()

    @contextmanager
    def _response(self) -> "Iterator[httpx.Response]":
        """Request the file, follow redirects without reading their bodies, and yield the answer.

        Raises DataFormatError.
        """
        request = self._client.build_request("GET", self._address, headers=self._headers())
        response = self._client.send(request, stream=True)
        try:
            for _ in range(MAX_REDIRECTS):
                if response.next_request is None:
                    break
                target = response.next_request
                self._check_redirect(request.url.scheme, target.url)
                response.close()
                # httpx has removed the header with the credentials for another host. Without
                # auth=None it would add them again.
                response = self._client.send(target, stream=True, auth=None)
            if response.next_request is not None:
                raise DataFormatError(
                    f"{self._url} redirects more than {MAX_REDIRECTS} times, the last time to "
                    f"{shown(str(response.next_request.url))}: give the address of the file itself "
                    "in data.source"
                )
            yield response
        finally:
            response.close()

    def _check_redirect(self, first_scheme: str, url: "httpx.URL") -> None:
        """Refuse a redirect from https to anything else, or to anything but http and https."""
        allowed = ("https",) if first_scheme == "https" else ("http", "https")
        if url.scheme not in allowed:
            raise DataFormatError(
                f"{self._url} redirects to {shown(str(url))}; from {first_scheme} a download "
                f"follows redirects only to {' and '.join(allowed)}: check data.source, or give "
                "the address of the file itself"
            )

    def _headers(self) -> dict[str, str]:
        headers = {"Accept-Encoding": "identity"}
        if self._size and self._version.validator:
            return {**headers, "Range": f"bytes={self._size}-", "If-Range": self._version.validator}
        if self._complete is not None and self._complete.etag:
            headers["If-None-Match"] = self._complete.etag
        elif self._complete is not None and self._complete.last_modified:
            headers["If-Modified-Since"] = self._complete.last_modified
        return headers

    def _accept(self, response: "httpx.Response") -> None:
        """Prepare the partial file for the body of the response: the rest, or the complete file."""
        status = response.status_code
        if status in _TRANSIENT:
            seconds = response.headers.get("retry-after", "")
            wait = float(seconds) if seconds.isdecimal() else 0.0
            raise _BrokenOffError(f"the server answered {status} {response.reason_phrase}", wait)
        if status == 206 and self._continues(response):
            return
        if status in (206, 416) and self._size:
            self._restart()
            raise _BrokenOffError("the server's file has changed")
        if status != 200:
            raise DataFormatError(
                f"{self._url} answered {status} {response.reason_phrase} instead of a file: check "
                "data.source"
            )
        self._restart(_version_of(response, self._url))

    def _continues(self, response: "httpx.Response") -> bool:
        """Return True if the body is the rest of the partial file."""
        content_range = re.fullmatch(
            r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("content-range", "")
        )
        if content_range is None or int(content_range[1]) != self._size:
            return False
        version = _version_of(response, self._url)
        total = self._version.size if content_range[2] == "*" else int(content_range[2])
        expected = replace(self._version, size=total)
        self._version = expected if self._version.size is None else self._version
        return total == self._version.size and version.validator in (None, expected.validator)

    def _receive(self, response: "httpx.Response") -> None:
        self._check_size(self._version.size or 0)
        self._check_space()
        try:
            with workspace_errors(self._part), open(self._part, "ab", buffering=_CHUNK) as file:
                for chunk in response.iter_raw():
                    self._check_size(self._size + len(chunk))
                    file.write(chunk)
                    self._digest.update(chunk)
                    self._size += len(chunk)
                    self._report(self._size, self._version.size)
        except WorkspaceError:
            # A file of unknown length may never fit, so remove the part to free the disk.
            if self._version.size is None:
                self._restart()
            raise

    def _check_size(self, size: int) -> None:
        """Refuse a file with more than `max_bytes` bytes, and remove what has arrived of it."""
        if size > self._max_bytes:
            self._restart()
            raise DataFormatError(
                f"{self._url} has at least {size} bytes, more than data.source.max_file_gb = "
                f"{self._max_bytes / 1e9:g} allows: check the address, or raise it"
            )

    def _check_space(self) -> None:
        missing = (self._version.size or 0) - self._size
        free = shutil.disk_usage(self._part.parent).free
        if missing > free:
            raise WorkspaceError(
                f"cannot write {self._part}: {missing} bytes are still to be downloaded and {free} "
                "are free: free some space or set another workspace"
            )

    def _finish(self) -> Version:
        self._report(self._size, self._size)
        version = replace(self._version, size=self._size, sha256=self._digest.hexdigest())
        with workspace_errors(self._target):
            with open(self._part, "ab") as file:
                os.fsync(file.fileno())
                written = os.fstat(file.fileno()).st_size
            if written != self._size:  # somebody removed it, and an empty one would take its place
                self._restart()
                raise _BrokenOffError(
                    f"{self._part} has {written} of the {self._size} bytes that arrived"
                )
            write_json(self._about, asdict(version))
            os.replace(self._part, self._target)
            self._about_part.unlink(missing_ok=True)
            sync_directory(self._target.parent)
        return version

    def _read_part(self) -> None:
        """Compute digest and size of the partial file that an earlier process left."""
        with open(self._part, "rb") as file:
            while chunk := file.read(_CHUNK):
                self._digest.update(chunk)
                self._size += len(chunk)
        if self._version.size is not None and self._size > self._version.size:
            self._restart()

    def _restart(self, version: Version | None = None) -> None:
        """Remove the partial file and set the version of the next one.

        NAME.part.json is removed first because it must never describe other bytes.
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


def first_sentence(error: BaseException) -> str:
    """Return the first line of an error's message, without the full stop."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(". ")


@contextmanager
def download_progress(name: str) -> Iterator[ProgressCallback]:
    """Show the progress of the download `name`: a bar on a terminal, else log lines.

    A terminal that cannot redraw a line (TERM=dumb) gets log lines, as does each further download
    of several at the same time.
    """
    from rich.console import Console

    console = Console(stderr=True)
    has_bar = console.is_interactive and _BAR.acquire(blocking=False)
    try:
        with _bar(name, console) if has_bar else _log(name) as report:
            yield report
    finally:
        if has_bar:
            _BAR.release()


@contextmanager
def _bar(name: str, console: "Console") -> Iterator[ProgressCallback]:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        # Escaped because rich would interpret brackets in a name as markup.
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
            suffix = f" of {total / 1e6:.1f}" if total is not None else ""
            _logger.info("%s: %.1f%s MB after %.0f s", name, done / 1e6, suffix, now - started)

    yield report
