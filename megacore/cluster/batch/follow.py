"""The follower: submits a batch job and follows it to its end, under the guard.

    python -m megacore.cluster.batch.follow --spec FILE

The follower prints the job's output and a line for each change of the job's state. It exits with
the code of the job. If the scheduler ended the job, the follower also writes this as the launcher's
reason. On SIGTERM it cancels the job and waits for its end. If the follower itself is killed, the
job ends itself after FOLLOWER_LIMIT, or the next attempt finds and cancels it. A job is never
submitted again while an earlier one exists.
"""

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from megacore.cluster.batch.kubernetes import KubernetesJob
from megacore.cluster.batch.scheduler import End, Look, Scheduler, Submission, say
from megacore.cluster.batch.slurm import SlurmJob
from megacore.cluster.batch.spec import STOP_MARGIN, BatchSpec, FollowerBeat
from megacore.errors import MegacoreError
from megacore.launch.exit_reason import read_reasons, remove_rank_files, write_launcher_reason
from megacore.launch.watch import write_launcher_state

SCHEDULERS: Mapping[str, type[Scheduler]] = {"slurm": SlurmJob, "kubernetes": KubernetesJob}
"""Batch job of each scheduler, by its `launch.kind`."""
_TICK = 0.25
_QUICK, _SLOW = 1.0, 5.0
"""Seconds between two queries of the scheduler: soon after a change, and later."""
_SILENCE = 60.0
"""Seconds between two messages about a scheduler that does not answer."""
_STOPPED = 128 + signal.SIGTERM


def main(arguments: list[str] | None = None) -> int:
    """Submit a batch job, follow it to its end, and return its exit code."""
    parser = argparse.ArgumentParser(prog="megacore.cluster.batch.follow", description=main.__doc__)
    parser.add_argument("--spec", type=Path, required=True, help="the batch job, as JSON")
    options = parser.parse_args(arguments)
    try:
        spec = BatchSpec.read(options.spec)
    except MegacoreError as error:
        parser.exit(error.exit_code, f"{error}\n")
    try:
        return Follower(spec, SCHEDULERS[spec.launch.kind](spec)).follow()
    except MegacoreError as error:
        _say(spec, str(error))
        with contextlib.suppress(MegacoreError):  # the code says it, too
            write_launcher_reason(spec.exit_directory, error)
        return error.exit_code


class Follower:
    """Follower of one batch job."""

    def __init__(self, spec: BatchSpec, scheduler: Scheduler) -> None:
        """Install the signal handlers; nothing is submitted yet."""
        self._spec, self._scheduler = spec, scheduler
        self._stop = self._save = False
        self._said = ""
        self._asked = self._changed = self._answered = time.monotonic()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self._save = True
        else:
            self._stop = True

    def _stopped(self) -> bool:
        return self._stop

    def follow(self) -> int:
        """Submit the job, follow it to its end, and return the exit code.

        Raises:
            MegacoreError: the job cannot be submitted, or an earlier one does not end.
        """
        folder, exit_directory = self._spec.folder, Path(self._spec.exit_directory)
        if earlier := Submission.read(folder):
            detail = (
                f"an earlier attempt submitted {earlier.job or earlier.token}: it is cancelled if "
                "it still exists"
            )
            _say(self._spec, detail)
            write_launcher_state(exit_directory, "ending", detail)
            self._scheduler.remove(earlier)
            earlier.forget(folder)
        remove_rank_files(exit_directory)
        if self._stop:
            return _STOPPED
        submission = Submission.new()
        submission.write(folder)  # before the submission: the job can be found by its name
        beat = FollowerBeat(folder, submission.token)
        beat.beat()
        write_launcher_state(exit_directory, "queued", "submitted")
        try:
            # perhaps with another token
            submission = self._scheduler.submit(submission, self._stopped)
        except MegacoreError as error:
            # The file may contain secrets. If the scheduler accepted the job after the timeout, the
            # job ends without the file.
            self._spec.path.unlink(missing_ok=True)
            if not self._stopped():
                raise
            _say(self._spec, str(error))
            return _STOPPED
        submission.write(folder)
        beat = FollowerBeat(folder, submission.token)
        _say(self._spec, f"submitted as {submission.job}")
        try:
            end = self._until_its_end(beat)
        except MegacoreError:  # for example a full disk; the job has no follower from here on
            self._scheduler.cancel(at_once=False)
            raise
        ended = end is not None or self._cancel(beat)
        beat.over = True
        beat.beat()
        self._scheduler.close()
        if ended:
            submission.forget(folder)
            # The file may contain secrets and is no longer needed.
            self._spec.path.unlink(missing_ok=True)
        return _STOPPED if end is None else self._exit(end)

    def _until_its_end(self, beat: FollowerBeat) -> End | None:
        """Follow the job and return its end; None if this process must stop first."""
        while not self._stop:
            beat.save = self._save
            beat.beat()
            self._scheduler.copy_output()
            look = self._look()
            if look is not None and look.end is not None:
                return look.end
            time.sleep(_TICK)
        return None

    def _look(self) -> Look | None:
        """Query the scheduler if that is due, report changes, and return the job's state."""
        now = time.monotonic()
        if now - self._asked < min(_SLOW, max(_QUICK, (now - self._changed) / 10)):
            return None
        look = self._scheduler.look()
        self._asked = time.monotonic()
        if look is None:
            if self._asked - self._answered > _SILENCE:
                self._answered = self._asked
                why = self._scheduler.silence
                _say(
                    self._spec,
                    f"no answer for {_SILENCE:g} s ({why}); the job continues, and so do the "
                    "queries",
                )
            return None
        self._answered = self._asked
        if look.detail != self._said:
            self._said, self._changed = look.detail, self._asked
            _say(self._spec, look.detail)
            if look.end is None:
                write_launcher_state(Path(self._spec.exit_directory), look.state, look.detail)
        return look

    def _cancel(self, beat: FollowerBeat) -> bool:
        """End the job within the stop grace of the guard; return True if it has ended."""
        _say(self._spec, "this run ends, and so does the job")
        self._scheduler.cancel(at_once=False)
        deadline = time.monotonic() + self._spec.launch.stop_grace + STOP_MARGIN - 1.0
        killed = False
        while True:
            beat.beat()
            self._scheduler.copy_output()
            look = self._scheduler.look()
            if look is not None and look.end is not None:
                _say(self._spec, look.detail)
                return True
            remaining = deadline - time.monotonic()
            if remaining < STOP_MARGIN / 2 and not killed:
                killed = True
                self._scheduler.cancel(at_once=True)
            if remaining < 0:
                _say(self._spec, "the job has not ended yet; the scheduler ends it")
                return False
            time.sleep(_TICK)

    def _exit(self, end: End) -> int:
        exit_directory = Path(self._spec.exit_directory)
        if end.error is None:
            return end.code
        if end.outranks_stop:
            for reason in read_reasons(exit_directory):
                if reason.stopped:
                    (exit_directory / f"rank_{reason.rank}.json").unlink(missing_ok=True)
        _say(self._spec, str(end.error))
        write_launcher_reason(exit_directory, end.error)
        return end.code or end.error.exit_code


def _say(spec: BatchSpec, text: str) -> None:
    say(f"{spec.launch.kind}: {text}")


if __name__ == "__main__":
    sys.exit(main())
