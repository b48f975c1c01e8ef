"""Monitoring of running processes: their log, a progress display and the forwarding of metrics."""

import logging
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, Self

from prefect import get_run_logger
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.logging.handlers import PrefectConsoleHandler
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.theme import Theme

from megacore.artifact.files import access_errors
from megacore.errors import MegacoreError
from megacore.observe.events import EventReader, end_of_lines
from megacore.observe.logging import short_number
from megacore.paths import exists
from tasks._logging import shown_in_prefect
from tasks._perplexity import PerplexityTable

_WIDE = re.compile(r"(?:\S+: +)?(?:\[|time \(ms\))")
"""Start of a wide log line, which follows the host's name when there are several hosts."""
STORED_LINES = 2000
"""Number of wide lines of an attempt that Prefect stores; of later ones, a few a minute."""
STORED_PER_MINUTE = 4
"""A month of them takes 100 MB of Prefect's database; two lines a second would take 3 GB."""
ARTIFACT_INTERVAL = 5.0
"""Seconds between updates of the progress artifact."""
_LONGEST_STOP = 5.0
"""Seconds that an ending attempt waits until Prefect has stored the last progress."""


class LogTail:
    """Reader that passes each new line of a growing file to `emit`."""

    def __init__(self, path: Path, emit: Callable[[str], None]) -> None:
        self.path = path
        self.emit = emit
        self._offset = path.stat().st_size if exists(path) else 0

    def poll(self) -> None:
        """Emit the complete lines written since the last call."""
        if not exists(self.path):
            return
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            chunk = file.read()
        complete = chunk[: chunk.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.decode("utf-8", errors="replace").splitlines():
            if line.strip():
                self.emit(line.strip())


def log_tail(path: Path) -> LogTail:
    """Return a reader that streams a job's log into the log of the task run that polls it."""
    return LogTail(path, lambda line: get_run_logger().info(line))


def _end_of_events(path: Path) -> int:
    """Return the offset after the last complete event, to hide events of earlier attempts."""
    if not exists(path):
        return 0
    with access_errors(path), open(path, "rb") as file:
        return end_of_lines(file)


def console_handler() -> PrefectConsoleHandler | None:
    """Return the handler that prints Prefect's log to the terminal, or None."""
    for name in ("prefect.task_runs", "prefect", "root"):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, PrefectConsoleHandler):
                return handler
    return None


def _is_not_interval_line(record: logging.LogRecord) -> bool:
    """Return False for the wide lines of each log interval.

    While a progress bar is shown, these lines go only to the log and to Prefect.
    """
    return _WIDE.match(record.getMessage()) is None


class _Sender:
    """Thread that stores in Prefect what a training shows.

    A server that does not answer must not hold up the supervision.
    """

    def __init__(self) -> None:
        self._calls: dict[str, Callable[[], None]] = {}
        self._thread: threading.Thread | None = None

    def add(self, name: str, call: Callable[[], None]) -> None:
        """Add a call, in place of an earlier one of this name that has not begun."""
        self._calls[name] = call

    def start(self) -> None:
        """Begin the calls, unless earlier ones still run."""
        if not self._calls or (self._thread is not None and self._thread.is_alive()):
            return
        calls = list(self._calls.values())

        def call_all() -> None:
            for call in calls:
                call()

        # with the context of the task run, to which the artifacts belong
        arguments = (call_all,)
        thread = threading.Thread(target=copy_context().run, args=arguments, daemon=True)
        with suppress(RuntimeError):  # no thread can start now: the next poll tries again
            thread.start()
            self._thread, self._calls = thread, {}

    def finish(self, seconds: float) -> None:
        """Wait for all calls, at most `seconds`."""
        deadline = time.monotonic() + seconds
        self._join(deadline)
        self.start()
        self._join(deadline)

    def _join(self, deadline: float) -> None:
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))


class TrainingMonitor:
    """Monitor of one training: log lines, a terminal bar, a progress artifact and MLflow."""

    def __init__(
        self,
        log: Path,
        events: Path,
        train_iters: int | None,
        send: Callable[[], None],
        *,
        label: str = "training",
    ) -> None:
        """Initialize the monitor without reading or showing anything.

        `train_iters` is the last iteration, or None to take it from the events. `send` sends the
        events since its last call to MLflow, without waiting.
        """
        self.log = LogTail(log, self._emit)
        self._wide_lines, self._minute, self._in_minute = 0, 0.0, 0
        self.events = events
        self.train_iters = train_iters
        self.send = send
        self.label = label
        self._offset = _end_of_events(events)
        self._perplexities = PerplexityTable(events.parent)
        self._ppl = ""
        self._step: dict[str, Any] | None = None
        self._artifact: Any = None
        self._updated = 0.0
        self._sender = _Sender()
        self._warned = False
        self._first: tuple[float, int] | None = None
        self._handler = console_handler() if sys.stderr.isatty() else None
        self._bar = Progress(
            TextColumn(label),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=self._handler.console if self._handler else Console(stderr=True),
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task(label, total=train_iters, note="starting")

    def __enter__(self) -> Self:
        # Prefect's console has only its own styles.
        self._bar.console.push_theme(Theme())
        if self._handler:
            self._handler.addFilter(_is_not_interval_line)
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._sender.finish(_LONGEST_STOP)
        with suppress(OSError):  # the terminal was closed: this must not fail the training
            self._bar.stop()
        self._bar.console.pop_theme()
        if self._handler:
            self._handler.removeFilter(_is_not_interval_line)

    def poll(self) -> None:
        """Read the log and the events once; called a few times a second.

        A file that cannot be read is a warning, once: the display must not end the training.
        """
        try:
            self._read()
        except (OSError, MegacoreError) as error:
            if not self._warned:
                self._warned = True
                get_run_logger().warning(
                    "the progress cannot be shown: %s; training continues, and the display if it "
                    "can be read again",
                    error,
                )
        self.send()

    def _emit(self, line: str) -> None:
        wide = _WIDE.match(line) is not None
        stored = not wide or self._may_store(time.monotonic())
        get_run_logger().info(line, extra={"send_to_api": stored})
        if wide and self._wide_lines == STORED_LINES:
            get_run_logger().info(
                "Prefect stores at most %d lines on steps a minute from here on; all are in %s",
                STORED_PER_MINUTE,
                self.log.path,
            )

    def _may_store(self, now: float) -> bool:
        """Return True if Prefect may store the next wide line, and count it."""
        self._wide_lines += 1
        if now >= self._minute + 60:
            self._minute, self._in_minute = now, 0
        self._in_minute += 1
        return self._wide_lines <= STORED_LINES or self._in_minute <= STORED_PER_MINUTE

    def _read(self) -> None:
        self.log.poll()
        if exists(self.events):
            for event, offset in EventReader(self.events, self._offset):
                self._offset = offset
                self._show(event)
        self._sender.start()

    def _show(self, event: dict[str, Any]) -> None:
        if event["kind"] == "perplexity":
            name = f"perplexity {event['iteration']}"
            self._sender.add(name, partial(self._perplexities.measured, event))
            self._ppl = (
                f", valid_ppl {short_number(event['valid_ppl'])}" if event["valid_ppl"] else ""
            )
            if self._step is not None:
                self._show_step(self._step)  # the last one would keep the perplexity before it
        if event["kind"] == "step":
            self._step = event
            self._show_step(event)

    def _show_step(self, event: dict[str, Any]) -> None:
        iteration = int(event["iteration"])
        total = int(event["total_iterations"]) if self.train_iters is None else self.train_iters
        name = "lm_loss" if "lm_loss" in event else "loss"
        # An interval in which every iteration overflowed (fp16 at the start) has no loss.
        loss = "-" if event.get(name) is None else f"{event[name]:.3f}"
        now = time.monotonic()
        self._first = self._first or (now, iteration)
        lr = "" if event.get("lr") is None else f", lr {event['lr']:.2e}"
        rate = event.get("tokens_per_second")
        tokens = "" if rate is None else f", {rate:,.0f} tokens/s"
        progress = (
            f"{name.replace('_', ' ')} {loss}{self._ppl}{lr}{tokens}, "
            f"{self._eta(now, iteration, total)} left"
        )
        self._bar.update(self._task, total=total, completed=iteration, note=progress)
        if now - self._updated < ARTIFACT_INTERVAL and iteration < total:
            return
        self._updated = now
        shown = f"iteration {iteration} of {total}, {progress}"
        self._sender.add(
            "progress", partial(self._update_artifact, 100.0 * iteration / total, shown)
        )

    def _eta(self, now: float, iteration: int, total: int) -> str:
        started, first = self._first or (now, iteration)
        if iteration <= first and iteration < total:
            return "unknown"
        seconds = (now - started) / max(1, iteration - first) * (total - iteration)
        return f"{seconds / 3600:.1f} h" if seconds > 5400 else f"{seconds / 60:.1f} min"

    def _update_artifact(self, percent: float, description: str) -> None:
        # Without retries: the next update is the retry.
        with (
            shown_in_prefect("the progress"),
            temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
        ):
            if self._artifact is None:
                self._artifact = create_progress_artifact(
                    progress=percent, key=self.label, description=description
                )
            else:
                update_progress_artifact(
                    artifact_id=self._artifact, progress=percent, description=description
                )
