"""The flow `finetune --find-batch-size` with real probes and epochs of two distributions."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks._stage_runner import StageRunner
from tests.finetune._tiny_models import TASKS, write_data, write_model
from tests.flows.conftest import on_report, outcomes

METHODS = ["ddp", "zero2"]


def write_conf(root: Path) -> Path:
    write_model(root / "model", "deberta")
    write_data(root, "classification")
    conf = root / "compared.yaml"
    values = {
        "name": "compared",
        "model": {"path": str(root / "model")},
        "data": {
            "source": {
                "kind": "files",
                "train": [str(root / "train.jsonl")],
                "valid": [str(root / "valid.jsonl")],
            },
            "workers": 1,
        },
        "task": TASKS["classification"],
        "optim": {"lr": 3e-3},
        "train": {"micro_batch_size": 4, "precision": "fp32"},
        "launch": {"nproc_per_node": 1, "threads_per_rank": 1, "retries": 0},
        "find_batch_size": {"methods": METHODS, "max_batch": 4, "steps": 2},
    }
    conf.write_text(yaml.safe_dump(values), encoding="utf-8")
    return conf


@pytest.mark.slow
@pytest.mark.usefixtures("warm_ranks")
def test_distributions_are_compared_and_cached(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from flows.finetune import finetune

    runners: list[StageRunner[Any]] = []
    conf = write_conf(tmp_path)
    with on_report(runners.append):
        for _ in range(2):
            finetune(str(conf), find_batch_size=True)
    first, second = runners
    stages = ["pretrained", "dataset", "examples", "find-batch-size", "find-batch-size 2"]
    assert outcomes(first) == dict.fromkeys(stages, "ran")
    assert outcomes(second) == dict.fromkeys(stages, "cached")
    assert second.summary == first.summary
    capsys.readouterr()
    with on_report(runners.append):
        finetune(
            str(conf),
            {"find_batch_size.methods": [*METHODS, "zero3"]},
            dry_run=True,
            find_batch_size=True,
        )
    planned = capsys.readouterr().out
    assert planned.count("cached") == len(stages)
    assert "find-batch-size 3" in planned
    assert "ddp, zero2, zero3 are compared, with 1 CPU rank" in planned
    assert len(runners) == 2, "a dry run runs nothing"

    table = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in first.summary.splitlines()[:4]
    ]
    assert table[0][:2] == ["method", "largest batch per rank"]
    assert table[0][-2:] == ["accuracy", "f1"]
    assert [row[:2] for row in table[2:]] == [["ddp", "4"], ["zero2", "4"]]
    assert all(0 <= float(row[-2]) <= 1 for row in table[2:])
    recommendations = [
        line for line in first.summary.splitlines() if line.startswith("The shortest epoch")
    ]
    assert recommendations[0].endswith(" train.micro_batch_size=4`.")

    for row, method in zip(first.rows[3:], METHODS, strict=True):
        directory = workspace / "batch-sizes" / row.key
        result = json.loads((directory / "report.json").read_text())
        assert (result["method"], result["batch"], list(result["tried"])) == (method, 4, ["4"])
        assert result["peak_memory"] > 10**8
        assert result["epoch"]["train_seconds_per_epoch"] > 0
        files = {path.name for path in (directory / "runs" / "epoch").iterdir()}
        assert {"events.jsonl", "result.json"} <= files
        assert files.isdisjoint({"best", "checkpoints"})
