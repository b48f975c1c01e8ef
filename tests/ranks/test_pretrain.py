"""The entry points as a launcher starts them."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megacore.cluster import rank_commands
from megacore.jobs.run import EvaluateJob, TrainJob
from megacore.models.build import build_model
from megacore.observe.heartbeat import read_heartbeats
from megacore.parallel.mesh import ProcessMesh
from tests.train import _runs

TIMEOUT = 240


def start(module: str, job_file: Path, ranks: int) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        rank_commands.torchrun_alone(f"megacore.ranks.{module}", job_file, ranks),
        env={**os.environ, **rank_commands.rank_environment(1)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    _runs.write_data(directory, _runs.config())
    return directory


def test_two_ranks_train_and_score_their_checkpoints(data: Path, tmp_path: Path) -> None:
    run = _runs.config(evaluate={"micro_batch_size": 3})
    run_directory = tmp_path / "run"
    run_directory.mkdir()
    job_file = run_directory / "run.json"
    _runs.job(run, data, run_directory, ranks=2).write(job_file)
    result = start("pretrain", job_file, 2)
    assert result.returncode == 0, result.stderr
    assert " validation loss at iteration 6 | lm loss value: " in result.stdout
    assert result.stdout.count("iteration        1/       6 |") == 1
    assert _runs.events(run_directory)[-1]["reason"] == "finished"
    assert not list((run_directory / "exit").glob("*.json"))
    beats = read_heartbeats(run_directory / "exit")
    assert [(beat.rank, beat.phase, beat.iteration) for beat in beats] == [
        (0, "ended", 6),
        (1, "ended", 6),
    ]
    assert all(beat.collectives >= 6 for beat in beats)

    checkpoints = tuple(
        str(path) for path in sorted((run_directory / "checkpoints").glob("iter_*"))
    )
    output = tmp_path / "out" / "scores.json"
    output.parent.mkdir()
    values = _runs.job(run, data, run_directory, ranks=2).model_dump()
    EvaluateJob(**values, checkpoints=checkpoints, output=str(output)).write(
        tmp_path / "out" / "job.json"
    )
    result = start("evaluate", tmp_path / "out" / "job.json", 2)
    assert result.returncode == 0, result.stderr
    results = json.loads(output.read_text(encoding="utf-8"))
    scores = results["checkpoints"]
    assert results["unigram"].keys() == {"test", "valid"}
    assert all(1 < ppl < 2 * _runs.VOCAB_SIZE for ppl in results["unigram"].values())
    assert list(scores) == list(checkpoints)
    left = {
        path.name for path in output.parent.iterdir() if not path.name.startswith(".rendezvous-")
    }
    assert left == {"job.json", "scores.json", "torchrun"}
    check_scores(scores[checkpoints[-1]], run_directory, data)


def check_scores(scores: dict[str, float], run_directory: Path, data: Path) -> None:
    """Against the definition: every target of every sample of one epoch of the split, once."""
    from megacore.checkpoint.load import read_tensors
    from megacore.data.gpt_dataset import GPTDataset

    model = build_model(_runs.config(), _runs.VOCAB_SIZE, ProcessMesh.serial()).eval()
    weights = read_tensors(run_directory / "checkpoints/iter_0000006", prefix="model.")
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in weights.items()})
    assert scores["iteration"] == 6
    for split in ("test", "valid"):
        dataset = GPTDataset(data / "tokens_text_document", data / "index", split, _runs.SEQ_LENGTH)
        tokens = torch.from_numpy(dataset.gather(range(len(dataset))))
        with torch.no_grad():
            expected = float(model.loss(tokens[:, :-1], tokens[:, 1:]).double().mean())
        assert scores[f"{split}_loss"] == pytest.approx(expected, rel=1e-6)
        assert scores[f"{split}_ppl"] == pytest.approx(math.exp(expected), rel=1e-6)
        assert scores[f"{split}_samples"] == len(dataset)


def test_a_rank_reports_why_it_ended(data: Path, tmp_path: Path) -> None:
    _runs.job(_runs.config(), data, tmp_path, ranks=2).write(tmp_path / "run.json")
    result = start("pretrain", tmp_path / "run.json", 1)
    assert result.returncode == 2
    reason = json.loads((tmp_path / "exit" / "rank_0.json").read_text(encoding="utf-8"))
    assert reason["error"] == "ParallelLayoutError"
    assert "the job is for 2 ranks and 1 were started" in reason["message"]


def test_an_unreadable_job_is_one_sentence(tmp_path: Path) -> None:
    result = start("pretrain", tmp_path / "absent.json", 1)
    assert result.returncode == 2
    assert "absent.json is not a job" in result.stderr
    assert "Traceback" not in result.stderr


LAUNCHER = """
import os, subprocess, sys
env = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
rank = subprocess.Popen(sys.argv[2:], env=env, start_new_session=True)
open(sys.argv[1], "w").write(str(rank.pid))
rank.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent death signal is Linux's")
def test_a_rank_does_not_outlive_its_launcher(data: Path, tmp_path: Path) -> None:
    endless = _runs.config(
        train=_runs.config().train.model_dump() | {"train_iters": 50, "eval_interval": 1}
    )
    job: TrainJob = _runs.job(endless, data, tmp_path)
    job.write(tmp_path / "run.json")
    command = rank_commands.torchrun_alone("megacore.ranks.pretrain", tmp_path / "run.json", 1)
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path / "pid"), *command],
        env={**os.environ, **rank_commands.rank_environment(1)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert wait_until(lambda: (tmp_path / "events.jsonl").exists())
    finally:
        launcher.kill()
        launcher.wait()
    pid = int((tmp_path / "pid").read_text(encoding="ascii"))
    assert wait_until(lambda: ended(pid))
    assert not any(event["kind"] == "exit" for event in _runs.events(tmp_path))


def wait_until(condition: "object", timeout: float = TIMEOUT) -> bool:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.02)
    return False


def ended(pid: int) -> bool:
    """Whether a process is gone or a zombie that nobody has reaped yet."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0]
            == "Z"
        )
    except (FileNotFoundError, ProcessLookupError):
        return True
