"""Slurm and Ray keep the documents that processes of this host keep, also after kills."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("datatrove", reason="the extra curate is not installed")

from megacore.cluster.batch import array as arrays
from megacore.cluster.batch.scheduler import Submission
from megacore.cluster.executors import check_executor, executor_of
from megacore.config.curate import ChosenExecutor, CurateSteps
from megacore.config.validate import validated
from megacore.corpus import curate_task
from megacore.corpus.curate import Executor, curate_segments
from megacore.corpus.curate_job import CurateOptions, Job, Phase
from megacore.corpus.segments import jsonl_segments
from megacore.errors import (
    ConfigError,
    DataFormatError,
    LaunchError,
    MegacoreError,
    WorkerLostError,
)
from tests._limits import HANG
from tests.cluster.batch._slurm import Slurm
from tests.launch._processes import REPOSITORY, alive, wait_until

DOCUMENTS = 300
OPTIONS = CurateOptions(shard_bytes=12_000, workers=1)
STEPS = """
import os, signal, time
from pathlib import Path
HERE = Path(__file__).parent

def step(document):
    if document["n"] == 250 and (HERE / "die").exists():
        (HERE / "die").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    if document["n"] == 250 and (HERE / "wait").exists():
        (HERE / "waits.new").write_text(str(os.getpid()))
        (HERE / "waits.new").rename(HERE / "waits")
        while (HERE / "wait").exists():
            time.sleep(0.05)
    if document["n"] == 299 and (HERE / "fail").exists():
        return "nonsense"
    return document["n"] % 3 != 0
"""


def executor(**values: Any) -> Any:
    return validated(ChosenExecutor, {"executor": values}, "test").executor


def run(place: Path, name: str, execute: Executor | None = None) -> dict[str, bytes]:
    """Return the files of a curation in `place` by their names."""
    output = place / name
    output.mkdir(exist_ok=True)
    steps = [{"step": "python", "function": f"{place}/steps.py:step"}, {"step": "exact_dedup"}]
    curate_segments(
        jsonl_segments([place / "in.jsonl"], "text"),
        output,
        place / f"{name}.work",
        validated(CurateSteps, {"curate": steps}, "steps").curate,
        OPTIONS,
        executor=execute,
    )
    return {path.name: path.read_bytes() for path in sorted(output.iterdir())}


def run_from_a_shell(place: str, options: str) -> None:
    """Run a curation in the process of a test, which kills it."""
    run(Path(place), "killed", executor_of(executor(**json.loads(options)), 2, print))


def kill_submitter(place: Path, **options: Any) -> dict[Path, int]:
    """Run a curation in another process, and kill that process while a task waits.

    Returns the receipts of the tasks that are done with their times.
    """
    (place / "wait").touch()
    program = (
        "import sys; from tests.cluster.test_executors import run_from_a_shell as run; "
        "run(*sys.argv[1:])"
    )
    with open(place / "program.log", "wb") as log:
        submitter = subprocess.Popen(
            [sys.executable, "-c", program, str(place), json.dumps(options)],
            cwd=REPOSITORY,
            stdout=log,
            stderr=log,
        )
    try:
        wait_until((place / "waits").exists, HANG, "a task that waits")
    finally:
        submitter.kill()
        submitter.wait()
    receipts = (place / "killed.work/phases/pass-0").glob("0*.json")
    done = {path: path.stat().st_mtime_ns for path in receipts}
    assert done
    return done


@pytest.fixture
def place(tmp_path: Path) -> Path:
    rows = [{"text": f"text {n % 100} " + "word " * 40, "n": n} for n in range(DOCUMENTS)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "in.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "steps.py").write_text(STEPS, encoding="utf-8")
    return tmp_path


@pytest.mark.slow
def test_slurm_keeps_the_same_documents_after_kills(place: Path, slurm: Slurm) -> None:
    expected = run(place, "local")
    assert len(expected) > 5
    done = kill_submitter(place, kind="slurm")
    assert slurm.jobs()

    lines: list[str] = []
    (place / "die").touch()

    def say(line: str) -> None:
        lines.append(line)
        if "are submitted as" in line:  # the earlier array has ended
            (place / "wait").unlink(missing_ok=True)

    choice = executor(kind="slurm", partition="normal", arguments=["--comment=curation"])
    execute = executor_of(choice, 2, say)
    assert run(place, "killed", execute) == expected
    assert "of an earlier attempt" in lines[0]
    assert not (place / "die").exists()
    (again,) = [line for line in lines if "are submitted again" in line]
    assert "ended without its tasks (FAILED" in again
    assert all(path.stat().st_mtime_ns == when for path, when in done.items())
    assert not slurm.jobs()

    (place / "fail").touch()
    with pytest.raises(DataFormatError, match=r"step returned 'nonsense' for .*in\.jsonl:300"):
        run(place, "failed", execute)
    assert not slurm.jobs()


@pytest.mark.slow
def test_ray_keeps_the_same_documents_after_kills(place: Path) -> None:
    """Ray runs in another process, which it ends at errors of its own."""
    pytest.importorskip("ray", reason="the extra ray is not installed")
    program = "import sys; from tests.cluster import test_executors as t; t.curate_with_ray()"
    ended = subprocess.run(
        [sys.executable, "-c", program, str(place)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def curate_with_ray() -> None:
    """Run curations with Ray in the directory that the command names, with kills."""
    import ray

    place = Path(sys.argv[1])
    expected = run(place, "local")
    execute = executor_of(executor(kind="ray"), 2, print)
    assert execute is not None
    with execute(place) as tasks:
        # The submitter uses the same cluster, which outlives it.
        done = kill_submitter(place, kind="ray", address=ray.get_runtime_context().gcs_address)
        waiting = int((place / "waits").read_text())
        wait_until(lambda: not alive(waiting), HANG, "the end of the killed submitter's tasks")

        (place / "wait").unlink()
        (place / "die").touch()
        assert run(place, "killed", lambda work: nullcontext(tasks)) == expected
        assert not (place / "die").exists()
        assert all(path.stat().st_mtime_ns == when for path, when in done.items())

        (place / "fail").touch()
        with pytest.raises(DataFormatError, match=r"returned 'nonsense' for .*in\.jsonl:300"):
            run(place, "failed", lambda work: nullcontext(tasks))
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kind": "slurm"}, LaunchError, "is slurm and sbatch is not installed here"),
        (
            {"kind": "slurm", "arguments": ["--array=1"]},
            ConfigError,
            "data.curate_executor.arguments has --array=1",
        ),
        ({"kind": "ray"}, ConfigError, r"which is not installed: install megacore\[ray\]"),
        ({"kind": "ray", "address": "ray://a:1"}, ConfigError, "address is ray://a:1, of Ray's"),
    ],
)
def test_what_is_missing_is_said_before_anything_starts(
    options: dict[str, Any],
    error: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    installed = object() if "address" in options else None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: installed)
    with pytest.raises(error, match=message):
        check_executor(executor(**options))


def test_a_task_waits_for_receipts_and_files_that_a_share_shows_late(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: dict[Path, bytes] = {}

    @contextmanager
    def execute(work: Path) -> Iterator[Any]:
        def tasks(job: Job, phase: Phase, ranks: Sequence[int]) -> None:
            if phase.kind == "find":
                first = job.phases[0]
                name = next(name for name in job.files(first, 1) if name.startswith("dedup-"))
                for path in (work / name, job.folder(first) / "00001.json"):
                    late[path] = path.read_bytes()
                    path.unlink()
            for rank in ranks:
                curate_task.run_task(work, phase.name, rank)

        yield tasks

    def show(seconds: float) -> None:
        path, content = late.popitem()
        path.write_bytes(content)

    expected = run(place, "local")
    monkeypatch.setattr(curate_task, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=show))
    assert run(place, "late", execute) == expected
    assert not late


PROGRAM = """#!/bin/sh
case "$0" in
*sbatch)
    echo x >>submitted
    if [ -s failures ]; then
        head -n 1 failures >&2; sed -i 1d failures; echo 9 >unconfirmed; exit 1
    fi
    cp records shown; echo 7 ;;
*scancel)
    echo "$*" >>cancels
    if [ "$1" = 9 ]; then rm unconfirmed; fi
    if [ -e "after-$1" ]; then cp "after-$1" shown; fi ;;
*squeue) if [ -e unconfirmed ]; then cat unconfirmed; fi ;;
*scontrol) if [ "$4" = 9 ]; then echo JobState=PENDING; else cat shown; fi ;;
esac
"""


def answer_for_slurm(
    place: Path, monkeypatch: pytest.MonkeyPatch, *records: str, **cancelled: Sequence[str]
) -> None:
    """Put programs in place of Slurm's: each array, 7, has `records`.

    sbatch fails with each line of the file `failures`, and leaves array 9. `cancelled` gives other
    records after `scancel 7` and `scancel 7_1` as `all` and `element_1`.
    """
    programs = place / "bin"
    programs.mkdir()
    for name in ("sbatch", "scontrol", "squeue", "scancel"):
        (programs / name).write_text(PROGRAM, encoding="utf-8")
        (programs / name).chmod(0o755)
    (place / "records").write_text("".join(f"{line}\n" for line in records), encoding="utf-8")
    for which, lines in cancelled.items():
        job = "7" if which == "all" else which.replace("element", "7")
        (place / f"after-{job}").write_text("".join(f"{line}\n" for line in lines))
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(arrays, "_SETTLE", 0.0)
    monkeypatch.setattr(arrays, "_TICK", 0.01)
    monkeypatch.setattr("megacore.cluster.batch.slurm._PAUSE", 0.0)
    monkeypatch.setattr("megacore.cluster.batch.slurm._SUBMISSION_PAUSE", 0.0)
    monkeypatch.chdir(place)


def test_tasks_that_are_lost_again_and_again_are_an_error_with_the_log(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program in place of sbatch accepts each array, which ends at once without its tasks."""
    answer_for_slurm(place, monkeypatch, "ArrayTaskId=0 JobState=FAILED ExitCode=0:9 NodeList=n1")

    def say(line: str) -> None:
        if "are submitted as" in line:
            log = place / "out.work/slurm/7_0.out"
            log.write_text("one\n\ntwo\nkilled\n", encoding="utf-8")

    execute = executor_of(executor(kind="slurm", retries=1), 1, say)
    message = r"\(FAILED, exit code 0:9 on n1\); the end of .*7_0.out is: one \| two \| killed; the"
    with pytest.raises(WorkerLostError, match=message):
        run(place, "out", execute)
    assert (place / "submitted").read_text() == "x\nx\n"
    assert not (place / "out.work/slurm/submission.json").exists()


@pytest.mark.parametrize("listed", ["0-1", "0,1", "0-4:2%1", "2,4,...%3"])
def test_an_array_that_was_cancelled_while_it_waited_is_not_submitted_again(
    place: Path, monkeypatch: pytest.MonkeyPatch, listed: str
) -> None:
    answer_for_slurm(place, monkeypatch, f"ArrayTaskId={listed} JobState=CANCELLED")
    execute = executor_of(executor(kind="slurm", retries=1), 2, print)
    with pytest.raises(
        LaunchError, match=r"element 0 of array 7 .* was cancelled, not by this run"
    ):
        run(place, "out", execute)
    assert (place / "submitted").read_text() == "x\n"


HELD = "JobId=7 ArrayJobId=7 ArrayTaskId={} JobState=PENDING Reason=launch_failed_requeued_held"
"""Record of the element whose JobId is the array's."""


def test_an_element_that_slurm_could_not_start_is_submitted_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled = "JobId=7 ArrayJobId=7 ArrayTaskId=0 JobState=CANCELLED"
    ended = {"all": [cancelled], "element_0": [cancelled]}
    answer_for_slurm(place, monkeypatch, HELD.format(0), **ended)
    execute = executor_of(executor(kind="slurm", retries=1), 1, print)
    with pytest.raises(WorkerLostError, match="BOOT_FAIL"):
        run(place, "out", execute)
    assert (place / "submitted").read_text() == "x\nx\n"


def test_only_the_element_that_slurm_could_not_start_is_cancelled(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "JobId=8 ArrayJobId=7 ArrayTaskId=0 JobState={} NodeList=n1"
    ended = "JobId=7 ArrayJobId=7 ArrayTaskId=1 JobState=CANCELLED"
    answer_for_slurm(
        place,
        monkeypatch,
        HELD.format(1),
        other.format("RUNNING"),
        all=[ended, other.format("CANCELLED")],
        element_1=[ended, other.format("COMPLETED")],
    )
    execute = executor_of(executor(kind="slurm", retries=0), 2, print)
    with pytest.raises(WorkerLostError, match=r"element 0 of array 7 .* \(COMPLETED"):
        run(place, "out", execute)
    assert (place / "cancels").read_text() == "7_1\n"


BUSY = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


@pytest.mark.parametrize(
    ("failures", "submitted", "cancels", "error", "message"),
    [
        (2, 3, 2, WorkerLostError, r"element 0 of array 7 .* \(FAILED"),
        (9, 4, 4, LaunchError, r"did not answer 4 times to sbatch .* \(.*Socket timed out"),
    ],
)
def test_an_array_is_submitted_again_if_the_controller_does_not_answer(
    failures: int,
    submitted: int,
    cancels: int,
    error: type[Exception],
    message: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer_for_slurm(place, monkeypatch, "ArrayTaskId=0 JobState=FAILED")
    (place / "failures").write_text(f"{BUSY}\n" * failures, encoding="utf-8")
    lines: list[str] = []
    execute = executor_of(executor(kind="slurm", retries=0), 1, lines.append)
    with pytest.raises(error, match=message):
        run(place, "out", execute)
    assert (place / "submitted").read_text() == "x\n" * submitted
    assert (place / "cancels").read_text() == "9\n" * cancels
    assert "no answer to sbatch (sbatch: error: Batch job submission failed: Socket" in lines[1]


def test_a_host_without_a_configuration_of_slurm_is_named_at_once(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_for_slurm(place, monkeypatch)
    fault = "fatal: Could not establish a configuration source"
    for name in ("sbatch", "squeue"):
        program = f"#!/bin/sh\necho '{name}: {fault}' >&2; exit 1\n"
        (place / "bin" / name).write_text(program, encoding="utf-8")
    monkeypatch.setattr("megacore.cluster.batch.slurm.REMOVE_LIMIT", 0.0)
    lines: list[str] = []
    execute = executor_of(executor(kind="slurm"), 1, lines.append)
    with pytest.raises(LaunchError, match=r"no configuration here \(squeue: fatal.*a host of the"):
        run(place, "out", execute)
    assert re.match(r"slurm: pass-0: submits [\d,]+ tasks with sbatch$", lines[0])


@pytest.mark.parametrize("kind", [DataFormatError, WorkerLostError, LaunchError])
def test_error_of_a_task_counts_although_its_array_cannot_be_cancelled(
    kind: type[MegacoreError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def does_not_end(submission: Submission, folder: Path) -> None:
        raise LaunchError("job 9 does not end")

    monkeypatch.setattr(arrays, "_remove", does_not_end)
    lines: list[str] = []
    execute = arrays.SlurmArrays(executor(kind="slurm"), 1, lines.append)

    def fails() -> None:
        with execute(tmp_path):
            Submission("ab", "9").write(tmp_path / "slurm")
            raise kind("of the block")

    with pytest.raises(kind, match="job 9 does not end" if kind is LaunchError else "of the block"):
        fails()
    assert ("slurm: job 9 does not end" in lines) is (kind is not LaunchError)


def test_an_option_that_slurm_refuses_is_not_submitted_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_for_slurm(place, monkeypatch, "ArrayTaskId=0 JobState=FAILED")
    refusal = "sbatch: error: invalid partition specified: cpu"
    (place / "failures").write_text(refusal, encoding="utf-8")
    execute = executor_of(executor(kind="slurm"), 1, print)
    with pytest.raises(LaunchError, match=r"sbatch refused .*: cpu: correct"):
        run(place, "out", execute)
    assert (place / "submitted").read_text() == "x\n"


@pytest.mark.parametrize(
    ("reason", "error", "message"),
    [
        (lambda ray: ray.WorkerCrashedError(), WorkerLostError, "Ray lost a task"),
        (lambda ray: ray.OutOfMemoryError("killed"), WorkerLostError, "Ray lost a task"),
        (lambda ray: ray.NodeDiedError("node 3"), WorkerLostError, "Ray lost a task"),
        (lambda ray: ray.LocalRayletDiedError(), WorkerLostError, "Ray lost a task"),
        (
            lambda ray: ray.RuntimeEnvSetupError("no conda"),
            LaunchError,
            r"did not run .*\(RuntimeEnvSetupError: .*no conda",
        ),
        (
            lambda ray: ray.RayTaskError("f", "trace", KeyError("n")).as_instanceof_cause(),
            KeyError,
            "^'n'$",
        ),
        (
            lambda ray: ray.RayTaskError("f", "trace", DataFormatError("bad")),
            DataFormatError,
            "^bad$",
        ),
    ],
)
@pytest.mark.parametrize("cpus", [{}, {"CPU": 0.5}, {"CPU": 8.0}])
def test_only_a_lost_process_of_ray_asks_for_memory(
    reason: Callable[[Any], Exception],
    error: type[Exception],
    message: str,
    cpus: dict[str, float],
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = pytest.importorskip("ray", reason="the extra ray is not installed")
    submitted: list[tuple[Any, ...]] = []

    def wait(running: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        assert running
        return running[:1], running[1:]

    def get(reference: Any) -> None:
        raise reason(ray.exceptions)

    remote = SimpleNamespace(remote=lambda *arguments: submitted.append(arguments))
    for name, function in {
        "init": lambda **_: None,
        "shutdown": lambda: None,
        "cluster_resources": lambda: cpus,
        "remote": lambda **_: lambda function: remote,
        "wait": wait,
        "get": get,
    }.items():
        monkeypatch.setattr(ray, name, function)
    lines: list[str] = []
    with pytest.raises(error, match=message) as raised:
        run(place, "out", executor_of(executor(kind="ray"), None, lines.append))
    assert type(raised.value) is error
    assert submitted
    assert any("has no CPU for a task" in line for line in lines) == (cpus.get("CPU", 0) < 1)
