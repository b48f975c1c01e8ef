"""The entry point of the conversion as a process: exit codes and reasons, without network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megacore.jobs.run import ConvertJob
from megacore.observe.heartbeat import beat_path, read_heartbeat
from megacore.ranks.convert import convert_checkpoint
from megacore.ranks.rank import run_rank
from tests._limits import HANG
from tests.convert._tiny import tiny_config, tiny_job


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> ConvertJob:
    return tiny_job(tmp_path_factory.mktemp("launch"), tiny_config())[0]


def run(job: ConvertJob, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    (tmp_path / "export").mkdir()
    paths = {"output_directory": str(tmp_path / "export"), "exit_directory": str(tmp_path / "exit")}
    job.model_copy(update=paths).write(tmp_path / "job.json")
    return subprocess.run(
        [sys.executable, "-m", "megacore.ranks.convert", "--config", str(tmp_path / "job.json")],
        capture_output=True,
        text=True,
        timeout=HANG,
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"},
    )


def test_job_fills_its_output_directory(job: ConvertJob, tmp_path: Path) -> None:
    result = run(job, tmp_path)
    assert result.returncode == 0, result.stderr
    assert {path.name for path in (tmp_path / "export").iterdir()} == {
        "model",
        "parity.json",
        "sample.txt",
    }
    assert (
        json.loads((tmp_path / "export" / "parity.json").read_text(encoding="utf-8"))["passed"]
        is True
    )
    assert not list((tmp_path / "exit").glob("*.json"))
    beat = read_heartbeat(beat_path(tmp_path / "exit", 0))
    assert beat is not None
    assert beat.phase == "ended"
    assert beat.changes > 30, "a beat for each tensor and each batch"


def test_failed_gate_exits_with_its_reason(job: ConvertJob, tmp_path: Path) -> None:
    config = job.config.model_copy(
        update={"export": job.config.export.model_copy(update={"parity_tolerance": 1e-12})}
    )
    result = run(job.model_copy(update={"config": config}), tmp_path)
    assert result.returncode == 6, result.stderr
    reason = json.loads((tmp_path / "exit" / "rank_0.json").read_text(encoding="utf-8"))
    assert reason["error"] == "ConversionError"
    assert "logits differ" in reason["message"]
    assert (tmp_path / "exit" / "parity.json").is_file()


def test_conversion_on_several_ranks_is_refused(job: ConvertJob, tmp_path: Path) -> None:
    result = run(job.model_copy(update={"ranks": 2}), tmp_path)
    assert result.returncode == 2, result.stderr
    reason = json.loads((tmp_path / "exit" / "rank_0.json").read_text(encoding="utf-8"))
    assert reason["message"] == "a conversion was asked to run on 2 ranks: it takes 1"


def test_invalid_job_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        run_rank(ConvertJob, convert_checkpoint, ["--config", str(tmp_path / "job.json")])
    assert ended.value.code == 2
    assert "is not a job" in capsys.readouterr().err
