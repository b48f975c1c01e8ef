"""How an entry point learns which rank of its machine it is."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megacore.jobs.run import RankJob
from megacore.ranks.rank import run_rank


def take(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, known: str | None = None
) -> tuple[int, str | None]:
    """Exit code for a job that is not there, and LOCAL_RANK then."""
    monkeypatch.delenv("RANK", raising=False)
    if known is None:
        monkeypatch.setenv("LOCAL_RANK", "")  # so that it is restored
        monkeypatch.delenv("LOCAL_RANK")
    else:
        monkeypatch.setenv("LOCAL_RANK", known)
    with pytest.raises(SystemExit) as caught:
        run_rank(RankJob, lambda job: None, ["--config", "absent.json", *arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code, os.environ.pop("LOCAL_RANK", None)


@pytest.mark.parametrize(
    "arguments",
    [["--local_rank", "3"], ["--local_rank=3"], ["--local-rank", "3"], ["--local-rank=3"]],
)
def test_both_spellings_set_local_rank(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert take(arguments, monkeypatch) == (2, "3")
    assert take(arguments, monkeypatch, known="3") == (2, "3")


def test_it_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert take([], monkeypatch) == (2, None)
    assert take([], monkeypatch, known="1") == (2, "1")


def test_a_contradiction_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert take(["--local_rank=0"], monkeypatch, known="1")[0] == 2
    assert (
        "--local_rank is 0 and the environment's LOCAL_RANK is 1: unset LOCAL_RANK"
        in capsys.readouterr().err
    )
    assert take(["--local-rank=-1"], monkeypatch)[0] == 2
    assert "--local_rank is -1: ranks of a machine are counted from 0" in capsys.readouterr().err


class Child(RankJob):
    """A job of one rank."""


def asks_for_its_stacks(job: Child) -> None:
    os.kill(os.getpid(), signal.SIGUSR2)


def test_a_rank_writes_its_stacks_when_it_is_asked(tmp_path: Path) -> None:
    job = Child(exit_directory=str(tmp_path / "exit"), ranks=1, threads_per_rank=1)
    job.write(tmp_path / "job.json")
    script = f"""
from tests.ranks.test_rank import Child, asks_for_its_stacks
from megacore.ranks.rank import run_rank
run_rank(Child, asks_for_its_stacks, ["--config", {str(tmp_path / "job.json")!r}])
"""
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env=environment)
    assert "in asks_for_its_stacks" in (tmp_path / "exit" / "rank_00000.stack").read_text()


@pytest.mark.parametrize("module", ["pretrain", "evaluate", "convert", "generate", "zeroshot"])
def test_every_entry_point_takes_it(module: str) -> None:
    command = [
        sys.executable,
        "-m",
        f"megacore.ranks.{module}",
        "--config",
        "absent.json",
        "--local-rank=0",
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "absent.json is not a job" in result.stderr
    assert "unrecognized arguments" not in result.stderr
