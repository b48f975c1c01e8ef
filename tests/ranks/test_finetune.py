"""Stages of a fine-tuning: start, kill, resume and export."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from megacore.errors import LaunchError, RankLostError
from megacore.jobs.finetune import FinetuneExportJob, FinetuneJob
from megacore.observe.events import EventReader
from megacore.observe.heartbeat import read_heartbeats
from megacore.ranks import stages


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide the artifacts of the earlier stages: a tiny GPT-2 and blocks of counting text."""
    pytest.importorskip("accelerate")
    from megacore.finetune.dataset import collect_rows
    from megacore.finetune.examples import build_examples
    from megacore.finetune.pretrained import collect_pretrained
    from tests.finetune import _tiny_task

    root = tmp_path_factory.mktemp("finetune")
    _tiny_task.write_model(root / "model", dropout=0.1)
    lines = [
        {"text": " ".join(f"w{1 + (start + place) % 31}" for place in range(36))}
        for start in range(24)
    ]
    for name, rows in {"train": lines, "valid": lines[:4]}.items():
        (root / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
    settings = config(root)
    for name in ("rows", "pretrained", "examples", "cache"):
        (root / name).mkdir()
    collect_rows(settings.data, root / "rows", root / "cache", seed=settings.seed)
    collect_pretrained(settings.model, root / "pretrained", root / "cache", local=root / "model")
    build_examples(settings, root / "rows", root / "pretrained", root / "examples")
    return root


def config(root: Path, **sections: Any) -> Any:
    from tests.finetune import _tiny_task

    source = {
        "kind": "files",
        "train": [str(root / "train.jsonl")],
        "valid": [str(root / "valid.jsonl")],
    }
    values: dict[str, Any] = {
        "model": {"path": str(root / "model")},
        "data": {"source": source, "workers": 1},
        "train": {"num_epochs": 2},
        "checkpoint": {"save_interval": 4},
        "launch": {"stop_grace": 5.0},
    }
    return _tiny_task.config(
        **{name: values.get(name, {}) | sections.get(name, {}) for name in values | sections}
    )


def job(root: Path, run_directory: Path, attempt: int, **values: Any) -> FinetuneJob:
    return FinetuneJob(**common(root, run_directory, attempt), **values)


def common(root: Path, run_directory: Path, attempt: int) -> dict[str, Any]:
    return {
        "config": config(root),
        "pretrained_directory": str(root / "pretrained"),
        "examples_directory": str(root / "examples"),
        "run_directory": str(run_directory),
        "exit_directory": str(run_directory / "exit"),
        "ranks": 1,
        "threads_per_rank": 1,
        "attempt": attempt,
    }


@pytest.mark.parametrize("distributed", ["ddp", "zero2", "zero3", "fsdp"])
def test_hosts_compare_the_version_of_deepspeed_for_its_stages(
    tmp_path: Path, distributed: str
) -> None:
    settings = config(tmp_path, launch={"distributed": distributed})
    values = common(tmp_path, tmp_path, 1) | {"config": settings}
    compared = "deepspeed" in FinetuneJob(**values).packages
    assert compared == distributed.startswith("zero")


def events(run_directory: Path) -> list[dict[str, Any]]:
    return [event for event, _ in EventReader(run_directory / "events.jsonl")]


@pytest.mark.slow
def test_killed_run_resumes_and_its_best_model_is_exported(data: Path, tmp_path: Path) -> None:
    run_directory = tmp_path / "run"

    def kill_after_a_checkpoint() -> None:
        if any(event["kind"] == "checkpoint" for event in events(run_directory)):
            for beat in read_heartbeats(run_directory / "exit"):
                if beat.alive:
                    os.kill(beat.pid, signal.SIGKILL)

    with pytest.raises(RankLostError, match="a retry resumes from the last complete checkpoint"):
        stages.finetune(job(data, run_directory, 1), kill_after_a_checkpoint)
    stages.finetune(job(data, run_directory, 2))
    run_events = events(run_directory)
    resumed = [event for event in run_events if event["kind"] == "start"][-1]["resumed_from"]
    assert resumed >= 4
    assert resumed % 4 == 0
    assert run_events[-1]["reason"] == "finished"
    result = json.loads((run_directory / "result.json").read_text(encoding="utf-8"))
    assert result["value"] < result["start_metrics"][result["metric"]]
    assert "step 36/36 | loss " in (run_directory / "logs" / "attempt-002.log").read_text(
        encoding="utf-8"
    )
    (beat,) = read_heartbeats(run_directory / "exit")
    assert (beat.phase, beat.iteration) == ("ended", 36)

    output, scratch = tmp_path / "export", tmp_path / "scratch"
    output.mkdir()
    scratch.mkdir()
    values = common(data, run_directory, 2) | {"exit_directory": str(scratch / "exit")}
    export = FinetuneExportJob(
        **values,
        best=str(run_directory / result["best"]),
        output_directory=str(output),
        card={"Data": "counting"},
    )
    report = stages.convert(export, scratch)
    assert report["relative_difference"] < 1e-4
    assert {path.name for path in output.iterdir()} == {"model", "parity.json", "sample.txt"}
    assert "| Data | counting |" in (output / "model" / "README.md").read_text(encoding="utf-8")


def test_files_of_a_job_include_model_examples_and_job_file(data: Path, tmp_path: Path) -> None:
    from megacore.cluster.placement.reads import JOB_FILES_ROLE, items_of

    run_directory = tmp_path / "run"
    (run_directory / "exit").mkdir(parents=True)
    finetune_job = job(data, run_directory, 1)
    finetune_job.write(run_directory / "run.json")
    items = items_of(finetune_job, [])
    files = {str(item.directory / name) for item in items for name in item.entries}
    assert {
        str(data / "pretrained" / "model" / "model.safetensors"),
        str(run_directory / "run.json"),
    } <= files
    assert any(name.startswith(str(data / "examples" / "train")) for name in files)
    assert {item.role for item in items} == {"pretrained model", "examples", JOB_FILES_ROLE}


def test_missing_directory_of_a_job_is_refused(data: Path, tmp_path: Path) -> None:
    from megacore.cluster.placement.reads import items_of

    places = {"examples_directory": str(tmp_path / "nowhere")}
    with pytest.raises(LaunchError, match=r"examples: .*nowhere is not there on this machine"):
        items_of(job(data, tmp_path / "run", 1).model_copy(update=places), [])
