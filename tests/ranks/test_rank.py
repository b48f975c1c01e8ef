"""Local rank and stacks of the entry points."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megacore.errors import ConfigError, DataFormatError
from megacore.jobs.finetune import FinetuneJob
from megacore.jobs.run import RankJob, TrainJob
from megacore.ranks.rank import gpu_variables, run_rank
from tests._limits import HANG


def run_with_missing_job(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, local_rank: str | None = None
) -> tuple[int, str | None]:
    """Run an entry point with a missing job; return its exit code and LOCAL_RANK."""
    monkeypatch.delenv("RANK", raising=False)
    if local_rank is None:
        monkeypatch.setenv("LOCAL_RANK", "")  # so that monkeypatch restores it
        monkeypatch.delenv("LOCAL_RANK")
    else:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(SystemExit) as caught:
        run_rank(RankJob, lambda job: None, ["--config", "absent.json", *arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code, os.environ.pop("LOCAL_RANK", None)


def test_a_missing_job_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json does not exist: give the job file of a"):
        TrainJob.read(tmp_path / "none.json")
    (tmp_path / "none.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not a job written by this version of megacore: "):
        TrainJob.read(tmp_path / "none.json")


@pytest.mark.parametrize(
    "arguments",
    [["--local_rank", "3"], ["--local_rank=3"], ["--local-rank", "3"], ["--local-rank=3"]],
)
def test_both_spellings_of_the_option_set_local_rank(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_with_missing_job(arguments, monkeypatch) == (2, "3")
    assert run_with_missing_job(arguments, monkeypatch, local_rank="3") == (2, "3")


def test_local_rank_option_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_with_missing_job([], monkeypatch) == (2, None)
    assert run_with_missing_job([], monkeypatch, local_rank="1") == (2, "1")


def test_invalid_or_contradicting_local_rank_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_with_missing_job(["--local_rank=0"], monkeypatch, local_rank="1")[0] == 2
    assert (
        "--local_rank is 0 and the environment's LOCAL_RANK is 1: unset LOCAL_RANK"
        in capsys.readouterr().err
    )
    assert run_with_missing_job(["--local-rank=-1"], monkeypatch)[0] == 2
    assert "--local_rank is -1: ranks of a machine are counted from 0" in capsys.readouterr().err


class SingleRankJob(RankJob):
    """A job of one rank."""


def request_own_stacks(job: SingleRankJob) -> None:
    os.kill(os.getpid(), signal.SIGUSR2)


def test_rank_writes_its_stacks_on_sigusr2(tmp_path: Path) -> None:
    job = SingleRankJob(exit_directory=str(tmp_path / "exit"), ranks=1, threads_per_rank=1)
    job.write(tmp_path / "job.json")
    script = f"""
from tests.ranks.test_rank import SingleRankJob, request_own_stacks
from megacore.ranks.rank import run_rank
run_rank(SingleRankJob, request_own_stacks, ["--config", {str(tmp_path / "job.json")!r}])
"""
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=HANG, env=environment)
    assert "in request_own_stacks" in (tmp_path / "exit" / "rank_00000.stack").read_text()


def fail_beside_a_stuck_thread(job: SingleRankJob) -> None:
    threading.Thread(target=time.sleep, args=(2 * HANG,)).start()
    raise DataFormatError("x.bin is damaged")


def test_failed_rank_ends_although_a_thread_is_stuck(tmp_path: Path) -> None:
    job = SingleRankJob(exit_directory=str(tmp_path / "exit"), ranks=1, threads_per_rank=1)
    job.write(tmp_path / "job.json")
    script = f"""
from tests.ranks.test_rank import SingleRankJob, fail_beside_a_stuck_thread
from megacore.ranks.rank import run_rank
run_rank(SingleRankJob, fail_beside_a_stuck_thread, ["--config", {str(tmp_path / "job.json")!r}])
"""
    environment = {**os.environ, "RANK": "0"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, timeout=HANG, env=environment, check=False, capture_output=True)
    assert done.returncode == DataFormatError.exit_code
    assert b"x.bin is damaged" in done.stderr
    assert "x.bin is damaged" in (tmp_path / "exit" / "rank_0.json").read_text()


@pytest.mark.parametrize("module", ["pretrain", "evaluate", "convert", "generate", "zeroshot"])
def test_every_entry_point_accepts_local_rank(module: str) -> None:
    command = [
        sys.executable,
        "-m",
        f"megacore.ranks.{module}",
        "--config",
        "absent.json",
        "--local-rank=0",
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    assert "absent.json does not exist" in result.stderr
    assert "unrecognized arguments" not in result.stderr


def test_traces_of_collectives_stay_when_the_next_attempt_empties_the_exit_directory() -> None:
    fields = {"exit_directory": "/runs/k/exit", "run_directory": "/runs/k", "attempt": 3}
    for job in (TrainJob.model_construct(**fields), FinetuneJob.model_construct(**fields)):
        traces = Path(gpu_variables(job, {})["TORCH_FR_DUMP_TEMP_FILE"])
        assert traces == Path("/runs/k/logs/attempt-003-nccl_trace_rank_")


def test_variables_of_torch_on_gpus_have_defaults_that_a_user_can_replace(tmp_path: Path) -> None:
    job = SingleRankJob(exit_directory=str(tmp_path), ranks=1, threads_per_rank=1)
    assert gpu_variables(job, {}) == {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/nccl_trace_rank_",
    }
    users = {
        "PYTORCH_ALLOC_CONF": "backend:native",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "trace",
    }
    assert gpu_variables(job, users) == {}
    assert gpu_variables(job, {"PYTORCH_CUDA_ALLOC_CONF": ""}).keys() == {
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "TORCH_FR_DUMP_TEMP_FILE",
    }
