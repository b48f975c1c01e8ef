"""Tasks of a curation as array jobs of Slurm, one array for the tasks of a phase.

Each element of an array runs a fixed share of the tasks one after the other. A task that is done
has a receipt in the work directory, so an element that Slurm starts again, and a new array after
lost elements, only runs the others. Nothing depends on claims that a killed element could keep.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megacore.artifact.files import read_json, replace_file, workspace_errors, write_json
from megacore.cluster.batch.scheduler import Submission, run
from megacore.cluster.batch.slurm import (
    ENDED,
    exported,
    job_records,
    remove_jobs,
    submit_until_answered,
)
from megacore.config.curate import SlurmExecutor
from megacore.corpus.curate_job import Job, Phase
from megacore.corpus.curate_task import run_task
from megacore.errors import (
    ERROR_TYPES,
    LaunchError,
    MegacoreError,
    MemoryExhaustedError,
    WorkerLostError,
)
from megacore.paths import glob

_ELEMENTS = 1000
"""Most elements of an array by default: Slurm's default MaxArraySize is 1001."""
_TICK, _SLOW = 0.5, 10.0
"""Seconds between two queries at first, and at most."""
_SILENCE = 60.0
"""Seconds after which a controller that does not answer is reported."""
_SETTLE = 3.0
"""Seconds to wait for receipts that a file share shows late."""
_LOG_LINES = 5
_SHORTENED = "..."
"""End of a list of elements that Slurm shows shortened, without the limit after it."""
_SCRIPT = b'#!/bin/bash\nexec "$@" "$SLURM_ARRAY_TASK_ID"\n'
_REFUSED = "correct data.curate_executor or data.curate_workers"


class SlurmArrays:
    """Executor that submits an array job for each phase and follows it to its end."""

    def __init__(
        self, options: SlurmExecutor, workers: int | None, say: Callable[[str], None]
    ) -> None:
        """Keep the options of the arrays; `say` shows a sentence on their progress."""
        self._options, self._workers, self._say = options, workers, say

    @contextmanager
    def __call__(self, work: Path) -> Iterator[Callable[[Job, Phase, Sequence[int]], None]]:
        """Yield the function that runs tasks of a phase; an error in the block cancels them.

        An array that an earlier process left is cancelled first.
        """
        folder = work / "slurm"
        if earlier := Submission.read(folder):
            self._say(f"slurm: cancels {_name(earlier)} of an earlier attempt if it still exists")
            _remove(earlier, folder)
        try:
            yield self._run
        except BaseException as cause:
            if current := Submission.read(folder):
                self._say(f"slurm: cancels {_name(current)}")
                try:
                    _remove(current, folder)
                except LaunchError as error:
                    if type(cause) is LaunchError:  # this one says more of the same problem
                        raise
                    self._say(f"slurm: {error}")
            raise

    def _run(self, job: Job, phase: Phase, ranks: Sequence[int]) -> None:
        fruitless = 0
        missing = list(ranks)
        while missing:
            before = len(missing)
            array = _Array(job, phase, missing, self._elements(before))
            self._say(f"slurm: {phase.name}: submits {before:,} tasks with sbatch")
            array.submit(self._options, self._say)
            self._say(f"slurm: {phase.name}: {before:,} tasks are submitted as {array.job}")
            self._follow(array)
            missing = array.missing()
            if not missing:
                return
            problem = array.problem(missing)
            if not problem.retryable:
                raise problem
            fruitless = fruitless + 1 if len(missing) == before else 0
            if fruitless > self._options.retries:
                raise problem
            self._say(f"slurm: {problem}; {len(missing):,} tasks are submitted again")

    def _elements(self, tasks: int) -> int:
        return min(tasks, self._workers or _ELEMENTS)

    def _follow(self, array: "_Array") -> None:
        """Wait for the end of an array, and show its state and the number of tasks that are done.

        Raises the error of a task at once, which ends the others.
        """
        shown, done = "", -1
        started = answered = reported = time.monotonic()
        while True:
            if (error := array.failure()) is not None and not error.retryable:
                raise error
            states, now = array.states(), time.monotonic()
            if states is not None:
                answered = now
                if not states:
                    return
            elif now - answered > _SILENCE:
                answered = now
                self._say(f"slurm: no answer on {array.job}; it continues, and so do the queries")
            text = "" if states is None else ", ".join(sorted(states))
            if text and text != shown:
                shown = text
                self._say(f"slurm: {array.job}: {text}")
            if (count := array.done()) != done and now - reported > _SLOW:
                done, reported = count, now
                self._say(f"slurm: {array.phase.name}: {count:,} of {array.phase.tasks:,} tasks")
            time.sleep(min(_SLOW, max(_TICK, (now - started) / 20)))


class _Array:
    """One array job for tasks of a phase."""

    def __init__(self, job: Job, phase: Phase, ranks: Sequence[int], elements: int) -> None:
        self.phase, self._job, self._ranks, self._elements = phase, job, list(ranks), elements
        self._folder = job.work / "slurm"
        self._submission = Submission.new()
        self._found: dict[str, dict[str, str]] = {}
        """Last known records of the elements, which Slurm forgets some time after their end."""
        self._unstarted: set[str] = set()
        """Elements that this run cancelled since Slurm could not start them."""

    @property
    def job(self) -> str:
        """Id of the array."""
        return self._submission.job or "?"

    def submit(self, options: SlurmExecutor, say: Callable[[str], None]) -> None:
        """Submit the array, again if the controller does not answer.

        Raises LaunchError, WorkspaceError.
        """

        def attempt(submission: Submission) -> "subprocess.CompletedProcess[str]":
            # Elements of an array with another token end without running a task.
            self._submission = submission
            return run(self._command(options, self._prepare()), env=exported(os.environ))

        self._submission = submit_until_answered(
            self._submission,
            attempt,
            lambda submission: _remove(submission, self._folder),
            say,
            what="an array of tasks of data.curate",
            advice=_REFUSED,
            again="continues with the tasks that are done",
        )
        self._submission.write(self._folder)

    def _prepare(self) -> Path:
        """Write the record, the plan and the script of the array, and return the script's path."""
        self._submission.write(self._folder)  # the array can be found by its name
        with workspace_errors(self._folder):
            for old in glob(self._folder, "failed-*.json"):
                old.unlink()
            plan = {
                "token": self._submission.token,
                "phase": self.phase.name,
                "ranks": self._ranks,
                "elements": self._elements,
            }
            write_json(self._folder / "tasks.json", plan)
            script = self._folder / "job.sh"
            replace_file(script, _SCRIPT)
        return script

    def _command(self, options: SlurmExecutor, script: Path) -> list[str]:
        chosen = {
            "partition": options.partition,
            "account": options.account,
            "qos": options.qos,
            "time": options.time_limit,
            "mem": options.memory,
        }
        return [
            "sbatch",
            "--parsable",
            f"--job-name={_name(self._submission)}",
            f"--array=0-{self._elements - 1}",
            f"--output={str(self._folder).replace('%', '%%')}/%A_%a.out",
            "--open-mode=append",
            f"--chdir={os.getcwd()}",
            "--requeue",
            "--nodes=1",
            "--ntasks=1",
            "--cpus-per-task=1",
            *(f"--{name}={value}" for name, value in chosen.items() if value is not None),
            *options.arguments,
            str(script),
            sys.executable,
            "-m",
            "megacore.cluster.batch.array",
            str(self._job.work),
            self._submission.token,
        ]

    def states(self) -> set[str] | None:
        """Return states of elements that have not ended; empty at the end, None if unknown.

        An element that Slurm could not start and holds is cancelled. It would wait forever.
        """
        records = job_records(self.job)
        if records is None:
            return None
        states = set()
        for record in records:
            state, reason = record.get("JobState", ""), record.get("Reason", "None")
            name = record.get("ArrayTaskId", "")
            if reason == "launch_failed_requeued_held" and state not in ENDED:
                # The JobId of one element is the array's, with which scancel ends all elements.
                run(["scancel", f"{self.job}_{name}"])
                self._unstarted.add(name)
            elif name in self._unstarted and state == "CANCELLED":
                record = record | {"JobState": "BOOT_FAIL"}
            self._found.pop(name, None)  # the newest record comes last
            self._found[name] = record
            if state in ENDED:
                continue
            states.add(f"{state} ({reason})" if reason not in ("", "None") else state)
        return states

    def done(self) -> int:
        """Return the number of tasks of the phase with a receipt."""
        names = os.listdir(self._job.folder(self.phase))
        return sum(name.endswith(".json") and name != "done.json" for name in names)

    def missing(self) -> list[int]:
        """Return the tasks that are not done, after the time in which receipts may show late."""
        started, missing = time.monotonic(), self._ranks
        while True:
            missing = [rank for rank in missing if not self._job.is_done(self.phase, rank)]
            late = time.monotonic() - started > _SETTLE or self.failure() is not None
            if late or not missing:
                return missing
            time.sleep(_TICK)

    def failure(self) -> MegacoreError | None:
        """Return the error that a task ended with, if there is one."""
        for path in sorted(glob(self._folder, "failed-*.json")):
            values = read_json(path)
            return ERROR_TYPES[values["error"]](values["message"])
        return None

    def problem(self, missing: Sequence[int]) -> MegacoreError:
        """Return the reason why tasks are missing after the end of the array."""
        if (error := self.failure()) is not None:
            return error
        element = self._ranks.index(missing[0]) % self._elements
        record = self._record(element)
        state = record.get("JobState", "lost")
        where = f"element {element} of array {self.job} (data.curate, {self.phase.name})"
        end = self._log_end(element)
        if state == "OUT_OF_MEMORY":
            return MemoryExhaustedError(
                f"{where} needed more memory than it was given{end}: raise memory of "
                "data.curate_executor, or lower data.curate_shard_mb; the tasks that are done are "
                "kept"
            )
        if state == "CANCELLED":
            return LaunchError(
                f"{where} was cancelled, not by this run: start the same command again to continue "
                "with the tasks that are done"
            )
        hint = ": set a longer time_limit of data.curate_executor" if state == "TIMEOUT" else ""
        return WorkerLostError(
            f"{where} ended without its tasks ({state}, exit code {record.get('ExitCode', '?')} on "
            f"{record.get('NodeList') or 'no node'}){end}{hint}; the tasks that are done are kept"
        )

    def _record(self, element: int) -> dict[str, str]:
        """Return the last known record of an element; elements that never ran share one."""
        if record := self._found.get(str(element)):
            return record
        newest_first = list(reversed(self._found.items()))
        shared = [record for listed, record in newest_first if _lists(listed, element)]
        # A shortened list may have any element that no other record names.
        shared += [record for listed, record in newest_first if _is_shortened(listed)]
        return shared[0] if shared else {}

    def _log_end(self, element: int) -> str:
        """Return the last lines of an element's output, for an error message."""
        path = self._folder / f"{self.job}_{element}.out"
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            return ", without output"
        shown = [" ".join(line.split()) for line in lines if line.strip()]
        last = " | ".join(shown[-_LOG_LINES:])
        return f"; the end of {path} is: {last}" if last else f", {path} is empty"


def _lists(listed: str, element: int) -> bool:
    """Return True if Slurm's list of elements, such as `0,3-9:2%4`, has an element."""
    numbers = listed.partition("%")[0]
    if _is_shortened(listed):
        numbers = numbers.rpartition(",")[0]  # the last number may have lost digits
    ranges = re.findall(r"(\d+)(?:-(\d+)(?::(\d+))?)?", numbers)
    return any(
        element in range(int(first), int(last or first) + 1, int(step or 1))
        for first, last, step in ranges
    )


def _is_shortened(listed: str) -> bool:
    """Return True if Slurm's list of elements, such as `0,2,4,...%4`, does not show all."""
    return listed.partition("%")[0].endswith(_SHORTENED)


def _name(submission: Submission) -> str:
    return f"curate-{submission.token}"


def _remove(submission: Submission, folder: Path) -> None:
    """Cancel an array, wait for its end, and forget it. Raises LaunchError."""
    remove_jobs(_name(submission), submission.job)
    submission.forget(folder)


def main(arguments: list[str] | None = None) -> int:
    """Run the tasks of one element of an array, and return the exit code."""
    parser = argparse.ArgumentParser(prog="megacore.cluster.batch.array", description=main.__doc__)
    parser.add_argument("work", type=Path, help="work directory of the curation")
    parser.add_argument("token", help="random part of the array's name")
    parser.add_argument("element", type=int, help="number of the element")
    options = parser.parse_args(arguments)
    folder: Path = options.work / "slurm"
    plan = read_json(folder / "tasks.json")
    if plan["token"] != options.token:
        sys.stdout.write("another array has taken the place of this one\n")
        return 0
    try:
        for rank in plan["ranks"][options.element :: plan["elements"]]:
            run_task(options.work, plan["phase"], rank)
    except MegacoreError as error:
        name = next(base.__name__ for base in type(error).__mro__ if base.__name__ in ERROR_TYPES)
        sys.stdout.write(f"{error}\n")
        with workspace_errors(folder):
            values = {"error": name, "message": str(error)}
            write_json(folder / f"failed-{options.element}.json", values)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
