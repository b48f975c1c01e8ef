"""A web server on the loopback interface that misbehaves as it is told."""

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Site:
    """What the server has, and what it does."""

    files: dict[str, bytes] = field(default_factory=dict)
    breaks: list[int] = field(default_factory=list)
    """For each of the next answers with a body: after how many bytes of it the connection is
    cut."""
    statuses: list[int] = field(default_factory=list)
    """What the next answers are instead of a file."""
    headers: dict[str, str] = field(default_factory=dict)
    """Sent with every answer."""
    ranges: bool = True
    """Whether it sends parts."""
    if_range: bool = True
    """Whether it minds what If-Range says."""
    validators: bool = True
    """Whether it says which version of a file it has."""
    chunked: bool = False
    """Whether it keeps the length to itself."""
    length_error: int = 0
    """Added to the length it announces."""
    silence: threading.Event | None = None
    """Waited for at the end of each body, the connection open."""
    requests: list[dict[str, str]] = field(default_factory=list)
    """Headers of every request, in lower case, and its path."""
    url: str = ""

    def ranges_asked(self) -> list[str | None]:
        return [request.get("range") for request in self.requests]


def etag(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()[:8]}"'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    site: Site

    def do_GET(self) -> None:
        site = self.site
        asked = {name.lower(): value for name, value in self.headers.items()} | {"path": self.path}
        site.requests.append(asked)
        if site.statuses:
            self._answer(site.statuses.pop(0), b"")
            return
        content = site.files.get(self.path)
        if content is None:
            self._answer(404, b"no such file")
            return
        if asked.get("if-none-match") == etag(content):
            self._answer(304, b"")
            return
        start = self._start(asked, content)
        if start is None:
            self._answer(200, content, {"ETag": etag(content)} if site.validators else {})
        elif start >= len(content):
            self._answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
        else:
            part = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
            self._answer(
                206, content[start:], part | ({"ETag": etag(content)} if site.validators else {})
            )

    def _start(self, asked: dict[str, str], content: bytes) -> int | None:
        found = re.fullmatch(r"bytes=(\d+)-", asked.get("range", ""))
        if found is None or not self.site.ranges:
            return None
        if self.site.if_range and asked.get("if-range") not in (None, etag(content)):
            return None
        return int(found[1])

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        site = self.site
        self.send_response(status)
        for name, value in {**(headers or {}), **site.headers}.items():
            self.send_header(name, value)
        chunked = site.chunked and status == 200
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif status != 304:
            self.send_header(
                "Content-Length",
                str(len(body) + (site.length_error if status in (200, 206) else 0)),
            )
        self.end_headers()
        cut = site.breaks.pop(0) if body and status in (200, 206) and site.breaks else None
        body = body if cut is None else body[:cut]
        if chunked and body:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(body), body))
        elif body:
            self.wfile.write(body)
        if site.silence is not None:
            site.silence.wait(30)
        if chunked and cut is None:
            self.wfile.write(b"0\r\n\r\n")
        if cut is not None or site.length_error:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are what these tests are about."""


@contextmanager
def serve() -> Iterator[Site]:
    site = Site()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"site": site}))
    site.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
