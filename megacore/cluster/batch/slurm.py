"""Batch jobs of Slurm, managed with sbatch, scontrol, scancel and, if available, sacct."""

import fnmatch
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import ClassVar

from megacore.artifact.files import replace_file, workspace_errors
from megacore.cluster.batch.scheduler import (
    TIMED_OUT,
    End,
    Look,
    Submission,
    check_template,
    one_line,
    pause,
    render,
    run,
    say,
)
from megacore.cluster.batch.spec import FOLLOWER_LIMIT, BatchSpec, FollowerBeat
from megacore.config.launch import LaunchConfig
from megacore.errors import (
    ConfigError,
    HostLostError,
    LaunchError,
    MegacoreError,
    MemoryExhaustedError,
    RankLostError,
)
from megacore.launch.guard import JOB_VARIABLE, NOT_FOUND

REMOVE_LIMIT = FOLLOWER_LIMIT + 60.0
"""Seconds to wait until the cancelled job of an earlier attempt has ended: by then its ranks have
ended themselves, because it has no follower."""

_EXPORTED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_*", "TZ", "LD_LIBRARY_PATH"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_*", "CUDA_HOME", "CUDA_PATH", "ROCM_PATH"),
    *("MODULE*", "LMOD_*", "LOADEDMODULES", "_LMFILES_", "BASH_FUNC_*", "SLURM_CONF"),
    "SBATCH_*",
)
"""Variables of this process that the batch script gets; the ranks' variables are in the
specification."""
_HIDING = {
    *("SBATCH_ARRAY_INX", "SBATCH_JOB_NAME", "SBATCH_CLUSTERS", "SBATCH_WAIT"),
    *("SBATCH_OPEN_MODE", "SBATCH_OUTPUT", "SBATCH_ERROR"),
}
"""Variables of sbatch that the script does not get: they would override its lines by which the job
is found."""
_NOT_TO_FOLLOW = (
    *("-a", "--array", "-o", "--output", "-e", "--error", "-W", "--wait", "--wrap"),
    *("--test-only", "-Q", "--quiet", "-J", "--job-name", "-M", "--clusters"),
    "--open-mode",
)
"""Options of sbatch that are refused: with them the job or its output could not be found."""
ENDED = {
    *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"),
    *("DEADLINE", "OUT_OF_MEMORY", "REVOKED"),
}
"""States of a job that has ended."""
_UNANSWERED = re.compile(
    "socket timed out|unable to contact slurm controller|zero bytes were transmitted|standby mode|"
    "(?:communication (?:connection|shutdown)|message (?:send|receive)) failure|"
    "resource temporarily unavailable|unable to create job record, try again",
    re.IGNORECASE,
)
"""Messages of Slurm's programs when the controller is busy or cannot be reached."""
_UNCONFIGURED = "Could not establish a configuration source"
"""Message of Slurm's programs on a host without slurm.conf that finds no controller to ask."""
_ON_MACHINES = {"RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING"}
_ENDING = {"COMPLETING", "STAGE_OUT"}
"""States of a job whose processes are being ended, or have ended while Slurm cleans up."""
_NOT_LAUNCHED = "JobLaunchFailure"
"""Reason of a job whose script could not be started on its nodes; nothing of it has run."""
_SHOW = ("scontrol", "--oneliner", "show", "job")
_PAUSE = 1.0
"""Seconds between two checks of a job that is being cancelled."""
_SUBMISSIONS = 4
"""Tries to submit a job to a controller that does not answer."""
_SUBMISSION_PAUSE = 10.0
"""Seconds before the next try to submit a job."""


class SlurmJob:
    """The Slurm batch job of a specification."""

    programs: ClassVar[tuple[str, ...]] = ("sbatch", "scontrol", "squeue", "scancel")

    def __init__(self, spec: BatchSpec) -> None:
        """Keep `spec`; nothing is submitted yet."""
        self.silence = ""
        self._spec = spec
        self._job = ""
        self._output: Path | None = None
        self._read = 0

    @staticmethod
    def check(launch: LaunchConfig) -> None:
        """Raise ConfigError for an option that cannot be used."""
        for word in launch.slurm.arguments:
            check_argument(word, "launch.slurm.arguments")
        check_template(launch.slurm.template, "launch.slurm.template")

    @property
    def _again(self) -> str:
        return f"a retry submits it again and {self._spec.again}"

    @property
    def script(self) -> Path:
        """Path of the batch script, the filled template."""
        return self._spec.folder / "job.sbatch"

    def name(self, token: str) -> str:
        """Return the job's name, by which it is found if its id is not recorded."""
        return f"{Path(self._spec.job_file).parent.name}-{token}"

    def text(self, token: str) -> str:
        """Return the batch script. Raises ConfigError."""
        spec, slurm = self._spec, self._spec.launch.slurm
        minimum, maximum = spec.nodes
        values = {
            "name": self.name(token),
            "nodes": str(minimum) if minimum == maximum else f"{minimum}-{maximum}",
            "ranks_per_node": spec.ranks_per_node,
            "cpus_per_node": spec.cpus_per_node,
            "gpus_per_node": spec.gpus_per_node,
            "partition": slurm.partition,
            "account": slurm.account,
            "qos": slurm.qos,
            "time_limit": slurm.time_limit,
            "signal_before": slurm.signal_before,
            "output": str(spec.folder / "slurm-").replace("%", "%%") + "%j.out",
            "directory": spec.directory,
            "node_command": [
                *(spec.python, "-m", "megacore.cluster.batch.node", "slurm"),
                *(f"--spec={spec.path}", f"--token={token}"),
            ],
        }
        return render(slurm.template, "train.sbatch.j2", "launch.slurm.template", values)

    def command(self) -> list[str]:
        """Return the command that submits the script."""
        return ["sbatch", "--parsable", *self._spec.launch.slurm.arguments, str(self.script)]

    def submit(self, submission: Submission, stopped: Callable[[], bool]) -> Submission:
        """Write the script, submit it, and return the submission with the job's id.

        It is submitted again, with another token, if the controller does not answer and `stopped`
        returns False.
        """
        folder = self._spec.folder

        def attempt(submission: Submission) -> "subprocess.CompletedProcess[str]":
            submission.write(folder)
            FollowerBeat(folder, submission.token).beat()
            with workspace_errors(self.script):
                replace_file(self.script, self.text(submission.token).encode(), durable=False)
            return run(self.command(), directory=self._spec.directory, env=exported(os.environ))

        submission = submit_until_answered(
            submission,
            attempt,
            lambda earlier: remove_jobs(self.name(earlier.token), earlier.job, stopped),
            say,
            stopped=stopped,
            what=str(self.script),
            advice="correct launch.slurm, launch.nnodes or launch.nproc_per_node",
            again=self._spec.again,
        )
        self._job = str(submission.job)
        self._output = folder / f"slurm-{self._job}.out"
        return submission

    def remove(self, earlier: Submission) -> None:
        """Cancel the job of an earlier follower, and wait until its processes have ended."""
        remove_jobs(self.name(earlier.token), earlier.job)

    def look(self) -> Look | None:
        """Return the current state of the job; None if Slurm does not answer."""
        done = run([*_SHOW, self._job])
        records = _records_of(done)
        if records is None:
            self.silence = one_line(done)
            return None
        known = dict(pair for each in records for pair in each.items())
        record = known or accounted(self._job)
        state, reason, nodes = (record.get(key, "") for key in ("JobState", "Reason", "NodeList"))
        if not state:
            error = RankLostError(f"Slurm does not know job {self._job} any more; {self._again}")
            return Look("running", "gone", End(1, error))
        restarts = int(record.get("Restarts", "0"))
        again = f", start {restarts + 1}" if restarts else ""
        if state in ENDED:
            return Look("running", state, self._end(state, record))
        if state in _ON_MACHINES:
            return Look("running" if state == "RUNNING" else "queued", f"{state} on {nodes}{again}")
        if state in _ENDING:
            where = "" if nodes in ("", "(null)") else f" on {nodes}"
            return Look("ending", f"{state}{where}{again}")
        if reason == "launch_failed_requeued_held":
            # Slurm would hold the job until somebody releases it.
            self.cancel(at_once=False)
            error = RankLostError(
                f"Slurm could not start job {self._job} and holds it ({reason}); {self._again}"
            )
            return Look("queued", f"{state} ({reason}){again}", End(1, error))
        why = f" ({reason})" if reason not in ("", "None") else ""
        return Look("queued", f"{state}{why}{again}")

    def _end(self, state: str, record: Mapping[str, str]) -> End:
        code, _, number = record.get("ExitCode", "1:0").partition(":")
        exit_code = int(code) or (128 + int(number) if int(number or 0) else 0)
        if state == "COMPLETED":
            return End(exit_code)
        if state == "FAILED" and record.get("Reason") != _NOT_LAUNCHED:
            return End(exit_code or 1)
        return End(
            exit_code or 1,
            self._error(state, record),
            outranks_stop=state in {"CANCELLED", "REVOKED", "NODE_FAIL", "BOOT_FAIL"},
        )

    def _error(self, state: str, record: Mapping[str, str]) -> MegacoreError:
        job, nodes = f"job {self._job}", record.get("NodeList", "")
        if state == "FAILED":
            return RankLostError(
                f"Slurm could not start {job} on {nodes} ({_NOT_LAUNCHED}), for example because "
                f"{self._spec.folder} cannot be written there: look at whether the workspace is "
                f"mounted on these machines; {self._again}"
            )
        if state == "TIMEOUT":
            return RankLostError(
                f"{job} reached its time limit ({record.get('TimeLimit', 'of the partition')}) and "
                f"Slurm ended it; {self._again}; launch.slurm.time_limit sets a longer one, "
                "launch.slurm.signal_before the seconds in which ranks save before it"
            )
        if state == "PREEMPTED":
            return RankLostError(
                f"Slurm preempted {job} on {nodes} without queueing it again; {self._again}"
            )
        if state in {"NODE_FAIL", "BOOT_FAIL"}:
            return HostLostError(
                f"{down_nodes(nodes) or nodes} failed, and {job} with it ({state}); {self._again}"
            )
        if state == "OUT_OF_MEMORY":
            return MemoryExhaustedError(
                f"Slurm ended {job} on {nodes} since it needed more memory than it was given: ask "
                "for more, for example with launch.slurm.arguments: [--mem=0] for all of each "
                "machine"
            )
        if state == "DEADLINE":
            return LaunchError(
                f"{job} could not end before its deadline: remove --deadline, or start it earlier"
            )
        return LaunchError(
            f"{job} was cancelled{record.get('By', '')}, not by this run: start the same command "
            f"again, it {self._spec.again}"
        )

    def copy_output(self) -> None:
        """Append the job's new output to the output of this process."""
        if self._output is None:
            return
        while piece := self._next_output(self._output):
            self._read += len(piece)
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()

    def _next_output(self, path: Path) -> bytes:
        """Return the next piece of the job's output.

        It is empty if the file does not exist yet or the file share fails for a moment.
        """
        try:
            with open(path, "rb") as file:  # reopened each time, because another host writes it
                file.seek(self._read)
                return file.read(1 << 20)
        except OSError:
            return b""

    def cancel(self, *, at_once: bool) -> None:
        """Cancel the job: Slurm sends SIGTERM and, after KillWait, SIGKILL.

        With `at_once` it sends SIGKILL immediately.
        """
        run(["scancel", *(["--signal=KILL"] if at_once else []), self._job])

    def close(self) -> None:
        """Copy the rest of the output, which a shared file system may show late."""
        size_before = -1
        for _ in range(5):
            if size_before == self._read and self._read:
                return
            size_before = self._read
            self.copy_output()
            if size_before != self._read or not self._read:
                time.sleep(0.2)


def check_argument(word: str, setting: str) -> None:
    """Raise ConfigError unless `word` in a setting is an option of sbatch that is not refused.

    sbatch would take another word as the script. It also accepts the beginning of a long option as
    an abbreviation.
    """
    if not word.startswith("-"):
        raise ConfigError(
            f"{setting} has {word!r}, which is no option: write each option with its "
            "value as one word, such as --constraint=h100"
        )
    name = word.partition("=")[0] if word.startswith("--") else word[:2]
    if any(
        option == name or (option.startswith(name) and len(name) > len("--"))
        for option in _NOT_TO_FOLLOW
    ):
        raise ConfigError(
            f"{setting} has {word}, with which the job could not be followed: leave it out"
        )


def exported(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the batch script gets: paths and settings, no credentials."""
    return {
        name: value
        for name, value in environment.items()
        if name != JOB_VARIABLE
        and name not in _HIDING
        and any(fnmatch.fnmatchcase(name, pattern) for pattern in _EXPORTED)
    }


def is_unanswered(done: "subprocess.CompletedProcess[str]") -> bool:
    """Return True if a program of Slurm failed since the controller is busy or not reached.

    The controller may nevertheless have done what it was told to do.
    """
    failed = done.returncode != 0
    return failed and (done.returncode == TIMED_OUT or bool(_UNANSWERED.search(one_line(done))))


def submit_until_answered(
    submission: Submission,
    attempt: "Callable[[Submission], subprocess.CompletedProcess[str]]",
    remove: Callable[[Submission], None],
    say: Callable[[str], None],
    *,
    stopped: Callable[[], bool] = lambda: False,
    what: str,
    advice: str,
    again: str,
) -> Submission:
    """Submit a job, again if the controller does not answer; return the submission with its id.

    Args:
        submission: the first submission.
        attempt: function that records a submission and calls sbatch for it.
        remove: function that cancels the job of a submission that was not confirmed. The controller
            may nevertheless start it, so the next submission has another token.
        say: function that shows a sentence.
        stopped: function that returns True if this process must end: nothing is submitted again.
        what: what is submitted, for messages.
        advice: what to do if sbatch refuses it.
        again: verb phrase on the same command later, to follow a subject.

    Raises:
        LaunchError: sbatch refused the job, the controller did not answer several times or to the
            cancellation, or this process must end.
    """
    cause: LaunchError | None = None
    for tries in range(1, _SUBMISSIONS + 1):
        done = attempt(submission)
        match = re.search(r"^(\d+)(?:;\S*)?$", done.stdout, re.M)
        if done.returncode == 0 and match is not None:
            return Submission(submission.token, match[1])
        if not is_unanswered(done):
            raise LaunchError(f"sbatch refused {what}: {one_line(done)}: {advice}")
        if tries == _SUBMISSIONS:
            break
        say(f"slurm: no answer to sbatch ({one_line(done)}); {what} is submitted again")
        pause(_SUBMISSION_PAUSE, stopped)
        try:
            remove(submission)
        except LaunchError as error:
            cause = error
            break
        if stopped():
            raise LaunchError(
                f"this run ends before Slurm's controller answered to sbatch with {what} "
                f"({one_line(done)}): start the same command again, it {again}"
            )
        submission = Submission.new()
    raise LaunchError(
        f"Slurm's controller did not answer {tries} time{'s' if tries > 1 else ''} to sbatch with "
        f"{what} ({one_line(done)}): when `scontrol ping` says that it is up, start the same "
        f"command again, it {again}"
    ) from cause


def remove_jobs(name: str, job: str | None, stopped: Callable[[], bool] = lambda: False) -> None:
    """Cancel the jobs of a name and the one with an id, and wait until they have ended.

    After REMOVE_LIMIT a job that is completing counts as ended: a node that does not answer, or a
    process that hangs in the kernel, can hold it for long. It returns earlier if `stopped` returns
    True. Raises LaunchError.
    """
    started = time.monotonic()
    while jobs := _unended_jobs(name, job):
        run(["scancel", f"--name={name}"] if jobs == {name} else ["scancel", *sorted(jobs)])
        if time.monotonic() - started > REMOVE_LIMIT:
            if not _unended_jobs(name, job, ENDED | _ENDING):
                return
            raise LaunchError(
                f"job {', '.join(sorted(jobs))} of an earlier attempt does not end although it "
                "was cancelled, or Slurm does not answer: look at it with scontrol show job, "
                "and start again when it is gone"
            )
        if stopped():
            return
        time.sleep(_PAUSE)


def _unended_jobs(name: str, job: str | None, ended: Set[str] = ENDED) -> set[str]:
    """Return the ids of jobs whose states are not in `ended`; the name if Slurm is silent.

    A job counts as ended only if Slurm says so. Otherwise a busy controller could lead to a second
    copy of a job. A job with the id but another name is not meant: another cluster, where the same
    workspace is mounted, gave it the id.

    Raises LaunchError if this host does not belong to a cluster.
    """
    listed = run(["squeue", "--noheader", "--me", f"--name={name}", "--format=%A"])
    if listed.returncode != 0:
        if _UNCONFIGURED in one_line(listed):
            raise LaunchError(
                f"Slurm's programs find no configuration here ({one_line(listed)}): start the same "
                "command on a host of the cluster"
            )
        return {name}
    jobs = {*listed.stdout.split(), *([job] if job else [])}
    records = {each: job_records(each) for each in jobs}
    first_word = name.split()[0]  # all that `job_records` reads of a name
    return {
        each
        for each, found in records.items()
        if found is None
        or any(
            record.get("JobState") not in ended and record.get("JobName", first_word) == first_word
            for record in found
        )
    }


def job_records(job: str) -> list[dict[str, str]] | None:
    """Return Slurm's records of a job, for an array those of its elements.

    The list is empty if the job is unknown, None if Slurm is silent.
    """
    return _records_of(run([*_SHOW, job]))


def _records_of(done: "subprocess.CompletedProcess[str]") -> list[dict[str, str]] | None:
    if done.returncode == 0:
        lines = [re.findall(r"(?:^| )(\w+)=(\S*)", line) for line in done.stdout.splitlines()]
        return [dict(pairs) for pairs in lines if pairs]
    return [] if "Invalid job id" in done.stderr else None


def accounted(job: str) -> dict[str, str]:
    """Return the accounting record of a job that has ended; empty if there is none."""
    # Only these fields: sacct refuses the whole command for an unknown field, and Restarts is newer
    # than Slurm 22.05.
    names = ("State", "ExitCode", "NodeList", "Timelimit")
    shape = ["--noheader", "--parsable2", "--allocations"]
    done = _run_if_installed(
        ["sacct", *shape, f"--jobs={job}", f"--format={','.join(names)}"],
    )
    fields = (
        done.stdout.splitlines()[-1].split("|")
        if done.returncode == 0 and done.stdout.strip()
        else []
    )
    state, _, by = fields[0].partition(" ") if len(fields) == len(names) else ("", "", "")
    if state not in ENDED:  # accounting waits for an end that nobody reports any more
        return {}
    record = dict(
        zip(("JobState", "ExitCode", "NodeList", "TimeLimit"), (state, *fields[1:]), strict=True)
    )
    return {**record, "By": f" {by}" if by else ""}


def down_nodes(nodes: str) -> str:
    """Return the names of a job's nodes that are down according to Slurm."""
    done = _run_if_installed(
        ["sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--states=down,fail", "--format=%N"]
    )
    return ", ".join(sorted(set(done.stdout.split()))) if done.returncode == 0 else ""


def _run_if_installed(command: list[str]) -> "subprocess.CompletedProcess[str]":
    """Run a program that is not required; without it the result has the code NOT_FOUND."""
    try:
        return run(command)
    except LaunchError as error:
        return subprocess.CompletedProcess(command, NOT_FOUND, "", str(error))
