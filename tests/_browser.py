"""Headless Chromium, driven over its DevTools protocol."""

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from tests._limits import HANG

_TEXT = "document.body ? document.body.innerText : ''"


class Browser:
    """One tab of a browser."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._connection.recv(timeout=HANG))
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, url: str) -> None:
        """Open a page; `text` and `wait_for` read it while it loads."""
        self.call("Page.navigate", url="about:blank")  # a new fragment loads nothing
        self.call("Page.navigate", url=url)

    def text(self) -> str:
        """Return the text that the page shows now."""
        answer = self.call("Runtime.evaluate", expression=_TEXT)
        return str(answer["result"].get("value", ""))

    def wait_for(self, *texts: str) -> str:
        """Return the page's text as soon as it contains all of `texts`."""
        deadline = time.monotonic() + HANG
        while True:
            shown = self.text()
            missing = [text for text in texts if text not in shown]
            if not missing:
                return shown
            assert time.monotonic() < deadline, f"{missing} not in the page:\n{shown}"
            time.sleep(0.2)

    def wait_for_element(self, selector: str) -> None:
        """Wait until the page has an element."""
        deadline = time.monotonic() + HANG
        expression = f"document.querySelector({json.dumps(selector)}) !== null"
        while not self.call("Runtime.evaluate", expression=expression)["result"].get("value"):
            assert time.monotonic() < deadline, f"{selector} not in the page:\n{self.text()}"
            time.sleep(0.2)

    def enter(self, text: str) -> None:
        """Type `text` into the page's first input and press Enter."""
        focused = "document.querySelector('input').focus()"
        self.call("Runtime.evaluate", expression=focused)
        self.call("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
            self.call("Input.dispatchKeyEvent", type=kind, **key)

    def screenshot(self, path: Path) -> None:
        """Write a picture of the page as PNG."""
        answer = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(answer["data"]))


@contextlib.contextmanager
def browser(width: int = 1600, height: int = 1200) -> Iterator[Browser]:
    """Start Chromium with one tab; end it by its process id."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                program,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                f"--window-size={width},{height}",
                "--remote-debugging-port=0",
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port = Path(profile, "DevToolsActivePort")
            deadline = time.monotonic() + HANG
            while not port.exists() or not port.read_text().strip():
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            address = f"http://127.0.0.1:{port.read_text().split()[0]}/json/list"
            with urllib.request.urlopen(address, timeout=HANG) as answer:
                tab = next(tab for tab in json.load(answer) if tab["type"] == "page")
            with connect(tab["webSocketDebuggerUrl"], max_size=None) as connection:
                yield Browser(connection)
        finally:
            process.terminate()
            process.wait(timeout=HANG)
