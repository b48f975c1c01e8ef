"""Jobs of Slurm with scripted answers of its commands; test_slurm_jobs.py runs a real Slurm."""

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megacore.artifact.files import read_json
from megacore.cluster.batch.node import slurm_node
from megacore.cluster.batch.scheduler import End, Submission, run
from megacore.cluster.batch.slurm import SlurmJob, accounted, exported
from megacore.cluster.batch.spec import BatchSpec
from megacore.cluster.batch.start import check_batch, show_batch, start_batch
from megacore.config.launch import LaunchConfig
from megacore.errors import (
    ConfigError,
    HostLostError,
    LaunchError,
    MegacoreError,
    MemoryExhaustedError,
    RankLostError,
)
from megacore.jobs.run import RankJob
from tests._limits import HANG
from tests.train import _runs

JOB = (
    "JobId=12 JobName=run-1 UserId=me(1000) JobState={state} Reason={reason} Requeue=1 "
    "Restarts={restarts} ExitCode={code} TimeLimit=12:00:00 ReqNodeList=(null) ExcNodeList=(null) "
    "NodeList={nodes} BatchHost=n1"
)


def launch(*, slurm: dict[str, Any] | None = None, **values: Any) -> LaunchConfig:
    return LaunchConfig.model_validate(
        {"kind": "slurm", "nproc_per_node": 8, "slurm": slurm or {}, **values}
    )


def spec(settings: LaunchConfig, directory: Path) -> BatchSpec:
    paths = {"job_file": str(directory / "run.json"), "exit_directory": str(directory / "exit")}
    values = {
        "module": "m",
        "environment": {},
        "directory": "/",
        "python": "python",
        "follower_limit": 300.0,
    }
    return BatchSpec(**paths, **values, launch=settings, workspace=str(directory))


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, str, str]]:
    """Provide exit code, output and errors of each of Slurm's commands; commands not in it fail."""
    results: dict[str, tuple[int, str, str]] = {}

    def run(command: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[str]":
        return subprocess.CompletedProcess(command, *results.get(command[0], (1, "", "not there")))

    monkeypatch.setattr("megacore.cluster.batch.slurm.run", run)
    return results


def answer(
    state: str, reason: str = "None", nodes: str = "n[1-2]", code: str = "0:0", restarts: int = 0
) -> Any:
    return 0, JOB.format(state=state, reason=reason, nodes=nodes, code=code, restarts=restarts), ""


@pytest.mark.parametrize(
    ("reply", "state", "detail"),
    [
        (answer("PENDING", "Resources", "(null)"), "queued", "PENDING (Resources)"),
        (answer("CONFIGURING"), "queued", "CONFIGURING"),
        (answer("RUNNING"), "running", "RUNNING on n[1-2]"),
        (answer("RUNNING", restarts=2), "running", "RUNNING on n[1-2], start 3"),
        (answer("SUSPENDED"), "queued", "SUSPENDED on n[1-2]"),
        (answer("COMPLETING", restarts=1), "ending", "COMPLETING on n[1-2], start 2"),
        (answer("COMPLETING", nodes="(null)"), "ending", "COMPLETING"),
        (answer("PENDING", "BeginTime", restarts=1), "queued", "PENDING (BeginTime), start 2"),
    ],
)
def test_unfinished_job_is_described_by_its_state(
    reply: tuple[int, str, str],
    state: str,
    detail: str,
    answers: dict[str, tuple[int, str, str]],
    tmp_path: Path,
) -> None:
    answers["scontrol"] = reply
    look = SlurmJob(spec(launch(), tmp_path)).look()
    assert look is not None
    assert (look.state, look.detail, look.end) == (state, detail, None)


@pytest.mark.parametrize(
    ("module", "again"),
    [
        ("pretrain", "a retry submits it again and resumes from the last complete checkpoint"),
        ("evaluate", "a retry submits it again and starts from the beginning"),
    ],
)
def test_advice_after_a_lost_node_fits_the_stage(
    module: str, again: str, answers: dict[str, tuple[int, str, str]], tmp_path: Path
) -> None:
    answers["scontrol"], answers["sinfo"] = answer("NODE_FAIL"), (0, "n2\n", "")
    ranks = spec(launch(), tmp_path).model_copy(update={"module": f"megacore.ranks.{module}"})
    look = SlurmJob(ranks).look()
    assert look is not None
    assert look.end is not None
    assert str(look.end.error).endswith(again)


@pytest.mark.parametrize(
    ("reply", "kind", "text", "retryable"),
    [
        (answer("TIMEOUT", "TimeLimit"), RankLostError, "reached its time limit (12:00:00)", True),
        (
            answer("PREEMPTED"),
            RankLostError,
            "Slurm preempted job  on n[1-2] without queueing it again",
            True,
        ),
        (answer("NODE_FAIL"), HostLostError, "n2 failed, and job  with it (NODE_FAIL)", True),
        (answer("BOOT_FAIL"), HostLostError, "(BOOT_FAIL)", True),
        (
            answer("OUT_OF_MEMORY", code="0:125"),
            MemoryExhaustedError,
            "more memory than it was given",
            False,
        ),
        (answer("DEADLINE"), LaunchError, "before its deadline", False),
        (
            answer("FAILED", "JobLaunchFailure", code="0:53"),
            RankLostError,
            "could not start job  on n[1-2] (JobLaunchFailure), for example because",
            True,
        ),
        (answer("CANCELLED"), LaunchError, "was cancelled, not by this run", False),
        (
            answer("PENDING", "launch_failed_requeued_held"),
            RankLostError,
            "could not start job",
            True,
        ),
    ],
)
def test_job_ended_by_slurm_is_reported_with_its_cause(
    reply: tuple[int, str, str],
    kind: type[MegacoreError],
    text: str,
    retryable: bool,
    answers: dict[str, tuple[int, str, str]],
    tmp_path: Path,
) -> None:
    answers["scontrol"] = reply
    answers["sinfo"] = (0, "n2\n", "")
    look = SlurmJob(spec(launch(), tmp_path)).look()
    assert look is not None
    assert look.end is not None
    assert type(look.end.error) is kind
    assert text in str(look.end.error)
    assert look.end.error.retryable is retryable
    assert look.end.code != 0
    outranking = ("CANCELLED", "NODE_FAIL", "BOOT_FAIL")
    assert look.end.outranks_stop is any(state in reply[1] for state in outranking)


@pytest.mark.parametrize(
    ("state", "code", "end"),
    [
        ("COMPLETED", "0:0", End(0)),
        ("FAILED", "7:0", End(7)),
        ("FAILED", "0:9", End(137)),
        ("FAILED", "0:0", End(1)),
    ],
)
def test_finished_job_ends_with_its_exit_code(
    state: str, code: str, end: End, answers: dict[str, tuple[int, str, str]], tmp_path: Path
) -> None:
    answers["scontrol"] = answer(state, code=code)
    look = SlurmJob(spec(launch(), tmp_path)).look()
    assert look is not None
    assert look.end == end


def test_end_of_a_forgotten_job_is_read_from_accounting(
    answers: dict[str, tuple[int, str, str]], tmp_path: Path
) -> None:
    """Accounting gives the end of the job; without accounting the end is a retryable error."""
    job = SlurmJob(spec(launch(), tmp_path))
    answers["scontrol"] = (1, "", "slurm_load_jobs error: Invalid job id specified")
    look = job.look()
    assert look is not None
    assert look.end is not None
    assert type(look.end.error) is RankLostError
    assert "does not know job" in str(look.end.error)
    answers["sacct"] = (0, "PENDING|0:0||12:00:00\n", "")  # its end was lost with the controller
    look = job.look()
    assert look is not None
    assert look.end is not None
    assert type(look.end.error) is RankLostError
    answers["sacct"] = (0, "CANCELLED by 0|0:15|n1|12:00:00\n", "")
    look = job.look()
    assert look is not None
    assert look.end is not None
    assert "was cancelled by 0, not by this run" in str(look.end.error)
    answers["sacct"] = (0, "COMPLETED|0:0|n1|12:00:00\n", "")
    look = job.look()
    assert look is not None
    assert look.end == End(0)


def test_accounting_requests_only_fields_of_every_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """sacct fails if it does not know one of the fields; Restarts is newer than Slurm 22.05."""
    fields: list[str] = []

    def run(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        fields.extend(command[-1].partition("=")[2].split(","))
        return subprocess.CompletedProcess(command, 0, "COMPLETED|0:0|n1|12:00:00\n", "")

    monkeypatch.setattr("megacore.cluster.batch.slurm.run", run)
    assert accounted("7")["JobState"] == "COMPLETED"
    assert set(fields) <= {"State", "ExitCode", "NodeList", "Timelimit"}


def test_a_job_ends_with_its_reason_without_the_programs_that_are_not_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sacct and sinfo give details; a host of the flow may lack them."""
    scontrol = tmp_path / "scontrol"
    monkeypatch.setenv("PATH", str(tmp_path))
    for script, kind, text in (
        (f"echo '{answer('NODE_FAIL')[1]}'", HostLostError, r"n\[1-2\] failed, and job"),
        ("echo 'Invalid job id specified' >&2; exit 1", RankLostError, "does not know job"),
    ):
        scontrol.write_text(f"#!/bin/sh\n{script}\n")
        scontrol.chmod(0o755)
        look = SlurmJob(spec(launch(), tmp_path)).look()
        assert look is not None
        assert look.end is not None
        assert type(look.end.error) is kind
        assert re.search(text, str(look.end.error))


def test_preferences_of_the_user_do_not_reach_slurms_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With them squeue hides jobs, scancel spares them, and all ask another cluster."""
    for name in ("SCANCEL_INTERACTIVE", "SCANCEL_STATE", "SQUEUE_PARTITION", "SLURM_CLUSTERS"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("SLURM_CONF", "/c")
    shown = run(["env"]).stdout.splitlines()
    assert "SLURM_CONF=/c" in shown
    assert not [line for line in shown if line.endswith("=x")]


def test_a_job_of_another_name_with_the_recorded_id_is_spared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another cluster with the same workspace gave the id to somebody else's job."""
    cancelled = []

    def scripted(command: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[str]":
        cancelled.extend([command] if command[0] == "scancel" else [])
        found = answer("RUNNING")[1] if command[0] == "scontrol" else ""
        return subprocess.CompletedProcess(command, 0, found, "")

    monkeypatch.setattr("megacore.cluster.batch.slurm.run", scripted)
    monkeypatch.setattr("megacore.cluster.batch.slurm.REMOVE_LIMIT", -1.0)
    SlurmJob(spec(launch(), tmp_path)).remove(Submission("t", "12"))
    assert cancelled == []


def test_earlier_job_is_removed_only_on_a_positive_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answers: dict[str, tuple[int, str, str]]
) -> None:
    """A busy controller must not result in a second job."""
    monkeypatch.setattr("megacore.cluster.batch.slurm._PAUSE", 0.01)
    monkeypatch.setattr("megacore.cluster.batch.slurm.REMOVE_LIMIT", 0.05)
    job, known, unknown = (
        SlurmJob(spec(launch(), tmp_path)),
        Submission("t", "7"),
        Submission("t", None),
    )
    for submission in (known, unknown):  # no command succeeds
        with pytest.raises(LaunchError, match="or Slurm does not answer"):
            job.remove(submission)
    answers["squeue"] = (0, "", "")
    with pytest.raises(LaunchError, match="job 7 of an earlier attempt does not end"):
        job.remove(known)
    job.remove(unknown)
    running, completing = (
        (0, answer(state)[1].replace("run-1", job.name("t")), "")
        for state in ("RUNNING", "COMPLETING")
    )
    answers["scontrol"] = running
    with pytest.raises(LaunchError, match="job 7 of an earlier attempt does not end"):
        job.remove(known)
    answers["scontrol"] = completing  # on a node that does not answer, for hours
    job.remove(known)
    answers["scontrol"] = (1, "", "slurm_load_jobs error: Invalid job id specified")
    job.remove(known)
    answers["scontrol"] = answer("CANCELLED")
    job.remove(known)
    code, text, errors = answer("RUNNING")
    answers["scontrol"] = code, text.replace("run-1", job.name("t")), errors
    with pytest.raises(LaunchError, match="does not end although it was cancelled"):
        job.remove(known)


def test_output_is_copied_after_a_read_error_has_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    job = SlurmJob(spec(launch(), tmp_path))
    job._output = tmp_path / "out"
    job._output.mkdir()  # a directory: any error of the file system
    job.copy_output()
    job._output.rmdir()
    job._output.write_bytes(b"one\n")
    job.copy_output()
    with open(job._output, "ab") as file:
        file.write(b"two\n")
    job.copy_output()
    assert capfdbinary.readouterr().out == b"one\ntwo\n"


def test_silent_controller_gives_no_state_and_its_error(
    answers: dict[str, tuple[int, str, str]], tmp_path: Path
) -> None:
    answers["scontrol"] = (
        1,
        "",
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
    )
    job = SlurmJob(spec(launch(), tmp_path))
    assert job.look() is None
    assert "Unable to contact slurm controller" in job.silence


def test_batch_script_requests_the_configured_resources(tmp_path: Path) -> None:
    slurm = {
        "partition": "a100",
        "account": "nlp",
        "qos": "high",
        "time_limit": "2-00:00:00",
        "signal_before": 300,
    }
    settings = launch(slurm=slurm, nnodes="2:4", threads_per_rank=12)
    text = SlurmJob(spec(settings, tmp_path / "50% done")).text("abcd")
    options = [
        line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")
    ]
    assert " --cpu-bind=none " in text  # the ranks of a node must not share one core
    assert options[1:] == [
        "--nodes=2-4",
        "--ntasks-per-node=1",
        "--cpus-per-task=96",
        "--gpus-per-node=8",
        "--partition=a100",
        "--account=nlp",
        "--qos=high",
        "--time=2-00:00:00",
        "--signal=USR1@300",
        "--requeue",
        "--open-mode=append",
        f"--output='{tmp_path}/50%% done/batch/slurm-%j.out'",
        "--chdir=/",
    ]
    assert (
        subprocess.run(["bash", "-n"], input=text, text=True, timeout=HANG, check=False).returncode
        == 0
    )


def test_unset_options_are_absent_from_the_batch_script(tmp_path: Path) -> None:
    text = SlurmJob(spec(launch(slurm={"signal_before": 0}, allow_cpu=True), tmp_path)).text("abcd")
    for option in ("--gpus", "--partition", "--account", "--qos", "--time", "--signal"):
        assert option not in text
    assert "--gpus-per-node=4" in SlurmJob(spec(launch(slurm={"gpus_per_node": 4}), tmp_path)).text(
        "abcd"
    )


def test_credentials_of_the_flow_are_not_exported_to_the_job() -> None:
    environment = {
        "PATH": "/bin",
        "HOME": "/h",
        "PYTHONPATH": "/p",
        "SLURM_CONF": "/c",
        "SBATCH_ACCOUNT": "a",
        "PREFECT_API_KEY": "s",
        "HF_TOKEN": "s",
        "AWS_SECRET_ACCESS_KEY": "s",
        "MEGACORE_JOB": "mark",
        "SLURM_JOB_ID": "7",
        "CUDA_VISIBLE_DEVICES": "3",
    }
    assert {*exported(environment)} == {
        "PATH",
        "HOME",
        "PYTHONPATH",
        "SLURM_CONF",
        "SBATCH_ACCOUNT",
    }


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "scontrol", "squeue", "scancel"):
        (folder / name).write_text("#!/bin/sh\nexit 1\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


@pytest.mark.usefixtures("programs")
def test_auto_nproc_per_node_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"launch\.nproc_per_node is auto, and which machines slurm will give"
    ):
        check_batch(launch(nproc_per_node="auto"))


@pytest.mark.usefixtures("programs")
def test_missing_template_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"launch\.slurm\.template is 'no/such', and there is no such file"
    ):
        check_batch(launch(slurm={"template": "no/such"}))


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    "option",
    [
        "--array=1-3",
        "--output=elsewhere",
        "--out=x",
        "-ox",
        "-J",
        "--job-name=x",
        "--clusters=all",
        "--wait",
    ],
)
def test_arguments_that_hide_the_job_from_the_follower_are_refused(option: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"launch\.slurm\.arguments has {option}, with which the job could not be",
    ):
        check_batch(launch(slurm={"arguments": ["--exclusive", option]}))


@pytest.mark.usefixtures("programs")
def test_value_without_its_option_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"has 'h100', which is no option: write each option with its value as one",
    ):
        check_batch(launch(slurm={"arguments": ["--constraint", "h100"]}))


@pytest.mark.usefixtures("programs")
def test_other_arguments_are_accepted() -> None:
    check_batch(launch())
    check_batch(
        launch(slurm={"arguments": ["--wait-all-nodes=1", "--no-requeue", "--exclusive", "-Ch100"]})
    )


def test_missing_sbatch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="sbatch is not installed here"):
        check_batch(launch())


def test_start_batch_writes_the_spec_of_the_follower(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    monkeypatch.setenv("HF_TOKEN", "secret")
    (tmp_path / ".deepspeed_env").write_text("FROM_FILE=1\n")
    job = RankJob(exit_directory="exit", ranks=8, threads_per_rank=1)
    start = start_batch(launch(), "module", job, tmp_path / "run.json", {"OWN": "2"})
    written = BatchSpec.read(tmp_path / "batch" / "spec.json")
    assert start.command[1:] == [
        "-m",
        "megacore.cluster.batch.follow",
        f"--spec={tmp_path}/batch/spec.json",
    ]
    assert written.path.stat().st_mode & 0o777 == 0o600
    assert {
        "NCCL_DEBUG": "INFO",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=0",
        "FROM_FILE": "1",
        "OWN": "2",
    }.items() <= written.environment.items()
    assert not {"HF_TOKEN", "CUDA_VISIBLE_DEVICES"} & written.environment.keys()
    assert written.exit_directory == str(tmp_path / "exit")
    with pytest.raises(ConfigError, match="is no batch job written by this version"):
        BatchSpec.read(tmp_path / "run.json")


def test_dry_run_writes_nothing(programs: Path, tmp_path: Path) -> None:
    job = RankJob(exit_directory=str(tmp_path / "exit"), ranks=8, threads_per_rank=1)
    settings = launch(slurm={"arguments": ["--exclusive", "--comment=two words"]})
    command, text = show_batch(settings, "module", job, tmp_path / "run" / "run.json")
    script = tmp_path / "run" / "batch" / "job.sbatch"
    assert command == ["sbatch", "--parsable", "--exclusive", "--comment=two words", str(script)]
    assert "#SBATCH --job-name=run-00000000" in text
    assert not (tmp_path / "run").exists()


def test_number_of_hosts_that_does_not_divide_the_batch_is_refused(
    programs: Path, tmp_path: Path
) -> None:
    settings = launch(nnodes="3:4", nproc_per_node=1)
    run = _runs.config(launch=settings.model_dump())  # global batch 8, micro batch 2
    job = _runs.job(run, tmp_path, tmp_path / "run", ranks=4)
    with pytest.raises(
        ConfigError, match=r"launch\.nnodes is 3:4, and slurm may give 3 machines: .*8"
    ):
        start_batch(settings, "module", job, tmp_path / "run" / "run.json", {})


def test_slurm_node_reads_its_rank_and_hosts_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "scontrol").write_text(
        '#!/bin/sh\n[ "$*" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n"\n'
    )
    (folder / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    variables = {
        "SLURM_NODEID": "1",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NTASKS": "2",
        "SLURM_JOB_NODELIST": "n[1-2]",
    }
    variables |= {"SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "SLURM_CPUS_ON_NODE": "1"}
    batch_spec = spec(launch(nnodes=2), tmp_path)
    node = slurm_node(batch_spec, variables)
    assert (node.rank, node.names, node.cpus, node.address) == (1, ["n1", "n2"], 1, "127.0.0.1")
    first = slurm_node(batch_spec, {**variables, "SLURM_NODEID": "0"})
    assert (first.address, first.port > 1024) == ("127.0.0.1", True)
    with pytest.raises(
        LaunchError, match=re.escape("Slurm started 16 processes on 2 machines (n[1-2])")
    ):
        slurm_node(batch_spec, {**variables, "SLURM_NTASKS": "16"})
    with pytest.raises(
        LaunchError, match="this process must be started by srun, and 'SLURM_NODEID' is not"
    ):
        slurm_node(batch_spec, {})


def test_sbatch_variables_that_hide_the_job_are_not_exported() -> None:
    """sbatch prefers these variables to the options in the script."""
    hiding = {
        "SBATCH_JOB_NAME": "x",
        "SBATCH_ARRAY_INX": "0-3",
        "SBATCH_OPEN_MODE": "truncate",
        "SBATCH_WAIT": "1",
    }
    assert exported({"SBATCH_ACCOUNT": "nlp", **hiding}) == {"SBATCH_ACCOUNT": "nlp"}


BUSY = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


def never() -> bool:
    return False


def replies_of_sbatch(
    monkeypatch: pytest.MonkeyPatch, *replies: tuple[int, str, str], down: bool = False
) -> tuple[list[str], list[str]]:
    """Answer sbatch in this order; return the names of jobs that are submitted and looked for.

    With `down`, squeue is not answered.
    """
    left, submitted, removed = list(replies), list[str](), list[str]()

    def run(command: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[str]":
        if command[0] == "squeue":
            removed.extend(word for word in command if word.startswith("--name="))
            return subprocess.CompletedProcess(command, int(down), "", "")
        if command[0] == "scancel":
            return subprocess.CompletedProcess(command, 1, "", "")
        text = Path(command[-1]).read_text()
        submitted.extend(re.findall(r"--job-name=(\S+)", text))
        return subprocess.CompletedProcess(command, *left.pop(0))

    monkeypatch.setattr("megacore.cluster.batch.slurm.run", run)
    monkeypatch.setattr("megacore.cluster.batch.slurm._SUBMISSION_PAUSE", 0.0)
    return submitted, removed


def test_a_job_is_submitted_again_under_another_name_if_the_controller_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = (1, "", BUSY)
    submitted, removed = replies_of_sbatch(monkeypatch, busy, (0, "12;cluster\n", ""))
    batch = spec(launch(slurm={"time_limit": "1:00"}), tmp_path)
    job, first = SlurmJob(batch), Submission("ab", None)
    submission = job.submit(first, never)
    assert submission.job == "12"
    assert submitted == [job.name("ab"), job.name(submission.token)]
    assert submission.token != "ab"
    assert removed == [f"--name={job.name('ab')}"]
    recorded = Submission.read(batch.folder)
    assert recorded is not None
    assert recorded.token == submission.token
    assert read_json(batch.folder / "follower.json")["token"] == submission.token
    assert f"slurm: no answer to sbatch ({BUSY})" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("reply", "tries", "message"),
    [
        (
            BUSY,
            4,
            r"did not answer 4 times to sbatch with .*job\.sbatch .*scontrol ping.*, it starts",
        ),
        ("invalid partition", 1, r"refused .*job\.sbatch: invalid partition: correct launch"),
    ],
)
def test_a_job_that_cannot_be_submitted_is_an_error(
    reply: str, tries: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted, _ = replies_of_sbatch(monkeypatch, *[(1, "", reply)] * tries)
    with pytest.raises(LaunchError, match=message):
        SlurmJob(spec(launch(slurm={"time_limit": "1:00"}), tmp_path)).submit(
            Submission.new(), never
        )
    assert len(submitted) == tries


def test_a_controller_that_is_down_does_not_seem_to_have_an_earlier_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted, _ = replies_of_sbatch(monkeypatch, (1, "", BUSY), down=True)
    monkeypatch.setattr("megacore.cluster.batch.slurm.REMOVE_LIMIT", -1.0)
    job = SlurmJob(spec(launch(slurm={"time_limit": "1:00"}), tmp_path))
    with pytest.raises(LaunchError, match=r"did not answer 1 time to sbatch .*scontrol ping"):
        job.submit(Submission.new(), never)
    assert len(submitted) == 1


@pytest.mark.parametrize("during", ["pause", "removal"])
def test_a_job_is_not_submitted_again_after_a_signal(
    during: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted, looked_for = replies_of_sbatch(monkeypatch, (1, "", BUSY), down=True)
    if during == "pause":
        monkeypatch.setattr("megacore.cluster.batch.slurm._SUBMISSION_PAUSE", 600.0)
    job = SlurmJob(spec(launch(slurm={"time_limit": "1:00"}), tmp_path))
    with pytest.raises(LaunchError, match=r"this run ends before Slurm's controller answered"):
        job.submit(Submission.new(), lambda: during == "pause" or bool(looked_for))
    assert (len(submitted), len(looked_for)) == (1, 1)
