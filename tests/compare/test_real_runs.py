"""Comparison of runs that were trained."""

from pathlib import Path
from typing import Any

import pytest

from megacore.compare.models import compare_models
from megacore.compare.runs import compare_runs
from tests.train._runs import config, job, train, write_data

pytestmark = pytest.mark.slow


def trained(root: Path, name: str, seed: int = 1234, **sections: dict[str, Any]) -> Path:
    """Train a run on its own copy of the data, and return its directory."""
    run = config(**sections).model_copy(update={"seed": seed})
    write_data(root / f"{name}-data", run)
    directory = root / name
    directory.mkdir()
    job(run, root / f"{name}-data", directory).write(directory / "run.json")
    train(run, root / f"{name}-data", directory)
    return directory


def test_the_same_run_twice_is_equal(tmp_path: Path) -> None:
    a, b = trained(tmp_path, "a"), trained(tmp_path, "b")
    report = compare_runs(a, b)
    assert report.equal, report.differences
    assert report.facts["common_steps"] == 6
    assert compare_models(a, b).equal


@pytest.mark.parametrize(
    ("changes", "reason", "step"),
    [
        ({"seed": 7}, "seed", 1),
        ({"optim": {"lr": 5e-3, "lr_warmup_iters": 2, "lr_decay_iters": 20}}, "lr_schedule", 2),
        ({"train": {"global_batch_size": 16}}, "batch_size", 1),
        ({"optim": {"weight_decay": 0.0}}, "optimizer", 2),
        ({"model": {"hidden_dropout": 0.1}}, "dropout", 1),
    ],
)
def test_a_changed_run_differs_for_its_reason(
    changes: dict[str, Any], reason: str, step: int, tmp_path: Path
) -> None:
    report = compare_runs(trained(tmp_path, "a"), trained(tmp_path, "b", **changes))
    assert reason in report.facts["reasons"], report.findings
    assert report.facts["first_step"] == step
