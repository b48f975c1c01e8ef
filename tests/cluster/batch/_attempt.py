"""One attempt of a job, supervised in a thread while the test observes it."""

import threading
from collections.abc import Callable
from pathlib import Path

from megacore.cluster.batch.start import start_batch
from megacore.config.launch import LaunchConfig
from megacore.jobs.run import RankJob
from megacore.launch.supervise import supervise
from megacore.launch.watch import read_launcher_state
from tests._limits import HANG
from tests.launch._processes import wait_until


class StoppedByTestError(Exception):
    """Error raised in the supervisor, like the cancellation by an orchestrator."""


class Attempt:
    """An attempt that starts at construction."""

    def __init__(
        self, start: Callable[[Callable[[], None]], None], log: Path, exit_directory: Path
    ) -> None:
        """Start a thread that calls `start` with the function to call on each poll."""
        self.log, self.exit_directory = log, exit_directory
        self.states: list[str] = []
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(start,), daemon=True)
        self._thread.start()

    @classmethod
    def with_fake_ranks(cls, launch: LaunchConfig, directory: Path) -> "Attempt":
        """Start an attempt with fake ranks."""
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
                timeout=HANG,
            )

        return cls(start, directory / "log", directory / "exit")

    @property
    def directory(self) -> Path:
        """Directory of the job file."""
        return self.exit_directory.parent

    def _run(self, start: Callable[[Callable[[], None]], None]) -> None:
        try:
            start(self._poll)
        except BaseException as error:
            self.error = error

    def _poll(self) -> None:
        state = read_launcher_state(self.exit_directory)
        description = "" if state is None else f"{state.state}: {state.detail}"
        if description and description not in self.states[-1:]:
            self.states.append(description)
        if self._stop.is_set():
            raise StoppedByTestError

    @property
    def log_text(self) -> str:
        """Text of the log."""
        return self.log.read_text(encoding="utf-8") if self.log.exists() else ""

    @property
    def ended(self) -> bool:
        """True if the attempt has ended."""
        return not self._thread.is_alive()

    def wait_for(self, text: str) -> None:
        """Wait until the log contains a text; fail if the attempt ends first."""
        wait_until(
            lambda: text in self.log_text or self.ended, HANG, f"{text!r} in {self.log_text}"
        )
        assert text in self.log_text, f"{self.log_text}: {self.error}"

    def stop(self) -> None:
        """Cancel the attempt, like an orchestrator."""
        self._stop.set()

    def join(self) -> BaseException | None:
        """Wait for the end of the attempt and return the error that it raised."""
        self._thread.join(HANG)
        assert self.ended, self.log_text
        return self.error

    def rank_pid(self, rank: int = 0) -> int:
        """Wait for a fake rank to start and return its process id."""
        path = self.directory / f"pid_{rank}"
        wait_until(lambda: path.exists() or self.ended, HANG, "the rank started")
        return int(path.read_text())
