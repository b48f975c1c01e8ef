"""How far a download is: a bar on a terminal, now and then a line of the log elsewhere."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[int, int | None], None]
"""Takes the bytes that are there and all bytes, None as long as these are unknown."""

_LOG_SECONDS = 10.0
_logger = logging.getLogger("megacore.corpus")


@contextmanager
def download_progress(name: str) -> Iterator[Report]:
    """Show the progress of the download `name` until the block is left."""
    from rich.console import Console

    console = Console(stderr=True)
    with _bar(name, console) if console.is_terminal else _log(name) as report:
        yield report


@contextmanager
def _bar(name: str, console: object) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    assert isinstance(console, Console)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        # Escaped: a name may hold what rich would take for markup.
        task = progress.add_task(name.replace("[", r"\["), total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def _log(name: str) -> Iterator[Report]:
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
