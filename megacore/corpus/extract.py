"""Extraction of the main text of web pages with trafilatura, in a process that may be lost."""

import signal
from collections.abc import Iterable, Iterator
from contextlib import closing
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from megacore.config.curate import ExtractTextStep
from megacore.corpus.curate_report import Tally
from megacore.errors import ConfigError, WorkerLostError

PLAIN = "megacore.plain"
"""Field that marks a text that is not HTML; the fields of a source have other names."""
_STOP_SECONDS = 5.0
_PAGE_SIGNALS: dict[int, str] = {
    signal.SIGPROF: "time limit",
    signal.SIGABRT: "extraction failed",
    signal.SIGBUS: "extraction failed",
    signal.SIGSEGV: "extraction failed",
}
"""Reasons for which a page is removed, by the signal with which it ended the process. Other signals
come from outside, such as SIGKILL when memory runs out."""


def check_installed() -> None:
    """Raise ConfigError unless trafilatura is installed."""
    try:
        import trafilatura  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"data.curate's step extract_text needs {error.name}, which is not installed: install "
            "megacore[web]"
        ) from error


class ExtractText:
    """Block that replaces the HTML of documents by their main text, and removes those without one.

    A text with the field PLAIN stays.
    """

    def __init__(self, tally: Tally, label: str, step: ExtractTextStep) -> None:
        """Count what is removed in `tally`, under the step's `label`."""
        self._tally, self._label, self._step = tally, label, step

    def __call__(self, data: Iterable[Any], rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        """Yield the documents that have a text. Raises WorkerLostError."""
        with closing(_Extractor(self._step)) as extractor:
            for document in data:
                if document.metadata.pop(PLAIN, False):
                    yield document
                    continue
                text, reason = extractor.main_text(document.text, document.id)
                if text is None:
                    self._tally.note_removed(self._label, reason, document)
                    continue
                self._tally.changed[self._label] += 1
                document.text = text
                yield document


class _Extractor:
    """Process that extracts texts, and that is started again when a page ended it.

    A page may take libxml2 minutes, or crash it. The limit is on processor time, so that the texts
    that are found do not depend on what else the machine does.
    """

    def __init__(self, step: ExtractTextStep) -> None:
        self._options = (step.favour_precision, step.seconds)
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def main_text(self, html: str, place: str) -> tuple[str | None, str]:
        """Return the text of the page from `place`, or None and the reason.

        Raises WorkerLostError if the process ended for another reason than the page.
        """
        pipe = self._started()
        try:
            pipe.send(html)
            answer: tuple[str | None, str] = pipe.recv()
            return answer
        except (EOFError, OSError):
            code = self._exit_code()
        if reason := _PAGE_SIGNALS.get(-code):
            return None, reason
        raise WorkerLostError(
            f"the process that extracts the text of {place} ended with {_end(code)}, perhaps "
            "because memory ran out: run it again, with fewer processes (data.curate_workers) if "
            "it does"
        )

    def _started(self) -> Connection:
        if self._pipe is not None:
            return self._pipe
        context = get_context("spawn")  # this process may have threads
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, *self._options))
        self._process.start()
        other.close()
        try:
            self._pipe.recv()
        except (EOFError, OSError):
            raise WorkerLostError(
                "the process of data.curate's step extract_text ended with "
                f"{_end(self._exit_code())} while it imported trafilatura: correct what it wrote "
                "to the log, or reinstall megacore[web]"
            ) from None
        return self._pipe

    def _exit_code(self) -> int:
        """Return the exit code of the process that has ended, or minus its signal."""
        assert self._process is not None
        self._process.join()
        code = self._process.exitcode
        assert code is not None
        self.close()
        return code

    def close(self) -> None:
        """End the process."""
        if self._pipe is None or self._process is None:
            return
        self._pipe.close()  # which ends the process
        self._process.join(_STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process = self._pipe = None


def _end(code: int) -> str:
    return f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"


def _serve(pipe: Connection, favour_precision: bool, seconds: float) -> None:
    """Answer each page with its text, or with None and the reason, until the pipe is closed.

    The first message says that this process is ready.
    """
    from trafilatura import extract

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends this process, even inside of libxml2
    pipe.send("ready")
    while True:
        try:
            html = pipe.recv()
        except (EOFError, OSError):
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            text = extract(html, favor_precision=favour_precision, include_comments=False)
        except MemoryError:  # not the page's fault
            raise
        except Exception:  # whatever trafilatura raises for a page
            answer: tuple[str | None, str] = (None, "extraction failed")
        else:
            answer = (text, "") if text else (None, "no text")
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send(answer)
