"""Web server on the loopback interface with configurable faults."""

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests._limits import HANG


@dataclass
class Site:
    """Files and faults of the server, and the requests it received."""

    files: dict[str, bytes] = field(default_factory=dict)
    breaks: list[int] = field(default_factory=list)
    """Bytes of the body after which the connection is cut, for each of the next responses."""
    statuses: list[int] = field(default_factory=list)
    """Status codes of the next responses, which then have no body."""
    headers: dict[str, str] = field(default_factory=dict)
    """Headers of every response."""
    ranges: bool = True
    """True if the server supports range requests."""
    if_range: bool = True
    """True if the server respects If-Range."""
    validators: bool = True
    """True if the server sends the ETag of a file."""
    chunked: bool = False
    """True if the server sends chunks and no length."""
    length_error: int = 0
    """Error of the announced length in bytes."""
    silence: threading.Event | None = None
    """Event that the server waits for at the end of each body, with the connection open."""
    requests: list[dict[str, str]] = field(default_factory=list)
    """Lower-case headers and path of every request."""
    url: str = ""

    def ranges_asked(self) -> list[str | None]:
        return [request.get("range") for request in self.requests]


def etag(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()[:8]}"'


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    site: Site

    def do_GET(self) -> None:
        site = self.site
        request = {name.lower(): value for name, value in self.headers.items()} | {
            "path": self.path
        }
        site.requests.append(request)
        if site.statuses:
            self._answer(site.statuses.pop(0), b"")
            return
        content = site.files.get(self.path)
        if content is None:
            self._answer(404, b"no such file")
            return
        if request.get("if-none-match") == etag(content):
            self._answer(304, b"")
            return
        start = self._start(request, content)
        if start is None:
            self._answer(200, content, {"ETag": etag(content)} if site.validators else {})
        elif start >= len(content):
            self._answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
        else:
            part = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
            self._answer(
                206, content[start:], part | ({"ETag": etag(content)} if site.validators else {})
            )

    def _start(self, request: dict[str, str], content: bytes) -> int | None:
        match = re.fullmatch(r"bytes=(\d+)-", request.get("range", ""))
        if match is None or not self.site.ranges:
            return None
        if self.site.if_range and request.get("if-range") not in (None, etag(content)):
            return None
        return int(match[1])

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
            site.silence.wait(HANG)
        if chunked and cut is None:
            self.wfile.write(b"0\r\n\r\n")
        if cut is not None or site.length_error:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that hang up: the tests provoke them."""


@contextmanager
def serve(
    site: Site | None = None,
    handler: type[Handler] = Handler,
    *,
    port: int = 0,
    **values: object,
) -> Iterator[Site]:
    """Serve a site from this process.

    Args:
        site: files and faults; None for an empty site.
        handler: class that answers requests.
        port: port on the loopback interface; 0 for a free one.
        values: further attributes of the handler.
    """
    site = site or Site()
    server = _Server(("127.0.0.1", port), type("SiteHandler", (handler,), {"site": site, **values}))
    site.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
