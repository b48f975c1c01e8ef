"""The entry points of training and evaluation, started by torchrun."""

import json
import math
import os
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
import torch

from megacore.cluster.start import local_torchrun_command, rank_environment
from megacore.jobs.run import EvaluateJob, TrainJob
from megacore.models.build import build_model
from megacore.observe.heartbeat import read_heartbeats
from megacore.parallel.mesh import ProcessMesh
from tests._limits import HANG
from tests._loss import loss_of
from tests.launch._processes import none_alive, wait_until
from tests.ranks import _megatron_log
from tests.train import _runs


def start(module: str, job_file: Path, ranks: int) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        local_torchrun_command(f"megacore.ranks.{module}", job_file, ranks),
        env={**os.environ, **rank_environment(1)},
        capture_output=True,
        text=True,
        timeout=HANG,
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
    check_log(result.stdout, run_directory, ranks=2)
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
    output = tmp_path / "out"
    output.mkdir()
    values = _runs.job(run, data, run_directory, ranks=2).model_dump(exclude={"planned_samples"})
    EvaluateJob(**values, checkpoints=checkpoints, unigram=True, output=str(output)).write(
        output / "job.json"
    )
    result = start("evaluate", output / "job.json", 2)
    assert result.returncode == 0, result.stderr
    unigram = json.loads((output / "unigram.json").read_text(encoding="utf-8"))
    assert unigram.keys() == {"test", "valid"}
    assert all(1 < ppl < 2 * _runs.VOCAB_SIZE for ppl in unigram.values())
    results = {f"{Path(path).name}.json" for path in checkpoints} | {"unigram.json"}
    remaining = {path.name for path in output.iterdir() if not path.name.startswith(".rendezvous-")}
    assert remaining == {"job.json", "torchrun"} | results
    scores = json.loads((output / "iter_0000006.json").read_text(encoding="utf-8"))
    check_scores(scores, run_directory, data)


def check_log(log: str, run_directory: Path, *, ranks: int) -> None:
    """Compare what programs read from a log of Megatron with the run's events."""
    steps = _runs.events(run_directory, "step")
    lines = list(_megatron_log.LINE.finditer(log))
    assert len(lines) == len(steps) == 6
    for step, line in zip(steps, lines, strict=True):
        for name, text in line.groupdict().items():
            if name != "time":
                assert float(text) == pytest.approx(step[name], rel=1e-3, abs=0.051), name
        assert float(line["lm_loss"]) == pytest.approx(step["lm_loss"], rel=1e-6)
    for name, expression in _megatron_log.FIELDS.items():
        values = [float(text) for text in re.findall(expression, log)]
        assert values == pytest.approx([step[name] for step in steps], rel=1e-3, abs=1e-3), name
    rates = [step["tokens_per_second"] / ranks for step in steps]
    assert [step["tokens_per_second_per_rank"] for step in steps] == pytest.approx(rates)
    assert all(0 < step["model_tflops"] <= step["tflops"] for step in steps)

    (memory,) = _megatron_log.MEMORY.findall(log)  # of the ranks of the first replica
    assert memory[:2] == ("0", "1")
    assert float(memory[3]) == pytest.approx(steps[0]["memory_mb"], rel=0.2)
    assert 0 < float(memory[2]) <= float(memory[3])
    times = {
        name: (float(low), float(high)) for name, low, high in _megatron_log.SETUP.findall(log)
    }
    assert list(times) == ["model-and-optimizer-setup", "train/valid/test-data-iterators-setup"]
    assert all(0 < low <= high for low, high in times.values())
    (started,) = _megatron_log.START.finditer(log)
    assert datetime.strptime(started[1].strip(), "%Y-%m-%d %H:%M:%S") <= datetime.now()
    assert log.index("time across ranks (ms)") < started.start() < lines[0].start()
    evaluations = [
        (event["iteration"], event["lm_loss"])
        for event in _runs.events(run_directory, "evaluation")
    ]
    values = [(int(at), float(loss)) for at, loss, _ in _megatron_log.VALIDATION.findall(log)]
    assert [at for at, _ in values] == [at for at, _ in evaluations]
    assert [loss for _, loss in values] == pytest.approx([loss for _, loss in evaluations])


def check_scores(scores: dict[str, float], run_directory: Path, data: Path) -> None:
    """Compare the scores with the mean loss over every target of one epoch of each split."""
    from megacore.data.gpt_dataset import GPTDataset
    from tests.checkpoint._read import read_tensors

    model = build_model(_runs.config(), _runs.VOCAB_SIZE, ProcessMesh.serial()).eval()
    weights = read_tensors(run_directory / "checkpoints/iter_0000006", prefix="model.")
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in weights.items()})
    assert scores["iteration"] == 6
    for split in ("test", "valid"):
        dataset = GPTDataset(data / "tokens_text_document", data / "index", split, _runs.SEQ_LENGTH)
        tokens = torch.from_numpy(dataset.gather(range(len(dataset))))
        with torch.no_grad():
            expected = float(loss_of(model, tokens[:, :-1], tokens[:, 1:]).double().mean())
        assert scores[f"{split}_loss"] == pytest.approx(expected, rel=1e-6)
        assert scores[f"{split}_ppl"] == pytest.approx(math.exp(expected), rel=1e-6)
        assert scores[f"{split}_samples"] == len(dataset)


def test_wrong_number_of_ranks_is_reported_as_the_reason(data: Path, tmp_path: Path) -> None:
    _runs.job(_runs.config(), data, tmp_path, ranks=2).write(tmp_path / "run.json")
    result = start("pretrain", tmp_path / "run.json", 1)
    assert result.returncode == 2
    reason = json.loads((tmp_path / "exit" / "rank_0.json").read_text(encoding="utf-8"))
    assert reason["error"] == "ParallelLayoutError"
    assert "the job is for 2 ranks and 1 were started" in reason["message"]


def test_missing_job_file_is_refused_without_a_traceback(tmp_path: Path) -> None:
    result = start("pretrain", tmp_path / "absent.json", 1)
    assert result.returncode == 2
    assert "absent.json does not exist: give the job file" in result.stderr
    assert "Traceback" not in result.stderr


LAUNCHER = """
import os, subprocess, sys
env = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
rank = subprocess.Popen(sys.argv[2:], env=env, start_new_session=True)
open(sys.argv[1], "w").write(str(rank.pid))
rank.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent death signal is Linux's")
def test_rank_ends_if_its_launcher_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = _runs.config(train={"train_iters": 2000, "eval_interval": 1})
    monkeypatch.setattr(_runs, "SAMPLES", 20_000)
    _runs.write_data(tmp_path / "data", endless)
    job: TrainJob = _runs.job(endless, tmp_path / "data", tmp_path)
    job.write(tmp_path / "run.json")
    command = local_torchrun_command("megacore.ranks.pretrain", tmp_path / "run.json", 1)
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path / "pid"), *command],
        env={**os.environ, **rank_environment(1)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until((tmp_path / "events.jsonl").exists, HANG, "the training started")
    finally:
        launcher.kill()
        launcher.wait()
    pid = int((tmp_path / "pid").read_text(encoding="ascii"))
    none_alive([pid], HANG)
    assert not any(event["kind"] == "exit" for event in _runs.events(tmp_path))
