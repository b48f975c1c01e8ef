"""One attempt of a job, supervised in a thread while the test looks at it."""

import threading
from collections.abc import Callable
from pathlib import Path

from megacore.cluster.batch.start import start_batch
from megacore.config.launch import LaunchConfig
from megacore.jobs.run import RankJob
from megacore.launch.launcher_state import read_launcher_state
from megacore.launch.supervise import supervise
from tests.launch._processes import wait_until

LIMIT = 60.0


class StoppedByTestError(Exception):
    """Raised in the supervisor, as an orchestrator's cancellation is."""


class Attempt:
    """Starts at once."""

    def __init__(
        self, start: Callable[[Callable[[], None]], None], log: Path, exit_directory: Path
    ) -> None:
        """Call `start` with what it is to call on each poll."""
        self.log, self.exit_directory = log, exit_directory
        self.states: list[str] = []
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(start,), daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, launch: LaunchConfig, directory: Path) -> "Attempt":
        """One of fake ranks."""
        directory.mkdir(parents=True, exist_ok=True)
        job = RankJob(exit_directory=str(directory / "exit"), ranks=1, threads_per_rank=1)
        job.write(directory / "run.json")
        batch = start_batch(launch, "tests.cluster.batch._rank", job, directory / "run.json", {})

        def start(on_poll: Callable[[], None]) -> None:
            supervise(
                batch.command,
                log=directory / "log",
                exit_directory=directory / "exit",
                env=batch.env,
                on_poll=on_poll,
                poll_interval=0.05,
                stop_grace=launch.stop_grace,
                stop_margin=batch.stop_margin,
                timeout=LIMIT,
            )

        return cls(start, directory / "log", directory / "exit")

    @property
    def directory(self) -> Path:
        """Of the job file."""
        return self.exit_directory.parent

    def _run(self, start: Callable[[Callable[[], None]], None]) -> None:
        try:
            start(self._poll)
        except BaseException as error:
            self.error = error

    def _poll(self) -> None:
        state = read_launcher_state(self.exit_directory)
        said = "" if state is None else f"{state.state}: {state.detail}"
        if said and said not in self.states[-1:]:
            self.states.append(said)
        if self._stop.is_set():
            raise StoppedByTestError

    @property
    def said(self) -> str:
        """What is in the log."""
        return self.log.read_text(encoding="utf-8") if self.log.exists() else ""

    @property
    def ended(self) -> bool:
        """Whether it is over."""
        return not self._thread.is_alive()

    def wait_for(self, text: str) -> None:
        """Until the log holds a text, or the attempt has ended."""
        wait_until(lambda: text in self.said or self.ended, LIMIT, f"{text!r} in {self.said}")
        assert text in self.said, f"{self.said}: {self.error}"

    def stop(self) -> None:
        """Cancel it, as an orchestrator does."""
        self._stop.set()

    def end(self) -> BaseException | None:
        """What it raised, once it has ended."""
        self._thread.join(LIMIT)
        assert self.ended, self.said
        return self.error

    def rank_pid(self, rank: int = 0) -> int:
        """Process id of a fake rank, once it is there."""
        path = self.directory / f"pid_{rank}"
        wait_until(lambda: path.exists() or self.ended, LIMIT, "the rank started")
        return int(path.read_text())
